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


GROWING = {
    "one line": lambda count: b"x" * count,
    "a version": lambda count: b"VERSION " + b"1." * (count // 2) + b"\r\n",
    "statistics": lambda count: (
        b"VERSION 1.6.18\r\n\n----\n" + b"STAT a 1\r\n" * (count // 10) + b"END\r\n"
    ),
    "settings": lambda count: (
        b"VERSION 1.6.18\r\n\n----\n" * 2 + b"STAT a 1\r\n" * (count // 10) + b"END\r\n"
    ),
    "digits": lambda count: (
        b"VERSION 1.6.18\r\n\n----\nSTAT bytes " + b"1" * count + b"\r\nEND\r\n"
    ),
    "white space": lambda count: b" " * count + b"\r\n",
}
MOST_BYTES = 1 << 16
"""Inputs of about so many bytes."""


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
