"""Drawing a curve: with the dots of braille characters in a terminal, and as a PNG."""

import sys
from pathlib import Path

import numpy as np

_DOTS = (
    (0x01, 0x08),
    (0x02, 0x10),
    (0x04, 0x20),
    (0x40, 0x80),
)  # of a braille character, from the top; left, right
_BLANK = 0x2800
_WIDTH, _HEIGHT = 60, 12  # characters


def draw_in_terminal(x: np.ndarray, y: np.ndarray, title: str) -> None:
    """Print a curve with its range; where a value is not finite there is a gap."""
    shown = np.isfinite(y)
    low, high = (float(y[shown].min()), float(y[shown].max())) if shown.any() else (0.0, 0.0)
    lines = _as_text(_braille(x, y, low, high))
    labels = [f"{high:.4g}"] + [""] * (_HEIGHT - 2) + [f"{low:.4g}"]
    if high == low:  # a flat line, drawn in the middle
        labels = [""] * (_HEIGHT // 2) + [f"{low:.4g}"] + [""] * (_HEIGHT - _HEIGHT // 2 - 1)
    margin = max(map(len, labels))
    print(f"{'':>{margin}} {title}")
    for label, line in zip(labels, lines, strict=True):
        print(f"{label:>{margin}} {line}")
    print(f"{'':>{margin}} {x[0]:<{_WIDTH // 2},}{x[-1]:>{_WIDTH // 2},}")


def _braille(x: np.ndarray, y: np.ndarray, low: float, high: float) -> np.ndarray:
    """The characters of a curve, a row for each line: every column of dots joins its value to the one before."""
    columns, rows = 2 * _WIDTH, 4 * _HEIGHT
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


def _as_text(characters: np.ndarray) -> list[str]:
    try:
        chr(_BLANK).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return [
            "".join("*" if character > _BLANK else " " for character in row) for row in characters
        ]
    return ["".join(map(chr, row)) for row in characters]


def write_png(x: np.ndarray, y: np.ndarray, title: str, path: Path) -> None:
    """Write a curve as a picture."""
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
