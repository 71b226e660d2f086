"""Answers to the small writes that are sent on the event loop
(origin/s3/writing/loop_exchange.py, origin/s3/fast_path/loop_connection.py)."""

import socket

import trio

from cachefs.origin.options import OriginOptions
from cachefs.origin.s3.exchange import BrokenAnswerError, Request
from cachefs.origin.s3.fast_path.loop_connection import LoopConnection
from cachefs.origin.s3.writing.loop_exchange import LoopExchanges
from cachefs.origin.writable import BufferContent
from tests.fuzz.targets.http_loop import GROWING as GROWING_READS
from tests.fuzz.targets.http_loop import MOST_BYTES, TARGET, _NoCredentials

GROWING = GROWING_READS | {
    "interim heads": lambda count: b"HTTP/1.1 100 C\r\n\r\n" * (count // 18),
}
"""Inputs of about so many bytes."""


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
