"""Addresses: a host and a port."""

from typing import NamedTuple


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """A host and a port.

    >>> parse_address("node1:2222")
    Address(host='node1', port=2222)
    >>> parse_address("[::1]:80").host
    '::1'
    """
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if (
        not host
        or (":" in host and not text.startswith("["))
        or not port.isdecimal()
        or not 0 < int(port) < 65536
    ):
        raise ValueError(f"an address is host:port, such as node1:2222 or [::1]:2222, got {text!r}")
    return Address(host, int(port))
