"""ftrain schema"""

import json
from typing import Annotated

import typer


def schema(
    task: Annotated[
        str | None,
        typer.Option(help='A task of your own, "package.module:name", whose keys [model] accepts.'),
    ] = None,
) -> None:
    """Print the JSON Schema of configs, for editors."""
    from ftrain.config import ConfigError, json_schema

    try:
        result = json_schema(task)
    except LookupError as error:
        raise ConfigError(f"--task: {error}") from error.__cause__
    typer.echo(json.dumps(result, indent=2))
