"""Exit codes: what a command ends with when it fails for a reason that needs no traceback.

2 is for a user's mistake, which a restart would repeat. 74 is for an error of the operating system that may pass and
was retried in vain, 75 for a process that lost another one, 76 for one that hung: after these a launcher should start
the processes again, as `ftrain launch` does. 1 is for any other failure.
"""

import errno

from ftrain.launching.protocol import PEER_FAILED, TRANSIENT, USER_ERROR
from ftrain.storage import is_transient


def exit_code(error: Exception) -> int | None:
    """The code to exit with for an error that needs no traceback."""
    # By name, because importing the classes would import jax; only commands that have done so can raise them.
    kinds = (f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__)
    known = next((CODES[kind] for kind in kinds if kind in CODES), None)
    if known != PEER_FAILED and is_transient(error):
        return TRANSIENT
    if isinstance(error, OSError) and error.errno in MISTAKES and error.filename is not None:
        return USER_ERROR
    if isinstance(error, OSError) and (error.errno in NO_ROOM or error.filename is not None):
        return 1
    return known


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # for a file
MISTAKES = (  # with a path that a user gave
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY),
    *(
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EINVAL,
        errno.EXDEV,
    ),
)
CODES = {
    "ftrain.config.load.ConfigError": USER_ERROR,
    "ftrain.paths.PathError": USER_ERROR,
    "ftrain.cluster.control_protocol.ProcessMismatchError": USER_ERROR,
    "ftrain.cluster.control_protocol.ClusterError": PEER_FAILED,  # a restart of all processes may help
    "ftrain.checkpoints.lock.HeldElsewhereError": TRANSIENT,  # by a host that may be lost: its lock ends in time
    "ftrain.checkpoints.lock.InUseError": USER_ERROR,
    "ftrain.checkpoints.errors.SaveError": 1,
    "ftrain.checkpoints.errors.CheckpointError": USER_ERROR,
    "builtins.TimeoutError": 1,
    "ftrain.cli.data.arguments.DataCommandError": USER_ERROR,
    "ftrain.formats.examples.features.SpecError": USER_ERROR,
    "ftrain.formats.records.encoding.DamagedRecordError": 1,
    "ftrain.formats.tables.TableError": USER_ERROR,
    "ftrain.hooks.stopping.NotFiniteError": 1,
    "ftrain.training.metrics.UnknownMetricError": 2,
    "ftrain.training.recovery.NotReadyError": 1,
}
