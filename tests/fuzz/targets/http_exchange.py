"""Answers to the writes that are sent in threads (origin/s3/exchange.py)."""

import socket
from contextlib import suppress

from cachefs.origin.s3.exchange import (
    BrokenAnswerError,
    Exchange,
    Request,
    _Connection,
    head_of,
)
from cachefs.origin.writable import BufferContent
from tests.fuzz.targets.http_write import GROWING as GROWING_WRITES
from tests.fuzz.targets.http_write import MOST_BYTES

_TRAILERS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
GROWING = GROWING_WRITES | {"trailers": lambda count: _TRAILERS + b"a\r\n" * (count // 3)}
"""Inputs of about so many bytes."""
_WAIT_S = 60.0


def fuzz(data: bytes) -> None:
    method = "HEAD" if data[:1] == b"H" and data[1:2] != b"T" else "PUT"
    request = Request(method, "/b/key", "", {}, BufferContent(b"x" * 100))
    mine, peer = socket.socketpair()
    for end in (mine, peer):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    peer.sendall(data[:MOST_BYTES])
    peer.shutdown(socket.SHUT_WR)
    connection = _Connection(mine, None, _WAIT_S)
    try:
        for _ in range(2):
            with suppress(OSError, BrokenAnswerError):
                answer = connection.ask(head_of(request, "h"), request, Exchange())
                assert 0 <= answer.status <= 999
    finally:
        connection.close()
        peer.close()
