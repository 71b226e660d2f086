"""Open LMDB's files safely, and translate its errors."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import lmdb

from cachefs.errors import CacheDirError
from cachefs.trusted_path import check_own_file

DATA_NAME = "data.mdb"
_LOCK_NAME = "lock.mdb"
_LOCK_BYTES = 64 << 10
"""More than LMDB needs for 126 readers, its default."""
MARK_NAME = "damaged"
"""A file beside LMDB's files. It means that a daemon found damage there, so `open_env` refuses the
database."""
SUSPECT_NAME = "suspect"
"""A file beside LMDB's files. It means that a row had a wrong checksum, so pages may be damaged,
too: `copy_suspect` reads all rows before the next daemon opens the database."""

DAMAGE = (
    lmdb.BadDbiError,
    lmdb.BadTxnError,
    lmdb.BadValsizeError,
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.ProblemError,
    lmdb.VersionMismatchError,
    MemoryError,
)
"""Errors for files with content that LMDB didn't write: a damaged length may be gigabytes. A
failing disk raises others."""


class DamagedDatabaseError(CacheDirError):
    """The files differ from what was written, so no row in them can be trusted.

    `why` is the reason without the path and the advice, for callers that give their own advice.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"the database {path} is damaged ({why}); remove it, and it is rebuilt")
        self.why = why


def open_env(path: str, **options: Any) -> lmdb.Environment:
    """Do the same as `lmdb.open`, but refuse a file that is marked as damaged, was truncated, or
    may be somebody else's. With LMDB's locks, its lock file is in memory.

    LMDB reads through a mapping, so an access behind the end of the file would kill the process
    (SIGBUS). Opening accesses only the two meta pages, which LMDB checks first. Raises
    `lmdb.Error`, `OSError` and `DamagedDatabaseError`.
    """
    if (Path(path) / MARK_NAME).exists():
        raise DamagedDatabaseError(path, "some of it could not be read")
    for name in (DATA_NAME, _LOCK_NAME):
        check_own_file(Path(path) / name)
    with _lock_in_memory(path) if options.get("lock", True) else nullcontext(path) as place:
        # Look-ups are random: the kernel's read-ahead would only evict other useful pages.
        env = lmdb.open(place, readahead=False, **options)
    used_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    size_bytes = (Path(path) / DATA_NAME).stat().st_size
    if 0 < size_bytes < used_bytes:
        env.close()
        raise DamagedDatabaseError(path, f"{size_bytes} of {used_bytes} bytes are left")
    return env


@contextmanager
def _lock_in_memory(path: str) -> Iterator[str]:
    """Yield a directory with links to the data file in `path` and to a lock file in memory. It is
    removed afterwards: LMDB keeps both files open.

    LMDB writes to the lock file through a mapping. If the disk is full, such a write kills the
    process (SIGBUS), on btrfs even where the file has its space already. No other process may have
    the database open, so none needs the file.
    """
    place = _small_directory()
    if place is None:
        yield path
        return
    lock_fd = os.memfd_create("cachefs-lmdb-lock")
    try:
        os.pwrite(lock_fd, bytes(_LOCK_BYTES), 0)
        (place / DATA_NAME).symlink_to(Path(path).absolute() / DATA_NAME)
        (place / _LOCK_NAME).symlink_to(f"/proc/self/fd/{lock_fd}")
        yield str(place)
    finally:
        os.close(lock_fd)
        shutil.rmtree(place, ignore_errors=True)


def _small_directory() -> Path | None:
    """Make a directory for two links, where possible in memory. None if there is room nowhere."""
    for above in ("/dev/shm", "/run", tempfile.gettempdir()):
        with suppress(OSError):
            return Path(tempfile.mkdtemp(prefix="cachefs-", dir=above))
    return None


def refuse_older(path: str, env: lmdb.Environment, tables: Sequence[str]) -> None:
    """Raise `DamagedDatabaseError` if an older version of cachefs has written the database: its
    rows have no checksums."""
    with env.begin() as txn:
        if any(txn.get(table.encode()) is not None for table in tables):
            raise DamagedDatabaseError(path, "its rows have no checksums: an older version")


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Convert `lmdb.Error` and `OSError` to `CacheDirError`."""
    try:
        yield
    except (lmdb.Error, MemoryError) as error:
        raise explanation(path, error) from error
    except OSError as error:
        raise CacheDirError(f"can't open the database {path}: {error}") from error


def explanation(path: str, error: lmdb.Error | MemoryError) -> CacheDirError:
    """Return the exception to raise for an LMDB error: `DamagedDatabaseError` if the files are
    damaged."""
    if isinstance(error, DAMAGE):
        return DamagedDatabaseError(path, str(error))
    return CacheDirError(f"can't open the database {path}: {error}")
