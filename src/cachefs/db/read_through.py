"""Read every row of a database in a separate process, and copy the rows if asked to; its exit code
tells whether that succeeded.

A damaged page may make LMDB read beyond its file, or write beyond its memory, which kills the
process.

    python -m cachefs.db.read_through PATH COPY NEEDS TABLE...

COPY is the path of the new database; if it is empty, nothing is copied. NEEDS is `all` if a row
that is missing or has a wrong checksum counts as damage of the whole database, else `some`.
"""

import errno
import logging
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cachefs.db.environment import DATA_NAME, MARK_NAME, SUSPECT_NAME, DamagedDatabaseError
from cachefs.db.offline import DatabaseBuilder, replace_database
from cachefs.db.snapshot import DatabaseReader
from cachefs.errors import CacheDirError

log = logging.getLogger(__name__)

_DAMAGED, _UNKNOWN = 3, 4
"""Exit codes. Python's own codes for a failure are 1 and 2."""
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)
"""Somebody else ended the process, or there was no memory: this says nothing about the file."""
_COPY_NAME = "copy"
_STEP_BYTES = 4 << 20


def refuse_unreadable(path: Path, tables: Sequence[str]) -> None:
    """Raises `DamagedDatabaseError` if some row of the database can't be read, and `CacheDirError`
    if the process can't find that out. Blocks."""
    _read(path, None, tables, needs_all=False)


def copy_suspect(
    path: Path, tables: Sequence[str], has_crashed: bool, needs_all: bool = False
) -> None:
    """Replace the database in the directory `path` by a copy of its rows, if it is suspect: a
    daemon has crashed (`has_crashed`), or has found a row with a wrong checksum.

    The copy has none of the old pages, so damage is gone that reading can't find. If the database
    can't be read, or lacks rows and `needs_all` of them, leave the mark that makes `open_env`
    refuse it, so that a new one replaces it. If it can't be copied for another reason, such as a
    full disk, it stays. No process may have it open. Blocks.
    """
    suspect, copy = path / SUSPECT_NAME, path / _COPY_NAME
    try:
        if not (has_crashed or suspect.exists()) or not (path / DATA_NAME).exists():
            return
        log.info("%s: all rows are read, as some may be damaged", path / DATA_NAME)
        shutil.rmtree(copy, ignore_errors=True)
        try:
            _read(path, copy, tables, needs_all)
            if copy.exists():
                replace_database(copy, path)
        except DamagedDatabaseError as error:
            log.warning("%s is damaged: %s", path / DATA_NAME, error.why)
            (path / MARK_NAME).touch()
            suspect.unlink(missing_ok=True)
        finally:
            shutil.rmtree(copy, ignore_errors=True)
    except (CacheDirError, OSError) as error:
        log.warning("%s is used unchecked after a crash or a damaged row: %s", path, error)


def _read(path: Path, copy: Path | None, tables: Sequence[str], needs_all: bool) -> None:
    isolation = "-I" if sys.flags.isolated else "-P"  # import no code of the working directory
    command = [sys.executable, isolation, "-m", __name__, str(path), str(copy or "")]
    command += ["all" if needs_all else "some", *tables]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    code = done.returncode
    if code < 0 and code not in _KILLED:
        raise DamagedDatabaseError(str(path), "its pages contradict each other")
    if code == _DAMAGED:
        raise DamagedDatabaseError(str(path), done.stdout.strip())
    if code:
        said = done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]
        raise CacheDirError(
            f"the database {path} can't be checked: {said or 'for no known reason'}"
        )


def _read_file(file: Path) -> int:
    """Read the whole file, without mapping it, and return its size in bytes. Raises
    `DamagedDatabaseError` if the disk can't read it."""
    buffer = bytearray(_STEP_BYTES)
    size_bytes = 0
    try:
        with file.open("rb", buffering=0) as raw:
            while count := raw.readinto(buffer):
                size_bytes += count
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise DamagedDatabaseError(
            str(file.parent), f"it can't be read: {error.strerror}"
        ) from None
    return size_bytes


def _main(path: str, copy: str, needs: str, *tables: str) -> int:
    try:
        size_bytes = _read_file(Path(path) / DATA_NAME)
        if not size_bytes:
            return 0
        reader = DatabaseReader(Path(path), tables)
        map_bytes = (1 << 30) + 2 * size_bytes
        builder = DatabaseBuilder(Path(copy), tables, map_bytes) if copy else None
        for table in tables:
            found = 0
            for key, value in reader.scan(table):
                found += 1
                if builder is not None:
                    builder.put(table, key, value)
            if needs == "all" and found != reader.count(table):
                raise DamagedDatabaseError(path, "it lacks rows")
        if builder is not None:
            builder.finish()
    except DamagedDatabaseError as error:
        print(error.why)
        return _DAMAGED
    except (CacheDirError, OSError) as error:
        print(error)
        return _UNKNOWN
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
