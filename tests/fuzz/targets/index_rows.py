"""Rows of an index that are not what they were (format/index_record.py, cache/tier/index.py), and
`cachefs.json` (format/tier_identity.py).

An input is a byte of flags, and steps: a table's number, a row's number (of those that are there;
255: the key follows), lengths of key and value, key, value.
"""

from contextlib import suppress
from pathlib import Path

from cachefs.db import Database
from cachefs.errors import CacheDirError
from cachefs.format.index_record import CLEAN_KEY, STATE_TABLE, TABLES, decode_recency
from cachefs.format.tier_identity import decode_identity
from tests.fuzz.targets._cache import damage

_CRASHED, _IDENTITY = 1, 2


def fuzz(data: bytes) -> None:
    if not data:
        return
    flags, steps = data[0], data[1:]
    decode_recency(steps, 0, len(steps) // 4)
    with suppress(CacheDirError):
        decode_identity(steps, "DIR")

    def change(path: Path) -> None:
        if flags & _IDENTITY:
            (path / "cachefs.json").write_bytes(steps)
            return
        database = Database.open(str(path / "index"), TABLES, 1 << 30)
        _write(database, steps)
        if flags & _CRASHED:
            database.delete(STATE_TABLE, CLEAN_KEY)
        database.close()

    damage(change, not flags & _CRASHED)


def _write(database: Database, steps: bytes) -> None:
    at = 0
    while at + 4 <= len(steps):
        table, row, key_length, value_length = steps[at : at + 4]
        at += 4
        name = TABLES[table % len(TABLES)]
        keys = [key for key, _ in database.scan(name, b"")]
        key = steps[at : at + key_length]
        if row != 255 and keys:
            key = keys[row % len(keys)]
        value = steps[at + key_length : at + key_length + value_length]
        at += key_length + value_length
        if key:
            database.put(name, key, value)
