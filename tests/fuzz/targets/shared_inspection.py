"""What a member of the shared tier says of itself (shared/inspection.py).

The input has the answers to the commands, in their order, between lines of `----`."""

import socket
from dataclasses import asdict
from typing import cast

from cachefs.cli.views.shared import all_well
from cachefs.shared.inspection import inspect_on
from tests.fuzz.targets._support import parts

_TIMEOUT_S = 60.0


class _Told:
    """A connection to a member that answers each command with the next part, and then closes."""

    def __init__(self, answers: list[bytes]) -> None:
        self._answers = answers
        self._left = b""

    def settimeout(self, timeout_s: float) -> None:
        assert timeout_s > 0

    def sendall(self, command: bytes) -> None:
        assert command.endswith(b"\r\n")
        self._left += self._answers.pop(0) if self._answers else b""

    def recv(self, most_bytes: int) -> bytes:
        piece, self._left = self._left[:most_bytes], self._left[most_bytes:]
        return piece


def fuzz(data: bytes) -> None:
    found = inspect_on(cast("socket.socket", _Told(parts(data))), "h", 1, _TIMEOUT_S)
    for problem in found.problems:
        assert problem.isprintable()
        assert len(problem) < 300
    for name, value in asdict(found).items():
        if name not in ("host", "version", "problems"):
            assert value is None or 0 <= value < 10**19
    if not found.problems:
        assert found.version is not None
        assert found.disk_limit_bytes
        assert all_well([found]).isprintable()
