"""ftrain schema"""

import json
from typing import Annotated

import typer


def schema(
    task: Annotated[
        str | None,
        typer.Option(
            help='A task of your own, "package.module:name", whose keys [model] shall know.'
        ),
    ] = None,
) -> None:
    """Print the JSON Schema of configs, for editors."""
    from ftrain.config import ConfigError, json_schema

    try:
        made = json_schema(task)
    except LookupError as error:
        raise ConfigError(f"--task: {error}") from error.__cause__
    typer.echo(json.dumps(made, indent=2))
