"""Runtime files say which daemon serves which mountpoint.

Each daemon holds a lock on `RUNTIME_DIR/HASH.json` for as long as it lives (HASH is a hash of its
mountpoint). The kernel releases the lock however the daemon ends. So a file without a lock was left
by a dead daemon. The control socket is `HASH.sock` in the same directory.
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
from typing import Any, Self

from cachefs.errors import CachefsError, MountError
from cachefs.mounts.table import find_mount

RUNTIME_DIR = Path("/run/cachefs")
"""Root's directory. Those of other users are in $XDG_RUNTIME_DIR or /tmp."""

_LEAST_BYTES = 16384
_LEFTOVER_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class RuntimeEntry:
    """The content of a runtime file. The mount's owner writes it before it mounts.

    The owner is the daemon, or its supervisor (`supervised`), which also notes why the last upgrade
    failed. `device` is the mount's "MAJOR:MINOR", "" before it is mounted. `given` holds the
    parameters of the mount, for `cachefs reload`. `pid_namespace` is the inode number of the PID
    namespace in which `pid` counts (0 in files of earlier versions). `alive` says that a process
    holds the lock. Times are in seconds since the epoch.
    """

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
    pid_namespace: int = 0
    alive: bool = False

    @property
    def is_elsewhere(self) -> bool:
        """Whether the owner is in another container. There `pid` is the number of another process
        than here."""
        return self.pid_namespace not in {0, _pid_namespace()}

    @property
    def who(self) -> str:
        """The owner, in words for a user."""
        return "a process in another container" if self.is_elsewhere else f"process {self.pid}"


def _pid_namespace() -> int:
    """Return the inode number of this process's PID namespace; 0 without /proc."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def runtime_dir() -> Path:
    """Return this user's directory (mode 700), and create it if necessary. Root's gets this mode,
    because nobody else can have made it in /run.

    Raises `CachefsError` if it can't be created, or has another owner, mode or type.
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
        is_roots = stat.S_ISDIR(info.st_mode) and info.st_uid == uid == 0
        if is_roots and path == RUNTIME_DIR and _is_public(info):
            path.chmod(0o700)  # the kubelet creates the directory of a volume with 755
            info = path.lstat()
    except OSError as error:
        raise CachefsError(f"can't create {path}: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != uid or _is_public(info):
        raise CachefsError(
            f"{path} must be a directory of uid {uid} with mode 700, and is not; remove it"
            + (", or set XDG_RUNTIME_DIR to a directory of your own" if uid else "")
        )
    return path


def _is_public(info: os.stat_result) -> bool:
    return bool(info.st_mode & 0o077)


def _stem(mountpoint: Path) -> str:
    return hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16]


def socket_path(mountpoint: Path) -> Path:
    """Return the control socket's path of the daemon of a (canonical) mountpoint."""
    return runtime_dir() / f"{_stem(mountpoint)}.sock"


def report_dir() -> Path:
    """Return the directory of the sockets that only report, for the use in a pod that has nothing
    else of `runtime_dir`. It may not exist."""
    return (RUNTIME_DIR if os.geteuid() == 0 else runtime_dir()) / "report"


def report_path(mountpoint: Path) -> Path:
    """Return the path of the socket on which the daemon of a (canonical) mountpoint only
    reports."""
    return report_dir() / f"{_stem(mountpoint)}.sock"


def spare_path(mountpoint: Path) -> Path:
    """Return the directory that a (canonical) mountpoint's daemon uses when its disk is gone."""
    return runtime_dir() / f"{_stem(mountpoint)}.spare"


def keeper_path() -> Path:
    """Return the default path of the keeper's socket."""
    return runtime_dir() / "keeper.sock"


def entry_path(mountpoint: Path) -> Path:
    """Return the runtime file's path of a (canonical) mountpoint."""
    return runtime_dir() / f"{_stem(mountpoint)}.json"


def default_log_file(mountpoint: Path) -> Path:
    """Return the default log file of a (canonical) mountpoint's daemon."""
    name = str(mountpoint).strip("/").replace("/", "-") or "root"
    if os.geteuid() == 0:
        return Path("/var/log/cachefs", f"{name}.log")
    return Path("~/.cache/cachefs/log").expanduser() / f"{name}.log"


class RuntimeFile:
    """A process's claim on a mountpoint, from construction to `close` or the process's end.

    The object owns the file and the lock on it.
    """

    def __init__(
        self,
        mountpoint: Path,
        source: str,
        log_file: Path | None = None,
        *,
        supervised: bool = False,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        """Take the claim. Raises `MountError` while another process holds it."""
        self._path = entry_path(mountpoint)
        self._fd = _lock(self._path, mountpoint)
        _remove_leftovers()
        log_name = None if log_file is None else str(log_file)
        now = time.time()
        self._entry = RuntimeEntry(
            str(mountpoint),
            source,
            os.getpid(),
            now,
            log_name,
            supervised,
            given=dict(given or {}),
            pid_namespace=_pid_namespace(),
        )
        os.ftruncate(self._fd, 0)
        self._write()

    def note_failed_upgrade(self, why: str) -> None:
        """Store why an upgrade failed, for the process that waits for the upgrade."""
        self._entry = replace(self._entry, upgrade_failed_at=time.time(), upgrade_failure=why)
        self._write()

    def note_device(self) -> None:
        """Store the mount's device, so that bind mounts are recognised. Call it after mounting."""
        mount = find_mount(Path(self._entry.mountpoint))
        if mount is not None:
            self._entry = replace(self._entry, device=mount.device)
            self._write()

    def _write(self) -> None:
        """Write the entry in one call and with a fixed length, so that readers find it complete."""
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

    def __exit__(self, *failure: object) -> None:
        self.close()


def _remove_leftovers() -> None:
    """Remove report sockets, journals and spare directories of killed daemons.

    Journals and directories younger than `_LEFTOVER_S` stay, because a mount that comes back soon
    may need them.
    """
    here = runtime_dir()
    for path in report_dir().glob("*.sock"):
        entry = read_entry(here / f"{path.stem}.json")
        if entry is None or not entry.alive:
            path.unlink(missing_ok=True)
    for path in here.iterdir():
        stem, _, kind = path.name.partition(".")
        if not kind.startswith(("journal", "spare")):
            continue
        entry = read_entry(path.with_name(f"{stem}.json"))
        with contextlib.suppress(OSError):
            is_old = path.lstat().st_mtime + _LEFTOVER_S < time.time()
            if is_old and (entry is None or not entry.alive):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _lock(path: Path, mountpoint: Path) -> int:
    """Return a descriptor that holds the lock on the file that `path` names at that time.

    The file may be removed between open and lock; then the function tries again. Raises
    `MountError` if another process holds the lock.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and path.stat().st_ino == os.fstat(fd).st_ino:
                return fd
        except BlockingIOError:
            os.close(fd)
            holder = read_entry(path)
            who = f" ({holder.who}, {holder.source})" if holder else ""
            was_seen = holder is not None and holder.device and not holder.is_elsewhere
            if was_seen and find_mount(mountpoint) is None:
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
    """Read one runtime file; None if it is missing or not (yet) complete."""
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
            pid_namespace=int(fields.get("pid_namespace", 0)),
            alive=alive,
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _try_shared_lock(fd: int) -> bool:
    """Return whether no process holds the lock. The shared lock is released at once."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def read_entries() -> list[RuntimeEntry]:
    """Read all runtime files of this user, also those of dead daemons."""
    entries = [read_entry(path) for path in sorted(runtime_dir().glob("*.json"))]
    return [entry for entry in entries if entry is not None]


def find_entry(mountpoint: Path) -> RuntimeEntry | None:
    """Read the runtime file of a (canonical) mountpoint; None if there is none."""
    return read_entry(entry_path(mountpoint))


def open_owner(entry: RuntimeEntry | None) -> int | None:
    """Return a pidfd of the process that owns a mount, so that a reused process id can't be
    mistaken for it. Return None if it has ended, or is in another container."""
    if entry is None or not entry.alive or entry.is_elsewhere:
        return None
    try:
        pidfd = os.pidfd_open(entry.pid)
    except OSError:
        return None
    now = find_entry(Path(entry.mountpoint))
    if now is not None and now.alive and now.pid == entry.pid:
        return pidfd
    os.close(pidfd)
    return None


def mountpoint_of(pid: int) -> str | None:
    """Return the mountpoint of this user's daemon with that pid; None if there is none.

    The daemon's runtime entry may be its own or its supervisor's.
    """
    try:
        stat_line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        parent = int(stat_line.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
    for entry in read_entries():
        is_it = entry.pid == pid or (entry.supervised and entry.pid == parent)
        if entry.alive and is_it and not entry.is_elsewhere:
            return entry.mountpoint
    return None


def remove_leftovers(mountpoint: Path) -> None:
    """Remove runtime file and socket of a dead daemon; does nothing if the daemon lives."""
    entry = find_entry(mountpoint)
    if entry is None or not entry.alive:
        entry_path(mountpoint).unlink(missing_ok=True)
        socket_path(mountpoint).unlink(missing_ok=True)
