"""Messages between supervisor and daemon: JSON objects over a SEQPACKET socket, one each, some with
descriptors.

From the daemon:
    {"hello": PROTOCOL, "version": TEXT, "table": FORMAT}   first of all, once its code is loaded
    {"mount": {"source": TEXT, "allow_other": BOOL}}        answered
    {"drop_files": true}                                    answered; before its first file
    {"file": N, "waits": BOOL} and one descriptor           a slab file for the relay
    {"close_file": N}
    {"changes": {...}}                                      for the daemon after it, in "start"
    {"alive": true}                                         every few seconds while its loop turns
    {"ready": true, "warnings": [TEXT, ...]}                the kernel has been answered
    {"error": TEXT, "code": N}                              it could not begin, and ends
    {"fall_back": TEXT}                                     the relay can't be used, and ends
From the supervisor:
    {"start": {...}} and the table                          `link.Start`; may be long after hello
    {"mounted": DEVICE, "notices": BOOL} and                the answer to "mount"; the socket takes
        requests socket, /dev/fuse                          notices for the kernel, too
    {"error": TEXT}                                         the other one
    {"dropped": true}                                       the answer to "drop_files"
    {"ended": true}                                         the mount has ended: SIGTERM follows

Unknown keys are ignored, so that either side may be newer; what can't be ignored needs another
PROTOCOL, and such a daemon is not taken.
"""

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

PROTOCOL = 1

_MOST_BYTES = 1 << 18
_MOST_FDS = 4

Message = dict[str, Any]


class Channel:
    """One end. Not for several threads at a time, but that one may send while one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        """To poll for."""
        return self._socket.fileno()

    def send(
        self, message: Mapping[str, object], fds: Sequence[int] = (), *, wait: bool = True
    ) -> bool:
        """False if nobody is there any more, or there is no room (some hundred messages fit) and
        it must not `wait`."""
        data = json.dumps(message, separators=(",", ":")).encode()
        flags = socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT)
        try:
            if fds:
                socket.send_fds(self._socket, [data], list(fds), flags)
            else:
                self._socket.send(data, flags)
        except OSError:
            return False
        return True

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and its descriptors, which are the caller's; None at the end.

        Raises `BlockingIOError` if the socket does not wait and there is none.
        """
        try:
            data, fds, _, _ = socket.recv_fds(
                self._socket, _MOST_BYTES, _MOST_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            return None
        if not data:
            return None
        return json.loads(data), list(fds)

    def close(self) -> None:
        """The other end sees it."""
        self._socket.close()


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
