"""The directory of a spool: its access checks, its lock and its identity."""

import fcntl
import os
import stat
import uuid
from pathlib import Path

from cachefs.errors import SpoolError, reason_of
from cachefs.format.paths import SpoolPaths
from cachefs.format.spool_identity import (
    MOST_BYTES,
    SpoolIdentity,
    decode_identity,
    encode_identity,
)
from cachefs.staging.disk import SpoolDisk
from cachefs.trusted_path import check_tree, open_directory, open_own_file, read_own_file


class SpoolDirectory:
    """An open, locked spool directory. `open` blocks: a worker thread calls it."""

    def __init__(self, paths: SpoolPaths, identity: SpoolIdentity, lock_fds: list[int]) -> None:
        self.paths = paths
        self.identity = identity
        self._lock_fds = lock_fds

    @classmethod
    def open(cls, root: Path, source: str, disk: SpoolDisk) -> "SpoolDirectory":
        """Open or create the spool of one source, and lock it.

        Raises `SpoolError`, and leaves the directory as it is, if it is not writable, belongs to
        another user or another source, lies where other users can replace it, is in use, has a
        newer format, or contains other files, links, or files of other users. If other users could
        write to it, they can't any more."""
        paths = SpoolPaths(root)
        lock_fds: list[int] = []
        try:
            check_spool(paths)
            os.close(open_directory(root, make=True))
            _check_names(paths)
            _lock(paths, lock_fds)
            _close_to_others(paths)
            if paths.identity.exists():
                identity = decode_identity(read_own_file(paths.identity, MOST_BYTES), str(root))
                _check_source(root, identity.source, source)
            else:
                identity = SpoolIdentity(uuid.uuid4().bytes, source)
                _create(paths, identity, disk)
            paths.files.mkdir(mode=0o700, exist_ok=True)
            return cls(paths, identity, lock_fds)
        except OSError as error:
            _close_all(lock_fds)
            raise SpoolError(f"spool {root}: {reason_of(error)}") from error
        except BaseException:
            _close_all(lock_fds)
            raise

    def close(self) -> None:
        """Unlock the directory."""
        _close_all(self._lock_fds)


def check_spool(paths: SpoolPaths, is_written: bool = True) -> None:
    """Check the directory of a spool, which may be missing, and what is in it, and change nothing.
    Raises `OSError` and `SpoolError`."""
    root = paths.root
    try:
        fd = open_directory(root)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise SpoolError(f"spool {root} is not a directory") from None
    try:
        if is_written and not os.access(root, os.R_OK | os.W_OK | os.X_OK):
            raise SpoolError(f"spool {root} is not writable")
        if os.fstat(fd).st_mode & stat.S_ISVTX:
            raise SpoolError(f"{root} is shared by all users: name a directory below it")
        check_tree(fd, str(root), paths.all_names(), {paths.files.name}, paths.twice)
    finally:
        os.close(fd)


def _close_to_others(paths: SpoolPaths) -> None:
    fd = open_directory(paths.root)
    try:
        os.fchmod(fd, 0o700)
        names, files = paths.all_names(), {paths.files.name}
        check_tree(fd, str(paths.root), names, files, paths.twice, close=True)
    finally:
        os.close(fd)


def _check_names(paths: SpoolPaths) -> None:
    if paths.identity.exists():
        return
    foreign = set(os.listdir(paths.root)) - paths.all_names() - {"lost+found"}
    if foreign or paths.journal.exists() or (paths.files.exists() and os.listdir(paths.files)):
        raise SpoolError(
            f"spool {paths.root} holds other files and no {paths.identity.name}: "
            "name an empty directory"
        )


def _check_source(root: Path, found: str, wanted: str) -> None:
    if found != wanted:
        raise SpoolError(
            f"spool {root} has files that belong to {found}: give every source a spool of its own"
        )


def _lock(paths: SpoolPaths, fds: list[int]) -> None:
    """Lock the file `lock` and the directory. A user may delete the file. The locks last as long
    as the descriptors."""
    fds.append(open_own_file(paths.lock, os.O_RDWR | os.O_CREAT))
    fds.append(os.open(paths.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        for fd in fds:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fds[0], 20, 0).decode("ascii", "replace").strip() or "unknown"
        raise SpoolError(
            f"spool {paths.root} is in use by another cachefs (pid {owner}): use that mount, or "
            "give this one a spool of its own"
        ) from None
    os.ftruncate(fds[0], 0)
    os.pwrite(fds[0], f"{os.getpid()}\n".encode(), 0)


def _create(paths: SpoolPaths, identity: SpoolIdentity, disk: SpoolDisk) -> None:
    """Create a spool. The rename is the commit point: before it the directory counts as empty."""
    paths.files.mkdir(mode=0o700, exist_ok=True)
    disk.unlink(paths.identity_tmp)
    fd = disk.create(paths.identity_tmp)
    try:
        disk.write(fd, encode_identity(identity), 0)
        disk.sync(fd)
    finally:
        os.close(fd)
    disk.rename(paths.identity_tmp, paths.identity)
    disk.sync_directory(paths.root)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
