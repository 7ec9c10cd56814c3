"""The command line: one file a command. Heavy imports stand inside the commands, so that --help is quick."""

import os
import sys
from typing import Annotated

import typer

from ftrain import __version__
from ftrain.cli.check import check
from ftrain.cli.evaluate import evaluate
from ftrain.cli.schema import schema
from ftrain.cli.train import train

app = typer.Typer(
    name="ftrain",
    help="Training for JAX: everything around the model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(train)
app.command(name="eval")(evaluate)
app.command()(check)
app.command()(schema)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ftrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


def main() -> None:
    """Run a command. A user's mistake is one or two lines and exit code 2, never a traceback."""
    sys.path.append(os.getcwd())  # so that a config can name a task of the user's own, beside it
    try:
        sys.exit(app(standalone_mode=False))
    except typer.TyperException as error:
        _fail(error.format_message() + "\ntry --help", 2)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except Exception as error:
        code = _EXIT_CODES.get(type(error).__name__)
        if code is None:
            raise
        _fail(str(error), code)


# By name, because importing the classes would import jax; only commands that have done so can raise them.
_EXIT_CODES = {"ConfigError": 2, "CheckpointError": 2, "NotFiniteError": 1}


def _fail(message: str, code: int) -> None:
    print(f"ftrain: {message}", file=sys.stderr, flush=True)
    sys.exit(code)
