"""Where the blocks of one tier are: `BlockKey -> BlockLocation`, and a row for each slab.

Every change is seen by the next look-up and durable within a second (`db.Database`). Rule for
writers: a change to blocks and to the slots concerned are made with no await between, and the rows
of changed slabs are put in the step in which a commit takes what is pending. So one commit holds
both, and a crash can't tear them apart.
"""

from collections.abc import Callable, Iterator

from cachefs.db import Database
from cachefs.format.index_record import (
    BLOCK_RECORD,
    BLOCKS_TABLE,
    CLEAN_KEY,
    SLABS_TABLE,
    STATE_TABLE,
    TABLES,
    SlabRow,
    decode_block_key,
    decode_location,
    decode_slab_key,
    decode_slab_row,
    encode_block_key,
    encode_location,
    encode_slab_key,
    encode_slab_row,
)
from cachefs.types import BlockKey, BlockLocation

_MAP_BASE_BYTES = 1 << 30
_unpack = BLOCK_RECORD.unpack


class Index:
    """The index of one cache directory. Synchronous: no look-up ever waits."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._get = database.get

    @classmethod
    def open(cls, path: str, quota_bytes: int) -> "Index":
        """Raises `CacheDirError`. A block costs some 60 bytes of index, so that an eighth of the
        quota is room enough even if every block were of the smallest class."""
        return cls(Database.open(path, TABLES, _MAP_BASE_BYTES + quota_bytes // 8))

    def find(self, key: BlockKey) -> tuple[int, int, int, int] | None:
        """slab, slot, length, checksum: the fields of a `BlockLocation` without making one."""
        value = self._get(BLOCKS_TABLE, key[0] + key[1].to_bytes(4, "big"))
        return None if value is None else _unpack(value)

    def locate(self, key: BlockKey) -> BlockLocation | None:
        found = self.find(key)
        return None if found is None else BlockLocation(*found)

    def put(self, key: BlockKey, location: BlockLocation) -> None:
        self._database.put(BLOCKS_TABLE, encode_block_key(key), encode_location(location))

    def delete(self, key: BlockKey) -> None:
        self._database.delete(BLOCKS_TABLE, encode_block_key(key))

    def blocks_of(self, object_id: bytes) -> Iterator[tuple[BlockKey, BlockLocation]]:
        """The cached blocks of one object version in order. Use it up before the next await."""
        for key, value in self._database.scan(BLOCKS_TABLE, object_id):
            yield decode_block_key(key), decode_location(value)

    def slab_rows(self) -> Iterator[tuple[int, SlabRow | None]]:
        for key, value in self._database.scan(SLABS_TABLE, b""):
            yield decode_slab_key(key), decode_slab_row(value)

    def put_slab(self, slab_id: int, row: SlabRow) -> None:
        self._database.put(SLABS_TABLE, encode_slab_key(slab_id), encode_slab_row(row))

    def delete_slab(self, slab_id: int) -> None:
        self._database.delete(SLABS_TABLE, encode_slab_key(slab_id))

    def before_commit(self, put_rows: Callable[[], None]) -> None:
        """`put_rows` is called in the same step in which a commit takes what is pending."""
        self._database.before_commit = put_rows

    def take_clean_mark(self) -> bool:
        """Whether the last daemon closed the directory; from now on it counts as open."""
        clean = self._database.get(STATE_TABLE, CLEAN_KEY) is not None
        if clean:
            self._database.delete(STATE_TABLE, CLEAN_KEY)
        return clean

    def put_clean_mark(self) -> None:
        self._database.put(STATE_TABLE, CLEAN_KEY, b"1")

    async def commit(self) -> None:
        """Make everything put so far durable (or log why not)."""
        await self._database.commit()

    def close(self) -> None:
        """Commit and close; blocks for the fsync."""
        self._database.close()

    def abandon(self) -> None:
        """Close as a crash would."""
        self._database.abandon()
