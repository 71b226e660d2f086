"""Answers to the GETs that are sent on the event loop (origin/s3/fast_path/loop_reader.py,
wire.py)."""

import socket
from contextlib import suppress

import trio

from cachefs.errors import OriginError
from cachefs.origin.options import OriginOptions
from cachefs.origin.s3.config import S3Target
from cachefs.origin.s3.fast_path.loop_connection import LoopConnection
from cachefs.origin.s3.fast_path.loop_reader import LoopReader
from cachefs.origin.s3.fast_path.wire import UnusualError, Wanted, read_head

BODY = b"x" * 1000
WANTED = Wanted("key", '"etag"', len(BODY), None)
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
    "one body": lambda count: (
        b"HTTP/1.1 404 Gone\r\ncontent-length: %d\r\n\r\n" % count + b"x" * count
    ),
}
"""Inputs of about so many bytes."""


class _NoCredentials:
    anonymous = True

    def at_hand(self) -> None:
        """There are none."""


class _Reader(LoopReader):
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
    reader = _Reader(data[:MOST_BYTES])
    try:
        with trio.fail_after(300):
            for _ in range(2):
                try:
                    found = await reader.get(WANTED, "s3://b/key")
                except OriginError:
                    continue
                assert found is None or len(found.data) == len(BODY)
    finally:
        reader.close()
        for peer in reader.peers:
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
