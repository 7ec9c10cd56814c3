"""Exit codes of commands that fail for a reason that needs no traceback.

- 1: any other failure
- 2: a user's mistake, which a restart would repeat
- 74: a transient error of the operating system, after retries
- 75: another process failed
- 76: a process hung

After 74 to 76 a launcher should restart the processes, as `ftrain launch` does.
"""

import errno

from ftrain.launching.protocol import PEER_FAILED, TRANSIENT, USER_ERROR
from ftrain.storage import is_transient


def exit_code(error: Exception) -> int | None:
    """Return the exit code for an error that needs no traceback, or None for any other error."""
    # By name, because importing the classes would import jax.
    kinds = (f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__)
    known = next((CODES[kind] for kind in kinds if kind in CODES), None)
    if known != PEER_FAILED and is_transient(error):
        return TRANSIENT
    if isinstance(error, OSError) and error.errno in MISTAKES and error.filename is not None:
        return USER_ERROR
    if isinstance(error, OSError) and (error.errno in NO_SPACE or error.filename is not None):
        return 1
    return known


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MISTAKES = (  # in a path that a user gave
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EXDEV),
)
CODES = {
    "ftrain.config.load.ConfigError": USER_ERROR,
    "ftrain.paths.PathError": USER_ERROR,
    "ftrain.cluster.control_protocol.ProcessMismatchError": USER_ERROR,
    "ftrain.cluster.control_protocol.ClusterError": PEER_FAILED,  # a restart may help
    # The lock of another host that may be lost ends by itself.
    "ftrain.checkpoints.lock.HeldElsewhereError": TRANSIENT,
    "ftrain.checkpoints.lock.InUseError": USER_ERROR,
    "ftrain.checkpoints.errors.SaveError": 1,
    "ftrain.checkpoints.errors.CheckpointError": USER_ERROR,
    "builtins.TimeoutError": 1,
    "ftrain.cli.arguments.DataCommandError": USER_ERROR,
    "ftrain.formats.examples.features.SpecError": USER_ERROR,
    "ftrain.formats.records.encoding.DamagedRecordError": 1,
    "ftrain.formats.npz_arrays.NpzError": USER_ERROR,
    "ftrain.formats.safetensors_files.SafetensorsError": USER_ERROR,
    "ftrain.formats.tables.TableError": USER_ERROR,
    "ftrain.hooks.stopping.NonFiniteError": 1,
    "ftrain.training.step_metrics.UnknownMetricError": USER_ERROR,
    "ftrain.training.recovery.NotReadyError": 1,
}
