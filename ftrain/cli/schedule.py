"""ftrain schedule CONFIG [key=value ...]"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftrain.cli.arguments import ConfigPath, Overrides

if TYPE_CHECKING:
    import numpy as np

_POINTS = 1000  # of the curve: more than a picture can show
# The bits of a braille character's dots, from the top; left, right.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800
_WIDTH = 60  # characters
_HEIGHT = 12


def schedule(
    config: ConfigPath,
    overrides: Overrides = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PNG", help="Where to write the picture.")
    ] = Path("schedule.png"),
) -> None:
    """Draw the learning rate over the run of CONFIG, in the terminal and as a PNG."""
    import numpy as np

    from ftrain.config import ConfigError, build, load, plan

    if output.suffix.lower() != ".png":
        raise typer.BadParameter(f"{output} must end in .png", param_hint="--output")
    job = build(plan(load(config, overrides or [])))
    rate = job.learning_rate
    if rate is None:
        name = job.plan.resolved()["optimizer"].get("name", "of the chain")
        raise ConfigError(
            f"{config}: cannot draw the learning rate of {name}: expected exactly one learning_rate"
        )
    steps = np.unique(np.linspace(0, job.steps - 1, _POINTS).round().astype(np.int32))
    rates = np.array([rate(step) if callable(rate) else rate for step in steps], float)
    title = f"learning rate of {config.stem} over {job.steps:,} steps"
    draw_in_terminal(steps, rates, title)
    write_png(steps, rates, title, output)
    typer.echo(f"written: {output}")


def draw_in_terminal(x: "np.ndarray", y: "np.ndarray", title: str) -> None:
    """Print a curve with its range, in braille characters; non-finite values leave a gap."""
    import numpy as np

    finite = y[np.isfinite(y)]
    low = float(finite.min()) if len(finite) else 0.0
    high = float(finite.max()) if len(finite) else 0.0
    lines = _as_text(_braille(x, y, low, high))
    labels = [f"{high:.4g}"] + [""] * (_HEIGHT - 2) + [f"{low:.4g}"]
    if high == low:  # a flat line, drawn in the middle
        labels = [""] * (_HEIGHT // 2) + [f"{low:.4g}"] + [""] * (_HEIGHT - _HEIGHT // 2 - 1)
    margin = max(map(len, labels))
    print(f"{'':>{margin}} {title}")
    for label, line in zip(labels, lines, strict=True):
        print(f"{label:>{margin}} {line}")
    print(f"{'':>{margin}} {x[0]:<{_WIDTH // 2},}{x[-1]:>{_WIDTH // 2},}")


def _braille(x: "np.ndarray", y: "np.ndarray", low: float, high: float) -> "np.ndarray":
    """Return the characters of a curve, a row for each line.

    Every column of dots joins its value to the one before.
    """
    import numpy as np

    columns = 2 * _WIDTH
    rows = 4 * _HEIGHT
    values = y[np.searchsorted(x, np.linspace(x[0], x[-1], columns)).clip(0, len(x) - 1)]
    characters = np.full((_HEIGHT, _WIDTH), _BLANK)
    before = None
    for column, value in enumerate(values):
        row = None
        if np.isfinite(value):
            row = round((high - value) / (high - low) * (rows - 1)) if high > low else rows // 2
            start = row if before is None else before + np.sign(row - before)
            for dot in range(min(start, row), max(start, row) + 1):
                characters[dot // 4, column // 2] |= _DOTS[dot % 4][column % 2]
        before = row
    return characters


def _as_text(characters: "np.ndarray") -> list[str]:
    """Return lines of braille, or of asterisks where stdout cannot encode braille."""
    try:
        chr(_BLANK).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return ["".join("*" if each > _BLANK else " " for each in row) for row in characters]
    return ["".join(map(chr, row)) for row in characters]


def write_png(x: "np.ndarray", y: "np.ndarray", title: str, path: Path) -> None:
    """Write a curve as a picture."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: it looks for a screen
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = FigureCanvasAgg(figure).figure.add_subplot()
    axes.plot(x, y, linewidth=1.8)
    axes.set(title=title, xlabel="step", ylabel="learning rate")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=min(0.0, float(np.nanmin(y))) if np.isfinite(y).any() else None)
    axes.margins(x=0.01)
    axes.grid(alpha=0.3)
    figure.savefig(path)
