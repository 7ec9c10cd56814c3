"""Exit codes: what a command ends with when it fails for a reason that needs no traceback."""

import errno


def exit_code(error: Exception) -> int | None:
    """The code to exit with for an error that needs no traceback."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return 1
    if isinstance(error, OSError) and error.filename is not None:
        return 2
    # By name, because importing the classes would import jax; only commands that have done so can raise them.
    kinds = (f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__)
    return next((CODES[kind] for kind in kinds if kind in CODES), None)


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # for a file
CODES = {
    "ftrain.config.load.ConfigError": 2,
    "ftrain.cluster.line.MismatchError": 2,
    "ftrain.cluster.line.ClusterError": 75,  # what could not be done together may be, when all are started again
    "ftrain.checkpoints.lock.InUseError": 2,
    "ftrain.checkpoints.errors.SaveError": 1,
    "ftrain.checkpoints.errors.CheckpointError": 2,
    "builtins.TimeoutError": 1,
    "ftrain.cli.data.errors.DataCommandError": 2,
    "ftrain.formats.examples.conversions.SpecError": 2,
    "ftrain.formats.records.framing.DamagedRecordError": 1,
    "ftrain.hooks.stopping.NotFiniteError": 1,
    "ftrain.training.metrics.UnknownMetricError": 2,
    "ftrain.training.scaffold.NotReadyError": 1,
}
