"""ftrain check CONFIG [key=value ...]"""

from ftrain.cli.arguments import ConfigPath, Overrides


def check(config: ConfigPath, overrides: Overrides = None) -> None:
    """Check CONFIG without training: its keys, the shapes of a step, its size, how it fits the devices."""
    import jax
    from rich.console import Console
    from rich.table import Table

    from ftrain.cluster import split_batch
    from ftrain.config import build, load, plan
    from ftrain.tree import count_bytes, count_elements, named_leaves

    planned = plan(load(config, overrides or []))
    job = build(planned)
    state = job.abstract_state()
    batch = job.pipeline.batch(0)
    _, metrics = jax.eval_shape(job.step, state, batch)

    facts = Table(show_header=False, box=None)
    facts.add_row("task", job.plan.top["task"])
    facts.add_row("run directory", str(job.directory))
    facts.add_row("parameters", f"{count_elements(state.params):,} in {len(jax.tree.leaves(state.params))} leaves")
    facts.add_row("state", f"{_show_bytes(count_bytes(state))} (parameters {_show_bytes(count_bytes(state.params))})")
    facts.add_row("examples", f"{len(job.pipeline.source):,}")
    epochs = job.steps * job.pipeline.batch_size / len(job.pipeline.source)
    facts.add_row("steps", f"{job.steps:,}, {epochs:,.1f} epochs")
    facts.add_row("batch", ", ".join(f"{name} {_show_leaf(leaf)}" for name, leaf in named_leaves(batch).items()))
    facts.add_row("mesh", ", ".join(f"{axis} {size}" for axis, size in job.mesh.shape.items()))
    facts.add_row("examples a device", f"{split_batch(job.pipeline.batch_size, job.mesh)}")
    facts.add_row("metrics", ", ".join(sorted(metrics)))
    console = Console()
    console.print(facts)
    console.print(f"{config} is good; train it with: ftrain train {config}", highlight=False)


def _show_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def _show_leaf(leaf) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
