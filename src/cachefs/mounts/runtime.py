"""Runtime files: which daemon serves which mountpoint.

Each daemon holds a lock on `RUNTIME_DIR/HASH.json` (HASH names its mountpoint) for as long as it
lives; the kernel lets go of it however the daemon ends. So a file that isn't locked is left over
from a dead daemon. The control socket stands beside it as `HASH.sock`.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cachefs.errors import CachefsError, MountError
from cachefs.mounts.table import find_mount

RUNTIME_DIR = Path("/run/cachefs")
"""For root; other users have theirs in $XDG_RUNTIME_DIR or /tmp."""

_LEAST_BYTES = 16384
_LEFTOVER_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class RuntimeEntry:
    """What the process that a mount belongs to says about itself before it mounts: the daemon, or
    its supervisor (`supervised`), which also tells why the last upgrade failed. `device` is that
    of the kernel's table, "" before it mounts. `given` is what it was mounted with, for
    `cachefs reload`. `alive`: its lock is held."""

    mountpoint: str
    source: str
    pid: int
    started_at: float
    log_file: str | None = None
    supervised: bool = False
    upgrade_failed_at: float = 0.0
    upgrade_failure: str | None = None
    device: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    alive: bool = False


def runtime_dir() -> Path:
    """This user's directory, created if need be, readable by nobody else.

    Raises `CachefsError` if something else stands in its place.
    """
    uid = os.geteuid()
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    if uid == 0:
        path = RUNTIME_DIR
    elif xdg and os.access(xdg, os.W_OK):
        path = Path(xdg) / "cachefs"
    else:
        path = Path(f"/tmp/cachefs-{uid}")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        raise CachefsError(f"can't create {path}: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != uid or info.st_mode & 0o077:
        raise CachefsError(
            f"{path} must be a directory of uid {uid} with mode 700, and is not; remove it"
        )
    return path


def _stem(mountpoint: Path) -> str:
    return hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16]


def socket_path(mountpoint: Path) -> Path:
    """Where the daemon of a (canonical) mountpoint listens."""
    return runtime_dir() / f"{_stem(mountpoint)}.sock"


def spare_path(mountpoint: Path) -> Path:
    """A directory for what a (canonical) mountpoint's daemon keeps where its disk is gone."""
    return runtime_dir() / f"{_stem(mountpoint)}.spare"


def entry_path(mountpoint: Path) -> Path:
    """The runtime file of a (canonical) mountpoint."""
    return runtime_dir() / f"{_stem(mountpoint)}.json"


def default_log_file(mountpoint: Path) -> Path:
    """Where the daemon of a (canonical) mountpoint logs unless told otherwise."""
    name = str(mountpoint).strip("/").replace("/", "-") or "root"
    if os.geteuid() == 0:
        return Path("/var/log/cachefs", f"{name}.log")
    return Path("~/.cache/cachefs/log").expanduser() / f"{name}.log"


class RuntimeFile:
    """A process's claim on a mountpoint, from construction to `close` or the process's end."""

    def __init__(
        self,
        mountpoint: Path,
        source: str,
        log_file: Path | None = None,
        *,
        supervised: bool = False,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises `MountError` while another process holds the claim."""
        self._path = entry_path(mountpoint)
        self._fd = _lock(self._path, mountpoint)
        _remove_leftovers()
        log_name = None if log_file is None else str(log_file)
        now = time.time()
        self._entry = RuntimeEntry(
            *(str(mountpoint), source, os.getpid(), now, log_name, supervised),
            given=dict(given or {}),
        )
        os.ftruncate(self._fd, 0)
        self._write()

    def note_failed_upgrade(self, why: str) -> None:
        """For whoever waits for one."""
        self._entry = replace(self._entry, upgrade_failed_at=time.time(), upgrade_failure=why)
        self._write()

    def note_device(self) -> None:
        """For those who see the mount elsewhere; to be called when it is mounted."""
        mount = find_mount(Path(self._entry.mountpoint))
        if mount is not None:
            self._entry = replace(self._entry, device=mount.device)
            self._write()

    def _write(self) -> None:
        """All at once, and always as long, so that it is whole whenever it is read."""
        fields = asdict(self._entry)
        del fields["alive"]
        os.pwrite(self._fd, json.dumps(fields).encode().ljust(_LEAST_BYTES), 0)

    def close(self) -> None:
        """Give up the claim and remove the file."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def _remove_leftovers() -> None:
    """What daemons that were killed have left here, except what a mount that comes back soon may
    still want."""
    for path in runtime_dir().iterdir():
        stem, _, kind = path.name.partition(".")
        if not kind.startswith(("journal", "spare")):
            continue
        entry = read_entry(path.with_name(f"{stem}.json"))
        with contextlib.suppress(OSError):
            is_old = path.lstat().st_mtime + _LEFTOVER_S < time.time()
            if is_old and (entry is None or not entry.alive):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _lock(path: Path, mountpoint: Path) -> int:
    """A descriptor that holds the lock on the file that `path` names at that time."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and path.stat().st_ino == os.fstat(fd).st_ino:
                return fd
        except BlockingIOError:
            os.close(fd)
            holder = read_entry(path)
            who = f" (process {holder.pid}, {holder.source})" if holder else ""
            if holder is not None and holder.device and find_mount(mountpoint) is None:
                raise MountError(
                    f"{mountpoint} was unmounted, but its daemon{who} serves those who still use "
                    "it; wait until they are done, or end it: "
                    f"cachefs umount --force {mountpoint}"
                ) from None
            raise MountError(
                f"{mountpoint} is already served by a cachefs daemon{who}; unmount it first: "
                f"cachefs umount {mountpoint}"
            ) from None
        os.close(fd)


def read_entry(path: Path) -> RuntimeEntry | None:
    """One runtime file; None if it is missing or not (yet) complete."""
    try:
        with path.open("rb") as stream:
            fields = json.loads(stream.read(65536))
            alive = not _try_shared_lock(stream.fileno())
        return RuntimeEntry(
            mountpoint=str(fields["mountpoint"]),
            source=str(fields["source"]),
            pid=int(fields["pid"]),
            started_at=float(fields["started_at"]),
            log_file=fields.get("log_file"),
            supervised=bool(fields.get("supervised", False)),
            upgrade_failed_at=float(fields.get("upgrade_failed_at", 0.0)),
            upgrade_failure=fields.get("upgrade_failure"),
            device=str(fields.get("device", "")),
            given=dict(fields.get("given") or {}),
            alive=alive,
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _try_shared_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def read_entries() -> list[RuntimeEntry]:
    """All runtime files of this user, left-over ones included."""
    entries = [read_entry(path) for path in sorted(runtime_dir().glob("*.json"))]
    return [entry for entry in entries if entry is not None]


def find_entry(mountpoint: Path) -> RuntimeEntry | None:
    """The runtime file of a (canonical) mountpoint, if there is one."""
    return read_entry(entry_path(mountpoint))


def mountpoint_of(pid: int) -> str | None:
    """Where the daemon with that process id, or its supervisor, has this user's mount."""
    try:
        stat_line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        parent = int(stat_line.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
    for entry in read_entries():
        if entry.alive and (entry.pid == pid or (entry.supervised and entry.pid == parent)):
            return entry.mountpoint
    return None


def remove_leftovers(mountpoint: Path) -> None:
    """Remove what a dead daemon left for `mountpoint`; nothing if the daemon lives."""
    entry = find_entry(mountpoint)
    if entry is None or not entry.alive:
        entry_path(mountpoint).unlink(missing_ok=True)
        socket_path(mountpoint).unlink(missing_ok=True)
