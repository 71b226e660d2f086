"""Answers to the small writes that are sent on the event loop
(origin/s3/writing/loop_exchange.py, origin/s3/fast_path/loop_connection.py)."""

import socket
from contextlib import suppress

import trio

from cachefs.origin.options import OriginOptions
from cachefs.origin.s3.config import S3Target
from cachefs.origin.s3.exchange import BrokenAnswerError, Request
from cachefs.origin.s3.fast_path.loop_connection import LoopConnection
from cachefs.origin.s3.fast_path.wire import UnusualError, read_head
from cachefs.origin.s3.writing.loop_exchange import LoopExchanges
from cachefs.origin.writable import BufferContent

TARGET = S3Target("b", "", "http://h", "http://h/b", "us-east-1", False, None)


_DRIP_BYTES = 64
MOST_BYTES = 1 << 16
"""Of an input."""
_OK = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = b"HTTP/1.1 404 Gone\r\ntransfer-encoding: chunked\r\n\r\n"
GROWING = {
    "one header": lambda count: _OK + b"a: " + b"x" * count + b"\r\n\r\n",
    "a head without an end": lambda count: _OK + b"a: " + b"\r\n\r" * (count // 3),
    "headers": lambda count: _OK + b"a:\r\n" * (count // 4) + b"\r\n",
    "empty lines": lambda count: b"\r\n" * (count // 2),
    "white space": lambda count: _OK + b"content-length:" + b" " * count + b"x\r\n\r\n",
    "chunks": lambda count: _CHUNKED + b"1\r\nx\r\n" * (count // 6),
    "zeros of a chunk": lambda count: _CHUNKED + b"0" * count,
    "extensions of a chunk": lambda count: _CHUNKED + b"1;" + b"x" * count + b"\r\nx\r\n0\r\n\r\n",
    "one chunk": lambda count: _CHUNKED + b"%x\r\n" % count + b"x" * count + b"\r\n0\r\n\r\n",
    "interim heads": lambda count: b"HTTP/1.1 100 C\r\n\r\n" * (count // 18),
    "one body": lambda count: (
        b"HTTP/1.1 404 Gone\r\ncontent-length: %d\r\n\r\n" % count + b"x" * count
    ),
}
"""Inputs of about so many bytes."""


class _NoCredentials:
    anonymous = True

    def at_hand(self) -> None:
        """There are none."""


class _Exchanges(LoopExchanges):
    """Connected to somebody who has sent `data` and hung up."""

    def __init__(self, data: bytes) -> None:
        super().__init__(TARGET, _NoCredentials(), OriginOptions(), None)  # type: ignore[arg-type]
        self.data = data
        self.peers: list[socket.socket] = []

    async def _opened(self) -> LoopConnection:
        with socket.create_server(("127.0.0.1", 0)) as server:
            mine = socket.create_connection(server.getsockname())
            peer, _ = server.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        peer.sendall(self.data)
        peer.shutdown(socket.SHUT_WR)
        self.peers.append(peer)
        return LoopConnection(mine, None)


async def _ask(data: bytes) -> None:
    method = "HEAD" if data[:1] == b"H" and data[1:2] != b"T" else "PUT"
    exchanges = _Exchanges(data[:MOST_BYTES])
    request = Request(method, "/b/key", "", {}, BufferContent(b"x" * 100))
    try:
        with trio.fail_after(300):
            for _ in range(2):
                try:
                    answer = await exchanges.send(request)
                except (OSError, EOFError, BrokenAnswerError):
                    continue
                assert 0 <= answer.status <= 999
    finally:
        exchanges.close()
        for peer in exchanges.peers:
            peer.close()


def fuzz(data: bytes) -> None:
    trio.run(_ask, data)


class _Drips(LoopConnection):
    """Gets `data` in pieces of a few bytes, without a socket."""

    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)
        self._tls = None

    def receive(self, into: memoryview) -> int:
        drip, self._left = self._left[:_DRIP_BYTES], self._left[_DRIP_BYTES:]
        if not drip:
            raise EOFError
        into[: len(drip)] = drip
        return len(drip)

    async def await_bytes(self, count: int) -> None:
        pass


async def _drip(data: bytes) -> None:
    connection, piece = _Drips(data), memoryview(bytearray(4 * MOST_BYTES))
    with suppress(EOFError, UnusualError):
        head, begun = await connection.head(b"", piece)
        if read_head(head, None).is_chunked:
            await connection.chunked_body(bytes(begun), piece)


def in_drips(data: bytes) -> None:
    """The answer comes in very small pieces."""
    trio.run(_drip, data)


PARSERS = (fuzz, in_drips)
"""What is measured with `GROWING`."""
