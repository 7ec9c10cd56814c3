"""ftrain check CONFIG [key=value ...]"""

from typing import Any

from ftrain.cli.arguments import ConfigPath, Overrides
from ftrain.cli.tables import show_bytes


def check(config: ConfigPath, overrides: Overrides = None) -> None:
    """Check CONFIG without training: its keys, the shapes of a step, its size, how it fits the devices."""
    import jax
    from rich.console import Console
    from rich.table import Table

    from ftrain.cluster import split_batch
    from ftrain.config import build, load, plan
    from ftrain.config.run_directory import compare
    from ftrain.tree import count_bytes, count_elements, named_leaves

    planned = plan(load(config, overrides or []))
    job = build(planned)
    state, metrics = job.trace()
    differences = compare(job.directory, planned.resolved())
    size, examples = job.pipeline.batch_size, len(job.pipeline.source)

    facts = Table(show_header=False, box=None)
    facts.add_row("task", job.plan.top["task"])
    facts.add_row("run directory", f"{job.directory}" + (" (of another run)" if differences else ""))
    facts.add_row("parameters", f"{count_elements(state.params):,} in {len(jax.tree.leaves(state.params))} leaves")
    facts.add_row("state", f"{show_bytes(count_bytes(state))} (parameters {show_bytes(count_bytes(state.params))})")
    facts.add_row("examples", f"{examples:,}")
    facts.add_row("steps", f"{job.steps:,}, {job.steps * size / examples:,.1f} epochs")
    batch = named_leaves(job.pipeline.batch(0))
    facts.add_row("batch", ", ".join(f"{name} {_show_leaf(leaf)}" for name, leaf in batch.items()))
    facts.add_row("mesh", ", ".join(f"{axis} {count}" for axis, count in job.mesh.shape.items()))
    facts.add_row("examples a device", f"{split_batch(size, job.mesh)}")
    facts.add_row("metrics", ", ".join(sorted(metrics)))
    Console(markup=False, highlight=False).print(facts)
    if differences:
        print(f"{job.directory} holds another run ({'; '.join(differences)}): choose another, run.directory=PATH")
    else:
        print(f"good; train it with: ftrain train {' '.join([str(config), *(overrides or [])])}")


def _show_leaf(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
