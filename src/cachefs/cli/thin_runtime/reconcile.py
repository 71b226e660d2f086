"""Keep the mounts as config.json describes them, until a signal ends all."""

import logging
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from cachefs.cli.thin_runtime.config_json import MOST_BYTES
from cachefs.cli.thin_runtime.mounts import MountProcess, remove_dead
from cachefs.cli.thin_runtime.wanted import Wanted
from cachefs.errors import CachefsError, UsageError
from cachefs.mounts import cachefs_mounts
from cachefs.trusted_path import open_file

LOOK_S = 1.0
"""How often the file is read. The kubelet replaces the link `..data` above it about a minute after
a change of the ConfigMap, and only the content of the file decides. So reading it again is as good
as inotify, which would have to watch two directories."""

_logger = logging.getLogger(__name__)


class Reconciler:
    """The mounts of one FUSE container. `describe` turns the content of the file into mounts, and
    raises `UsageError`."""

    def __init__(self, file: Path, describe: Callable[[bytes], Wanted]) -> None:
        self._file = file
        self._describe = describe
        self._content: bytes | None = None
        self._problem = ""
        self._mounts: dict[Path, MountProcess] = {}
        self._is_ending = False

    def run(self) -> None:
        """Mount, follow the changes of the file, and unmount all after SIGTERM or SIGINT.

        Raises `UsageError` if the file is wrong at the start. Returns when every process has ended.
        """
        with self._signals() as wakeup:
            try:
                self._apply(self._describe(self._read()))
            except UsageError as error:
                raise UsageError(f"{self._file}: {error}") from None
            while not self._is_ending or self._mounts:
                if not self._is_ending:
                    self._look()
                self._step()
                if not self._is_ending or self._mounts:
                    select.select([wakeup], [], [], LOOK_S)
                    _drain(wakeup)
                    self._reap()

    def _read(self) -> bytes:
        """Return the content, at most one byte more than is allowed. Raises `UsageError`."""
        try:
            with os.fdopen(open_file(self._file), "rb") as stream:
                self._content = stream.read(MOST_BYTES + 1)
        except OSError as error:
            raise UsageError(f"it can't be read: {error.strerror}") from None
        return self._content

    def _look(self) -> None:
        """Apply the file if its content has changed. A wrong one changes nothing, and one line in
        the log says so."""
        before = self._content
        try:
            content = self._read()
            if content == before:
                return
            wanted = self._describe(content)
        except CachefsError as error:
            if str(error) != self._problem or self._content != before:
                _logger.error("%s: %s; the present mounts stay", self._file, error)
            self._problem = str(error)
            return
        self._problem = ""
        _logger.info("%s has changed", self._file)
        self._apply(wanted)

    def _apply(self, wanted: Wanted) -> None:
        for mount in cachefs_mounts():
            place = mount.mountpoint
            if place not in self._mounts and place.is_relative_to(wanted.target):
                remove_dead(place)  # of a container that was killed
        with suppress(OSError):  # Fluid waits for this directory, also if there is no mount yet
            wanted.target.mkdir(parents=True, exist_ok=True)
        for place, process in self._mounts.items():
            process.want(wanted.mounts.get(place))
        for place, mount_wanted in wanted.mounts.items():
            if place not in self._mounts:
                self._mounts[place] = MountProcess(mount_wanted, wanted.target)

    def _step(self) -> None:
        for place, process in list(self._mounts.items()):
            if self._is_ending:
                process.want(None)
            process.step([p for p, other in self._mounts.items() if other.pid is not None])
            if process.is_over:
                del self._mounts[place]

    def _reap(self) -> None:
        """Reap all processes that have ended: in a container this is process 1, which inherits the
        orphans."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for process in self._mounts.values():
                if process.pid == pid:
                    process.note_end(status)

    @contextmanager
    def _signals(self) -> Iterator[int]:
        """Let SIGTERM and SIGINT end the mounts, and any signal end the wait. Yields a descriptor
        that is readable after a signal."""

        def end(number: int, frame: FrameType | None) -> None:
            self._is_ending = True

        def wake(number: int, frame: FrameType | None) -> None:
            """Only the descriptor matters."""

        handlers = {signal.SIGTERM: end, signal.SIGINT: end, signal.SIGCHLD: wake}
        receiver, sender = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        try:
            yield receiver
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(receiver)
            os.close(sender)


def _drain(descriptor: int) -> None:
    while True:
        try:
            os.read(descriptor, 4096)
        except BlockingIOError:
            return
