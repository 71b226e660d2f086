"""Reads many whole small objects; one thread has several requests in flight.

A GET of 100 KB costs 550 us of CPU in obstore, 440 us in http.client and 900 us in urllib3 (all
with 32 threads). It costs 170 us if the code only writes a request, parses the head and reads the
body into its final buffer. It costs 130 us if one thread sends requests on 8 connections before it
reads the first answer, because this thread seldom waits. It reads the answers in the order in which
they come, so that a late one does not keep the connections of the others idle.

For an unexpected answer the result is `None`, and `ObjectStoreOrigin.read` reads the object.

All functions here block and must be called in worker threads.
"""

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from botocore.credentials import ReadOnlyCredentials

from cachefs.origin.s3 import digest, redirects
from cachefs.origin.s3.fast_path.small_reader import Connection, SmallReader
from cachefs.origin.s3.fast_path.tls import TlsConnector, connect_tcp
from cachefs.origin.s3.fast_path.wire import (
    ERROR_BYTES,
    REPLACED,
    ChunkedBody,
    Head,
    UnusualError,
    Wanted,
    get_request,
    read_head,
)

_LITTLE_S = 0.1
_HEAD_BYTES = 64 << 10
"""The longest head."""
_PIECE_BYTES = 2 << 10
"""Bytes per call while a head is read: enough for most, and few if a body follows, because they
are copied."""


class Answers(NamedTuple):
    """The bytes of each object (None if it could not be read), and how many requests were sent.
    `first_s` is how long the first object took on a connection that was open already; None if it
    did not come. The others may have waited for this thread."""

    found: list[memoryview | None]
    requests: int
    first_s: float | None


class DirectReader(SmallReader["_Connection"]):
    """Reads small objects of one bucket for loads (`ObjectStoreOrigin.read_many`). Thread-safe."""

    def get(
        self,
        wanted: Sequence[Wanted],
        at_a_time: int,
        stopped: Callable[[], bool],
        given_up: Callable[[], bool],
    ) -> Answers:
        """Read `wanted`, with at most `at_a_time` requests in flight. Once `stopped()`, send no
        more requests. Once `given_up()`, wait for no more answers."""
        found: list[memoryview | None] = [None] * len(wanted)
        left = deque(enumerate(wanted))
        asked = _Asked()
        requests = 0
        first_s: float | None = None
        failed = False
        credentials: ReadOnlyCredentials | None = None
        while left or asked:
            try:
                if not requests:
                    credentials = self._provider.current()
                while left and len(asked) < at_a_time:
                    number, item = left.popleft()
                    asked.add(number, self._ask(item, credentials))
                    requests += 1
            except Exception:  # `ObjectStoreOrigin.read` will report the cause
                failed = True
            if failed or stopped():
                left.clear()
            # After a failure the other answers have had enough time already.
            wait_s = _LITTLE_S if failed else self._options.idle_timeout_s
            answered = None if given_up() else asked.wait(wait_s)
            if answered is None:
                failed = failed or (bool(asked) and not given_up())
                break
            number, connection = answered
            try:
                if failed:
                    connection.set_timeout(_LITTLE_S)
                found[number] = connection.answer(wanted[number])
                first_s = first_s or asked.seconds
            except Exception:  # `ObjectStoreOrigin.read` will report the cause, as above
                failed = True
            if failed:  # its timeout may have been changed
                connection.close()
            else:
                self._give_back(connection)
        asked.close()
        if failed:
            self._rest()
        _drop_damaged(found, wanted)
        return Answers(found, requests, first_s)

    def _ask(self, item: Wanted, credentials: ReadOnlyCredentials | None) -> "_Connection":
        request = get_request(self._target, item, credentials, time.time())
        connection = self._idle_connection() or _Connection(
            self._opened(), self._options.idle_timeout_s, self._tls
        )
        try:
            connection.ask(request)
        except BaseException:
            connection.close()
            raise
        return connection

    def _opened(self) -> socket.socket:
        connect_s = self._options.connect_timeout_s
        if self._tls is not None:
            return self._tls.connect(connect_s)
        return connect_tcp(self._host, self._port, connect_s)

    def _give_back(self, connection: "_Connection") -> None:
        if not connection.is_idle:
            connection.close()
            return
        connection.used_at = time.monotonic()
        self._idle.append(connection)
        if self._closed:
            self.close()


def _drop_damaged(found: list[memoryview | None], wanted: Sequence[Wanted]) -> None:
    """Replace objects by None that don't have the MD5 that is wanted."""
    comparable = {
        number: data
        for number, (data, item) in enumerate(zip(found, wanted, strict=True))
        if data is not None and item.md5 is not None
    }
    md5s = digest.md5_of_each(list(comparable.values()))
    for number, md5 in zip(comparable, md5s, strict=True):
        if md5 != wanted[number].md5:
            found[number] = None


class _Asked:
    """The connections on which an answer is awaited, each with the number of its object."""

    def __init__(self) -> None:
        self._by_fd: dict[int, tuple[int, _Connection]] = {}
        self._poll = select.poll()
        self._ready: deque[int] = deque()
        self._first_at: float | None = None

    def __len__(self) -> int:
        return len(self._by_fd)

    @property
    def seconds(self) -> float:
        """Seconds since the first request was sent."""
        return 0.0 if self._first_at is None else time.monotonic() - self._first_at

    def add(self, number: int, connection: "_Connection") -> None:
        """Await an answer on `connection`, whose request has just been sent."""
        self._first_at = self._first_at or time.monotonic()
        self._by_fd[connection.fd] = number, connection
        self._poll.register(connection.fd, select.POLLIN)

    def wait(self, timeout_s: float) -> "tuple[int, _Connection] | None":
        """Remove a connection whose answer has begun, and return it; None after `timeout_s`, or if
        there are no connections."""
        if not self._ready and self._by_fd:
            self._ready.extend(fd for fd, _ in self._poll.poll(timeout_s * 1000))
        if not self._ready:
            return None
        fd = self._ready.popleft()
        self._poll.unregister(fd)
        return self._by_fd.pop(fd)

    def close(self) -> None:
        """Close all connections that are left."""
        for _, connection in self._by_fd.values():
            connection.close()
        self._by_fd.clear()


class _Connection(Connection):
    """A connection whose calls block. They fail if no byte comes for `timeout_s`; if a body stops
    halfway, for at most twice as long."""

    def __init__(self, opened: socket.socket, timeout_s: float, tls: TlsConnector | None) -> None:
        super().__init__(opened, tls)
        self.fd = opened.fileno()
        self._for_all = socket.MSG_WAITALL if tls is None else 0
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        if self._tls is not None:
            self._socket.settimeout(timeout_s)
            return
        # The kernel limits the wait, not Python: with Python's timeout the socket is non-blocking,
        # and one call can't wait for a whole body.
        self._socket.setblocking(True)
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def ask(self, request: bytes) -> None:
        self.is_idle = False
        self._socket.sendall(request)

    def answer(self, item: Wanted) -> memoryview | None:
        """Return the object, or None if it is absent, elsewhere, or has another version. Raises
        `UnusualError`, `EOFError` and errors of sockets."""
        text, begun = self._head()
        head = read_head(text, item)
        if head.status in (*REPLACED, *redirects.STATUSES):
            self._skip_error(head, begun)
            return None
        if head.status != 200 or head.length_bytes is None:
            raise UnusualError
        if not head.is_wanted:
            return None
        data = self._body(item.size_bytes, begun)
        self.is_idle = head.stays_open
        return memoryview(data)

    def _head(self) -> tuple[bytes, bytes]:
        """Return the head, without the empty line at its end, and the bytes after it that have
        come."""
        received, searched = bytearray(), 0
        while (end := received.find(b"\r\n\r\n", max(0, searched - 3))) < 0:
            searched = len(received)
            if searched > _HEAD_BYTES:
                raise UnusualError
            received += self._receive()
        return bytes(received[:end]), bytes(received[end + 4 :])

    def _receive(self) -> bytes:
        received = self._socket.recv(_PIECE_BYTES)
        if not received:
            raise EOFError
        return received

    def _body(self, size_bytes: int, begun: bytes) -> bytearray:
        """Read a body that begins with `begun`."""
        filled = len(begun)
        if filled > size_bytes:
            raise UnusualError
        data = bytearray(size_bytes)
        data[:filled] = begun
        rest = memoryview(data)
        while filled < size_bytes:
            count = self._socket.recv_into(rest[filled:], 0, self._for_all)
            if not count:
                raise EOFError
            filled += count
        return data

    def _skip_error(self, head: Head, begun: bytes) -> None:
        """Read the body of an error, so that the connection can be used again. If that is long or
        unusual, the connection stays in use, and is closed."""
        if head.is_chunked:
            with suppress(UnusualError, EOFError):
                chunks = ChunkedBody()
                body = chunks.take(begun)
                while body is None:
                    body = chunks.take(self._receive())
                self.is_idle = head.stays_open
        elif head.length_bytes is not None and head.length_bytes <= ERROR_BYTES:
            with suppress(UnusualError, EOFError):
                self._body(head.length_bytes, begun)
                self.is_idle = head.stays_open
