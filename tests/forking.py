"""Run commands in forks of a process that has already imported ftrain.

`python -m ftrain` takes a second to start, mostly for imports, and the tests run hundreds of
commands. A fork is still a separate process with its own memory, files and exit code. The forked
process has no JAX device open, so it is safe to fork. Tests of the start itself run
`python -m ftrain`.
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
MOST_BYTES = 1 << 17  # of a message, which has the arguments and the environment of a command


class ForkServer:
    """Run commands one after another in forks of a process that is started here."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self._number = 0  # of the newest command
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        with theirs:
            self._process = start_process(command, env=self._environ, pass_fds=[theirs.fileno()])
        atexit.register(self.close)

    def serves(self, environ: Mapping[str, str]) -> bool:
        """Return True if the imported modules would read the same settings from `environ`."""
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
        self._number += 1
        request = {
            "number": self._number,
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
            number = 0
            while number < self._number:  # an earlier command may have ended after its time limit
                number, code = map(int, self._socket.recv(MOST_BYTES).split())
            texts = [file.seek(0) or file.read().decode() for file in (out, err)]
        return subprocess.CompletedProcess(["ftrain", *arguments], code, *texts)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(timeout=60)


def serve(connection: socket.socket) -> tuple[list[str], str | None]:
    """Fork for each command and send back its exit code; return in the fork, with its command."""
    while True:
        message, files, _, _ = socket.recv_fds(connection, MOST_BYTES, 2)
        if not message:  # the tests have ended
            os._exit(0)
        request = json.loads(message)
        with warnings.catch_warnings():
            # Python warns of a fork while other threads run: here, those of a matrix library.
            warnings.simplefilter("ignore")
            child = os.fork()
        if not child:
            connection.close()
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
        connection.send(f"{request['number']} {os.waitstatus_to_exitcode(status)}".encode())


if __name__ == "__main__":
    for module in MODULES:
        importlib.import_module(f"ftrain.{module}")
    sys.path[0] = str(Path.cwd())
    words, source = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.path[0] = os.getcwd()  # as with python -m and python -c
    sys.argv = ["ftrain" if source is None else "-c", *words]
    if source is None:
        sys.modules["ftrain.cli"].main()
    else:
        exec(source, {"__name__": "__main__"})
