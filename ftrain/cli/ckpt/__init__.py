"""ftrain ckpt ...: what there is to know and to do about checkpoints; one file a command."""

import typer

from ftrain.cli.ckpt.diff import diff
from ftrain.cli.ckpt.export import export
from ftrain.cli.ckpt.keep import pin, remove, unpin
from ftrain.cli.ckpt.list import list_checkpoints
from ftrain.cli.ckpt.show import show
from ftrain.cli.ckpt.verify import verify

app = typer.Typer(
    help="List, show, compare, verify, export and remove checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command(name="list")(list_checkpoints)
app.command()(show)
app.command()(diff)
app.command()(verify)
app.command()(export)
app.command(name="rm")(remove)
app.command()(pin)
app.command()(unpin)
