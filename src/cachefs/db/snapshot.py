"""Read one consistent state of a database while it is in use."""

from collections.abc import Iterator
from typing import Any

import lmdb

from cachefs.db.environment import explained, explanation


class DatabaseSnapshot:
    """A view of the committed rows that doesn't change. Any thread may use it, but only one at a
    time. Methods block for the disk."""

    def __init__(self, env: lmdb.Environment, handles: dict[str, Any]) -> None:
        self._path = env.path()
        self._handles = handles
        self._txn = env.begin()

    def count(self, table: str) -> int:
        """Return the number of rows."""
        rows: int = self._txn.stat(self._handles[table])["entries"]
        return rows

    def get(self, table: str, key: bytes) -> bytes | None:
        """Return the value, or None. Raises `DamagedDatabaseError`."""
        try:
            value: bytes | None = self._txn.get(key, db=self._handles[table])
        except lmdb.Error as error:
            raise explanation(self._path, error) from error
        return value

    def scan(self, table: str, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over the rows whose key begins with `prefix`, in key order. Raises
        `DamagedDatabaseError`."""
        with explained(self._path), self._txn.cursor(db=self._handles[table]) as cursor:
            if prefix and not cursor.set_range(prefix):
                return
            for key, value in cursor.iternext():
                if not key.startswith(prefix):
                    return
                yield key, value

    def close(self) -> None:
        self._txn.abort()
