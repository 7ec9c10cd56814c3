"""ftrain schedule CONFIG [key=value ...]"""

from pathlib import Path
from typing import Annotated

import typer

from ftrain.cli.arguments import ConfigPath, Overrides

_POINTS = 1000  # of the curve: more than a picture can show


def schedule(
    config: ConfigPath,
    overrides: Overrides = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PNG", help="Where to write the picture.")
    ] = Path("schedule.png"),
) -> None:
    """Draw the learning rate over the run of CONFIG, in the terminal and as a PNG."""
    import numpy as np

    from ftrain.cli.drawing import draw_in_terminal, write_png
    from ftrain.config import build, load, plan
    from ftrain.config.load import ConfigError

    if output.suffix.lower() != ".png":
        raise typer.BadParameter(f"{output} should end in .png", param_hint="--output")
    job = build(plan(load(config, overrides or [])))
    rate = job.learning_rate
    if rate is None:
        name = job.plan.resolved()["optimizer"]["name"]
        raise ConfigError(
            f"{config}: the optimizer {name} takes no learning_rate, so there is none to draw"
        )
    steps = np.unique(np.linspace(0, job.steps - 1, _POINTS).round().astype(np.int32))
    rates = np.array([rate(step) if callable(rate) else rate for step in steps], float)
    title = f"learning rate of {config.stem} over {job.steps:,} steps"
    draw_in_terminal(steps, rates, title)
    write_png(steps, rates, title, output)
    typer.echo(f"written: {output}")
