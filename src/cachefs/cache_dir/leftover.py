"""Lists and removes cache directories, without mounting them."""

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cachefs.errors import CacheDirError, reason_of
from cachefs.format.paths import OWN_NAMES, TierPaths
from cachefs.format.tier_identity import MOST_BYTES, decode_identity
from cachefs.trusted_path import check_directory, open_own_file, read_own_file


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """A cache directory on disk.

    `size_bytes` is its allocated disk space. `used_at` is the newest modification time of its
    files, in seconds since the epoch. `pid` is the process id of the daemon that uses the
    directory, 0 if there is none or it is unknown.
    """

    path: Path
    source: str
    size_bytes: int
    used_at: float
    in_use: bool
    pid: int


def find_caches(places: Iterable[Path]) -> list[CacheInfo]:
    """Return the cache directories among `places` and directly below them.

    Leaves out directories that can't be read.
    """
    found = {}
    for place in places:
        for path in (place, *_children(place)):
            with contextlib.suppress(CacheDirError, OSError):
                found[path] = inspect_cache(path)
    return list(found.values())


def _children(place: Path) -> list[Path]:
    try:
        return sorted(entry for entry in place.iterdir() if entry.is_dir())
    except OSError:
        return []


def inspect_cache(path: Path) -> CacheInfo:
    """Describe a cache directory. Raises `CacheDirError` if it is none, and `OSError`."""
    paths = TierPaths(path)
    check_directory(path)
    try:
        source = decode_identity(read_own_file(paths.identity, MOST_BYTES), str(path)).source
    except (FileNotFoundError, NotADirectoryError):
        raise CacheDirError(f"{path} is no cache directory of cachefs") from None
    size_bytes, used_at = 0, 0.0
    for file in _files(path):
        with contextlib.suppress(FileNotFoundError):
            info = file.lstat()
            size_bytes += info.st_blocks * 512
            used_at = max(used_at, info.st_mtime)
    with _lock_file(paths) as fd:
        in_use = fd is not None and not _try_lock(fd, fcntl.LOCK_SH)
        text = _owner_in(fd) if in_use and fd is not None else ""
    return CacheInfo(path, source, size_bytes, used_at, in_use, int(text) if text.isdigit() else 0)


def _owner_in(fd: int) -> str:
    """Return the text that the daemon wrote into the lock file; "" if `fd` is the directory."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return ""
    return os.pread(fd, 20, 0).decode("ascii", "replace").strip()


def _files(path: Path) -> Iterator[Path]:
    for directory, _, names in os.walk(path):
        for name in names:
            yield Path(directory, name)


def remove_cache(path: Path) -> CacheInfo:
    """Delete the files of cachefs in the directory, and the directory if it is empty then.

    Returns what `inspect_cache` found before. Raises `CacheDirError` if the directory is in use or
    can't be deleted; the rest is then still a valid cache directory.
    """
    try:
        info = inspect_cache(path)
        paths = TierPaths(path)
        with _lock_file(paths) as fd:
            if fd is not None and not _try_lock(fd, fcntl.LOCK_EX):
                raise CacheDirError(
                    f"{path} is in use by a daemon (process {info.pid or 'unknown'}); unmount first"
                )
            # Delete the index first: a new one can be built from the remaining slabs. Identity
            # and lock come last.
            last = [paths.slabs.name, paths.identity.name, paths.lock.name]
            for name in [*sorted(OWN_NAMES - set(last)), *last]:
                _delete(path / name)
        with contextlib.suppress(OSError):  # it has other files, or is a mountpoint
            path.rmdir()
    except OSError as error:
        raise CacheDirError(f"can't remove the cache {path}: {reason_of(error)}") from error
    return info


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock_file(paths: TierPaths) -> Iterator[int | None]:
    """Open the lock file, or the directory if the lock file was deleted: a daemon locks both.

    Yields its descriptor, None if neither exists.
    """
    try:
        fd = open_own_file(paths.lock)
    except FileNotFoundError:
        try:
            fd = os.open(paths.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            yield None
            return
    try:
        yield fd
    finally:
        os.close(fd)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
