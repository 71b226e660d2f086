"""Reads the spool of a mount that has ended, and changes nothing. Everything here blocks."""

import fcntl
import os
from pathlib import Path
from typing import NamedTuple

from cachefs.errors import SpoolError, reason_of
from cachefs.format.paths import SpoolPaths
from cachefs.format.spool_identity import MOST_BYTES, decode_identity
from cachefs.staging.directory import check_spool
from cachefs.staging.file_state import FileState, is_only_begun
from cachefs.staging.recovery import FoundFile, look
from cachefs.trusted_path import open_own_file, read_own_file

_NOT_CLOSED = "it was never closed"


class LeftFile(NamedTuple):
    """A file of a spool that no daemon uses. `state` is FAILED, CONFLICT or HELD, or OPEN for a
    file that the next mount sends. `base_bytes` is how much of an object at the origin shows where
    nothing was written. Up to `freed_bytes` only an upload at the origin has the bytes."""

    number: int
    path: str
    state: FileState
    reason: str
    size_bytes: int
    base_bytes: int
    freed_bytes: int
    changed_at_ns: int
    file: Path


class LeftSpool(NamedTuple):
    """A spool that no daemon uses. `source` is the origin to which its files belong."""

    root: Path
    source: str
    files: list[LeftFile]


def spool_exists(root: Path) -> bool:
    """Return whether there is a spool, in use or not."""
    return SpoolPaths(root).identity.exists()


def read_spool(root: Path) -> LeftSpool:
    """Return what lies in the spool `root`. Raises `SpoolError` if there is none, if a daemon uses
    it, or if it can't be read."""
    paths = SpoolPaths(root)
    try:
        check_spool(paths, is_written=False)
        identity = decode_identity(read_own_file(paths.identity, MOST_BYTES), str(root))
        _check_unused(paths)
        found = look(paths, identity.uuid).found
    except FileNotFoundError:
        raise SpoolError(f"there is no spool in {root}") from None
    except OSError as error:
        raise SpoolError(f"spool {root}: {reason_of(error)}") from error
    return LeftSpool(
        root, identity.source, [_left(paths, each) for each in found if not _is_dropped(each)]
    )


def _is_dropped(found: FoundFile) -> bool:
    """Return whether the next mount drops the file (`WrittenFiles.restore`)."""
    return found.file.state is FileState.OPEN and is_only_begun(found.file)


def _left(paths: SpoolPaths, found: FoundFile) -> LeftFile:
    file, status = found
    if file.state is FileState.OPEN and not file.is_sealed:
        file.hold(_NOT_CLOSED)  # the next mount does the same
    return LeftFile(
        file.number,
        file.path,
        file.state,
        file.reason,
        file.size_bytes,
        0 if file.base is None else file.base_bytes,
        file.freed_bytes,
        status.st_mtime_ns,
        paths.file(file.number),
    )


def _check_unused(paths: SpoolPaths) -> None:
    """Raise `SpoolError` if a daemon uses the spool. The lock is not kept, because it would stop a
    daemon that starts meanwhile; that daemon replaces the journal in one step."""
    fd = open_own_file(paths.lock)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
        raise SpoolError(
            f"spool {paths.root} is in use by a daemon (process {owner}): name its mountpoint"
        ) from None
    finally:
        os.close(fd)
