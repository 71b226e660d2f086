"""The supervisor's connection to the keeper (`keeper.py`), which holds a mount between two
supervisors.

One connection is about one mount. The messages have the form of `channel.py`.

From the supervisor:
    {"take": {"mountpoint": TEXT, "view": TEXT}}        has an answer
    {"keep": {"mountpoint": TEXT, "view": TEXT,         the mount is served; no answer
        "device": TEXT, "init": BASE64,
        "resends": BOOL}} and /dev/fuse
    {"leave": true}                                     has an answer; the supervisor then exits,
                                                        and leaves no request that the kernel can't
                                                        send again
    {"forget": true}                                    the mount has ended; no answer
    {"drop": true}                                      the taken mount is of no use; no answer
From the keeper:
    {"taken": {"device": TEXT, "init": BASE64}}         answers "take"; and /dev/fuse
    {"busy": true}                                      answers "take": ask again
    {"nothing": TEXT or null}                           answers "take", with the reason if a mount
                                                        was dropped for it
    {"left": true}                                      answers "leave"
    {"error": TEXT}                                     something was wrong; the connection ends

Both sides ignore unknown keys. The keeper counts a mount as served until the connection ends, and
that must not be before all threads of the relay have ended. So the socket of a supervisor that
leaves is closed by the end of its process only. If the kernel can't send requests again
("resends") and the connection ends without "leave", requests are lost, and the keeper ends the
mount.
"""

import base64
import binascii
import os
import socket
import time
from pathlib import Path
from typing import NamedTuple

from cachefs.errors import MountError, UntrustedPathError
from cachefs.mounts.peer import uid_of_peer
from cachefs.supervisor.channel import Channel, Message

LONGEST_INIT = 4096
"""Most bytes of a kernel's INIT that both sides accept. Linux 6.18 sends 104."""

_ANSWER_S = 5.0
_BUSY_S = 40.0
"""The limit for the supervisor before this one to end. It gives its daemon 25 s."""
_ASK_AGAIN_S = 0.05


class Taken(NamedTuple):
    """A mount from the keeper. The receiver owns `fd`, its /dev/fuse."""

    device: str
    init: bytes
    fd: int


class Held(NamedTuple):
    """A mount for the keeper. `fd` is its /dev/fuse and stays the sender's. `resends` says whether
    the kernel can send unanswered requests again."""

    device: str
    init: bytes
    fd: int
    resends: bool


class KeeperLink:
    """A connection to the keeper about one mount. `OSError` of any method means that it is lost."""

    def __init__(self, path: Path, mountpoint: Path, view: str) -> None:
        """Connect. `view` identifies what the kernel may have cached of the mount; see
        `config/view_key.py`. Raises `OSError`."""
        self._name = {"mountpoint": str(mountpoint), "view": view}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(_ANSWER_S)
            self._socket.connect(str(path))
            _refuse_stranger(self._socket)
        except OSError:
            self._socket.close()
            raise
        self._channel = Channel(self._socket)

    def fileno(self) -> int:
        """Return the socket's descriptor, for polling."""
        return self._socket.fileno()

    def take(self) -> tuple[Taken | None, str | None]:
        """Return the mount that the keeper has for this mountpoint; None if it has none.

        The second value is why the keeper dropped one, else None. Waits for the end of the
        supervisor that still serves it. Raises `OSError`, and `MountError` if that one does not
        end.
        """
        until_s = time.monotonic() + _BUSY_S
        while True:
            message, fds = self._ask({"take": self._name})
            match message:
                case {"taken": {"device": str(device), "init": str(text)}} if len(fds) == 1:
                    return Taken(device, decoded_init(text), fds[0]), None
                case {"busy": _} if time.monotonic() < until_s:
                    _close_all(fds)
                    time.sleep(_ASK_AGAIN_S)
                case {"busy": _}:
                    _close_all(fds)
                    raise MountError(
                        f"{self._name['mountpoint']} is still served by another cachefs, as the "
                        f"keeper says; end that one first: cachefs umount "
                        f"{self._name['mountpoint']}"
                    )
                case {"nothing": reason}:
                    _close_all(fds)
                    return None, None if reason is None else str(reason)
                case _:
                    _close_all(fds)
                    raise OSError(f"the keeper answers {message}")

    def keep(self, held: Held) -> None:
        """Give the keeper the mount that this supervisor serves."""
        fields = {"init": base64.b64encode(held.init).decode(), "resends": held.resends}
        self._send({"keep": {**self._name, "device": held.device, **fields}}, held.fd)

    def leave(self) -> None:
        """Make sure that the keeper has the mount. The socket is then closed by the end of this
        process."""
        message, fds = self._ask({"leave": True})
        _close_all(fds)
        if "left" not in message:
            raise OSError(f"the keeper answers {message}")
        self._socket.detach()

    def forget(self) -> None:
        """Tell the keeper that the mount has ended."""
        self._send({"forget": True})

    def drop(self) -> None:
        """Let the keeper end the mount that was taken."""
        self._send({"drop": True})

    def hear(self) -> str | None:
        """Receive a message when the socket is readable. Return the text of an error, else None.
        Raises `OSError` when the connection has ended."""
        message, fds = self._receive()
        _close_all(fds)
        return str(message["error"]) if "error" in message else None

    def close(self) -> None:
        """Close the connection. If the keeper has the mount, it then waits for a supervisor."""
        self._socket.close()

    def _ask(self, message: Message) -> tuple[Message, list[int]]:
        self._send(message)
        return self._receive()

    def _send(self, message: Message, *fds: int) -> None:
        if not self._channel.send(message, fds):
            raise ConnectionError("it is gone")

    def _receive(self) -> tuple[Message, list[int]]:
        try:
            received = self._channel.receive()
        except ValueError as error:
            raise OSError(f"its answer is no JSON: {error}") from error
        if received is None:
            raise ConnectionError("it has closed the connection")
        return received


def _refuse_stranger(connection: socket.socket) -> None:
    """Raise `OSError` unless root or this user listens: that process gets /dev/fuse of the mount,
    and could answer its requests."""
    uid = uid_of_peer(connection)
    if uid not in {0, os.geteuid()}:
        raise UntrustedPathError(
            f"uid {uid} listens there, and a keeper is a process of root or of the mount's user"
        )


def decoded_init(text: str) -> bytes:
    """Return the bytes of an INIT in base64. Raises `OSError` if that can't be one."""
    try:
        init = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise OSError(f"the INIT is no base64: {error}") from error
    if not 0 < len(init) <= LONGEST_INIT:
        raise OSError(f"the INIT has {len(init)} bytes")
    return init


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
