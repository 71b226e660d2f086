"""Read one consistent state of a database, while it is in use or without changing it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb

from cachefs.db.environment import explained, explanation, open_env


class DatabaseSnapshot:
    """A view of the committed rows that doesn't change. Any thread may use it, but only one at a
    time. Methods block for the disk. They raise `DamagedDatabaseError` for rows that can't be
    read."""

    def __init__(self, env: lmdb.Environment, handles: dict[str, Any]) -> None:
        """`handles` are the tables by name; a table without a handle counts as empty."""
        self._path = env.path()
        self._handles = handles
        self._txn = env.begin()

    def count(self, table: str) -> int:
        """Return the number of rows."""
        rows: int = self._txn.stat(self._handles[table])["entries"]
        return rows

    def get(self, table: str, key: bytes) -> bytes | None:
        """Return the value; None if there is no such row."""
        handle = self._handles[table]
        if handle is None:
            return None
        try:
            value: bytes | None = self._txn.get(key, db=handle)
        except lmdb.Error as error:
            raise explanation(self._path, error) from error
        return value

    def scan(self, table: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Iterate over the rows whose key begins with `prefix`, in key order."""
        handle = self._handles[table]
        if handle is None:
            return
        with explained(self._path), self._txn.cursor(db=handle) as cursor:
            if prefix and not cursor.set_range(prefix):
                return
            for key, value in cursor.iternext():
                if not key.startswith(prefix):
                    return
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
                super().__init__(self._env, {name: self._table(name) for name in tables})
            except BaseException:
                self._env.close()
                raise

    def _table(self, name: str) -> Any:
        try:
            return self._env.open_db(name.encode(), create=False)
        except lmdb.NotFoundError:
            return None

    def close(self) -> None:
        super().close()
        self._env.close()
