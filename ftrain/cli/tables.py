"""Tables, and figures as they show them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_WIDE = 300  # columns of a file or a pipe, in which nothing is to be cut or wrapped


def print_table(table: "Table") -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    console.print(table)


def show_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def show_number(value: float) -> str:
    return f"{value:.4g}"
