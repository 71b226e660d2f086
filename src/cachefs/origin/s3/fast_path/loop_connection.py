"""Connections of the event loop: they send and receive with non-blocking calls, also over TLS."""

import socket
import time

import trio
from botocore.credentials import ReadOnlyCredentials

from cachefs.loop_socket import LoopSocket
from cachefs.origin.options import OriginOptions
from cachefs.origin.s3.config import S3Target
from cachefs.origin.s3.credentials import CredentialProvider
from cachefs.origin.s3.fast_path import small_reader
from cachefs.origin.s3.fast_path.small_reader import Connection, SmallReader
from cachefs.origin.s3.fast_path.tls import TlsConnector
from cachefs.origin.s3.fast_path.wire import ChunkedBody, UnusualError
from cachefs.origin.s3.loop_credentials import LoopCredentials

_PIECE_BYTES = 256 << 10
_IDLE = 64
_RECORD_BYTES = 16 << 10
"""The most bytes that a TLS record holds. OpenSSL may have received a record except its end."""


class LoopConnection(LoopSocket, Connection):
    """A connection whose calls do not block; they wait on the loop."""

    def __init__(self, opened: socket.socket, tls: TlsConnector | None) -> None:
        Connection.__init__(self, opened, tls)
        LoopSocket.__init__(self, opened)
        self.has_answered = False
        """A byte of the answer to the present request has arrived."""

    async def send(self, request: bytes) -> None:
        """Send the bytes. Raises `OSError`."""
        self.is_idle = self.has_answered = False
        await self.send_all(memoryview(request))

    async def head(self, begun: bytes, piece: memoryview) -> tuple[bytes, memoryview]:
        """Return the head of an answer, without the empty line at its end, and the bytes after it
        that have arrived. `begun` is its beginning. All connections share the buffer `piece`, so
        its content is valid only until the next await. Raises `UnusualError` for a head that is
        too long, `EOFError`, and errors of sockets."""
        received, searched = bytearray(begun), 0
        while (end := received.find(b"\r\n\r\n", max(0, searched - 3))) < 0:
            searched = len(received)
            if searched > len(piece):
                raise UnusualError
            await self.await_bytes(1)
            count = self.receive(piece)
            received += piece[:count]
            self.has_answered = True
        return bytes(received[:end]), memoryview(received)[end + 4 :]

    async def body(self, size_bytes: int, begun: memoryview) -> bytearray:
        """Read a body. `begun` is its beginning, which arrived together with the head. Raises as
        `head`, and `UnusualError` if more bytes follow."""
        data = bytearray(size_bytes)
        filled = len(begun)
        if filled > size_bytes:
            raise UnusualError
        data[:filled] = begun
        rest = memoryview(data)
        while filled < size_bytes:
            count = self.receive(rest[filled:])
            filled += count
            if not count:
                await self.await_bytes(size_bytes - filled)
        return data

    async def chunked_body(self, begun: bytes, piece: memoryview) -> tuple[bytes, bool]:
        """Read a short body that comes in chunks. Return it and true, or of an unusual one what has
        come and false. `begun` and `piece` are as in `head`."""
        chunks = ChunkedBody()
        try:
            body = chunks.take(begun)
            while body is None:
                await self.await_bytes(1)
                body = chunks.take(piece[: self.receive(piece)])
        except UnusualError:
            return bytes(chunks.received), False
        return body, True

    async def await_bytes(self, count: int) -> None:
        """See `LoopSocket.await_bytes`. Over TLS, wait for those bytes that OpenSSL can't have
        received yet, at least for one."""
        if self._tls is not None:
            count = max(1, count - _RECORD_BYTES)
        await super().await_bytes(count)

    def close(self) -> None:
        """See `Connection.close`."""
        trio.lowlevel.notify_closing(self._socket)
        Connection.close(self)


class LoopClient(SmallReader[LoopConnection]):
    """The connections of the event loop to one bucket, and the credentials for their requests. Not
    thread-safe: only the loop may use it."""

    def __init__(
        self,
        target: S3Target,
        provider: CredentialProvider,
        options: OriginOptions,
        tls: TlsConnector | None,
    ) -> None:
        super().__init__(target, provider, options, tls)
        self._credentials = LoopCredentials(provider)
        self._piece = memoryview(bytearray(_PIECE_BYTES))

    async def _current_credentials(self) -> ReadOnlyCredentials | None:
        """Return the present credentials. Raises `OriginError`."""
        return await self._credentials.current()

    def _give_back(self, connection: LoopConnection) -> None:
        now = time.monotonic()
        if connection.is_idle and not self._closed and len(self._idle) < _IDLE:
            connection.used_at = now
            self._idle.append(connection)
        else:
            connection.close()
        while self._idle and now - self._idle[0].used_at > small_reader.REUSED_S:
            self._idle.popleft().close()

    async def _opened(self) -> LoopConnection:
        connect_s = self._options.connect_timeout_s
        with trio.fail_after(connect_s):
            if self._tls is not None:
                return LoopConnection(await self._tls.connect_in_thread(connect_s), self._tls)
            stream = await trio.open_tcp_stream(self._host, self._port)
        # trio's own socket calls always yield to the loop, even if they need not wait.
        opened = socket.socket(fileno=stream.socket.detach())
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return LoopConnection(opened, None)
