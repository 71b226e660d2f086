"""Messages between supervisor and daemon.

Each message is one JSON object in one packet of a SEQPACKET socket. Some carry descriptors.

From the daemon:
    {"hello": PROTOCOL, "version": TEXT, "table": FORMAT}   the first message: its code is loaded
    {"mount": {"source": TEXT, "allow_other": BOOL,         has an answer
        "writable": BOOL, "passthrough": BOOL}}
    {"drop_files": true}                                    has an answer; before its first file
    {"file": N, "waits": BOOL} and one descriptor           a slab file for the relay
    {"close_file": N}
    {"changes": {...}}                                      for the next daemon, in its "start"
    {"alive": true}                                         every few seconds while its loop runs
    {"ready": true, "warnings": [TEXT, ...]}                it has answered the kernel
    {"error": TEXT, "code": N}                              it could not begin, and ends
    {"fall_back": TEXT}                                     the relay can't be used; it ends
From the supervisor:
    {"start": {...}} and the table                          `link.Start`; may be long after hello
    {"mounted": DEVICE, "notices": BOOL} and                answers "mount"; with "notices", the
        requests socket, /dev/fuse                          socket takes notices for the kernel
    {"error": TEXT}                                         answers "mount": it failed
    {"dropped": true}                                       answers "drop_files"
    {"ended": true}                                         the mount has ended; SIGTERM follows

Both sides ignore unknown keys, so either side may be newer. An extension that the other side must
not ignore needs another PROTOCOL. A supervisor rejects a daemon with another PROTOCOL.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

PROTOCOL = 1

_MOST_BYTES = 1 << 18
_MOST_FDS = 4

Message = dict[str, Any]


class Channel:
    """One end of the connection; it owns its socket.

    One thread may send while another one receives. No other concurrent use is allowed.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        """Return the socket's descriptor, for polling."""
        return self._socket.fileno()

    def send(
        self, message: Mapping[str, object], fds: Sequence[int] = (), *, wait: bool = True
    ) -> bool:
        """Send a message with copies of `fds`, which stay the caller's.

        Return False if the other end is gone, or if the socket is full (some hundred messages fit)
        and `wait` is False.
        """
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
        """Return the next message and its descriptors, which the caller owns; None at the end.

        Raises `BlockingIOError` if the socket is non-blocking and there is no message, and
        `ValueError` or `RecursionError` for one that is no JSON. Its descriptors are then closed.
        """
        try:
            data, fds, _, _ = socket.recv_fds(
                self._socket, _MOST_BYTES, _MOST_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            return None
        if not data:
            return None
        try:
            return json.loads(data), list(fds)
        except (ValueError, RecursionError):
            for fd in fds:
                os.close(fd)
            raise

    def close(self) -> None:
        """Close the socket. The other end then receives None."""
        self._socket.close()


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that preserve message boundaries. The caller owns both."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
