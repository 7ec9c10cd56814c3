"""The job token: a secret of the processes of one job, and how a process proves to know it.

The token itself never crosses the network: each side of a connection answers a random challenge of
the other with an HMAC. It is in no config, log, summary or crash bundle, and on no command line.
"""

import hmac
import json
import os
import secrets
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ftrain.launching.protocol import TOKEN

FILE = "job_token"  # in the run directory, or in the user's own configuration directory
MIN_LENGTH = 16  # characters of a token that a user sets
_WRITTEN = 64  # characters of a token in a file, without the newline
_LIMIT = 10.0  # seconds for another process to finish writing the file that it has created
_WAY_OUT = f"or set {TOKEN} to the same random text for all processes (openssl rand -hex 32)"
Role = Literal["client", "server"]


class JobToken:
    """A secret, and the place that it was read from; only the place may be shown."""

    def __init__(self, secret: str, source: str):
        self._key = secret.encode()
        self.source = source

    def __repr__(self) -> str:
        return f"JobToken(source={self.source!r})"

    def prove(self, role: Role, *facts: str | int) -> str:
        """Return the answer to a challenge: an HMAC of the role and the facts of a handshake."""
        return hmac.new(self._key, json.dumps([role, *facts]).encode(), "sha256").hexdigest()

    def is_proof(self, answer: object, role: Role, *facts: str | int) -> bool:
        """True if the sender of `answer` knows the token; the comparison takes constant time."""
        shown = answer if isinstance(answer, str) else ""
        return hmac.compare_digest(
            self.prove(role, *facts).encode(), shown.encode(errors="replace")
        )


def make_challenge() -> str:
    """Return a random challenge for a peer."""
    return secrets.token_hex(16)


def find_token(
    directory: str | Path | None = None, environ: Mapping[str, str] | None = None
) -> JobToken:
    """Return the token of this job. `ftrain launch` makes one for each group of processes.

    Without a launcher it is FTRAIN_JOB_TOKEN, or else the content of the file `job_token` in
    `directory`, the run directory that all processes share; without a directory, of
    `~/.config/ftrain/job_token`. The first process that needs the file creates it, readable by its
    user only.
    """
    environ = os.environ if environ is None else environ
    given = environ.get(TOKEN, "").strip()
    if given:
        if len(given) < MIN_LENGTH:
            raise ValueError(
                f"{TOKEN} has {len(given)} characters, expected at least {MIN_LENGTH} random ones: "
                "openssl rand -hex 32"
            )
        return JobToken(given, TOKEN)
    path = (_own_directory(environ) if directory is None else Path(directory)) / FILE
    try:
        return JobToken(_read_or_create(path), f"{path}")
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"the job token {path} cannot be read or written: {reason}; fix that, {_WAY_OUT}"
        ) from None


def _own_directory(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CONFIG_HOME", "").strip()
    home = Path(environ.get("HOME") or "~").expanduser()
    return (Path(base) if base else home / ".config") / "ftrain"


def _read_or_create(path: Path) -> str:
    try:
        return _read(path)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # another process of the job was first
        return _read(path)
    with open(file, "w") as written:
        written.write(f"{secrets.token_hex(_WRITTEN // 2)}\n")
        written.flush()
        os.fsync(written.fileno())
    return _read(path)  # with its checks: not every file system keeps the mode


def _read(path: Path) -> str:
    deadline = time.monotonic() + _LIMIT
    while True:
        text = _read_once(path)
        if len(text) == _WRITTEN + 1:
            return text.strip()
        if time.monotonic() >= deadline:
            raise ValueError(f"the job token {path} is damaged; delete it, {_WAY_OUT}")
        time.sleep(0.02)


def _read_once(path: Path) -> str:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(file, encoding="ascii", errors="replace") as opened:
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError(f"the job token {path} is not a regular file; delete it, {_WAY_OUT}")
        if facts.st_uid != os.geteuid():
            raise ValueError(
                f"the job token {path} belongs to user {facts.st_uid}, "
                f"but this process runs as {os.geteuid()}; delete it, {_WAY_OUT}"
            )
        if facts.st_mode & 0o077:
            mode = stat.S_IMODE(facts.st_mode)
            raise ValueError(
                f"the job token {path} can be read by other users (mode {mode:o}, expected 600); "
                f"delete it, {_WAY_OUT}"
            )
        return opened.read(_WRITTEN + 2)
