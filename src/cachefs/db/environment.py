"""Open LMDB's files safely, and translate its errors."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb

from cachefs.errors import CacheDirError
from cachefs.trusted_path import check_own_file

log = logging.getLogger(__name__)

_STEP_BYTES = 4 << 20

DATA_NAME = "data.mdb"
_LOCK_NAME = "lock.mdb"
MARK_NAME = "damaged"
"""A file beside LMDB's files. It means that a daemon found damage there, so `open_env` refuses the
database."""

_DAMAGE = (
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
)
"""LMDB's errors for files with content that LMDB didn't write. A failing disk raises others."""


class DamagedDatabaseError(CacheDirError):
    """The files differ from what was written, so no row in them can be trusted.

    `why` is the reason without the path and the advice, for callers that give their own advice.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"the database {path} is damaged ({why}); remove it, and it is rebuilt")
        self.why = why


def open_env(path: str, **options: Any) -> lmdb.Environment:
    """Do the same as `lmdb.open`, but refuse a file that is marked as damaged, was truncated, or
    may be somebody else's.

    LMDB reads through a mapping, so an access behind the end of the file would kill the process
    (SIGBUS). Opening accesses only the two meta pages, which LMDB checks first. Raises
    `lmdb.Error`, `OSError` and `DamagedDatabaseError`.
    """
    if (Path(path) / MARK_NAME).exists():
        raise DamagedDatabaseError(path, "some of it could not be read")
    for name in (DATA_NAME, _LOCK_NAME):
        check_own_file(Path(path) / name)
    # Look-ups are random: the kernel's read-ahead would only evict other useful pages.
    env = lmdb.open(path, readahead=False, **options)
    used_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    size_bytes = (Path(path) / DATA_NAME).stat().st_size
    if 0 < size_bytes < used_bytes:
        env.close()
        raise DamagedDatabaseError(path, f"{size_bytes} of {used_bytes} bytes are left")
    return env


def mark_unreadable(path: Path, on_progress: Callable[[], None] = lambda: None) -> bool:
    """Read the whole file of the database in the directory `path`, without mapping it.

    If that fails, leave the mark that makes `open_env` refuse the database, so that a new one
    replaces it, and return True. Blocks; calls `on_progress` every 4 MiB.
    """
    buffer = bytearray(_STEP_BYTES)
    try:
        with open(path / DATA_NAME, "rb", buffering=0) as file:
            while file.readinto(buffer):
                on_progress()
    except FileNotFoundError:
        return False
    except OSError as error:
        log.warning("%s can't be read: %s", path / DATA_NAME, error.strerror)
        with suppress(OSError):  # a disk that can't be written either is not used at all
            (path / MARK_NAME).touch()
        return True
    return False


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Convert `lmdb.Error` and `OSError` to `CacheDirError`."""
    try:
        yield
    except lmdb.Error as error:
        raise explanation(path, error) from error
    except OSError as error:
        raise CacheDirError(f"can't open the database {path}: {error}") from error


def explanation(path: str, error: lmdb.Error) -> CacheDirError:
    """Return the exception to raise for an LMDB error: `DamagedDatabaseError` if the files are
    damaged."""
    if isinstance(error, _DAMAGE):
        return DamagedDatabaseError(path, str(error))
    return CacheDirError(f"can't open the database {path}: {error}")
