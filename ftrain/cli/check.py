"""ftrain check CONFIG [key=value ...]"""

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftrain.cli.arguments import ConfigPath, Overrides
from ftrain.cli.runs import on_one_device
from ftrain.cli.tables import show_bytes

if TYPE_CHECKING:
    from ftrain.cluster.sharding import Sharding
    from ftrain.config import Plan

_NOTICES = 3  # that are shown unless all leaves are


def check(
    config: ConfigPath,
    overrides: Overrides = None,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices", min=1, metavar="N", help="Fit it to N devices, without having them."
        ),
    ] = None,
    leaves: Annotated[
        bool,
        typer.Option(
            "--leaves", help="How each leaf of the state is split, as --devices shows it too."
        ),
    ] = False,
) -> None:
    """Check CONFIG without training: its keys, the shapes of a step, its size, how it fits the devices."""
    import jax

    from ftrain.cli.layout_table import print_layout, show_axes, show_size
    from ftrain.config import build, load, plan
    from ftrain.config.run_directory import compare
    from ftrain.tree import count_bytes, count_elements, named_leaves

    planned = plan(load(config, overrides or []))
    if planned.config.notice:
        print(planned.config.notice)
    imagined = None if devices is None else _imagine(planned, devices)
    job = build(planned if imagined is None else on_one_device(planned))
    axes = imagined or job.mesh.shape
    size, examples = job.pipeline.batch_size, len(job.pipeline.source)
    share = _split_batch(planned, size, axes)
    state, metrics = job.trace()
    specs, notices = _lay_out(planned, job.sharding, state, axes)
    differences = compare(job.directory, planned.resolved())

    _print_facts(
        {
            "task": job.plan.top["task"],
            "run directory": f"{job.directory}" + (" (of another run)" if differences else ""),
            "parameters": f"{count_elements(state.params):,} in {len(jax.tree.leaves(state.params))} leaves",
            "state": f"{show_size(state, specs, axes)} (parameters {show_bytes(count_bytes(state.params))})",
            "examples": f"{examples:,}",
            "steps": f"{job.steps:,}, {job.steps * size / examples:,.1f} epochs",
            "batch": ", ".join(
                f"{name} {_show(leaf)}"
                for name, leaf in named_leaves(job.pipeline.batch(0)).items()
            ),
            "mesh": show_axes(axes, devices or len(jax.devices())),
            "examples a device": f"{share}",
            "metrics": ", ".join(sorted(metrics)),
        }
    )
    if leaves or devices is not None:
        print()
        print_layout(state, specs, axes)
        print()
    _print_notices(notices, len(notices) if leaves else _NOTICES)
    if differences:
        print(
            f"{job.directory} holds another run ({'; '.join(differences)}): choose another, run.directory=PATH"
        )
    else:
        print(f"good; train it with: ftrain train {shlex.join([str(config), *(overrides or [])])}")


def _imagine(planned: "Plan", devices: int) -> dict[str, int]:
    """The axes of the config's mesh over so many devices, which need not be there."""
    from ftrain.cluster.mesh import AXES, sizes

    asked = planned.calls["mesh"].arguments
    try:
        return sizes(**{axis: asked[axis] for axis in AXES}, devices=devices)
    except ValueError as error:
        raise planned.config.error("mesh", str(error)) from None


def _split_batch(planned: "Plan", batch_size: int, axes: Any) -> int:
    from ftrain.cluster.mesh import split_batch

    try:
        return split_batch(batch_size, axes)
    except ValueError as error:
        raise planned.config.error("data.batch_size", str(error)) from None


def _lay_out(planned: "Plan", sharding: "Sharding", state: Any, axes: Any) -> tuple[Any, list[str]]:
    """How the state lies on the mesh, and what there is to say about it."""
    try:
        return sharding.specs(state, axes), sharding.undivided(state, axes)
    except ValueError as error:
        raise planned.config.error("sharding.rules", str(error)) from None


def _print_facts(facts: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name, fact in facts.items():
        table.add_row(name, fact)
    Console(markup=False, highlight=False).print(table)


def _print_notices(notices: list[str], most: int) -> None:
    for notice in notices[:most]:
        print(f"note: {notice}")
    if len(notices) > most:
        print(f"note: and {len(notices) - most} more such leaves; --leaves names them")


def _show(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
