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

MOST_BYTES = 1 << 16
"""Of an input."""
_OK = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = b"HTTP/1.1 404 Gone\r\ntransfer-encoding: chunked\r\n\r\n"
_GROWING = {
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
_TRAILERS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
GROWING = _GROWING | {"trailers": lambda count: _TRAILERS + b"a\r\n" * (count // 3)}
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
