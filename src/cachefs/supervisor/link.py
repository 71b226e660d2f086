"""The daemon's end of the connection to its supervisor."""

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cachefs.errors import MountError
from cachefs.fuse.kernel_mount import KernelMount
from cachefs.supervisor.channel import PROTOCOL, Channel, Message
from cachefs.types import DataPath, DataPathName

ALIVE_INTERVAL_S = 5.0

_ANSWER_TIMEOUT_S = 60.0
_LAST_BREATH_S = 20.0
"""Time for a daemon without a supervisor to store fetched blocks."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """The parameters that a daemon receives before it begins.

    `config` is the output of `config.to_json`. `changes` is the last value that the daemon before
    passed to `Link.changed`.
    """

    config: str
    supervisor_pid: int
    restarts: int = 0
    restarted_at: float | None = None
    last_end: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    mounted: tuple[str, str] | None = None
    """Mountpoint and device of the mount, if it exists; needed to unmount without a supervisor."""
    suspect: bool = False
    """The daemon before has crashed, so this one must read its files before it maps them."""
    kept: bool = False
    """The keeper has the mount, so it stays if the supervisor dies."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Start":
        """Make a `Start` from a message. Fields that only a newer supervisor has are ignored."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})

    def data_path(self) -> DataPath:
        """Return the data path's description for the status."""
        return DataPath(
            DataPathName.RELAY,
            None,
            self.supervisor_pid,
            self.restarts,
            self.restarted_at,
            self.last_end,
        )


class Sockets(NamedTuple):
    """What a daemon needs to serve a mount. The receiver owns both descriptors.

    Requests come from `requests_fd`; replies go to `device_fd` (/dev/fuse). `device` is the mount's
    "MAJOR:MINOR". `takes_notices` is False for the socket of an older supervisor, which does not
    pass notices on to the kernel.
    """

    requests_fd: int
    device_fd: int
    device: str
    takes_notices: bool


class Link:
    """The daemon's connection to its supervisor; there is one per daemon.

    A thread receives the messages. If the supervisor dies, this thread removes the mount and ends
    the daemon with SIGTERM, whatever its loop does. `table_fd` and `changes` are set by `hello`.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._answers: queue.SimpleQueue[tuple[Message, list[int]]] = queue.SimpleQueue()
        self._mount: KernelMount | None = None
        self._is_kept = False
        self._sent_file = False
        self.table_fd = -1
        self.changes: Mapping[str, Any] = {}
        """The last value that the daemon before passed to `changed`."""
        threading.Thread(target=self._listen, name="cachefs-link", daemon=True).start()

    def hello(self, version: str, table_format: int, timeout_s: float | None = None) -> Start:
        """Report that the code is loaded, and wait for the order to start.

        Raises `queue.Empty` after `timeout_s`; None waits for ever.
        """
        self._channel.send({"hello": PROTOCOL, "version": version, "table": table_format})
        message, fds = self._answers.get(timeout=timeout_s)
        (self.table_fd,) = fds
        start = Start.of(message["start"])
        if start.mounted is not None:
            mountpoint, device = start.mounted
            self._mount = KernelMount(Path(mountpoint), -1, device)
        self.changes = start.changes
        self._is_kept = start.kept
        return start

    def mount(
        self,
        mountpoint: Path,
        source: str,
        allow_other: bool,
        writable: bool,
        passthrough: bool = False,
    ) -> Sockets:
        """Let the supervisor mount, unless the mount exists. Raises `MountError`.

        With `passthrough`, the kernel may read whole files directly."""
        wanted = {
            "source": source,
            "allow_other": allow_other,
            "writable": writable,
            "passthrough": passthrough,
        }
        message, fds = self._ask({"mount": wanted})
        if "error" in message:
            raise MountError(str(message["error"]))
        requests_fd, device_fd = fds
        device = str(message["mounted"])
        self._mount = KernelMount(mountpoint, device_fd, device)
        return Sockets(requests_fd, device_fd, device, bool(message.get("notices")))

    def send_file(self, number: int, fd: int, waits: bool) -> None:
        """Give the relay a slab file. `fd` stays the caller's. No number may be used twice."""
        if not self._sent_file:
            # The files of the daemon before have the same numbers.
            self._ask({"drop_files": True})
            self._sent_file = True
        self._channel.send({"file": number, "waits": waits}, [fd])

    def close_file(self, number: int) -> None:
        """Tell the relay to close a slab file. READs of its blocks then come to the daemon."""
        self._channel.send({"close_file": number})

    def changed(self, changes: Mapping[str, object]) -> None:
        """Store `changes` for the next daemon. They replace those of the last call."""
        self._channel.send({"changes": changes})

    def alive(self) -> None:
        """Send a heartbeat: the loop runs. Does not wait if the socket is full."""
        self._channel.send({"alive": True}, wait=False)

    def ready(self, warnings: Sequence[str]) -> None:
        """Report that the kernel has been answered, with the warnings logged so far."""
        self._channel.send({"ready": True, "warnings": list(warnings)})

    def failed(self, text: str, code: int) -> None:
        """Report that the daemon can't begin and ends, with the reason and the exit code."""
        self._channel.send({"error": text, "code": code})

    def fall_back(self, reason: str) -> None:
        """Report that the relay can't be used here. The daemon ends."""
        self._channel.send({"fall_back": reason})

    def _ask(self, message: Message) -> tuple[Message, list[int]]:
        """Send a message and return its answer. Raises `MountError` after a timeout."""
        self._channel.send(message)
        try:
            return self._answers.get(timeout=_ANSWER_TIMEOUT_S)
        except queue.Empty:
            raise MountError(
                f"the supervisor (process {os.getppid()}) does not answer; end it and mount again"
            ) from None

    def _listen(self) -> None:
        has_ended = False
        while (received := self._channel.receive()) is not None:
            message, fds = received
            if "ended" in message:
                has_ended = True
            else:
                self._answers.put((message, fds))
        if not has_ended:
            self._be_orphan()

    def _be_orphan(self) -> None:
        """Unmount and end: without a supervisor, users of the mount would wait for ever. A mount
        that the keeper has waits for the next supervisor instead."""
        what = "the keeper has the mount" if self._is_kept else "unmounting"
        _logger.error("the supervisor is gone; %s", what)
        if self._mount is not None and not self._is_kept:
            with suppress(OSError):
                self._mount.detach()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LAST_BREATH_S)
        os._exit(1)
