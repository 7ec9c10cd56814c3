"""Addresses of processes: loopback for one host, and names that resolve to the wrong address."""

import socket

import pytest

from ftrain.cluster import ClusterError, ClusterSpec, connect
from ftrain.cluster.addresses import (
    Address,
    Host,
    check_reachable,
    control_address,
    explain_loopback_hosts,
)

NAMES = {"n1": "127.0.1.1", "n2": "192.0.2.12", "here": "127.0.0.1", "localhost": "127.0.0.1"}


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """A host table with Debian's line for n1; 192.0.2.12 is no address of any host."""

    def resolve(host, port, *_, **__):
        address = NAMES.get(host, host)
        if not address.replace(".", "").isdecimal():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port or 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")


def addresses(*hosts: str) -> list[Address]:
    return [Address(host, 2222 + number) for number, host in enumerate(hosts)]


def test_processes_of_one_host_meet_at_loopback():
    assert control_address(addresses("n2", "n2")) == Address("127.0.0.1", 2222)
    assert control_address(addresses("N2", "n2")) == Address("127.0.0.1", 2222)
    assert control_address(addresses("n1", "n1")).host == "n1"  # loopback already
    assert control_address(addresses("0.0.0.0", "0.0.0.0")).host == "127.0.0.1"
    assert control_address(addresses("n1", "n2")).host == "n1"


@pytest.mark.parametrize(
    "hosts", [("n1", "n1"), ("n1", "here"), ("127.0.0.1", "127.0.0.2"), ("n2", "n1")]
)
def test_what_can_be_reached(hosts):
    check_reachable(addresses(*hosts), 0)


def test_a_loopback_address_is_a_warning_where_the_other_hosts_are_not_known():
    hosts = addresses("n1", "process-1.invalid")
    with pytest.warns(
        UserWarning,
        match=r"listens at n1:2222, which resolves to 127\.0\.1\.1: only processes of this host",
    ):
        check_reachable(hosts, 0)
    check_reachable(hosts, 1)


@pytest.mark.parametrize(("index", "does"), [(0, "listens"), (1, "is expected")])
def test_a_name_that_leads_to_loopback_is_refused_with_the_way_out(index, does):
    spec = ClusterSpec({"worker": ["n1:2222", "n2:2222"]})
    with pytest.raises(ValueError, match="loopback") as caught:
        connect(spec, "worker", index, limit=1)
    assert str(caught.value) == (
        f"process 0 {does} at n1:2222, but on n1 the name n1 resolves to 127.0.1.1, "
        "a loopback address that n2 cannot reach; "
        "in /etc/hosts of n1, give n1 the host's network address in place of 127.0.1.1, "
        "or use that address in the cluster spec"
    )


def test_an_address_of_another_host_is_explained(tmp_path):
    spec = ClusterSpec({"worker": ["n2:2222", "n3:2222"]})
    with pytest.raises(
        ClusterError,
        match=r"n2 resolves to 192\.0\.2\.12, which is not an address of this host, n1; start proc",
    ):
        connect(spec, "worker", 0, limit=1, directory=tmp_path)


def test_hosts_whose_own_name_leads_to_loopback():
    good, bad = Host("n2", None), Host("n1", "127.0.1.1")
    assert explain_loopback_hosts([good, good]) is None
    assert explain_loopback_hosts([bad, bad]) is None  # one host
    message = f"{explain_loopback_hosts([good, bad, bad])}"
    assert message.startswith(
        "process 1 is on n1, where that name resolves to 127.0.1.1, a loopback address"
    )
    assert "(1 more are affected); in /etc/hosts of n1, give n1" in message
