"""Jobs on hosts in network namespaces: cut links, directories not shared, misleading names."""

import signal
import time

import pytest
from command import write_config
from jobs import LIMIT, metrics_of
from networks import Network, describe, wait_until, why_not

REASON = why_not()
pytestmark = [pytest.mark.campaign, pytest.mark.skipif(REASON is not None, reason=f"{REASON}")]
FOUND = 30.0  # seconds in which a lost peer must be detected
SLACK = 15.0  # seconds for a busy machine; without a limit on unacknowledged data it takes over 78


@pytest.mark.parametrize("has_data_under_way", [False, True])
def test_a_cut_cable_is_found_and_named(tmp_path, has_data_under_way):
    config = write_config(tmp_path, steps=1_000_000, every=1_000_000)
    run = tmp_path / "run"
    with Network(tmp_path, 2) as network:
        job = network.start_job(
            "train", f"{config}", f"run.directory={run}", "summary.every_steps=5"
        )
        wait_until(lambda: any(line["step"] >= 5 for line in metrics_of(run)), LIMIT, job)
        network.cut("n2")
        cut = time.monotonic()
        if has_data_under_way:  # it asks the other process to stop too, which is never acknowledged
            job[0].send_signal(signal.SIGTERM)
        reported = [process.communicate(timeout=LIMIT) for process in job]
        seconds = time.monotonic() - cut
    assert [process.returncode for process in job] == [75, 75], reported
    for index, (_, err) in enumerate(reported):
        assert f"process {1 - index} was lost; process {index} ends too" in err, reported
    assert seconds < FOUND + SLACK


def test_a_directory_that_is_not_shared_names_the_host(tmp_path):
    config = write_config(tmp_path, steps=5, every=5)
    run = tmp_path / "run"
    run.mkdir()
    words = ["train", f"{config}", f"run.directory={run}"]
    token = {"FTRAIN_JOB_TOKEN": "known to both of them"}
    with Network(tmp_path, 2) as network:
        addresses = ["n1:2222", "n2:2222"]
        job = [
            network.start("n1", *words, FTRAIN_CLUSTER=describe(addresses, 0), **token),
            network.start("n2", *words, hidden=run, FTRAIN_CLUSTER=describe(addresses, 1), **token),
        ]
        reported = [process.communicate(timeout=LIMIT) for process in job]
    assert [process.returncode for process in job] == [2, 2], reported
    for _, err in reported:
        assert err == (
            f"ftrain: run directory {run}: process 1 on n2 does not see the file "
            "that process 0 has written (waited 30 s); process 0 is on n1. "
            "Choose a directory on a file system that all hosts share "
            "and may write to\n"
        )
    assert not [path for path in run.iterdir() if path.name.startswith(".")]


def test_a_directory_that_is_not_shared_and_has_the_token_names_the_host_too(tmp_path):
    config = write_config(tmp_path, steps=5, every=5)
    run = tmp_path / "run"
    run.mkdir()
    words = ["train", f"{config}", f"run.directory={run}", "cluster.connect_timeout=100"]
    with Network(tmp_path, 2) as network:
        addresses = ["n1:2222", "n2:2222"]
        first = network.start("n1", *words, FTRAIN_CLUSTER=describe(addresses, 0))
        second = network.start("n2", *words, hidden=run, FTRAIN_CLUSTER=describe(addresses, 1))
        _, err = second.communicate(timeout=LIMIT)
        first.kill()
        _, log = first.communicate()
    assert second.returncode == 2
    assert "process 1 on n2 was refused at n1:2222: process 0 has another job token" in err
    assert f"do all hosts see the same {run}/job_token?" in err
    assert "refused a connection from 10.77.0.12:" in log
    assert "it claims to be process 1 on n2" in log


@pytest.mark.parametrize("host", ["n1", "n2"])
def test_a_host_name_that_leads_to_loopback_is_found_at_the_start(tmp_path, host):
    """Debian's /etc/hosts: others cannot reach process 0, or Gloo sends them to loopback."""
    config = write_config(tmp_path, steps=5, every=5)
    words = [
        "train",
        f"{config}",
        f"run.directory={tmp_path / 'run'}",
        "cluster.connect_timeout=100",
    ]
    with Network(tmp_path, 2, hosts={host: f"127.0.1.1 {host}"}) as network:
        job = network.start_job(*words)
        _, err = job[0].communicate(timeout=LIMIT)
        assert job[0].returncode == 2
        if host == "n1":
            job[1].kill()
    assert (
        f"{host} resolves to 127.0.1.1" in err
        or f"{host}, where that name resolves to 127.0.1.1" in err
    )
    assert (
        f"in /etc/hosts of {host}, give {host} the host's network address in place of 127.0.1.1"
        in err
    )
    assert len(err.splitlines()) == 1, err
