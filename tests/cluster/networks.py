"""Hosts in network namespaces, each with its own address, name, /etc/hosts and a link to cut."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from command import environment

TOOLS = ("ip", "nsenter", "unshare", "mount", "hostname")
_ENTER = """
hostname "$1"
mount --bind "$2" /etc/hosts
if [ -n "$3" ]; then mount -t tmpfs none "$3"; fi
shift 3
exec "$@"
"""


def why_not() -> str | None:
    """Return why network namespaces cannot be created here; None if they can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    name = f"ftrain-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None if made.returncode == 0 else f"no network namespaces: {made.stderr.strip()}"


class Network:
    """`count` hosts n1, n2, ... at 10.77.0.11, .12, ..., on a bridge in its own namespace."""

    def __init__(self, home: Path, count: int, hosts: Mapping[str, str] | None = None):
        """`hosts` has lines for the /etc/hosts of single hosts, before the common ones."""
        self.names = [f"n{number + 1}" for number in range(count)]
        self._home = home
        self._prefix = f"ft{os.getpid()}"
        self._own = hosts or {}
        self._switch = f"{self._prefix}-switch"
        self.started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            process.kill()
            process.communicate()
        for space in (self._switch, *map(self._space, self.names)):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def start(
        self, host: str, *words: str, hidden: Path | None = None, **variables: str
    ) -> subprocess.Popen[str]:
        """Run `ftrain` with these words on a host; `hidden` is a directory not shared with it."""
        enter = [
            "nsenter",
            f"--net=/var/run/netns/{self._space(host)}",
            "unshare",
            "--uts",
            "--mount",
        ]
        shell = ["bash", "-ec", _ENTER, "bash", host, f"{self._file(host)}", f"{hidden or ''}"]
        command = [*enter, *shell, sys.executable, "-m", "ftrain", *words]
        process = subprocess.Popen(
            command,
            env=environment() | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def start_job(self, *words: str, **variables: str) -> list[subprocess.Popen[str]]:
        """A process of `ftrain train` on each host, without a launcher."""
        addresses = [f"{name}:2222" for name in self.names]
        return [
            self.start(name, *words, FTRAIN_CLUSTER=describe(addresses, index), **variables)
            for index, name in enumerate(self.names)
        ]

    def cut(self, host: str) -> None:
        """Set the link of a host down, without any notice to its peers."""
        _ip("-n", self._switch, "link", "set", self._port(host), "down")

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        table = [f"10.77.0.{11 + number} {name}" for number, name in enumerate(self.names)]
        for number, name in enumerate(self.names):
            space = self._space(name)
            port = self._port(name)
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            _ip(
                "link",
                "add",
                port,
                "netns",
                self._switch,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                space,
            )
            _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", space, "addr", "add", f"10.77.0.{11 + number}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            own = self._own.get(name, "")
            others = [line for line in table if not own or not line.endswith(f" {name}")]
            self._file(name).write_text("\n".join(["127.0.0.1 localhost", own, *others, ""]))

    def _space(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _port(self, host: str) -> str:
        return f"to-{host}"

    def _file(self, host: str) -> Path:
        return self._home / f"hosts-{host}"


def describe(addresses: list[str], index: int) -> str:
    return json.dumps(
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    )


def wait_until(condition, limit: float, processes: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        ended = [process for process in processes if process.poll() is not None]
        assert not ended, [process.communicate() for process in ended]
        time.sleep(0.05)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
