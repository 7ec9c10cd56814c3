"""ftrain schema"""

import json

import typer


def schema() -> None:
    """Print the JSON Schema of configs, for editors."""
    from ftrain.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
