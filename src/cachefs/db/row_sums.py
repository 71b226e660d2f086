"""The checksum of each row on disk (docs/formats/database.md).

A disk may return other bytes than were written. LMDB doesn't notice this: it returns a wrong row,
or a right row for a wrong key. So each stored value ends with the xxh32 of its key and itself, with
a seed that depends on the table.
"""

from functools import cache
from typing import Final

from xxhash import xxh32_digest, xxh32_intdigest

SUM_BYTES: Final = 4


def stored_name(table: str) -> bytes:
    """Return LMDB's name of a table. Tables whose rows have no checksum, of older versions of
    cachefs, have the plain name."""
    return table.encode() + b"+"


@cache
def seed_of(table: str) -> int:
    """Return the seed of a table's checksums, for `sealed` and `unsealed`."""
    return xxh32_intdigest(table.encode())


def sealed(seed: int, key: bytes, value: bytes) -> bytes:
    """Return the value as it is stored: with its checksum."""
    return value + xxh32_digest(key + value, seed)


def unsealed(seed: int, key: bytes, stored: bytes) -> bytes | None:
    """Invert `sealed`. Return None if the checksum is wrong."""
    value = stored[:-SUM_BYTES]
    return value if stored[-SUM_BYTES:] == xxh32_digest(key + value, seed) else None
