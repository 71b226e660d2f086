"""Answers to the GETs of loads (origin/s3/fast_path/direct_reader.py, wire.py): several, one
connection each."""

import socket

from cachefs.origin.options import OriginOptions
from cachefs.origin.s3.config import S3Target
from cachefs.origin.s3.fast_path.direct_reader import DirectReader
from cachefs.origin.s3.fast_path.wire import Wanted
from tests.fuzz.targets._support import parts
from tests.fuzz.targets.http_loop import GROWING, MOST_BYTES

__all__ = ["GROWING", "MOST_BYTES", "fuzz"]

TARGET = S3Target("b", "", "http://h", "http://h/b", "us-east-1", False, None)


class _NoCredentials:
    def current(self) -> None:
        return None


class _Reader(DirectReader):
    def __init__(self, answers: list[bytes]) -> None:
        super().__init__(TARGET, _NoCredentials(), OriginOptions(), None)  # type: ignore[arg-type]
        self.answers = answers
        self.peers: list[socket.socket] = []

    def _opened(self) -> socket.socket:
        mine, peer = socket.socketpair()
        for end in (mine, peer):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        peer.sendall(self.answers.pop() if self.answers else b"")
        peer.shutdown(socket.SHUT_WR)
        self.peers.append(peer)
        return mine


def fuzz(data: bytes) -> None:
    reader = _Reader(parts(data[:MOST_BYTES], 4))
    wanted = [Wanted(f"key{number}", '"etag"', 1000, None) for number in range(4)]
    try:
        answers = reader.get(wanted, 2, lambda: False, lambda: False)
        assert len(answers.found) == 4
        assert all(found is None or len(found) == 1000 for found in answers.found)
    finally:
        reader.close()
        for peer in reader.peers:
            peer.close()
