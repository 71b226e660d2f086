"""Free loopback ports and waiting for servers."""

import socket
import time
from collections.abc import Callable


def free_ports(count: int) -> list[int]:
    """`count` different loopback TCP ports that nothing listens on just now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


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
