"""A disk that is full for databases only: nothing can be committed, all that is there is read."""

from typing import Any

import lmdb
import pytest

from cachefs.db import Database


class FullDatabase:
    """In the place of `Database._write` while the test runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        write = Database._write

        def write_or_fail(database: Database, batch: dict[str, Any]) -> None:
            if self.is_full:
                raise lmdb.DiskError("mdb_txn_commit: No space left on device")
            write(database, batch)

        monkeypatch.setattr(Database, "_write", write_or_fail)
