"""ftrain launch -n N CONFIG [key=value ...]"""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ftrain.launching import Screen

# All that follows CONFIG belongs to the processes, even if it looks like an option.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}


def launch(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help="A TOML file to train, a run directory to resume, or a program that ends in .py.",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Overrides, or arguments of the program, for all processes.",
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option("-n", "--processes", help="Number of processes to start.")
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Maximum number of restarts.")] = 10,
    hang_timeout: Annotated[
        float,
        typer.Option(help="Seconds without a step after which a process counts as hung."),
    ] = 300.0,
    processes_after_failure: Annotated[
        int | None, typer.Option(help="Number of processes of a restart; by default as before.")
    ] = None,
    inject: Annotated[
        str | None,
        typer.Option(
            help='Faults to survive, such as "kill rank=1 step=40; freeze rank=2 step=60".'
        ),
    ] = None,
    gpus_each: Annotated[
        int | None,
        typer.Option(
            min=1, help="GPUs of each process; by default its share, if there are enough."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address of this machine at which the processes connect.")
    ] = "127.0.0.1",
) -> None:
    """Train on several processes of this machine, and restart them when one fails or hangs.

    Options come before CONFIG. Ctrl-C makes the processes save and stop, a second one ends them.
    """
    from ftrain.launching import LaunchSpec, supervise
    from ftrain.launching.child_environment import share_of_gpus

    count = _check_processes(processes, processes_after_failure)
    if not 0 < hang_timeout < math.inf:
        raise typer.BadParameter(
            f"must be a finite number of seconds > 0, got {hang_timeout:g}",
            param_hint="--hang-timeout",
        )
    _check_faults(inject, count)
    _check_host(host)
    spec = LaunchSpec(
        _command(config, arguments or []),
        count,
        processes_after_failure=processes_after_failure,
        max_restarts=max_restarts,
        hang_timeout=hang_timeout,
        inject=inject,
        gpus_each=gpus_each or share_of_gpus(count),
        host=host,
    )
    screen = _open_screen()
    try:
        code = supervise(spec, screen)
    finally:
        screen.close()
    raise typer.Exit(code)


def _command(config: Path, arguments: list[str]) -> tuple[str, ...]:
    if config.suffix == ".py" and not config.is_file():
        raise typer.BadParameter(f"{config}: there is no such file", param_hint="CONFIG")
    if config.suffix == ".py":
        return (sys.executable, str(config), *arguments)
    misplaced = [word for word in arguments if word.split("=")[0] in _OWN_OPTIONS]
    if misplaced:
        raise typer.BadParameter(
            f"{misplaced[0]} is an option of launch and must come before {config}"
        )
    if not config.is_file():
        from ftrain.config.load import config_file, read_toml

        read_toml(config_file(config))  # raises an error, as `ftrain train` does
    return (sys.executable, "-m", "ftrain", "train", str(config), *arguments)


def _check_processes(processes: int | None, after_failure: int | None) -> int:
    if processes is None:
        raise typer.BadParameter("the number of processes is missing: pass -n N before CONFIG")
    if processes < 1:
        raise typer.BadParameter(f"must be at least 1, got {processes}", param_hint="-n")
    if after_failure is not None and not 1 <= after_failure <= processes:
        raise typer.BadParameter(
            f"must be between 1 and the {processes} of -n, got {after_failure}",
            param_hint="--processes-after-failure",
        )
    return processes


def _check_faults(inject: str | None, processes: int) -> None:
    from ftrain.launching import parse_faults

    try:
        faults = parse_faults(inject or "")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--inject") from None
    for fault in faults:
        if fault.rank is not None and fault.rank >= processes:
            raise typer.BadParameter(
                f"{fault.kind}: rank={fault.rank} is not one of the processes, "
                f"0 to {processes - 1}",
                param_hint="--inject",
            )


def _check_host(host: str) -> None:
    from ftrain.launching.child_environment import free_addresses

    try:
        free_addresses(1, host)
    except (OSError, UnicodeError) as error:
        raise typer.BadParameter(
            f"{host!r} is not an address of this machine: {error}", param_hint="--host"
        ) from None


def _open_screen() -> "Screen":
    from rich.console import Console

    from ftrain.launching import Screen

    console = Console()
    drawing = console.is_terminal and not console.is_dumb_terminal
    return Screen(sys.stdout.fileno(), sys.stderr.fileno(), console if drawing else None)


_OWN_OPTIONS = {
    "-n",
    "--processes",
    "--max-restarts",
    "--hang-timeout",
    "--processes-after-failure",
    "--inject",
    "--gpus-each",
    "--host",
}
