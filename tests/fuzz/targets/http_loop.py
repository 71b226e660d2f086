"""Answers to the GETs that are sent on the event loop (origin/s3/fast_path/loop_reader.py,
wire.py)."""

import socket

import trio

from cachefs.errors import OriginError
from cachefs.origin.options import OriginOptions
from cachefs.origin.s3.config import S3Target
from cachefs.origin.s3.fast_path.loop_connection import LoopConnection
from cachefs.origin.s3.fast_path.loop_reader import LoopReader
from cachefs.origin.s3.fast_path.wire import Wanted

BODY = b"x" * 1000
WANTED = Wanted("key", '"etag"', len(BODY), None)
TARGET = S3Target("b", "", "http://h", "http://h/b", "us-east-1", False, None)


class _NoCredentials:
    anonymous = False


class _Reader(LoopReader):
    """Connected to somebody who has sent `data` and hung up."""

    def __init__(self, data: bytes) -> None:
        super().__init__(TARGET, _NoCredentials(), OriginOptions(), None)  # type: ignore[arg-type]
        self.data = data
        self.peers: list[socket.socket] = []

    async def _renew_credentials(self) -> None:
        self._credentials_at = float("inf")

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
    reader = _Reader(data[:65536])
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
