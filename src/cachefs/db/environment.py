"""Opening LMDB's files safely, and saying what is wrong with them."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb

from cachefs.errors import CacheDirError

log = logging.getLogger(__name__)

_STEP_BYTES = 4 << 20

DATA_NAME = "data.mdb"
MARK_NAME = "damaged"
"""A file beside LMDB's: a daemon has met damage there, so the next one needn't try."""

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
"""What LMDB says about files that it didn't write, as opposed to a disk that fails."""


class DamagedDatabaseError(CacheDirError):
    """The files are not what was written; what can be had of them is not to be trusted.

    `why` is that without the name and the advice, for those who know better what to do.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"the database {path} is damaged ({why}); it is built anew if removed")
        self.why = why


def open_env(path: str, **options: Any) -> lmdb.Environment:
    """`lmdb.open`, refusing a file that was cut. Raises `lmdb.Error`, `OSError` and
    `DamagedDatabaseError`.

    LMDB reads through a mapping: touching a page behind the end of its file would kill the
    process (SIGBUS). Opening touches nothing but the two head pages, which it has checked.
    """
    if (Path(path) / MARK_NAME).exists():
        raise DamagedDatabaseError(path, "some of it could not be read")
    # Look-ups are random: the kernel's read-ahead would only evict others' pages.
    env = lmdb.open(path, readahead=False, **options)
    used_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    size_bytes = (Path(path) / DATA_NAME).stat().st_size
    if 0 < size_bytes < used_bytes:
        env.close()
        raise DamagedDatabaseError(path, f"{size_bytes} of {used_bytes} bytes are left")
    return env


def mark_unreadable(path: Path, on_progress: Callable[[], None] = lambda: None) -> bool:
    """Read the whole file of the database in that directory, without mapping it. If that is not
    possible, leave the mark that makes `open_env` refuse it, so that another takes its place. True
    then. Blocks; `on_progress` is called every few MiB."""
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
    """Errors of LMDB and of the system become `CacheDirError`s."""
    try:
        yield
    except lmdb.Error as error:
        raise explanation(path, error) from error
    except OSError as error:
        raise CacheDirError(f"can't open the database {path}: {error}") from error


def explanation(path: str, error: lmdb.Error) -> CacheDirError:
    if isinstance(error, _DAMAGE):
        return DamagedDatabaseError(path, str(error))
    return CacheDirError(f"can't open the database {path}: {error}")
