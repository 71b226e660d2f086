"""Free loopback ports and waiting for servers."""

import socket
import time
from collections.abc import Callable

_kept: list[socket.socket] = []


def reserved_port() -> socket.socket:
    """A socket at a loopback TCP port that nothing listens on. While it is open, the kernel gives
    the port to nobody, but a server that sets SO_REUSEADDR (as most do) can listen there."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


def free_ports(count: int) -> list[int]:
    """`count` different loopback TCP ports that nothing listens on, and that nobody else is given
    until this process ends: other tests take ports all the time, also while a server of this one
    starts or is down."""
    sockets = [reserved_port() for _ in range(count)]
    _kept.extend(sockets)
    return [sock.getsockname()[1] for sock in sockets]


def wait_until(works: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll `works` until it is true; raises `TimeoutError` naming `what`."""
    deadline = time.monotonic() + timeout_s
    while not works():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} after {timeout_s:.0f} s")
        time.sleep(0.1)


def answers(port: int) -> bool:
    """Whether something accepts TCP connections at the loopback port."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
