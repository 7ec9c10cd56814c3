"""A run directory that all processes share, and directories that some do not see."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from ftrain.cluster import ClusterSpec, ProcessGroup, ProcessMismatchError, create_local
from ftrain.cluster.addresses import parse_address
from ftrain.cluster.control_client import ControlClient
from ftrain.cluster.control_server import ControlServer
from ftrain.cluster.job_token import JobToken
from ftrain.cluster.process_group import look_for_probe, remove_probe, write_probe
from ftrain.launching.child_environment import free_addresses

TOKEN = JobToken("the token of all processes", "a test")


@pytest.fixture
def group():
    """The process groups of the three processes of one job."""
    addresses = free_addresses(3)
    address = parse_address(addresses[0])
    server = ControlServer(address, 3, TOKEN)
    lines = []
    members = []
    for index in range(3):
        member = ProcessGroup(ClusterSpec({"worker": addresses}), index, 3)
        lines.append(ControlClient(address, index, 3, 10.0, member.handle, TOKEN))
        member.attach(lines[-1], server if index == 0 else None)
        members.append(member)
    yield members
    for line in lines:
        line.disconnect()
    server.close()


def check(group, directories, limit=30.0) -> list[str | None]:
    """Return the error of each process, or None."""

    def ask(member, directory):
        try:
            member.check_directory(directory, limit)
        except ProcessMismatchError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(group)) as threads:
        return list(threads.map(ask, group, directories))


def test_a_directory_that_all_see(group, tmp_path):
    run = tmp_path / "new" / "run"
    assert check(group, [run] * 3) == [None] * 3
    assert list(run.iterdir()) == []
    assert check(group, [run] * 3) == [None] * 3


def test_those_that_do_not_see_it_are_named_by_all(group, tmp_path):
    run = tmp_path / "run"
    reported = check(group, [run, run, tmp_path / "other"], limit=0.3)
    assert len({*reported}) == 1
    assert reported[0] is not None
    assert reported[0].startswith(f"run directory {run}: process 2 on ")
    assert (
        "does not see the file that process 0 has written (waited 0.3 s); process 0 is on"
        in reported[0]
    )
    assert "Choose a directory on a file system that all hosts share" in reported[0]
    assert list(run.iterdir()) == []


def test_a_directory_that_process_0_cannot_make(group, tmp_path):
    (tmp_path / "file").touch()
    reported = check(group, [tmp_path / "file" / "run"] * 3)
    assert len({*reported}) == 1
    assert "process 0 on" in f"{reported[0]}"
    assert "cannot write there: Not a directory" in f"{reported[0]}"


def test_a_file_that_appears_late_is_found(tmp_path):
    probe = write_probe(tmp_path)
    remove_probe(probe)
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(look_for_probe, tmp_path, probe, 30.0)
        (tmp_path / probe.name).write_text(probe.name)
        assert found.result(40) is None


def test_a_process_on_its_own_has_nothing_to_check(tmp_path):
    create_local().check_directory(tmp_path / "run")
    assert not (tmp_path / "run").exists()
