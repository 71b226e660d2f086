"""Build a database, and replace one that no daemon has open."""

import os
from collections.abc import Sequence
from pathlib import Path

import lmdb

from cachefs.db.environment import (
    DATA_NAME,
    MARK_NAME,
    SUSPECT_NAME,
    explained,
    explanation,
    open_env,
)
from cachefs.db.row_sums import sealed, seed_of, stored_name, unsealed

_BUILD_ROWS = 100_000
"""Rows in each transaction of `DatabaseBuilder`. Its only purpose is to bound the memory."""


class DatabaseBuilder:
    """Writes a new database fast, without syncs. The database is usable only after `finish`."""

    def __init__(self, path: Path, tables: Sequence[str], map_size_bytes: int) -> None:
        """Create the database in the new directory `path`, which must not exist. This and all
        methods raise `CacheDirError`."""
        self._path = str(path)
        self._rows = 0
        with explained(self._path):
            path.mkdir(mode=0o700)
            self._env = open_env(
                self._path,
                max_dbs=len(tables),
                map_size=map_size_bytes,
                mode=0o600,
                sync=False,
                lock=False,
            )
            self._handles = {name: self._env.open_db(stored_name(name)) for name in tables}
            self._txn = self._env.begin(write=True)
        self._open = True

    def get(self, table: str, key: bytes) -> bytes | None:
        """Return the value; None if there is no such row."""
        try:
            stored: bytes | None = self._txn.get(key, db=self._handles[table])
        except lmdb.Error as error:
            raise explanation(self._path, error) from error
        return None if stored is None else unsealed(seed_of(table), key, stored)

    def put(self, table: str, key: bytes, value: bytes, overwrite: bool = False) -> bool:
        """Insert a row. If the key exists already, replace its value only with `overwrite`; else
        return False and change nothing."""
        self._rows += 1
        try:
            if self._rows % _BUILD_ROWS == 0:
                self._txn.commit()
                self._txn = self._env.begin(write=True)
            handle = self._handles[table]
            stored = sealed(seed_of(table), key, value)
            return bool(self._txn.put(key, stored, db=handle, overwrite=overwrite))
        except lmdb.Error as error:
            raise explanation(self._path, error) from error

    def finish(self) -> None:
        """Commit, sync and close: all rows are on disk when this returns."""
        with explained(self._path):
            self._txn.commit()
            self._env.sync(True)
            self._env.close()
        self._open = False

    def abandon(self) -> None:
        """Close the database unfinished. Does nothing after `finish`."""
        if self._open:
            self._txn.abort()
            self._env.close()
            self._open = False


def replace_database(new: Path, path: Path) -> None:
    """Replace the database at `path`, which no process has open, by the finished one at `new`.

    This is one rename of one file, so a crash leaves the old database or the new one. Removes the
    directory `new`. Raises `OSError`.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    (new / DATA_NAME).replace(path / DATA_NAME)
    for mark in (MARK_NAME, SUSPECT_NAME):  # they were for the old one
        (path / mark).unlink(missing_ok=True)
    for directory in (path, path.parent):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    new.rmdir()


def database_exists(path: Path) -> bool:
    """Return whether there is a database at `path`. An empty file counts as none."""
    data = path / DATA_NAME
    return data.exists() and data.stat().st_size > 0
