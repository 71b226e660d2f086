"""The process of one mount: `cachefs mount --foreground`, started again with pauses if it ends."""

import errno
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from cachefs.cli.thin_runtime.wanted import SecretFile, WantedMount
from cachefs.mounts import FSTYPE, MountHealth, check_answers, find_mount, unmount

FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 60.0
STEADY_S = 60.0
"""After so long a process that ends counts as the first that fails."""

_logger = logging.getLogger(__name__)


class MountProcess:
    """A mount that there must be, and its process if it runs. Not thread-safe.

    The owner calls `step` often, and `note_end` with the status of a process that it has reaped.
    """

    def __init__(self, wanted: WantedMount, target: Path) -> None:
        self._wanted: WantedMount | None = wanted
        self._target = target
        self._started: WantedMount | None = None
        self._started_at = 0.0
        self._may_start_at = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._is_stopping = False
        self.pid: int | None = None

    @property
    def is_over(self) -> bool:
        """Nobody wants it, and it does not run."""
        return self._wanted is None and self.pid is None

    def want(self, wanted: WantedMount | None) -> None:
        """Change what there must be; None ends the mount."""
        served = self._wanted
        if wanted is not None and (served is None or not wanted.is_served_by(served)):
            self._may_start_at, self._pause_s = 0.0, FIRST_PAUSE_S
        self._wanted = wanted

    def step(self, running: Collection[Path]) -> None:
        """Start or end the process if that is due. Does not wait. While one of the mounts in
        `running` lies above or below, it doesn't start."""
        wanted = self._wanted
        if self.pid is None:
            if wanted is None or any(_overlap(wanted.place, place) for place in running):
                return
            if time.monotonic() >= self._may_start_at:
                self._start(wanted)
            return
        assert self._started is not None
        if wanted is None or not wanted.is_served_by(self._started):
            if not self._is_stopping:
                _logger.info("unmounting %s", self._started.place)
                self._is_stopping = True
                os.kill(self.pid, signal.SIGTERM)
        elif wanted != self._started:
            with suppress(OSError):
                write_secrets(wanted.secrets_dir, wanted.secrets)
                self._started = wanted

    def _start(self, wanted: WantedMount) -> None:
        try:
            _prepare(wanted.place, self._target)
            write_secrets(wanted.secrets_dir, wanted.secrets)
            self.pid = os.posix_spawn(
                sys.executable,
                [*_command(), *wanted.arguments, "--", wanted.source, str(wanted.place)],
                os.environ,
                setpgroup=0,  # Ctrl-C ends the mounts in order, too
            )
        except OSError as error:
            self._pause(f"can't mount on {wanted.place}: {error.strerror or error}")
            return
        self._started, self._started_at, self._is_stopping = wanted, time.monotonic(), False
        _logger.info("mounting %s", wanted.place)

    def note_end(self, status: int) -> None:
        """Note that the process has ended, with a status of waitpid(2)."""
        assert self._started is not None
        place, meant = self._started.place, self._is_stopping
        self.pid = None
        if time.monotonic() - self._started_at >= STEADY_S:
            self._pause_s = FIRST_PAUSE_S
        remove_dead(place)
        if self._wanted is None:
            shutil.rmtree(self._started.secrets_dir, ignore_errors=True)
            _remove_empty(place, self._target)
        elif not meant:
            code = os.waitstatus_to_exitcode(status)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended ({code})"
            self._pause(f"the process of the mount on {place} {how}")

    def _pause(self, why: str) -> None:
        _logger.warning("%s; the next try comes in %.0f s", why, self._pause_s)
        self._may_start_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)


def _command() -> list[str]:
    """Return the command that mounts. -P keeps code in the working directory from being
    imported."""
    warnings = [f"-W{option}" for option in sys.warnoptions]
    return [sys.executable, *warnings, "-P", "-m", "cachefs", "mount", "--foreground"]


def write_secrets(directory: Path, secrets: dict[str, SecretFile]) -> None:
    """Write the files of a mount's secrets, as the kubelet does: all of them change at one moment,
    when the link `..data` leads elsewhere. Raises `OSError`."""
    data = directory / "..data"
    if not secrets:
        return
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    old = os.path.realpath(data) if data.is_symlink() else None
    fresh = directory / f"..{time.monotonic_ns()}"
    fresh.mkdir(mode=0o700)
    for name, secret in secrets.items():
        if secret.is_link:
            (fresh / name).symlink_to(secret.text)
        else:
            fd = os.open(fresh / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as stream:
                stream.write(secret.text)
    link = directory / "..data_new"
    link.unlink(missing_ok=True)
    link.symlink_to(fresh.name)
    link.replace(data)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _overlap(one: Path, other: Path) -> bool:
    return one.is_relative_to(other) or other.is_relative_to(one)


def remove_dead(place: Path) -> None:
    """Unmount what a killed process has left at `place`, if there is such a mount."""
    mount = find_mount(place)
    if mount is None or mount.fstype != FSTYPE:
        return
    if check_answers(place) is MountHealth.DEAD:
        with suppress(OSError):
            unmount(place, lazy=True)


def _prepare(place: Path, target: Path) -> None:
    """Create the directories from `target` to `place`. Raises `OSError`, also for a link among
    them, which could lead anywhere."""
    target.parent.mkdir(parents=True, exist_ok=True)
    inner = place.relative_to(target)
    for directory in reversed([place, *(target / above for above in inner.parents)]):
        mount = find_mount(directory)
        if mount is not None and mount.fstype == FSTYPE and directory != place:
            raise OSError(errno.EBUSY, f"{directory} is a mount of cachefs")
        if mount is not None:
            continue  # at the place itself perhaps a dead one, which `cachefs mount` removes
        if directory.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, f"{directory} is a symbolic link; remove it")
        directory.mkdir(exist_ok=True)


def _remove_empty(place: Path, target: Path) -> None:
    """Remove the directories of a mount that has gone, so that nobody takes them for an empty
    mount. `target` itself stays."""
    with suppress(OSError):
        while place != target and find_mount(place) is None:
            place.rmdir()
            place = place.parent
