"""Read one consistent state of a database, while it is in use or without changing it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb

from cachefs.db.environment import explained, explanation, open_env, refuse_older
from cachefs.db.row_sums import seed_of, stored_name, unsealed


class DatabaseSnapshot:
    """A view of the committed rows that doesn't change. Any thread may use it, but only one at a
    time. Methods block for the disk. They raise `DamagedDatabaseError` for rows that can't be
    read. A row with a wrong checksum counts as missing."""

    def __init__(self, path: str, env: lmdb.Environment, handles: dict[str, Any]) -> None:
        """`handles` are the tables by name; a table without a handle counts as empty."""
        self._path = path
        self._handles = handles
        self._txn = env.begin()
        self.bad_rows = 0
        """The number of rows that counted as missing because their checksum was wrong."""

    def count(self, table: str) -> int:
        """Return the number of rows."""
        handle = self._handles[table]
        rows: int = 0 if handle is None else self._txn.stat(handle)["entries"]
        return rows

    def get(self, table: str, key: bytes) -> bytes | None:
        """Return the value; None if there is no such row."""
        handle = self._handles[table]
        if handle is None:
            return None
        try:
            stored: bytes | None = self._txn.get(key, db=handle)
        except (lmdb.Error, MemoryError) as error:
            raise explanation(self._path, error) from error
        if stored is None:
            return None
        value = unsealed(seed_of(table), key, stored)
        self.bad_rows += value is None
        return value

    def scan(self, table: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Iterate over the rows whose key begins with `prefix`, in key order."""
        handle = self._handles[table]
        if handle is None:
            return
        seed, last_key = seed_of(table), b""
        with explained(self._path), self._txn.cursor(db=handle) as cursor:
            if prefix and not cursor.set_range(prefix):
                return
            for key, stored in cursor.iternext():
                value = unsealed(seed, key, stored)
                if value is None:  # its key may be wrong, too, and says nothing about the end
                    self.bad_rows += 1
                    continue
                if not key.startswith(prefix):
                    if key < prefix:
                        raise lmdb.CorruptedError("its keys are in the wrong order")
                    return
                if key <= last_key:
                    raise lmdb.CorruptedError("its keys are in the wrong order")
                last_key = key
                yield key, value

    def close(self) -> None:
        self._txn.abort()


class DatabaseReader(DatabaseSnapshot):
    """The committed rows of a database that no process has open. It writes nothing, not even a
    lock file."""

    def __init__(self, path: Path, tables: Sequence[str]) -> None:
        """Open the database in the directory `path`. A table that doesn't exist counts as empty.
        Raises `CacheDirError`."""
        with explained(str(path)):
            self._env = open_env(str(path), max_dbs=len(tables), readonly=True, lock=False)
            try:
                refuse_older(str(path), self._env, tables)
                tables_by_name = {name: self._table(name) for name in tables}
                super().__init__(str(path), self._env, tables_by_name)
            except BaseException:
                self._env.close()
                raise

    def _table(self, name: str) -> Any:
        try:
            return self._env.open_db(stored_name(name), create=False)
        except lmdb.NotFoundError:
            return None

    def close(self) -> None:
        super().close()
        self._env.close()
