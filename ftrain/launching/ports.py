"""Ports that nobody listens on."""

import socket
from contextlib import ExitStack


def free_addresses(count: int, host: str = "127.0.0.1") -> list[str]:
    """So many addresses on `host`, each with a port that was free a moment ago, no two the same."""
    family, _, _, _, _ = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    with (
        ExitStack() as stack
    ):  # all are held until the last is found, so that none is given out twice
        sockets = [
            stack.enter_context(socket.socket(family, socket.SOCK_STREAM)) for _ in range(count)
        ]
        for each in sockets:
            each.bind((host, 0))
        shown = f"[{host}]" if ":" in host else host
        return [f"{shown}:{each.getsockname()[1]}" for each in sockets]
