"""`LoopSocket`: a connected socket that the event loop uses without blocking and without threads.

Trio's own socket calls always yield to the loop, even if they need not wait. The calls here wait
only if they must.
"""

import socket
import ssl

import trio

_MOST_PIECES = 256
"""Linux takes 1,024 (IOV_MAX)."""
CLOSED = (EOFError, ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""The errors of a connection that the other side has closed."""


class LoopSocket:
    """A connected socket, also over TLS. It owns the socket. Only one task may use it at a time."""

    def __init__(self, opened: socket.socket) -> None:
        opened.setblocking(False)
        self._socket = opened
        self._waits_for_bytes = 1

    async def send_all(self, *pieces: memoryview) -> None:
        """Send the bytes, several pieces with one system call; over TLS only one piece is allowed.
        Raises `OSError`."""
        left = list(pieces)
        while left:
            try:
                if len(left) == 1:
                    sent = self._socket.send(left[0])
                else:
                    sent = self._socket.sendmsg(left[:_MOST_PIECES])
            except (BlockingIOError, ssl.SSLWantWriteError):
                await trio.lowlevel.wait_writable(self._socket)
                continue
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    def receive(self, into: memoryview) -> int:
        """Receive the bytes that are available and return their count, perhaps 0. Raises `EOFError`
        if the other side has closed the connection, and `OSError`."""
        try:
            count = self._socket.recv_into(into)
        except (BlockingIOError, ssl.SSLWantReadError):
            return 0
        if not count:
            raise EOFError
        return count

    async def await_bytes(self, count: int) -> None:
        """Wait until `count` bytes are available or the other side closes the connection."""
        if count != self._waits_for_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._waits_for_bytes = count
        await trio.lowlevel.wait_readable(self._socket)

    def close(self) -> None:
        """Close the socket. A task that waits for it gets `trio.ClosedResourceError`."""
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()
