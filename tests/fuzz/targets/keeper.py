"""Messages of two clients to the keeper (supervisor/keeper.py).

Each part of an input is one message. Its first byte says who sends it (bit 0), how many descriptors
go with it (bits 1 and 2), and whether the client leaves afterwards (bit 3).
"""

import os
import socket
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

from cachefs.supervisor import keeper as module
from cachefs.supervisor.keeper import Keeper
from tests.fuzz.targets._support import directory, parts

_WAIT_S = 100.0


def _connect(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(str(path))
    return client


def _settle(keeper: Keeper) -> None:
    while keeper._selector.select(0):
        keeper._turn()


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _talk(data: bytes, path: Path) -> None:
    keeper = Keeper(path, _WAIT_S)
    clients = [_connect(path), _connect(path)]
    reading, writing = os.pipe()  # never at its end: a mount that is still there
    for part in parts(data):
        how, message = part[:1] or b"\0", part[1:]
        who, count, leaves = how[0] & 1, how[0] >> 1 & 3, how[0] >> 3 & 1
        with suppress(OSError):  # the keeper has refused this client before
            socket.send_fds(clients[who], [message or b" "], [reading] * count)
        if leaves:
            clients[who].close()
            clients[who] = _connect(path)
        _settle(keeper)
        served = [mount.client for mount in keeper._mounts.values() if mount.client is not None]
        assert set(served) <= keeper._clients
    for client in clients:
        client.close()
    _settle(keeper)
    assert not keeper._clients
    os.close(writing)  # all mounts have ended
    keeper._close()
    os.close(reading)


def fuzz(data: bytes) -> None:
    with directory() as place:
        before = _open_descriptors()
        with (
            patch.object(module, "_is_fuse", lambda fd: True),
            patch.object(module, "cachefs_mounts", list),  # no real mount may be unmounted
        ):
            _talk(data, place / "socket")
        assert _open_descriptors() == before
