"""The addresses of the processes of a job, and whether the processes can reach each other there."""

import errno
import ipaddress
import socket
import warnings
from collections.abc import Sequence
from typing import NamedTuple

LOOPBACK = "127.0.0.1"


class Address(NamedTuple):
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Host(NamedTuple):
    """The name of a host, and the address of that name if it is a loopback address."""

    name: str
    loopback: str | None


def parse_address(text: str) -> Address:
    """Parse a host and a port.

    >>> parse_address("node1:2222")
    Address(host='node1', port=2222)
    >>> parse_address("[::1]:80").host
    '::1'
    """
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_bare_ipv6 = ":" in host and not text.startswith("[")
    if not host or is_bare_ipv6 or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"an address must be host:port, such as node1:2222 or [::1]:2222, got {text!r}"
        )
    return Address(host, int(port))


def control_address(addresses: Sequence[Address]) -> Address:
    """Return where the control server listens: loopback if all processes are on one host.

    Otherwise it is the address of process 0.

    >>> control_address([Address("node1", 2222), Address("node1", 2223)])
    Address(host='127.0.0.1', port=2222)
    >>> control_address([Address("node1", 2222), Address("node2", 2222)])
    Address(host='node1', port=2222)
    """
    first = addresses[0]
    one_host = len({address.host.lower() for address in addresses}) == 1
    return Address(LOOPBACK, first.port) if one_host and not loopback_of(first.host) else first


def check_reachable(addresses: Sequence[Address], index: int) -> None:
    """Raise ValueError if the name of process 0 resolves to loopback, but other hosts take part.

    Debian gives the name of a host the address 127.0.1.1 in /etc/hosts, which no other host can
    reach.
    """
    address = control_address(addresses)
    loopback = loopback_of(address.host)
    if loopback is None:
        return
    elsewhere = next((each.host for each in addresses if _is_elsewhere(each.host)), None)
    if elsewhere is None:
        if index == 0 and any(not _resolve(each.host) for each in addresses):
            warnings.warn(
                f"process 0 listens at {address}, which resolves to {loopback}: "
                "only processes of this host can reach it",
                stacklevel=3,
            )
        return
    here = socket.gethostname()
    does = "listens" if index == 0 else "is expected"
    raise ValueError(
        f"process 0 {does} at {address}, but on {here} the name {address.host} resolves to "
        f"{loopback}, a loopback address that {elsewhere} cannot reach; "
        f"{_fix(address.host, loopback, here)}, or use that address in the cluster spec"
    )


def explain_bind_error(address: Address, error: OSError) -> str:
    """Return why process 0 cannot listen at its address, and what to do about it."""
    found = sorted(_resolve(address.host))
    # Python 3.13 and later raise an error without a number if no address is one of this host.
    if error.errno == errno.EADDRNOTAVAIL or not any(map(_is_own, found)):
        return (
            f"{address.host} resolves to {', '.join(found) or 'nothing'}, "
            f"which is not an address of this host, {socket.gethostname()}; "
            "start process 0 on the host that the cluster spec names for it, or change the spec"
        )
    return f"{error.strerror or error}; is another job running there? choose another port"


def find_host() -> Host:
    """Return this host, by the name that the CPU collectives (Gloo) have others connect to."""
    name = socket.gethostname()
    return Host(name, loopback_of(name))


def explain_loopback_hosts(hosts: Sequence[Host]) -> str | None:
    """Return what is wrong if other hosts would connect to a loopback address, else None."""
    if len({host.name for host in hosts}) == 1:
        return None
    wrong = [index for index, host in enumerate(hosts) if host.loopback is not None]
    if not wrong:
        return None
    host = hosts[wrong[0]]
    more = f" ({len(wrong) - 1} more are affected)" if len(wrong) > 1 else ""
    return (
        f"process {wrong[0]} is on {host.name}, where that name resolves to {host.loopback}, "
        f"a loopback address that the other hosts cannot reach{more}; "
        f"{_fix(host.name, f'{host.loopback}', host.name)}"
    )


def loopback_of(host: str) -> str | None:
    """Return the loopback address of a name; None if it has any other address, or is unknown."""
    found = _resolve(host)
    is_loopback = bool(found) and all(ipaddress.ip_address(each).is_loopback for each in found)
    return min(found) if is_loopback else None


def _fix(name: str, loopback: str, here: str) -> str:
    return f"in /etc/hosts of {here}, give {name} the host's network address in place of {loopback}"


def _is_elsewhere(host: str) -> bool:
    """True if a name resolves, but not to an address of this host."""
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
