"""ftrain check CONFIG [key=value ...]"""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftrain.cli.arguments import ConfigPath, Overrides
from ftrain.cli.output import print_table, show_bytes

if TYPE_CHECKING:
    from ftrain.checkpoints import HandOver, WarmStart
    from ftrain.cluster.sharding import Sharding
    from ftrain.config import Job, Plan
    from ftrain.optimizers import Group
    from ftrain.training import TrainState

_MAX_NOTICES = 3  # shown without --leaves
_MAX_TAKEN = 20  # leaves of a warm start, likewise


def check(
    config: ConfigPath,
    overrides: Overrides = None,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            min=1,
            metavar="N",
            help="Show the layout on N devices; they need not exist.",
        ),
    ] = None,
    leaves: Annotated[
        bool,
        typer.Option(
            "--leaves", help="Show how each leaf of the state is split; implied by --devices."
        ),
    ] = False,
) -> None:
    """Check CONFIG without training: keys, shapes of a step, size, layout on the devices."""
    import jax

    from ftrain.config import build, load, plan
    from ftrain.config.open_run import on_one_device
    from ftrain.config.run_directory import compare
    from ftrain.tree import count_bytes, count_elements, named_leaves

    planned = plan(load(config, overrides or []))
    if planned.config.notice:
        print(planned.config.notice)
    imagined = None if devices is None else _imagined_axes(planned, devices)
    job = build(planned if imagined is None else on_one_device(planned))
    axes = imagined or job.mesh.shape
    size = job.pipeline.batch_size
    examples = len(job.pipeline.source)
    share = _split_batch(planned, size, axes)
    state, metrics = job.trace()
    specs, notices = _lay_out(planned, job.sharding, state, axes)
    differences = compare(job.directory, job.plan.resolved())
    batch = named_leaves(job.pipeline.batch(0))
    has_checkpoint = not job.saver.manager.is_empty()
    start = None
    if job.warm_start is not None and not has_checkpoint:
        start = job.warm_start.plan(state)
    leaf_count = len(jax.tree.leaves(state.params))
    parameter_size = show_bytes(count_bytes(state.params))

    _print_facts(
        {
            "task": job.plan.top["task"],
            "run directory": f"{job.directory}" + (" (of another run)" if differences else ""),
            "parameters": f"{count_elements(state.params):,} in {leaf_count} leaves"
            + _show_frozen(state),
            **_model_state_facts(state),
            "state": f"{_show_size(state, specs, axes)} (parameters {parameter_size})",
            "examples": f"{examples:,}",
            "steps": f"{job.steps:,}, {job.steps * size / examples:,.1f} epochs",
            "batch": ", ".join(
                f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in batch.items()
            ),
            "mesh": _show_axes(axes, devices or len(jax.devices())),
            "examples per device": f"{share}",
            "metrics": ", ".join(sorted(metrics)),
        }
        | ({} if job.precision is None else {"precision": _show_precision(job)})
        | _evaluation_facts(job)
        | _warm_start_fact(job.warm_start, start)
    )
    if start is not None:
        print()
        _print_hand_over(start, None if leaves else _MAX_TAKEN)
        print()
    if groups := job.groups():
        print()
        _print_groups(groups, state.params)
        print()
    if leaves or devices is not None:
        print()
        _print_layout(state, specs, axes)
        print()
    _print_notices(notices, len(notices) if leaves else _MAX_NOTICES)
    if differences:
        print(
            f"{job.directory} holds another run ({'; '.join(differences)}): "
            "choose another run.directory=PATH"
        )
    else:
        print(f"good; train it with: ftrain train {shlex.join([str(config), *(overrides or [])])}")


def _evaluation_facts(job: "Job") -> dict[str, str]:
    """Return what is measured on held-out examples, if the task has some."""
    pipeline = job.evaluation_pipeline
    if pipeline is None:
        return {}
    names = "every output" if job.task.metrics is None else ", ".join(sorted(job.task.metrics))
    batches = f"{len(pipeline.source):,} examples in batches of {pipeline.batch_size}"
    return {"evaluation": f"{names} of {batches}"}


def _warm_start_fact(asked: "WarmStart | None", start: "HandOver | None") -> dict[str, str]:
    if asked is None:
        return {}
    resumed = f"not taken again from {asked.checkpoint}: the run has a checkpoint of its own"
    return {"warm start": resumed if start is None else f"{start}"}


def _print_hand_over(start: "HandOver", limit: int | None) -> None:
    """Print where leaves come from, first those of the model that keep their initial values."""
    from rich.table import Table

    from ftrain.checkpoints.hand_over import is_of_model

    table = Table(box=None)
    table.add_column("leaf", overflow="fold")
    table.add_column("from", overflow="fold")
    kept = [name for name in start.kept if is_of_model(name)]
    rows = [(name, "kept: its initial value") for name in kept]
    rows += [
        (name, f"{source} ({start.counts[name]})" if name in start.counts else source)
        for name, source in start.sources.items()
    ]
    for row in rows[:limit]:
        table.add_row(*row)
    print_table(table)
    if limit is not None and len(rows) > limit:
        print(f"and {len(rows) - limit} more; --leaves shows them")


def _model_state_facts(state: "TrainState") -> dict[str, str]:
    """Return the line about the model state, if there is one."""
    import jax

    from ftrain.tree import count_elements

    leaves = jax.tree.leaves(state.model_state)
    shown = f"{count_elements(state.model_state):,} in {len(leaves)} leaves"
    return {"model state": shown} if leaves else {}


def _show_frozen(state: "TrainState") -> str:
    from ftrain.optimizers.parameter_group import frozen_names
    from ftrain.tree import named_leaves

    names = frozen_names(state.opt_state)
    count = sum(leaf.size for name, leaf in named_leaves(state.params).items() if name in names)
    return f", {count:,} of them frozen" if names else ""


def _print_groups(groups: Sequence["Group"], params: Any) -> None:
    """Print what each parameter group changes, and how many parameters it has."""
    import jax
    from rich.table import Table

    from ftrain.optimizers.groups import groups_of

    table = Table(box=None)
    table.add_column("group", overflow="fold")
    table.add_column("match", overflow="fold")
    table.add_column("changes", overflow="fold")
    table.add_column("leaves", justify="right")
    table.add_column("parameters", justify="right", no_wrap=True)
    own = groups_of(groups, params)
    leaves = jax.tree.leaves(params)
    for group in (*groups, None):
        sizes = [leaf.size for leaf, each in zip(leaves, own, strict=True) if each is group]
        shown = ("(all others)", "", "") if group is None else _describe_group(group)
        table.add_row(*shown, f"{len(sizes):,}", f"{sum(sizes):,}")
    print_table(table)


def _describe_group(group: "Group") -> tuple[str, str, str]:
    """Return the name of a group, its pattern, and what it changes."""
    numbers = {
        name: getattr(group, name)
        for name in ("learning_rate", "learning_rate_scale", "weight_decay")
    }
    changes = ["frozen"] if group.freeze else []
    changes += ["own optimizer"] if group.optimizer is not None else []
    changes += [
        f"{name} {'scheduled' if callable(value) else value}"
        for name, value in numbers.items()
        if value is not None
    ]
    return group.name, group.match, ", ".join(changes)


def _show_precision(job: "Job") -> str:
    """Return the policy, and in which dtypes a step really multiplies matrices."""
    counts = ", ".join(f"{count} in {dtype}" for dtype, count in job.products().items())
    return f"{job.precision}" + (f"; matrix products: {counts}" if counts else "")


def _imagined_axes(planned: "Plan", devices: int) -> dict[str, int]:
    """Return the axes of the config's mesh over a number of devices that need not exist."""
    from ftrain.cluster.mesh import AXES, sizes

    asked = planned.calls["mesh"].arguments
    try:
        return sizes(**{axis: asked[axis] for axis in AXES}, devices=devices)
    except ValueError as error:
        raise planned.config.error("mesh", str(error)) from None


def _split_batch(planned: "Plan", batch_size: int, axes: Mapping[str, int]) -> int:
    """Return the number of examples of a batch on each device."""
    from ftrain.cluster.mesh import split_batch

    try:
        return split_batch(batch_size, axes)
    except ValueError as error:
        raise planned.config.error("data.batch_size", str(error)) from None


def _lay_out(
    planned: "Plan", sharding: "Sharding", state: "TrainState", axes: Mapping[str, int]
) -> tuple[Any, list[str]]:
    """Return the partition specs of the state, and notices about leaves that are not split."""
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


def _print_notices(notices: list[str], limit: int) -> None:
    for notice in notices[:limit]:
        print(f"note: {notice}")
    if len(notices) > limit:
        print(f"note: and {len(notices) - limit} more such leaves; --leaves names them")


def _print_layout(state: "TrainState", specs: Any, axes: Mapping[str, int]) -> None:
    """Print how each leaf is split and its size on a device, and a line for all of them."""
    import jax
    from rich.table import Table

    from ftrain.cluster.sharding import leaf_bytes_per_device, leaves_with_rule_names

    table = Table(box=None)
    table.add_column("leaf", overflow="fold")
    for column in ("shape", "dtype", "split over"):
        table.add_column(column)
    table.add_column("per device", justify="right", no_wrap=True)
    leaves = leaves_with_rule_names(state)
    parts = jax.tree.leaves(specs)
    sizes = leaf_bytes_per_device(state, specs, axes)
    for (name, leaf), spec, size in zip(leaves, parts, sizes, strict=True):
        split = _show_split(spec, leaf.ndim)
        table.add_row(name, f"{list(leaf.shape)}", f"{leaf.dtype}", split, show_bytes(size))
    print_table(table)
    count = sum(any(spec) for spec in parts)
    print(f"state {_show_size(state, specs, axes)}; {count:,} of {len(parts):,} leaves are split")


def _show_split(spec: Any, dimensions: int) -> str:
    """Return the axes of each dimension, as a rule names them; empty for a replicated leaf."""
    from ftrain.cluster.sharding import entries

    split = ["+".join(entry) or "-" for entry in entries(spec)]
    return ", ".join(split + ["-"] * (dimensions - len(split))) if split else ""


def _show_size(tree: Any, specs: Any, axes: Mapping[str, int]) -> str:
    """Return the size of a tree in all, and on each device."""
    from ftrain.cluster.sharding import bytes_per_device
    from ftrain.tree import count_bytes

    each = bytes_per_device(tree, specs, axes)
    return f"{show_bytes(count_bytes(tree))}, {show_bytes(each)} per device"


def _show_axes(axes: Mapping[str, int], devices: int) -> str:
    """Return the axes of a mesh, and the number of devices that they leave unused."""
    shown = ", ".join(f"{axis} {size}" for axis, size in axes.items())
    used = math.prod(axes.values())
    return f"{shown}; {devices - used} of {devices} devices unused" if used < devices else shown
