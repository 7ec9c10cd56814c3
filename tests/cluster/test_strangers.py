"""Unauthenticated peers of a job learn nothing, block nothing and end nothing."""

import json
import os
import re
import resource
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from command import environment, run, write_config
from jobs import LIMIT, Launched, metrics_of, run_group

from ftrain.cluster import ClusterError, ProcessMismatchError
from ftrain.cluster.addresses import parse_address
from ftrain.cluster.control_client import ControlClient
from ftrain.cluster.control_protocol import MAX_DEPTH, MAX_HANDSHAKE_LINE, MAX_LINE, decode, encode
from ftrain.cluster.control_server import MAX_LOGGED, MIN_PENDING, ControlServer
from ftrain.cluster.job_token import FILE, JobToken, find_token
from ftrain.launching.child_environment import free_addresses

TOKEN = JobToken("the token of all processes", "a test")
OTHER = JobToken("what a stranger tries instead", "elsewhere")
HELLO = {"hello": 1, "count": 2, "nonce": "n", "host": "h"}


@pytest.fixture
def server():
    """The address of a control server for two processes; process 0 is connected."""
    address = parse_address(free_addresses(1)[0])
    server = ControlServer(address, 2, TOKEN)
    own = ControlClient(address, 0, 2, 5.0, lambda message: None, TOKEN)
    yield address, own
    own.disconnect()
    server.close()


class Stranger:
    """A connection without the token."""

    def __init__(self, address):
        self.socket = socket.create_connection(address)
        self.socket.settimeout(30)
        self._reader = self.socket.makefile("rb")

    def send(self, message) -> None:
        self.socket.sendall(message if isinstance(message, bytes) else encode(message))

    def receive(self) -> dict | None:
        """Return the next message, or None if the connection was closed."""
        try:
            line = self._reader.readline()
        except ConnectionError:
            return None
        return decode(line) if line else None

    def close(self) -> None:
        self._reader.close()
        self.socket.close()


@pytest.fixture
def stranger(server):
    found = Stranger(server[0])
    yield found
    found.close()


def meet(own: ControlClient, address) -> list:
    """Connect the second process late, and exchange a value between both."""
    second = ControlClient(address, 1, 2, 20.0, lambda message: None, TOKEN)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda line: line.gather("x", 7, 20.0), [own, second]))
    second.disconnect()
    return found


def logged(capsys, pattern: str) -> list[str]:
    """Return the log lines so far; wait until one matches, as the server logs in a thread."""
    lines = []
    deadline = time.monotonic() + 30
    while not any(re.search(pattern, line) for line in lines):
        assert time.monotonic() < deadline, lines
        lines += capsys.readouterr().err.splitlines()
        time.sleep(0.01)
    return lines


def test_a_stranger_that_says_hello_gets_a_challenge_and_nothing_else(server, stranger, capsys):
    address, own = server
    stranger.send(HELLO)
    challenge = stranger.receive()
    assert challenge is not None
    assert list(challenge) == ["challenge"]
    stranger.send({"proof": OTHER.prove("client", 1, 2, "n", challenge["challenge"])})
    assert stranger.receive() == {"refused": "token"}
    assert stranger.receive() is None
    (line,) = logged(capsys, "refused a connection")
    assert "process 1 on h, but does not know the job token of process 0" in line
    assert meet(own, address) == [[7, 7], [7, 7]]


def test_a_proof_is_good_for_one_connection_only(server, stranger):
    stranger.send(HELLO)
    first = stranger.receive()
    proof = TOKEN.prove("client", 1, 2, "n", first["challenge"])
    again = Stranger(server[0])
    again.send(HELLO)
    assert again.receive() != first
    again.send({"proof": proof})
    assert again.receive() == {"refused": "token"}
    again.close()


@pytest.mark.parametrize(
    "answer",
    [
        {"welcome": 1},
        {"welcome": 1, "proof": "0" * 64},
        {"welcome": 1, "proof": TOKEN.prove("client", 1, 2, "n", "c")},
    ],
)
def test_a_process_says_nothing_to_a_server_without_the_token(answer):
    address = parse_address(free_addresses(1)[0])
    messages = []
    with socket.create_server(address) as server, ThreadPoolExecutor(1) as threads:
        coming = threads.submit(ControlClient, address, 1, 2, 20.0, lambda message: None, TOKEN)
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as reader:
            messages.append(decode(reader.readline()))
            connection.sendall(encode({"challenge": "c"}))
            messages.append(decode(reader.readline()))
            connection.sendall(encode(answer))
            with pytest.raises(
                ProcessMismatchError,
                match="is not process 0 of this job: it does not know the job token",
            ):
                coming.result(20)
            assert reader.read() == b""
    assert [sorted(each) for each in messages] == [["count", "hello", "host", "nonce"], ["proof"]]


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"[" * 900 + b"\n", f"the message has more than {MAX_DEPTH} levels of nesting"),
        (b'{"hello":' * 100 + b"\n", f"the message has more than {MAX_DEPTH} levels of nesting"),
        (
            b'"' + b"x" * MAX_HANDSHAKE_LINE + b'"\n',
            f"the line has more than {MAX_HANDSHAKE_LINE:,} bytes",
        ),
        (b'{"hello": ' + b"9" * 5000 + b"}\n", "the line has more than"),
        (b"GET / HTTP/1.1\r\n\r\n", "it is not an ftrain process"),
        (b"\xff\xfe\n", "it is not an ftrain process"),
        (b"[1]\n", "it is not an ftrain process"),
        (b"{}\n", "it is not an ftrain process"),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_a_message_beyond_a_limit_closes_its_connection_with_one_line(
    server, stranger, capsys, sent, why
):
    stranger.send(sent)
    assert stranger.receive() is None
    (line,) = logged(capsys, "refused a connection")
    assert why in line
    assert meet(server[1], server[0]) == [[7, 7], [7, 7]]


def test_a_connection_that_says_nothing_is_closed(server, stranger, capsys, monkeypatch):
    monkeypatch.setattr("ftrain.cluster.control_protocol.HANDSHAKE_SECONDS", 0.1)
    silent = Stranger(server[0])
    slow = Stranger(server[0])
    slow.send(HELLO)
    assert list(slow.receive()) == ["challenge"]
    for each in (silent, slow):
        assert each.receive() is None
        each.close()
    assert logged(capsys, "no handshake within 0.1 s")


def test_idle_connections_do_not_keep_a_process_out(server, capsys):
    address, own = server
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(address)) for _ in range(3 * MIN_PENDING)
        ]
        assert meet(own, address) == [[7, 7], [7, 7]]
        for each in idle[:MIN_PENDING]:  # the oldest were aborted
            each.settimeout(30)
            assert not received(each)
    assert len(logged(capsys, "more connections than can authenticate at once")) <= MAX_LOGGED


def received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1)
    except ConnectionError:
        return b""


def test_what_a_process_may_send_is_limited_where_it_is_sent(server):
    _, own = server
    deep: list = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    with pytest.raises(ValueError, match="for 'deep' cannot be sent: the message has more than"):
        own.gather("deep", deep, 5.0)
    with pytest.raises(ValueError, match="for 'long' cannot be sent: the message has 16,777,"):
        own.gather("long", "x" * MAX_LINE, 5.0)
    assert meet(own, server[0]) == [[7, 7], [7, 7]]


@pytest.mark.parametrize("depth", [1, MAX_DEPTH])
def test_brackets_inside_of_text_are_no_depth(depth):
    message = {"x": "[" * 100 + '\\"{' * 100}
    assert decode(encode(message, MAX_LINE).strip()) == message
    nested: object = 1
    for _ in range(depth - 1):
        nested = [nested]
    assert decode(encode({"x": nested}, MAX_LINE).strip()) == {"x": nested}


def test_training_goes_on_under_a_flood_and_the_token_is_nowhere_to_be_read(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        with (
            Launched(tmp_path, 2, "steps=1000000", "summary.every_steps=5", every=1_000_000) as job,
            ExitStack() as stack,
        ):
            job.wait_for_step(5)
            members = job.members()
            variables = read_environment(members[0])
            token = variables["FTRAIN_JOB_TOKEN"]
            assert len(token) == 64
            assert read_environment(members[1])["FTRAIN_JOB_TOKEN"] == token
            address = parse_address(json.loads(variables["FTRAIN_CLUSTER"])["cluster"]["worker"][0])
            assert address.host == "127.0.0.1"
            idle = [stack.enter_context(socket.create_connection(address)) for _ in range(1000)]
            for _ in range(60):
                flood(address)
            before = max(line["step"] for line in metrics_of(job.run))
            job.wait_for_step(before + 50)
            assert job.members() == members
            assert sum(is_open(each) for each in idle) <= MIN_PENDING
            shown = "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in members.values())
            job.process.send_signal(signal.SIGINT)
            code, out, err = job.end()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert code == 0, out + err
    assert "Traceback" not in out + err
    assert 0 < (out + err).count("refused a connection") <= MAX_LOGGED
    written = b"".join(path.read_bytes() for path in job.run.rglob("*") if path.is_file())
    assert token.encode() not in written
    assert token not in shown + out + err


def flood(address) -> None:
    """Send an endless line, until the other side closes the connection."""
    with socket.create_connection(address) as connection:
        connection.settimeout(LIMIT)
        sent = 0
        try:
            while sent < 1 << 26:
                sent += connection.send(b"x" * 65536)
        except ConnectionError:
            return
    raise AssertionError(f"{sent} bytes without a newline were taken")


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def read_environment(pid: int) -> dict[str, str]:
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(each.split("=", 1) for each in variables if "=" in each)


def test_a_process_with_another_token_is_told_what_to_check_and_named_by_the_others(
    server, tmp_path, capsys
):
    address, own = server
    config = write_config(tmp_path, steps=5, every=5)
    cluster = {
        "cluster": {"worker": [f"{address}", "127.0.0.1:1"]},
        "task": {"type": "worker", "index": 1},
    }
    variables = {"FTRAIN_CLUSTER": json.dumps(cluster), "FTRAIN_JOB_TOKEN": "b" * 32}
    done = run("train", config, f"run.directory={tmp_path / 'run'}", env=environment() | variables)
    assert done.returncode == 2
    assert re.fullmatch(
        r"ftrain: process 1 on \S+ was refused at \S+: "
        r"process 0 has another job token than FTRAIN_JOB_TOKEN here; "
        r"set the same FTRAIN_JOB_TOKEN for all processes\n",
        done.stderr,
    ), done.stderr
    with pytest.raises(
        ClusterError,
        match=r"missing: process 1; .*; refused: process 1 on \S+ at .* another job token",
    ):
        own.gather("the start", None, 0.1)
    (line,) = logged(capsys, "refused a connection")
    assert "b" * 32 not in line + done.stderr


@pytest.mark.campaign
def test_without_a_launcher_the_run_directory_has_the_token(tmp_path):
    config = write_config(tmp_path, steps=5, every=5)
    reported = run_group(config, 2, f"run.directory={tmp_path / 'run'}")
    assert [code for code, _, _ in reported] == [0, 0], reported
    assert (tmp_path / "run" / FILE).stat().st_mode & 0o777 == 0o600


def test_all_who_look_for_a_token_at_once_find_the_same(tmp_path):
    start = threading.Barrier(8)

    def find(_):
        start.wait(30)
        return find_token(tmp_path, {}).prove("client", 1)

    with ThreadPoolExecutor(8) as threads:
        proofs = set(threads.map(find, range(8)))
    assert len(proofs) == 1
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert find_token(tmp_path / "other", {}).prove("client", 1) not in proofs


def test_the_environment_goes_before_files_and_a_home_after_them(tmp_path):
    given = find_token(tmp_path / "run", {"FTRAIN_JOB_TOKEN": "x" * 16})
    assert given.source == "FTRAIN_JOB_TOKEN"
    assert not (tmp_path / "run").exists()
    assert "x" * 16 not in repr(given)
    at_home = find_token(None, {"HOME": f"{tmp_path}"})
    assert at_home.source == f"{tmp_path / '.config' / 'ftrain' / FILE}"
    assert find_token(None, {"XDG_CONFIG_HOME": f"{tmp_path / '.config'}"}).source == at_home.source


def test_tokens_that_are_none(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="FTRAIN_JOB_TOKEN has 5 characters, expected at least 16"):
        find_token(tmp_path, {"FTRAIN_JOB_TOKEN": "short"})
    monkeypatch.setattr("ftrain.cluster.job_token._LIMIT", 0.1)
    path = tmp_path / FILE
    find_token(tmp_path, {})
    path.chmod(0o644)
    with pytest.raises(
        ValueError,
        match=r"can be read by other users \(mode 644, expected 600\); delete it, or set",
    ):
        find_token(tmp_path, {})
    path.chmod(0o600)
    path.write_text("abc")
    with pytest.raises(ValueError, match="is damaged; delete it"):
        find_token(tmp_path, {})
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ValueError, match="is not a regular file"):
        find_token(tmp_path, {})
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        ValueError, match=r"cannot be read or written: .*; fix that, or set FTRAIN_JOB_TOKEN"
    ):
        find_token(tmp_path, {})
    assert not (tmp_path / "elsewhere").exists()
