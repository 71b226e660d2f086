"""Opening LMDB's files safely, and saying what is wrong with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from cachefs.errors import CacheDirError

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
