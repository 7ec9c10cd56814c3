"""Where the processes of a job find each other, and whether they can: names, loopback addresses and hosts."""

import errno
import ipaddress
import socket
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from ftrain.cluster.addresses import Address

LOOPBACK = "127.0.0.1"


class Host(NamedTuple):
    """This host, as it finds itself: its name, and its name's address if that is a loopback address."""

    name: str
    loopback: str | None


def control_address(addresses: Sequence[Address]) -> Address:
    """Where the control server listens: at process 0's address, or at loopback if all processes are on one host.

    >>> control_address([Address("node1", 2222), Address("node1", 2223)])
    Address(host='127.0.0.1', port=2222)
    >>> control_address([Address("node1", 2222), Address("node2", 2222)])
    Address(host='node1', port=2222)
    """
    first = addresses[0]
    one_host = len({address.host.lower() for address in addresses}) == 1
    return Address(LOOPBACK, first.port) if one_host and not loopback_of(first.host) else first


def check_reachable(addresses: Sequence[Address], index: int) -> None:
    """Raise ValueError if process 0's name leads to this very host, but other processes are on other hosts.

    Debian gives a host's own name the address 127.0.1.1 in /etc/hosts: a server there is reached by nobody else.
    """
    address = control_address(addresses)
    loopback = loopback_of(address.host)
    if loopback is None:
        return
    elsewhere = next((each.host for each in addresses if _is_elsewhere(each.host)), None)
    if elsewhere is None:
        if index == 0 and any(not _resolve(each.host) for each in addresses):
            warnings.warn(
                f"process 0 listens at {address}, which leads to {loopback}: only processes of this host can reach it",
                stacklevel=3,
            )
        return
    here = socket.gethostname()
    does = "listens" if index == 0 else "is looked for"
    raise ValueError(
        f"process 0 {does} at {address}, but on {here} the name {address.host} leads to {loopback}, a loopback "
        f"address that {elsewhere} cannot reach; {_mend(address.host, loopback, here)}, "
        "or name that address in the cluster spec"
    )


def explain_bind_error(address: Address, error: OSError) -> str:
    """Why process 0 cannot listen at its address, and what to do about it."""
    if error.errno == errno.EADDRNOTAVAIL:
        found = ", ".join(sorted(_resolve(address.host))) or "nothing"
        return (
            f"{address.host} leads to {found}, which is no address of this host, {socket.gethostname()}; "
            "start process 0 on the host that the cluster spec names for it, or name this one"
        )
    return f"{error.strerror or error}; is another job running there? choose another port"


def find_host() -> Host:
    """This host. Its own name is what the runtime's CPU collectives (Gloo) have others connect to."""
    name = socket.gethostname()
    return Host(name, loopback_of(name))


def explain_loopback_hosts(hosts: Sequence[Host]) -> str | None:
    """What is wrong if processes on several hosts are told to connect to a loopback address; else None."""
    if len({host.name for host in hosts}) == 1:
        return None
    wrong = [index for index, host in enumerate(hosts) if host.loopback is not None]
    if not wrong:
        return None
    host = hosts[wrong[0]]
    more = f", and so for {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return (
        f"process {wrong[0]} is on {host.name}, whose own name leads to {host.loopback} there, a loopback address that "
        f"the other hosts cannot reach{more}; {_mend(host.name, f'{host.loopback}', host.name)}"
    )


def loopback_of(host: str) -> str | None:
    """The loopback address that a name leads to; None if it leads to any other, or is unknown."""
    found = _resolve(host)
    return (
        min(found)
        if found and all(ipaddress.ip_address(each).is_loopback for each in found)
        else None
    )


def _mend(name: str, loopback: str, here: str) -> str:
    return f"in /etc/hosts of {here}, give {name} the host's network address in place of {loopback}"


def _is_elsewhere(host: str) -> bool:
    """True if a name leads to an address that is none of this host's; an unknown name may be anything."""
    found = _resolve(host)
    return bool(found) and not any(_is_own(each) for each in found)


def _is_own(ip: str) -> bool:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((ip, 0))
    except OSError:
        return False
    return True


def _resolve(host: str) -> set[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {f"{address[0]}".partition("%")[0] for _, _, _, _, address in found}
