"""Reads small objects, and small parts of objects, on the event loop itself, for waiting readers.

The way through a thread and obstore takes nearly half of the daemon's CPU time for a cold read:
with 16 readers on two cores 700 us of 1,550 us. This module needs about 300 us. It sends requests
and receives answers on the loop with non-blocking calls. Over TLS it also decrypts there: a record
of at most 16 KiB in each call. Handshakes happen in threads.
"""

import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import trio
from botocore.credentials import ReadOnlyCredentials

from cachefs.origin.options import OriginOptions
from cachefs.origin.s3 import digest
from cachefs.origin.s3 import errors as s3_errors
from cachefs.origin.s3.config import S3Target
from cachefs.origin.s3.credentials import CredentialProvider
from cachefs.origin.s3.fast_path import small_reader
from cachefs.origin.s3.fast_path.small_reader import Connection, SmallReader
from cachefs.origin.s3.fast_path.tls import TlsConnector
from cachefs.origin.s3.fast_path.wire import (
    ERROR_BYTES,
    Head,
    UnusualError,
    Wanted,
    get_request,
    join_chunks,
    look_up_request,
    read_head,
)

_CREDENTIALS_S = 1.0
"""A thread looks credentials up again if the last look-up is at least this old."""
_CREDENTIAL_THREADS = 4
"""The most threads for that. A command that provides credentials may hang and block its thread,
even if the caller has given up."""
_PIECE_BYTES = 256 << 10
_IDLE = 64
_RECORD_BYTES = 16 << 10
"""The most bytes that a TLS record holds. OpenSSL may have received a record except its end."""
_CLOSED = (EOFError, ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""The errors of a connection that the server has closed."""


class _RefusedError(Exception):
    """An answer whose status means that it has no object."""

    def __init__(self, head: Head, body: bytes) -> None:
        super().__init__(head.status)
        self.status = head.status
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers.items()
        }
        self.body = body


class Loaded(NamedTuple):
    """The bytes of an object, and whether they have the expected MD5 (true if none is expected)."""

    data: memoryview
    is_as_told: bool


class LookedUp(NamedTuple):
    """The result of a look-up: the headers by lower-case names, and the first bytes."""

    headers: dict[bytes, bytes]
    data: bytearray


class LoopReader(SmallReader["_Connection"]):
    """Reads small objects of one bucket, and parts of objects, for `ObjectStoreOrigin.read` and
    `stat_and_read`. Not thread-safe: only the loop may use it."""

    def __init__(
        self,
        target: S3Target,
        provider: CredentialProvider,
        options: OriginOptions,
        tls: TlsConnector | None,
    ) -> None:
        super().__init__(target, provider, options, tls)
        self._credentials: ReadOnlyCredentials | None = None
        self._credentials_at = float("-inf")
        self._credential_threads = trio.CapacityLimiter(_CREDENTIAL_THREADS)
        self._piece = memoryview(bytearray(_PIECE_BYTES))

    async def get(self, item: Wanted, subject: str) -> Loaded | None:
        """Return the object or its part, or None if it can't be read so: `ObjectStoreOrigin.read`
        uses obstore, which finds the cause. Raises an `OriginError` about `subject` if the server
        refuses the request or does not answer."""
        request = partial(get_request, self._target, item)
        found = await self._answer(request, item, item.length_bytes, subject)
        if found is None:
            return None
        data = found.data
        return Loaded(memoryview(data), item.md5 is None or digest.has_md5(data, item.md5))

    async def look_up(self, key: str, most_bytes: int, subject: str) -> LookedUp | None:
        """Return the current version of an object with its first `most_bytes`, or None if it can't
        be read this way: then the caller sends a HEAD. Raises as `get`."""
        request = partial(look_up_request, self._target, key, most_bytes)
        return await self._answer(request, None, most_bytes, subject)

    async def _answer(
        self,
        request_with: Callable[[ReadOnlyCredentials | None, float], bytes],
        item: Wanted | None,
        most_bytes: int,
        subject: str,
    ) -> LookedUp | None:
        """Send a request on an idle connection or a new one, and return the answer."""
        try:
            if time.monotonic() >= self._credentials_at + _CREDENTIALS_S:
                await self._renew_credentials()
            request = request_with(self._credentials, time.time())
            connection = self._idle_connection()
            if connection is not None:
                try:
                    return await self._ask(connection, request, item, most_bytes)
                except _CLOSED:
                    pass  # the server had closed the idle connection
            return await self._ask(await self._opened(), request, item, most_bytes)
        except _RefusedError as refused:
            if item is None and not _is_plain_answer(refused.status):
                return None  # such as 416 for an empty object; the caller's HEAD tells the cause
            raise s3_errors.from_answer(
                self._target,
                subject,
                refused.status,
                refused.headers,
                refused.body,
                is_signed=not self._provider.anonymous,
            ) from None
        except (OSError, EOFError, trio.TooSlowError) as error:
            raise s3_errors.from_connection(self._target, subject, error) from None
        except Exception:  # the caller then uses the regular way, which reports the cause
            self._rest()
            return None

    async def _renew_credentials(self) -> None:
        current = self._provider.current
        self._credentials = await trio.to_thread.run_sync(
            current, limiter=self._credential_threads, abandon_on_cancel=True
        )
        self._credentials_at = time.monotonic()

    async def _ask(
        self, connection: "_Connection", request: bytes, item: Wanted | None, most_bytes: int
    ) -> LookedUp | None:
        try:
            await connection.send(request)
            return await connection.answer(item, most_bytes, self._piece)
        finally:
            self._give_back(connection)

    def _give_back(self, connection: "_Connection") -> None:
        now = time.monotonic()
        if connection.is_idle and not self._closed and len(self._idle) < _IDLE:
            connection.used_at = now
            self._idle.append(connection)
        else:
            connection.close()
        while self._idle and now - self._idle[0].used_at > small_reader.REUSED_S:
            self._idle.popleft().close()

    async def _opened(self) -> "_Connection":
        connect_s = self._options.connect_timeout_s
        with trio.fail_after(connect_s):
            if self._tls is not None:
                return _Connection(await self._tls.connect_in_thread(connect_s), self._tls)
            stream = await trio.open_tcp_stream(self._host, self._port)
        # trio's own socket calls always yield to the loop, even if they need not wait.
        opened = socket.socket(fileno=stream.socket.detach())
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _Connection(opened, None)


def _is_plain_answer(status: int) -> bool:
    """Whether a status is a definite result of a look-up: no such object, or a server problem."""
    return status in (404, 429) or status >= 500


class _Connection(Connection):
    """A connection whose calls do not block; they wait on the loop."""

    def __init__(self, opened: socket.socket, tls: TlsConnector | None) -> None:
        super().__init__(opened, tls)
        opened.setblocking(False)
        self._waits_for_bytes = 1

    async def send(self, request: bytes) -> None:
        self.is_idle = False
        left = memoryview(request)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                await trio.lowlevel.wait_writable(self._socket)

    async def answer(
        self, item: Wanted | None, most_bytes: int, piece: memoryview
    ) -> LookedUp | None:
        """Return the object, or None if the server sends another version. Without an `item`, any
        version is accepted. All connections share the buffer `piece`, so its content is valid only
        until the next await. Raises `_RefusedError` for a status without an object, `UnusualError`
        (also for a body of more than `most_bytes`), `EOFError`, and errors of sockets."""
        head, end = b"", -1
        while end < 0:
            if len(head) > len(piece):
                raise UnusualError
            await self._await_bytes(1)
            count = self._receive(piece)
            head += piece[:count]
            end = head.find(b"\r\n\r\n")
        told = read_head(head[:end].split(b"\r\n"), item)
        begun = memoryview(head)[end + 4 :]
        if told.is_wanted:
            size_bytes = told.length_bytes or 0
            if size_bytes > most_bytes:
                raise UnusualError  # the server ignored the range
            data = await self._body(size_bytes, begun)
            self.is_idle = told.stays_open
            return LookedUp(told.headers, data)
        if told.status in (200, 206):
            return None
        if 300 <= told.status < 400 and b"location" in told.headers:
            raise UnusualError  # obstore follows the redirect
        if told.is_chunked:
            raise _RefusedError(told, await self._chunked_error(told, bytes(begun), piece))
        if told.length_bytes is None or told.length_bytes > ERROR_BYTES:
            raise _RefusedError(told, bytes(begun))
        data = await self._body(told.length_bytes, begun)
        self.is_idle = told.stays_open
        raise _RefusedError(told, bytes(data))

    async def _chunked_error(self, told: Head, begun: bytes, piece: memoryview) -> bytes:
        """Read the chunked body of an error; of an unusual one return what has come. `begun` is
        its beginning, as in `_body`."""
        try:
            while (body := join_chunks(begun)) is None:
                await self._await_bytes(1)
                count = self._receive(piece)
                begun += piece[:count]
        except UnusualError:
            return begun
        self.is_idle = told.stays_open
        return body

    async def _body(self, size_bytes: int, begun: memoryview) -> bytearray:
        """Read the body. `begun` is its beginning, which arrived together with the head."""
        data = bytearray(size_bytes)
        filled = len(begun)
        if filled > size_bytes:
            raise UnusualError
        data[:filled] = begun
        rest = memoryview(data)
        while filled < size_bytes:
            count = self._receive(rest[filled:])
            filled += count
            if not count:
                await self._await_bytes(size_bytes - filled)
        return data

    def _receive(self, into: memoryview) -> int:
        """Receive the bytes that are available and return their count, perhaps 0. Raises `EOFError`
        if the server has closed the connection."""
        try:
            count = self._socket.recv_into(into)
        except (BlockingIOError, ssl.SSLWantReadError):
            return 0
        if not count:
            raise EOFError
        return count

    async def _await_bytes(self, count: int) -> None:
        """Wait until `count` bytes are available or the server closes the connection. Over TLS,
        wait for those of them that OpenSSL can't have received yet, at least for one."""
        if self._tls is not None:
            count = max(1, count - _RECORD_BYTES)
        if count != self._waits_for_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._waits_for_bytes = count
        await trio.lowlevel.wait_readable(self._socket)

    def close(self) -> None:
        trio.lowlevel.notify_closing(self._socket)
        super().close()
