"""The command line: one file per command. Heavy imports are local, so that --help is quick."""

import os
import signal
import sys
import warnings
from typing import Annotated

import typer

from ftrain import __version__
from ftrain.cli.check import check
from ftrain.cli.ckpt import app as ckpt
from ftrain.cli.data import app as data
from ftrain.cli.evaluate import evaluate
from ftrain.cli.exit_codes import exit_code
from ftrain.cli.launch import CONTEXT_SETTINGS, launch
from ftrain.cli.migrate import migrate
from ftrain.cli.replay import replay
from ftrain.cli.schedule import schedule
from ftrain.cli.schema import schema
from ftrain.cli.train import train
from ftrain.cli.verify_resume import verify_resume

app = typer.Typer(
    name="ftrain",
    help="Training for JAX: everything around the model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(train)
app.command(context_settings=CONTEXT_SETTINGS)(launch)
app.command(name="eval")(evaluate)
app.command()(check)
app.add_typer(ckpt, name="ckpt")
app.add_typer(data, name="data")
app.command(name="verify-resume")(verify_resume)
app.command()(replay)
app.command()(schedule)
app.command()(schema)
app.command()(migrate)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"ftrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error was raised.")
    ] = False,
) -> None:
    del version, traceback  # main() looks for --traceback itself


def main() -> None:
    """Run a command. A user's mistake is one or two lines and exit code 2, never a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until a run handles it, Ctrl-C ends the process: an import could swallow an exception.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    warnings.showwarning = _show_warning
    sys.unraisablehook = _show_unraisable
    sys.path.append(os.getcwd())  # a config can name a task in the working directory
    try:
        sys.exit(app(standalone_mode=False))
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # which typer does not export
            typer.echo(error.format_message())
            sys.exit(2)
        _fail(f"{error.format_message()}\ntry --help", 2)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except Exception as error:
        code = exit_code(error)
        if code is None or "--traceback" in sys.argv:
            raise
        has_cause = error.__cause__ and "\n" not in str(error)
        hint = "\nftrain --traceback ... shows where it was raised" if has_cause else ""
        _fail("\n".join([f"{error}{hint}", *getattr(error, "__notes__", [])]), code)


def _show_warning(
    message: Warning | str, category: type[Warning], *_: object, **__: object
) -> None:
    """Print the message of a warning, without the line of ftrain that raised it."""
    del category
    print(f"ftrain: warning: {message}", file=sys.stderr, flush=True)


def _show_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Print an error that nothing can catch, unless Orbax has reported its cause before.

    Orbax closes its event loop when a save fails; writes that end later raise this error.
    """
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _shortened(message: str) -> str:
    """Return a message with at most three entries of its list, which has indented lines."""
    head, *listed = message.split("\n  ")
    if not listed:
        return message
    more = f"; and {len(listed) - 3} more" if len(listed) > 3 else ""
    return head.rstrip() + " " + "; ".join(listed[:3]) + more


def _fail(message: str, code: int) -> None:
    print(f"ftrain: {_shortened(message)}", file=sys.stderr, flush=True)
    sys.exit(code)
