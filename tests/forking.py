"""Commands in processes that are forked from one which has imported ftrain already.

Starting `python -m ftrain` takes a second, most of it for imports, and the tests run hundreds of commands. Each of
them is a process of its own here too, with its own memory, files and exit code. JAX has no device open in the process
that is forked, so that it is safe to fork. Where starting is what is tested, tests start `python -m ftrain`.
"""

import atexit
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

from processes import start_process

MODULES = (
    "checkpoints",
    "cli",
    "config",
    "data",
    "hooks",
    "launching",
    "optimizers",
    "tasks",
    "training",
)
MOST_BYTES = 1 << 17  # of a message: the arguments and the environment of a command


class ForkServer:
    """Runs commands, one after the other, in forks of a process that is started with the first of them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        with theirs:
            self._process = start_process(command, env=self._environ, pass_fds=[theirs.fileno()])
        atexit.register(self.close)

    def serves(self, environ: Mapping[str, str]) -> bool:
        """Whether the modules that are imported would read the same settings from this environment."""
        names = {
            name
            for name in environ.keys() | self._environ.keys()
            if name.startswith(("JAX_", "PYTHON"))
        }
        return all(environ.get(name) == self._environ.get(name) for name in names)

    def run(
        self,
        arguments: list[str],
        env: Mapping[str, str],
        cwd: str | Path = ".",
        program: str | None = None,
        timeout: float = 240,
    ) -> subprocess.CompletedProcess:
        """Run `ftrain` with these arguments, or the source of a `program`, as `python -c` does."""
        request = {
            "arguments": arguments,
            "environ": dict(env),
            "directory": os.path.abspath(cwd),
            "program": program,
        }
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            socket.send_fds(
                self._socket, [json.dumps(request).encode()], [out.fileno(), err.fileno()]
            )
            self._socket.settimeout(timeout)
            code = int(self._socket.recv(MOST_BYTES))
            texts = [file.seek(0) or file.read().decode() for file in (out, err)]
        return subprocess.CompletedProcess(["ftrain", *arguments], code, *texts)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(timeout=60)


def serve(connection: socket.socket) -> tuple[list[str], str | None]:
    """Fork for each command and tell how it ended; return in the fork, with its arguments and its program."""
    while True:
        message, files, _, _ = socket.recv_fds(connection, MOST_BYTES, 2)
        if not message:  # the tests are over
            os._exit(0)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of forking while there are threads: those of a library for matrices
            child = os.fork()
        if not child:
            connection.close()
            request = json.loads(message)
            os.environ.clear()
            os.environ.update(request["environ"])
            os.chdir(request["directory"])
            for file, number in zip(files, (1, 2), strict=True):
                os.dup2(file, number)
                os.close(file)
            return request["arguments"], request["program"]
        for file in files:
            os.close(file)
        _, status = os.waitpid(child, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())


if __name__ == "__main__":
    for module in MODULES:
        importlib.import_module(f"ftrain.{module}")
    sys.path[0] = str(Path.cwd())
    words, source = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.path[0] = os.getcwd()  # as python -m and python -c would have it
    sys.argv = ["ftrain" if source is None else "-c", *words]
    if source is None:
        sys.modules["ftrain.cli"].main()
    else:
        exec(source, {"__name__": "__main__"})
