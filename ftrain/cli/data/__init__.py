"""ftrain data: show, verify, index and convert record files; one file per command."""

import typer

from ftrain.cli.data.convert import convert
from ftrain.cli.data.index import index
from ftrain.cli.data.show import show
from ftrain.cli.data.verify import verify

app = typer.Typer(
    help="Show, verify, index and convert record files.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command()(show)
app.command()(verify)
app.command()(index)
app.command()(convert)
