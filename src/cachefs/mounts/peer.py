"""Who is at the other end of a Unix socket.

A socket's directory decides who can reach it, but a directory can be shared, replaced or mounted
elsewhere. So both ends also ask the kernel.
"""

import os
import socket
import struct
from typing import Protocol

_CREDENTIALS = struct.Struct("iII")


class _Connection(Protocol):
    """A socket of Python or of trio."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def uid_of_peer(connection: _Connection) -> int:
    """Return the uid of the process at the other end (SO_PEERCRED in unix(7)): of the one that
    connected, or of the one that listens. Raises `OSError`."""
    size = _CREDENTIALS.size
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(_CREDENTIALS.unpack(found)[1])


def is_trusted(uid: int) -> bool:
    """Whether a process of this uid may give orders to this one, or answer it: root, and our own
    user."""
    return uid in (0, os.geteuid())
