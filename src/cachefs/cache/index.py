"""Where the blocks of one tier are: `BlockKey -> BlockLocation`, and a row for each slab.

Every change is seen by the next look-up and durable within a second (`db.Database`). Rule for
writers: a change to blocks and to the slots concerned are made with no await between, and the rows
of changed slabs are put in the step in which a commit takes what is pending. So one commit holds
both, and a crash can't tear them apart.
"""

import logging
import shutil
import struct
import uuid
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

from cachefs.db import DamagedDatabaseError, Database
from cachefs.errors import CacheDirError
from cachefs.format.index_record import (
    BLOCK_KEY_BYTES,
    BLOCK_RECORD,
    BLOCKS_TABLE,
    CLEAN_KEY,
    CRASHED_KEY,
    NEXT_SLAB_KEY,
    RECENCY_TABLE,
    SLAB_KEY_BYTES,
    SLABS_TABLE,
    STATE_TABLE,
    TABLES,
    TIER_KEY,
    SlabRow,
    decode_block_key,
    decode_location,
    decode_next_slab,
    decode_recency,
    decode_slab_key,
    decode_slab_row,
    encode_block_key,
    encode_location,
    encode_next_slab,
    encode_recency,
    encode_slab_key,
    encode_slab_row,
)
from cachefs.format.paths import BAD_ENDING, BAD_INDEX_NAME
from cachefs.types import BlockKey, BlockLocation

log = logging.getLogger(__name__)

_MAP_BASE_BYTES = 1 << 30
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_unpack = BLOCK_RECORD.unpack


class Index:
    """The index of one cache directory. Synchronous: no look-up ever waits. Rows of another length
    than they should have count as missing."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._get = database.get
        self.replaced_bad = False
        """The index found at opening was damaged or another directory's, and was moved aside."""

    @classmethod
    def open(cls, path: str, quota_bytes: int, tier_uuid: bytes) -> "Index":
        """Open or create the index of the cache directory with that uuid.

        One that can't be used is moved to `index.bad`, and an empty one made in its place: the
        slabs know what it knew, and are asked as after a crash. Raises `CacheDirError` if the
        disk can't be written.
        """
        try:
            return cls(_open_own(path, quota_bytes, tier_uuid))
        except DamagedDatabaseError as error:
            log.warning(
                "%s can't be used (%s): it is moved to %s, and made anew from the slabs",
                path,
                error.why,
                BAD_INDEX_NAME,
            )
        try:
            set_aside(Path(path))
        except OSError as error:
            raise CacheDirError(f"can't move {path} away: {error.strerror}") from error
        index = cls(_open_own(path, quota_bytes, tier_uuid))
        index.replaced_bad = True
        return index

    def find(self, key: BlockKey) -> tuple[int, int, int, int] | None:
        """slab, slot, length, checksum: the fields of a `BlockLocation` without making one."""
        value = self._get(BLOCKS_TABLE, key[0] + key[1].to_bytes(4, "big"))
        try:
            return None if value is None else _unpack(value)
        except struct.error:
            return None

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
            if len(key) == BLOCK_KEY_BYTES and len(value) == BLOCK_RECORD.size:
                yield decode_block_key(key), decode_location(value)

    def blocks_between(
        self, object_id: bytes, first: int, stop: int
    ) -> Iterator[tuple[BlockKey, BlockLocation]]:
        """Those with indexes of [first, stop). Use it up before the next await."""
        start = encode_block_key(BlockKey(object_id, first))
        for data, value in self._database.scan(BLOCKS_TABLE, object_id, start):
            if len(data) != BLOCK_KEY_BYTES or len(value) != BLOCK_RECORD.size:
                continue
            key = decode_block_key(data)
            if key.block_index >= stop:
                return
            yield key, decode_location(value)

    def slab_rows(self) -> Iterator[tuple[int, SlabRow | None]]:
        for key, value in self._database.scan(SLABS_TABLE, b""):
            if len(key) == SLAB_KEY_BYTES:
                yield decode_slab_key(key), decode_slab_row(value)

    def put_slab(self, slab_id: int, row: SlabRow) -> None:
        self._database.put(SLABS_TABLE, encode_slab_key(slab_id), encode_slab_row(row))

    def delete_slab(self, slab_id: int) -> None:
        key = encode_slab_key(slab_id)
        self._database.delete(SLABS_TABLE, key)
        self._database.delete(RECENCY_TABLE, key)

    @property
    def next_slab_id(self) -> int:
        """Above the ids of all slabs that rows may point to, as far as it is known; 0 if not."""
        return decode_next_slab(self._database.get(STATE_TABLE, NEXT_SLAB_KEY))

    def put_next_slab_id(self, slab_id: int) -> None:
        self._database.put(STATE_TABLE, NEXT_SLAB_KEY, encode_next_slab(slab_id))

    def put_recency(self, slab_id: int, class_index: int, ticks: "array[int]") -> None:
        """The recency of every slot of the slab; `ticks` may change afterwards."""
        value = encode_recency(class_index, ticks)
        self._database.put(RECENCY_TABLE, encode_slab_key(slab_id), value)

    def recency(self, slab_id: int, class_index: int, slot_count: int) -> "array[int] | None":
        """What was put last; None if that was for another class, or nothing was."""
        value = self._database.get(RECENCY_TABLE, encode_slab_key(slab_id))
        return None if value is None else decode_recency(value, class_index, slot_count)

    def before_commit(self, put_rows: Callable[[], None]) -> None:
        """`put_rows` is called in the same step in which a commit takes what is pending."""
        self._database.before_commit = put_rows

    def take_clean_mark(self) -> bool:
        """Whether the last daemon closed the directory, and the machine has run ever since: slabs
        are not synced. From the next commit on the directory counts as open."""
        mark = self._database.get(STATE_TABLE, CLEAN_KEY)
        if mark is not None:
            self._database.delete(STATE_TABLE, CLEAN_KEY)
        return mark is not None and mark == boot_id()

    def note_crash(self) -> None:
        """For ever: from now on rows may point to slots that hold another's block."""
        self._database.put(STATE_TABLE, CRASHED_KEY, b"")

    @property
    def has_seen_crash(self) -> bool:
        return self._database.get(STATE_TABLE, CRASHED_KEY) is not None

    def put_clean_mark(self) -> None:
        self._database.put(STATE_TABLE, CLEAN_KEY, boot_id())

    @property
    def pending_count(self) -> int:
        """Changes that the next commit will write."""
        return self._database.pending_count

    @property
    def is_cold(self) -> bool:
        """Some of it is not in memory: `bring` what is about to be looked up."""
        return self._database.is_cold

    async def bring(self, key: BlockKey) -> None:
        """Have the row of a block in memory."""
        raw = encode_block_key(key)
        await self._database.bring(lambda get: get(BLOCKS_TABLE, raw))

    async def keep_warm(self) -> None:
        """See `Database.keep_warm`."""
        await self._database.keep_warm()

    def warm(self) -> int:
        """See `Database.warm`: blocks, for a worker thread that may be abandoned."""
        return self._database.warm()

    async def commit(self) -> bool:
        """Make everything put so far durable (or log why not, and return False)."""
        return await self._database.commit()

    def close(self) -> None:
        """Commit and close; blocks for the fsync."""
        self._database.close()

    def abandon(self) -> None:
        """Close as a crash would."""
        self._database.abandon()


def boot_id() -> bytes:
    """Of the running kernel (random(4)); one that never comes again if it can't be had."""
    try:
        return uuid.UUID(_BOOT_ID.read_text().strip()).bytes
    except (OSError, ValueError):
        return uuid.uuid4().bytes


def map_size_bytes(quota_bytes: int) -> int:
    """A block costs some 60 bytes of index, so that an eighth of the quota is room enough even
    if every block were of the smallest class."""
    return _MAP_BASE_BYTES + quota_bytes // 8


def set_aside(index: Path) -> None:
    """Move a database that can't be used out of the way, replacing what was moved before."""
    aside = index.with_name(index.name + BAD_ENDING)
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside)
    else:
        aside.unlink(missing_ok=True)
    index.rename(aside)


def _open_own(path: str, quota_bytes: int, tier_uuid: bytes) -> Database:
    place = Path(path)
    if place.exists() and not place.is_dir():
        raise DamagedDatabaseError(path, "not a directory")
    database = Database.open(path, TABLES, map_size_bytes(quota_bytes))
    try:
        database.read_through(SLABS_TABLE)
        owner = database.get(STATE_TABLE, TIER_KEY)
        if owner is None:  # new, or from before there was this row
            database.put(STATE_TABLE, TIER_KEY, tier_uuid)
        elif owner != tier_uuid:
            raise DamagedDatabaseError(path, "another cache directory's")
    except BaseException:
        database.abandon()
        raise
    return database
