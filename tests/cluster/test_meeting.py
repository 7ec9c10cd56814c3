"""Processes that connect, or cannot: each reports why, within its limit."""

import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from command import write_config
from jobs import run_group

from ftrain.cluster import ClusterError, ClusterSpec, PeerLostError, connect, create_local
from ftrain.cluster.addresses import parse_address
from ftrain.cluster.control_client import ControlClient
from ftrain.cluster.control_server import ControlServer
from ftrain.cluster.job_token import JobToken
from ftrain.cluster.process_group import ProcessGroup, check_facts
from ftrain.launching.child_environment import free_addresses

TOKEN = JobToken("the token of all processes", "a test")


@pytest.fixture
def meeting():
    """A server for three processes, and a function that connects to it."""
    address = parse_address(free_addresses(1)[0])
    server = ControlServer(address, 3, TOKEN)
    lines = []

    def come(
        index: int, listen=lambda message: None, count: int = 3, limit: float = 5.0
    ) -> ControlClient:
        lines.append(ControlClient(address, index, count, limit, listen, TOKEN))
        return lines[-1]

    yield come
    for line in lines:
        line.disconnect()
    server.close()


def test_all_bring_something(meeting):
    lines = [meeting(index) for index in (2, 0, 1)]
    with ThreadPoolExecutor(3) as threads:
        reported = list(
            threads.map(lambda pair: pair[1].gather("a name", pair[0] * 10, 5.0), enumerate(lines))
        )
    assert reported == [[10, 20, 0]] * 3
    with ThreadPoolExecutor(3) as threads:  # the same name again
        assert (
            list(threads.map(lambda line: line.gather("a name", None, 5.0), lines))
            == [[None] * 3] * 3
        )


def test_who_does_not_come_is_named(meeting):
    lines = [meeting(index) for index in (0, 2)]
    expected = r"waited 0.3 s at: the exit; missing: process 1; are they running\?"
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(line.gather, "the exit", None, 0.3) for line in lines]
    for each in waiting:
        with pytest.raises(ClusterError, match=expected):
            each.result()
    with pytest.raises(ClusterError, match=expected):  # too late
        meeting(1).gather("the exit", None, 0.3)


def test_a_step_is_decided_on_by_all(meeting):
    counts = [3, 7, 5]
    decided = {}
    done = threading.Barrier(4)
    lines: dict[int, ControlClient] = {}

    def listen(index):
        def hear(message):
            if "hold" in message:
                lines[index].send({"held": counts[index]})
            elif "decided" in message:
                decided[index] = (message["decided"], message["step"])
                done.wait(10)

        return hear

    for index in range(3):
        lines[index] = meeting(index, listen(index))
    lines[1].send({"propose": {"stop": "enough"}})
    done.wait(10)
    assert decided == {index: ({"stop": "enough"}, 7) for index in range(3)}


def test_who_is_gone_is_told(meeting):
    reported = []
    received = threading.Event()

    def hear(message):
        reported.append(message)
        received.set()

    lines = [meeting(0, hear), meeting(1), meeting(2)]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda line: line.gather("the start", None, 5.0), lines))
    lines[1]._socket.shutdown(socket.SHUT_RDWR)
    assert received.wait(10)
    assert reported == [{"lost": 1}]


@pytest.mark.parametrize(
    ("index", "count", "reason"),
    [
        (1, 3, "process 1 is or was connected already"),
        (3, 3, "a job of 3 has no process 3"),
        (2, 4, "it was started as one of 4 processes"),
    ],
)
def test_who_does_not_belong_is_refused(meeting, index, count, reason):
    meeting(1)
    with pytest.raises(ClusterError, match=reason):
        meeting(index, count=count, limit=1.0)


def test_until_all_have_met_another_may_come_for_one_that_is_gone(meeting):
    early = meeting(1)
    early.send({"gather": "the start", "value": "of the one that is gone", "limit": 5.0})
    early._socket.shutdown(socket.SHUT_RDWR)
    lines = [meeting(0), meeting(1), meeting(2)]
    with ThreadPoolExecutor(3) as threads:
        assert (
            list(threads.map(lambda line: line.gather("the start", 5, 5.0), lines))
            == [[5, 5, 5]] * 3
        )


def test_one_that_gives_up_before_all_have_met_is_not_counted(meeting):
    early = meeting(1)
    early.send({"gather": "the start", "value": 1, "limit": 5.0})
    early.disconnect(agreed=False)
    lines = [meeting(0), meeting(2)]
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(line.gather, "the start", 1, 0.5) for line in lines]
    for each in waiting:
        with pytest.raises(ClusterError, match="missing: process 1"):
            each.result()


def test_a_connection_that_is_reset_is_tried_again():
    address = parse_address(free_addresses(1)[0])
    with socket.create_server(address) as ending, ThreadPoolExecutor(1) as threads:
        coming = threads.submit(ControlClient, address, 0, 1, 20.0, lambda message: None, TOKEN)
        accepted, _ = ending.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()  # with a reset, as a listener that ends before it accepts
        ending.close()
        server = ControlServer(address, 1, TOKEN)
        line = coming.result(20)
    assert line.gather("the start", 2, 5.0) == [2]
    line.disconnect()
    server.close()


def test_who_comes_again_is_let_in_by_the_next_job():
    address = parse_address(free_addresses(1)[0])
    old = ControlServer(address, 1, TOKEN)
    forerunner = ControlClient(address, 0, 1, 5.0, lambda message: None, TOKEN)
    assert forerunner.gather("the start", 1, 5.0) == [1]
    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(ControlClient, address, 0, 1, 20.0, lambda message: None, TOKEN)
        time.sleep(0.2)
        forerunner.disconnect()
        old.close()
        new = ControlServer(address, 1, TOKEN)
        line = coming.result(20)
    assert line.gather("the start", 2, 5.0) == [2]
    line.disconnect()
    new.close()


@pytest.mark.parametrize(
    "nonsense",
    [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b'{"hello": "x", "count": 3}\n', b"\xff\xfe\n", b"[1]\n"],
)
def test_strangers_do_no_harm(meeting, nonsense):
    line = meeting(0)
    with socket.create_connection(line._socket.getpeername()) as stranger:
        stranger.sendall(nonsense)
        stranger.settimeout(10)
        assert b"welcome" not in stranger.recv(100)
    others = [meeting(1), meeting(2)]
    with ThreadPoolExecutor(3) as threads:
        assert (
            list(threads.map(lambda each: each.gather("x", 1, 5.0), [line, *others]))
            == [[1, 1, 1]] * 3
        )


def test_a_lost_chief_ends_a_wait():
    address = parse_address(free_addresses(1)[0])
    server = ControlServer(address, 2, TOKEN)
    line = ControlClient(address, 1, 2, 5.0, lambda message: None, TOKEN)
    threading.Timer(0.2, server.close).start()
    with pytest.raises(PeerLostError, match="process 0 was lost while process 1 waited at: a name"):
        line.gather("a name", None, 20.0)
    line.disconnect()


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        spec = ClusterSpec({"worker": [address, "127.0.0.1:1"]})
        with pytest.raises(
            ClusterError, match=f"cannot listen at {address}.*in use.*choose another port"
        ):
            connect(spec, "worker", 0, limit=2)


def test_no_coordinator_and_a_missing_process():
    addresses = free_addresses(2)
    spec = ClusterSpec({"worker": addresses})
    with pytest.raises(
        ClusterError, match=f"process 1 found no process 0 at {addresses[0]} within 0.5 s"
    ):
        connect(spec, "worker", 1, limit=0.5)
    with pytest.raises(ClusterError, match="at: the start of the job; missing: process 1"):
        connect(spec, "worker", 0, limit=0.5)


def test_a_task_that_is_not_there_and_an_address_twice():
    with pytest.raises(
        ValueError,
        match="worker:2 is not a process that trains in this cluster; there are worker:0",
    ):
        connect(ClusterSpec({"worker": ["a:1", "b:1"]}), "worker", 2)
    with pytest.raises(ValueError, match="a:1"):
        connect(ClusterSpec({"worker": ["a:1", "a:1"]}), "worker", 0)


def test_alone():
    with create_local() as group:
        assert (group.index, group.count, group.is_chief) == (0, 1, True)
        assert group.gather("anything", 5) == [5]
        group.barrier("anything")
    alone = connect(ClusterSpec({"worker": ["somewhere:1"]}), "worker", 0)
    assert isinstance(alone, ProcessGroup)
    assert alone.count == 1


def test_facts_that_differ_are_named():
    check_facts([{"a": 1}, {"a": 1}])
    with pytest.raises(
        ClusterError,
        match=r"(?s)must have the same config and versions:"
        r".*b is 3 at process 2, 2 at process 0.*c is 1 at",
    ):
        check_facts([{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 1}])


def test_processes_with_different_configs_say_who_differs_in_what(tmp_path):
    config = write_config(tmp_path, steps=5, every=5)
    reported = run_group(
        config,
        2,
        f"run.directory={tmp_path / 'run'}",
        own={0: ["seed=1"], 1: ["seed=1", "optimizer.learning_rate=0.5"]},
    )
    for code, _, err in reported:
        assert code == 2
        assert "optimizer.learning_rate is '0.5' at process 1, '0.01' at process 0" in err
        assert len(err.strip().splitlines()) <= 2


@pytest.mark.campaign
def test_mistakes_of_a_job_are_told_by_every_process_at_once(tmp_path):
    config = write_config(tmp_path, steps=5, every=5)
    run = f"run.directory={tmp_path / 'run'}"
    reported = run_group(config, 3, run, "cluster.connect_timeout=3", missing=(1,))
    for code, _, err in reported:
        assert code == 75
        assert "missing: process 1" in err
    for mistake in ("mesh.data=3", "data.batch_size=9"):
        codes = [code for code, _, _ in run_group(config, 2, run, mistake)]
        assert codes == [2, 2]
