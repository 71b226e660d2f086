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
"""For an orphan to store what was fetched."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """What a daemon is told before it begins. `config` is what `config.to_json` made, `changes`
    what the daemon before said of its own."""

    config: str
    supervisor_pid: int
    restarts: int = 0
    restarted_at: float | None = None
    last_end: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    mounted: tuple[str, str] | None = None
    """Mountpoint and device of the mount, if there is one: to be removed by an orphan."""
    suspect: bool = False
    """The daemon before has crashed: what it mapped is to be read before it is mapped again."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Start":
        """Without what a newer supervisor may have added."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})

    def data_path(self) -> DataPath:
        """For the status."""
        return DataPath(
            DataPathName.RELAY,
            None,
            self.supervisor_pid,
            self.restarts,
            self.restarted_at,
            self.last_end,
        )


class Sockets(NamedTuple):
    """What a mount is served with: the socket that requests come from, and /dev/fuse for the
    replies. `device` is what the mount table calls the mount. An older supervisor's socket takes no
    notices for the kernel."""

    requests_fd: int
    device_fd: int
    device: str
    takes_notices: bool


class Link:
    """One per daemon. Should the supervisor die, the mount is removed and the daemon ended with
    SIGTERM, whatever its loop does. `table_fd` and `changes` are there after `hello`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._answers: queue.SimpleQueue[tuple[Message, list[int]]] = queue.SimpleQueue()
        self._mount: KernelMount | None = None
        self._sent_file = False
        self.table_fd = -1
        self.changes: Mapping[str, Any] = {}
        """What `changed` was told in the daemon before."""
        threading.Thread(target=self._listen, name="cachefs-link", daemon=True).start()

    def hello(self, version: str, table_format: int, timeout_s: float | None = None) -> Start:
        """Say that the code is loaded, and wait until it is wanted."""
        self._channel.send({"hello": PROTOCOL, "version": version, "table": table_format})
        message, fds = self._answers.get(timeout=timeout_s)
        (self.table_fd,) = fds
        start = Start.of(message["start"])
        if start.mounted is not None:
            mountpoint, device = start.mounted
            self._mount = KernelMount(Path(mountpoint), -1, device)
        self.changes = start.changes
        return start

    def mount(self, mountpoint: Path, source: str, allow_other: bool) -> Sockets:
        """Have the supervisor mount, unless it has. Raises `MountError`."""
        message, fds = self._ask({"mount": {"source": source, "allow_other": allow_other}})
        if "error" in message:
            raise MountError(str(message["error"]))
        requests_fd, device_fd = fds
        device = str(message["mounted"])
        self._mount = KernelMount(mountpoint, device_fd, device)
        return Sockets(requests_fd, device_fd, device, bool(message.get("notices")))

    def send_file(self, number: int, fd: int, waits: bool) -> None:
        """Give the relay a slab file. `fd` stays the caller's. Numbers are never used again."""
        if not self._sent_file:
            # Those of the daemon before have the same numbers.
            self._ask({"drop_files": True})
            self._sent_file = True
        self._channel.send({"file": number, "waits": waits}, [fd])

    def close_file(self, number: int) -> None:
        """The relay may forget it. The table must have called it dead."""
        self._channel.send({"close_file": number})

    def changed(self, changes: Mapping[str, object]) -> None:
        """What the next daemon shall be told, in place of what was said before."""
        self._channel.send({"changes": changes})

    def alive(self) -> None:
        """The loop turns."""
        self._channel.send({"alive": True}, wait=False)

    def ready(self, warnings: Sequence[str]) -> None:
        """The kernel has been answered."""
        self._channel.send({"ready": True, "warnings": list(warnings)})

    def failed(self, text: str, code: int) -> None:
        """The daemon can't begin, and ends: why, for the user, and the exit code it means."""
        self._channel.send({"error": text, "code": code})

    def fall_back(self, reason: str) -> None:
        """The relay can't be used here. The daemon ends."""
        self._channel.send({"fall_back": reason})

    def _ask(self, message: Message) -> tuple[Message, list[int]]:
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
        """Nobody reads requests any more: whoever uses the mount would wait for ever."""
        _logger.error("the supervisor is gone; unmounting")
        if self._mount is not None:
            with suppress(OSError):
                self._mount.detach()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LAST_BREATH_S)
        os._exit(1)
