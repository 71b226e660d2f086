"""The index of one tier: it maps `BlockKey` to `BlockLocation`, and has a row for each slab.

The next look-up sees every change. A change is durable within a second (`db.Database`).

Invariant: one commit contains a change to blocks and the matching slab rows, so a crash cannot
separate them. Writers must therefore change a block's row and its slot with no await between. The
rows of changed slabs are put by the `before_commit` hook, which runs in the same loop step in
which the commit takes the pending changes.
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
    """The index of one cache directory; its `TierStore` owns it.

    Look-ups are synchronous. A row of the wrong length counts as missing.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._get = database.get
        self.replaced_bad = False
        """True if `open` found a damaged index, or one of another directory, and moved it aside."""

    @classmethod
    def open(cls, path: str, quota_bytes: int, tier_uuid: bytes) -> "Index":
        """Open or create the index at `path` for the cache directory with uuid `tier_uuid`.

        `quota_bytes` determines the size of the LMDB map. An unusable index is moved to
        `index.bad`, and a new, empty index replaces it: its content is then rebuilt from the slab
        tables, as after a crash. Raises `CacheDirError` if the directory can't be written.
        """
        try:
            return cls(_open_own(path, quota_bytes, tier_uuid))
        except DamagedDatabaseError as error:
            log.warning(
                "%s can't be used (%s): it is moved to %s, and rebuilt from the slabs",
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
        """Return (slab, slot, length, checksum) of a block, or None if it has no row.

        These are the fields of a `BlockLocation`; not creating one makes reads faster.
        """
        value = self._get(BLOCKS_TABLE, key[0] + key[1].to_bytes(4, "big"))
        try:
            return None if value is None else _unpack(value)
        except struct.error:
            return None

    def locate(self, key: BlockKey) -> BlockLocation | None:
        """Return the location of a block, or None if it has no row."""
        found = self.find(key)
        return None if found is None else BlockLocation(*found)

    def put(self, key: BlockKey, location: BlockLocation) -> None:
        """Add or replace the row of a block."""
        self._database.put(BLOCKS_TABLE, encode_block_key(key), encode_location(location))

    def delete(self, key: BlockKey) -> None:
        """Delete the row of a block, if there is one."""
        self._database.delete(BLOCKS_TABLE, encode_block_key(key))

    def blocks_between(
        self, object_id: bytes, first: int, stop: int
    ) -> Iterator[tuple[BlockKey, BlockLocation]]:
        """Iterate over the cached blocks of one object version with the block indexes in
        [first, stop), in their order.

        The caller must exhaust the iterator before its next await or write.
        """
        start = encode_block_key(BlockKey(object_id, first))
        for data, value in self._database.scan(BLOCKS_TABLE, object_id, start):
            if len(data) != BLOCK_KEY_BYTES or len(value) != BLOCK_RECORD.size:
                continue
            key = decode_block_key(data)
            if key.block_index >= stop:
                return
            yield key, decode_location(value)

    def slab_rows(self) -> Iterator[tuple[int, SlabRow | None]]:
        """Iterate over (slab id, row) of all slabs; the row is None if it can't be decoded.

        The caller must exhaust the iterator before its next await or write.
        """
        for key, value in self._database.scan(SLABS_TABLE, b""):
            if len(key) == SLAB_KEY_BYTES:
                yield decode_slab_key(key), decode_slab_row(value)

    def put_slab(self, slab_id: int, row: SlabRow) -> None:
        """Add or replace the row of a slab."""
        self._database.put(SLABS_TABLE, encode_slab_key(slab_id), encode_slab_row(row))

    def delete_slab(self, slab_id: int) -> None:
        """Delete the row and the recency of a slab. The rows of its blocks stay."""
        key = encode_slab_key(slab_id)
        self._database.delete(SLABS_TABLE, key)
        self._database.delete(RECENCY_TABLE, key)

    @property
    def next_slab_id(self) -> int:
        """A number above the ids of all slabs that block rows may point to; 0 if none is stored."""
        return decode_next_slab(self._database.get(STATE_TABLE, NEXT_SLAB_KEY))

    def put_next_slab_id(self, slab_id: int) -> None:
        """Store `next_slab_id`."""
        self._database.put(STATE_TABLE, NEXT_SLAB_KEY, encode_next_slab(slab_id))

    def put_recency(self, slab_id: int, class_index: int, ticks: "array[int]") -> None:
        """Store the recency tick of every slot of a slab of class `class_index`.

        `ticks` is copied: the caller may change it afterwards.
        """
        value = encode_recency(class_index, ticks)
        self._database.put(RECENCY_TABLE, encode_slab_key(slab_id), value)

    def recency(self, slab_id: int, class_index: int, slot_count: int) -> "array[int] | None":
        """Return the ticks that `put_recency` stored last, one per slot.

        Returns None if nothing is stored, or if the stored ticks are for another class or number
        of slots.
        """
        value = self._database.get(RECENCY_TABLE, encode_slab_key(slab_id))
        return None if value is None else decode_recency(value, class_index, slot_count)

    @property
    def bad_rows(self) -> int:
        """The number of rows that counted as missing because their checksum was wrong."""
        return self._database.bad_rows

    def on_bad_row(self, note: Callable[[], None]) -> None:
        """Register `note`, which is called for each such row."""
        self._database.on_bad_row = lambda table, key: note()

    def before_commit(self, put_rows: Callable[[], None]) -> None:
        """Register `put_rows`: each commit calls it in the loop step that takes its changes."""
        self._database.before_commit = put_rows

    def take_clean_mark(self) -> bool:
        """Return whether the last daemon closed the directory and the machine has not restarted.

        A restart counts because slabs are not synced. Deletes the mark: after the next commit the
        directory counts as open.
        """
        mark = self._database.get(STATE_TABLE, CLEAN_KEY)
        if mark is not None:
            self._database.delete(STATE_TABLE, CLEAN_KEY)
        return mark is not None and mark == boot_id()

    def note_crash(self) -> None:
        """Record permanently that block rows may point to slots that hold another block."""
        self._database.put(STATE_TABLE, CRASHED_KEY, b"")

    @property
    def has_seen_crash(self) -> bool:
        """Whether `note_crash` was ever called for this directory."""
        return self._database.get(STATE_TABLE, CRASHED_KEY) is not None

    def put_clean_mark(self) -> None:
        """Mark the directory as closed under the running kernel; see `take_clean_mark`."""
        self._database.put(STATE_TABLE, CLEAN_KEY, boot_id())

    @property
    def pending_count(self) -> int:
        """Number of changes that are not yet committed."""
        return self._database.pending_count

    @property
    def is_cold(self) -> bool:
        """Whether part of the file is not in memory: call `bring` before a look-up on the loop."""
        return self._database.residency.is_cold

    async def bring(self, key: BlockKey) -> None:
        """Load the row of a block into memory, so that the next look-up does not wait."""
        raw = encode_block_key(key)
        await self._database.residency.bring(lambda get: get(BLOCKS_TABLE, raw))

    async def keep_warm(self) -> None:
        """See `Residency.keep_warm`."""
        await self._database.residency.keep_warm()

    def warm(self) -> int:
        """See `Residency.warm`. It blocks: call it in a worker thread, which may be abandoned."""
        return self._database.residency.warm()

    async def commit(self) -> bool:
        """Make all changes so far durable. If that fails, log the cause and return False."""
        return await self._database.commit()

    def close(self) -> None:
        """Commit and close. Blocks until fsync ends."""
        self._database.close()

    def abandon(self) -> None:
        """Close without a commit, as a crash does."""
        self._database.abandon()


def boot_id() -> bytes:
    """Return the boot id of the running kernel (random(4)).

    Returns a random, unique id if the kernel's can't be read.
    """
    try:
        return uuid.UUID(_BOOT_ID.read_text().strip()).bytes
    except (OSError, ValueError):
        return uuid.uuid4().bytes


def map_size_bytes(quota_bytes: int) -> int:
    """Return the size of the LMDB map for a tier of `quota_bytes`.

    A block needs about 60 bytes of index. An eighth of the quota is therefore enough even if all
    blocks are of the smallest class.
    """
    return _MAP_BASE_BYTES + quota_bytes // 8


def set_aside(index: Path) -> None:
    """Move an unusable database to its `.bad` name, and remove an earlier one of that name.

    Raises `OSError`.
    """
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
        if owner is None:  # a new index, or one older than this row
            database.put(STATE_TABLE, TIER_KEY, tier_uuid)
        elif owner != tier_uuid:
            raise DamagedDatabaseError(path, "another cache directory's")
    except BaseException:
        database.abandon()
        raise
    return database
