"""A program that requests cached blocks at a steady pace, in a separate process.

Its request is a byte on a socket, as a read on a mount is a message on /dev/fuse. Until the answer
arrives, it waits for the event loop, for the hit, and for any other holder of the cache process's
GIL. It measures this wait itself. A request that was due while it waited for the one before counts
from when it was due: a loop that stands still for a while makes many of them wait.

Run as a script by `PacedReader`: python -S paced_reader.py RATE, with the socket as stdin.
"""

import contextlib
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

_REQUEST = struct.Struct("<q")
"""The duration of the previous request in ns; -1 in the first request."""


class PacedReader:
    """The side of the cache process. Figures are in ns."""

    def __init__(self, answer: Callable[[], Awaitable[None]]) -> None:
        """`answer` serves a request of the program."""
        self._answer = answer
        self._waits_ns: list[int] = []
        self._service_ns: list[int] = []

    def take(self) -> tuple[list[int], list[int]]:
        """Return, for each request since the last call, its total wait in ns, and the part of
        `answer`."""
        taken = self._waits_ns, self._service_ns
        self._waits_ns, self._service_ns = [], []
        return taken

    @asynccontextmanager
    async def running(self, rate: float) -> AsyncIterator[None]:
        """Run the program with `rate` requests per second within the context."""
        import trio

        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        command = [sys.executable, "-S", __file__, str(rate)]
        with its:
            process = subprocess.Popen(command, stdin=its.fileno())  # noqa: ASYNC220 - 1 ms
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve, ours)
                yield
                nursery.cancel_scope.cancel()
        finally:
            ours.close()
            process.wait(timeout=5)

    async def _serve(self, ours: socket.socket) -> None:
        import trio

        while True:
            await trio.lowlevel.wait_readable(ours)
            (wait_ns,) = _REQUEST.unpack(ours.recv(_REQUEST.size))
            began_ns = time.perf_counter_ns()
            await self._answer()
            self._service_ns.append(time.perf_counter_ns() - began_ns)
            ours.send(b".")
            if wait_ns >= 0:
                self._waits_ns.append(wait_ns)


def _ask(rate: float) -> None:
    its = socket.socket(fileno=sys.stdin.fileno())
    period_ns = int(1e9 / rate)
    due_ns = time.perf_counter_ns()
    answered_ns, wait_ns = due_ns, -1
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            due_ns += period_ns
            left_ns = due_ns - time.perf_counter_ns()
            if left_ns > 0:
                time.sleep(left_ns / 1e9)
            late = answered_ns > due_ns
            asked_ns = due_ns if late else time.perf_counter_ns()
            its.send(_REQUEST.pack(wait_ns))
            if not its.recv(1):
                return
            answered_ns = time.perf_counter_ns()
            wait_ns = answered_ns - asked_ns


if __name__ == "__main__":
    _ask(float(sys.argv[1]))
