"""One tier in use: its slabs, its index and its policy, kept consistent.

Every method that is not a coroutine is atomic on the event loop. A method that changes the place
of a block changes index, slot and slab row together, with no await between (`index.py` says why).

A worker thread that reads a slot holds a reference to it, from before the read starts
until it ends. Meanwhile the block may be evicted, but the slot's bytes are not overwritten.
"""

from array import array
from collections.abc import Callable
from functools import partial

import trio

from cachefs.cache.counters import TierCounters
from cachefs.cache.policies import make_policy
from cachefs.cache.tier.common import Common
from cachefs.cache.tier.disk_threads import DiskThreads, OverdueError
from cachefs.cache.tier.index import Index
from cachefs.cache.tier.page_in import PageInPolling
from cachefs.cache.tier.partial_checksums import Bytes
from cachefs.cache.tier.slab_files import SlabFiles
from cachefs.cache.tier.slot_io import Checked, read_and_check
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.cache_dir.slab import Slab
from cachefs.format.slab import SLOT_ENTRY, SlotEntry, checksum_of, entry_at, table_offset
from cachefs.types import BLOCK_BYTES, BlockKey, BlockLocation, Buffer, Medium

COMMIT_INTERVAL_S = 1.0
_VERIFY_NOW_BYTES = 256 << 10
"""Blocks up to this size are compared with their checksums on the event loop, on their first read
after a start. That takes 10 us for 100 KB; a thread costs ten times as much."""
_RECENCY_INTERVAL_S = 300.0
_PENDING_CHANGES = 10_000
"""With more pending index changes than this, commit early. LMDB keeps a page in memory for each
change, so one transaction with the evictions of a second would need 0.5 GB if blocks are tiny."""


OnAdmitted = Callable[["TierStore", BlockKey, BlockLocation], None]


class TierStore:
    """Slabs, index and policy of one tier; its `ActiveTier` owns it. For the invariants see the
    module docstring."""

    def __init__(self, directory: CacheDirectory, common: Common) -> None:
        """Opens the tier's index. Raises `CacheDirError`."""
        index = Index.open(
            str(directory.paths.index), directory.quota_bytes, directory.identity.uuid
        )
        self.directory = directory
        self.partial_checksums = common.partial_checksums
        self.is_on_disk = directory.medium is not Medium.MEM
        """Whether each read must be compared with a checksum. A disk can lose or change data, and
        the daemon cannot find out which pages of a slab the kernel has read from the disk since
        the last comparison."""
        self.admission_filter = common.admission_filter
        self.slabs = directory.slabs
        self.index = index
        self.counters = TierCounters(bad_index=int(index.replaced_bad), bad_rows=index.bad_rows)
        index.on_bad_row(self._count_bad_row)
        self.io = DiskThreads(directory)
        self.policy = make_policy(common.options.policy, common.history)
        self.history = common.history
        self.on_lower_hit: Callable[[BlockKey, int], None] | None = None
        """Called for each hit, with key and age of the block, if there is a faster tier. Only
        `ActiveTier.connect` sets it."""
        self.on_admitted: OnAdmitted | None = None
        """Called for each block that this tier stores; None if not needed. Only `TierSet` sets
        it."""
        self.retired = False
        """True once the tier is about to be closed. It then serves no block."""
        self._verify_full = common.options.verify_full
        self._by_id = directory.slabs.by_id
        self._disk = directory.disk
        self._read_nowait = directory.disk.read_nowait
        self._page_in = PageInPolling(directory.disk.read_nowait)
        self._whole_block = memoryview(bytearray(BLOCK_BYTES))
        self._entry = memoryview(bytearray(SLOT_ENTRY.size))
        self.files = SlabFiles(
            directory,
            index,
            self.io,
            self.counters,
            lambda: self.policy.now,
            common.options.open_slabs,
        )
        self.open_slab = self.files.open
        self.reconcile = self.files.reconcile
        self.put_row = self.files.put_row
        self.policy.resume(max((slab.tick for slab in self._by_id.values()), default=0))

    # -- reading ---------------------------------------------------------------------------

    def _count_bad_row(self) -> None:
        self.counters.bad_rows += 1

    def read_slot_now(
        self, key: BlockKey, offset: int, length: int, buffer: memoryview
    ) -> memoryview | None:
        """Read `length` bytes at `offset` of the block into `buffer` (exactly `length` long) and
        return `buffer`, if that needs no waiting.

        None does not mean that the block is absent, only that the caller must call `read_slot`.
        """
        if self.index.is_cold:
            return None
        found = self.index.find(key)
        flags = self.directory.read_flags
        if found is None or flags is None:
            return None
        slab_id, slot, stored_length, checksum = found
        slab = self._by_id.get(slab_id)
        if slab is None or slab.fd < 0 or offset + length > stored_length:
            return None
        if self._verify_full:
            return self._read_verified_now(key, slab, BlockLocation(*found), offset, buffer)
        try:
            if slab.verified[slot] != checksum or not checksum:  # 0 means "not verified"
                if stored_length > _VERIFY_NOW_BYTES:
                    return None
                return self._read_verified_now(key, slab, BlockLocation(*found), offset, buffer)
            if self.is_on_disk:
                return self._read_compared_now(key, slab, BlockLocation(*found), offset, buffer)
            position = slab.data_offset + slot * slab.slot_bytes + offset
            if self._read_nowait(slab.fd, (buffer,), position, flags) != length:
                return None
        except (OSError, IndexError):  # the page is not in memory, or index and slab disagree
            return None
        self._hit(key, slab, slot, length)
        return buffer

    def _read_verified_now(
        self, key: BlockKey, slab: Slab, location: BlockLocation, offset: int, buffer: memoryview
    ) -> memoryview | None:
        """Verify the whole block and return the requested part; None if that fails. The block must
        be in memory and match its checksum, and the slot table must name it as the slot's owner.
        The owner matters because, after a crash, index rows of several blocks with equal bytes may
        name one slot, and only the owner's row is dropped together with the slot."""
        length = len(buffer)
        if not self._fits(slab, location, offset + length):
            return None
        block = self._whole_block[: location.length]
        position, flags = slab.layout.slot_offset(location.slot), self.directory.read_flags or 0
        try:
            read = self._read_nowait(slab.fd, (block,), position, flags)
            self._read_nowait(slab.table_fd, (self._entry,), table_offset(location.slot), flags)
        except OSError:
            return None
        if read != location.length or checksum_of(block) != location.checksum:
            return None  # `read_slot` finds the reason
        owner = entry_at(self._entry, 0, slab.mask)
        if owner is None or owner.key != key:
            return None
        self.counters.verified += 1
        slab.verified[location.slot] = location.checksum
        self._hit(key, slab, location.slot, length)
        buffer[:] = block[offset : offset + length]
        return buffer

    def _read_compared_now(
        self, key: BlockKey, slab: Slab, location: BlockLocation, offset: int, buffer: memoryview
    ) -> memoryview | None:
        """Return the part of a verified block, or None. All bytes that its checksum covers must be
        in memory and match. Raises `OSError`."""
        length = len(buffer)
        first, end = self.partial_checksums.range_of(location, offset, length)
        data = buffer if end - first == length else self._whole_block[: end - first]
        position = slab.layout.slot_offset(location.slot) + first
        flags = self.directory.read_flags or 0
        if self._read_nowait(slab.fd, (data,), position, flags) != end - first:
            return None
        if not self.partial_checksums.agree(location, first, data):
            return None  # `read_slot` finds the reason
        if data is not buffer:
            buffer[:] = data[offset - first : offset - first + length]
            self._note_checksums(location, data)
        self._hit(key, slab, location.slot, length)
        return buffer

    def _note_checksums(self, location: BlockLocation, data: Bytes) -> None:
        """Store the part checksums of a block that was read whole, so that the next read of a part
        needs only that part."""
        if self.is_on_disk and len(data) == location.length:
            self.partial_checksums.note(location.checksum, data)

    def _hit(self, key: BlockKey, slab: Slab, slot: int, length: int) -> None:
        if self.on_lower_hit is not None:
            self._hit_lower(slab, slot, key)
        self.policy.on_hit(slab, slot)
        slab.was_read = True
        counters = self.counters
        counters.hits += 1
        counters.hit_bytes += length

    def find_verified(self, key: BlockKey) -> BlockLocation | None:
        """Return the block's location if its bytes were verified since the start, else None."""
        location = self.index.locate(key)
        if location is None or self.retired or not self.io.health.usable:
            return None
        slab = self._by_id.get(location.slab)
        if slab is None or slab.fd < 0 or not slab.holds(location.slot):
            return None
        return location if slab.verified[location.slot] == location.checksum != 0 else None

    def hit_elsewhere(self, slab: Slab, slot: int, key: BlockKey | None) -> None:
        """Note that the relay has read a used slot, once or more. `key` is the key of its block;
        None if unknown."""
        if self.on_lower_hit is not None and key is not None:
            self._hit_lower(slab, slot, key)
        self.policy.on_hit(slab, slot)

    def _hit_lower(self, slab: Slab, slot: int, key: BlockKey) -> None:
        assert self.on_lower_hit is not None
        if slab.whole is None:  # what belongs to a whole object stays together
            self.on_lower_hit(key, self.policy.age(slab, slot))

    def note_open(self, slab: Slab) -> None:
        """Note that the kernel has opened the file of an object's slab: any of its blocks may be
        read from now on without this process."""
        if slab.slot_count and slab.holds(0):
            self.policy.on_hit(slab, 0)
            slab.ticks = array("I", [slab.ticks[0]]) * slab.slot_count

    async def read_slot(self, key: BlockKey, offset: int, length: int) -> Buffer | None:
        """Return `length` verified bytes at `offset` of the block. This waits for the disk.

        Return None if the block is absent, if the disk fails or takes too long, or if the block is
        bad (then it is dropped and counted). The caller then reads from the origin.
        """
        while self.io.health.usable and not self.retired:
            location = self.index.locate(key)
            if location is None:
                return None
            slab = self._by_id.get(location.slab)
            if slab is not None and slab.fd < 0:
                if not await self.open_slab(slab):
                    return None  # e.g. no free descriptor: the origin serves, the block stays
                continue  # the block may have moved or gone meanwhile
            if slab is None or not self._fits(slab, location, offset + length):
                self._forget(key, slab)  # if the slot is used, it holds another block
                return None
            try:
                return await self._read_slot(key, slab, location, offset, length)
            except OverdueError:
                return None
        return None

    async def _read_raw(
        self, drop_reference: Callable[[], None], fd: int, length: int, position: int
    ) -> bytes | bytearray:
        """Return the bytes; fewer than `length` if the file ends there. `drop_reference` is called
        once the slot is not read any more. Raises `OSError`, `OverdueError`."""
        try:
            data = await self._page_in.read(fd, length, position, self.directory.read_flags)
        except BaseException:
            drop_reference()
            raise
        if data is None:
            return await self.io.read_patiently(
                drop_reference, length, self._disk.read, fd, length, position
            )
        drop_reference()
        return data

    async def _read_parts(
        self, slab: Slab, location: BlockLocation, first: int, end: int
    ) -> bytes | bytearray | None:
        """Return the bytes from `first` to `end` of a verified block; None if they are wrong now.
        Bytes of a disk are compared, because the kernel may have read them from it again."""
        slab.add_reference(location.slot)
        drop_reference = partial(self.slabs.drop_reference, slab, location.slot)
        position = slab.layout.slot_offset(location.slot) + first
        data = await self._read_raw(drop_reference, slab.fd, end - first, position)
        if len(data) != end - first:
            return None
        if self.is_on_disk and not self.partial_checksums.agree(location, first, data):
            return None
        return data

    async def _verify(self, slab: Slab, location: BlockLocation) -> Checked:
        """Read a whole block and compare it with its checksum."""
        slab.add_reference(location.slot)
        drop_reference = partial(self.slabs.drop_reference, slab, location.slot)
        checked = await self.io.read_patiently(
            drop_reference, location.length, read_and_check, self._disk, slab, location
        )
        self.counters.verified += 1
        return checked

    async def verify_slot(self, key: BlockKey) -> None:
        """Compare a cached block with its checksum, unless that was done since the start. A bad one
        is dropped."""
        location = self.index.locate(key)
        slab = None if location is None else self._by_id.get(location.slab)
        if location is None or slab is None or slab.fd < 0 or not self._fits(slab, location, 0):
            return
        if slab.verified[location.slot] == location.checksum:
            return
        try:
            checked = await self._verify(slab, location)
        except (OSError, OverdueError):
            self.counters.read_errors += 1
            return
        self._accept(key, slab, location, checked)

    def _accept(self, key: BlockKey, slab: Slab, location: BlockLocation, checked: Checked) -> bool:
        """Return whether the bytes are those of the block, which is then verified. Otherwise drop
        it."""
        owner = checked.owner
        if checked.data is None or self.belongs_to_other(key, slab, location, owner):
            self.drop_bad(key, slab, location, owner)
            return False
        if self.index.locate(key) == location and slab.holds(
            location.slot
        ):  # not evicted meanwhile
            slab.verified[location.slot] = location.checksum
        return True

    @staticmethod
    def _fits(slab: Slab, location: BlockLocation, end: int) -> bool:
        return (
            end <= location.length <= slab.slot_bytes
            and location.checksum != 0
            and slab.holds(location.slot)
        )

    async def _read_slot(
        self, key: BlockKey, slab: Slab, location: BlockLocation, offset: int, length: int
    ) -> Buffer | None:
        slot = location.slot
        first, end = 0, location.length
        try:
            if slab.verified[slot] == location.checksum and not self._verify_full:
                first, end = offset, offset + length
                if self.is_on_disk:
                    first, end = self.partial_checksums.range_of(location, offset, length)
                data = await self._read_parts(slab, location, first, end)
                if data is None:
                    if self.index.locate(key) == location and slab.holds(slot):
                        slab.verified[slot] = 0
                    return await self.read_slot(key, offset, length)  # verifies the whole block
                checked = Checked(data, None)
            else:
                checked = await self._verify(slab, location)
        except OSError as error:
            self.counters.read_errors += 1
            self.files.report(slab, f"read failed: {error.strerror}")
            if not self.io.health.usable:
                return None  # the disk as a whole is unusable: the block may be right
            checked = Checked(None, None)
        if not self._accept(key, slab, location, checked) or checked.data is None:
            return None
        if self.index.locate(key) == location and slab.holds(slot):  # it was not evicted meanwhile
            self._hit(key, slab, slot, length)
        if end - first == length:
            return checked.data
        self._note_checksums(location, checked.data)
        return checked.data[offset - first : offset - first + length]

    # -- changing what is where --------------------------------------------------------------

    def admit(
        self, key: BlockKey, slab: Slab, slot: int, length: int, checksum: int, age: int = 0
    ) -> None:
        """Add a block whose bytes are already written to an allocated slot. Look-ups find it from
        now on. `age` is the number of block reads since its last use.

        The caller must mark the slab's row (`put_row`) before its next await.
        """
        self.slabs.commit(slab, slot, length, checksum)
        self.policy.on_admit(slab, slot, age)
        location = BlockLocation(slab.slab_id, slot, length, checksum)
        self.index.put(key, location)
        if self.on_admitted is not None:
            self.on_admitted(self, key, location)
        self.counters.admitted += 1
        self.counters.admitted_bytes += length
        if self.admission_filter.must_be_pinned(key):
            self.admission_filter.note_entered(key)
            if self.may_pin(slab.charge_bytes):
                self.slabs.pin(slab, slot)

    def has_in_place(self, key: BlockKey) -> bool:
        """Whether the tier has the block: in the slab of its object, if the object has one."""
        found = self.index.find(key)
        if found is None:
            return False
        whole = self.slabs.of_object.get(key.object_id)
        return whole is None or whole.slab_id == found[0]

    def drop_misplaced(self, key: BlockKey) -> bool:
        """Drop a block that is not in the slab of its object, just before it is admitted there.
        Return whether it was pinned."""
        location = self.index.locate(key)
        slab = None if location is None else self._by_id.get(location.slab)
        if location is None or slab is None:
            return False
        is_pinned = slab.is_pinned(location.slot)
        if self.moved_away(key, slab, location):
            self.put_row(slab)
        return is_pinned

    def may_pin(self, charge_bytes: int) -> bool:
        """Return whether the tier's limit allows so many more bytes of pinned slots."""
        return self.slabs.pinned_charge_bytes + charge_bytes <= self.directory.pin_limit_bytes

    def pin_moved(self, key: BlockKey) -> None:
        """Pin a block that was pinned in the tier that it came from, regardless of the
        limit."""
        location = self.index.locate(key)
        slab = None if location is None else self._by_id.get(location.slab)
        if location is not None and slab is not None and slab.holds(location.slot):
            self.slabs.pin(slab, location.slot)
            self.put_row(slab)

    def drop_bad(
        self, key: BlockKey, slab: Slab | None, location: BlockLocation, owner: SlotEntry | None
    ) -> None:
        """Drop a block whose bytes do not match its index row.

        `owner` is the slot's entry in the slot table. If `owner` is another block and the index
        confirms that, the slot was reused before a crash undid an index change. Then only the
        index row is deleted and the slot stays as it is.
        """
        if self.index.locate(key) != location:
            return  # another task dropped the block, or fetched it again, during the read
        self._forget(key, slab)
        if slab is None or not slab.holds(location.slot):
            return
        if self.belongs_to_other(key, slab, location, owner):
            return
        if slab.is_pinned(location.slot):
            self.admission_filter.note_lost(key)
        self.slabs.free(slab, location.slot, location.length)
        self.put_row(slab)

    def _forget(self, key: BlockKey, slab: Slab | None) -> None:
        self.index.delete(key)
        self.counters.bad_blocks += 1
        if slab is not None:
            self.files.report(slab, "a block is not what was stored; it will be fetched again")

    def belongs_to_other(
        self, key: BlockKey, slab: Slab, location: BlockLocation, owner: SlotEntry | None
    ) -> bool:
        """Return whether slot table and index both say that the slot holds another block."""
        if owner is None or owner.key == key:
            return False
        found = self.index.locate(owner.key)
        return found is not None and found[:2] == (slab.slab_id, location.slot)

    def evict(self, slab: Slab, slot: int, entry: SlotEntry | None) -> None:
        """Drop the block of a used slot. `entry` is the slot's entry in the slot table, read after
        the block was stored; None if it is damaged.

        The caller must mark the slab's row (`put_row`) before its next await.
        """
        length = 0
        if entry is not None:
            length = entry.length
            found = self.index.locate(entry.key)
            if found is not None and found[:2] == (slab.slab_id, slot):
                self.index.delete(entry.key)
                length = found.length
                self.history.on_evict(entry.key, self.policy.age(slab, slot))
        self.slabs.free(slab, slot, length)
        self.counters.evicted += 1

    def moved_away(self, key: BlockKey, slab: Slab, location: BlockLocation) -> bool:
        """Drop a block from `location`, for example because another tier has it now. Return False
        if it is no longer there.

        The caller must mark the slab's row (`put_row`) before its next await.
        """
        if self.index.locate(key) != location or not slab.holds(location.slot):
            return False
        self.index.delete(key)
        self.slabs.free(slab, location.slot, location.length)
        return True

    # -- life ------------------------------------------------------------------------------------

    async def commit_early(self) -> None:
        """Let the event loop run; commit if more than `_PENDING_CHANGES` changes are pending."""
        await trio.lowlevel.checkpoint()
        if self.index.pending_count > _PENDING_CHANGES and not self.retired:
            await self.index.commit()

    async def commit_loop(self) -> None:
        """Commit changes every second, and the slabs' recency every 5 minutes. Never returns."""
        next_recency = trio.current_time() + _RECENCY_INTERVAL_S
        while True:
            await trio.sleep(COMMIT_INTERVAL_S)
            if trio.current_time() >= next_recency:
                next_recency += _RECENCY_INTERVAL_S
                for slab in list(self._by_id.values()):
                    self._put_recency(slab)
                    await trio.lowlevel.checkpoint()
            await self.index.commit()

    def _put_recency(self, slab: Slab) -> None:
        if slab.ticks and self._by_id.get(slab.slab_id) is slab:
            self.index.put_recency(slab.slab_id, slab.class_index, slab.ticks)

    def close(self) -> None:
        """Commit pending changes, mark the directory as cleanly closed, and close it. There is no
        mark if slabs still await reconciliation."""
        for slab in self._by_id.values():
            if slab.ticks:
                self.put_row(slab)  # recency has moved since the row was put
                self._put_recency(slab)
        self.files.close()
        if not self.files.must_reconcile:
            self.index.put_clean_mark()
        self.index.close()
        self.directory.close()

    def abandon(self) -> None:
        """Close everything as a crash would, without writing."""
        self.files.close()
        self.index.abandon()
        self.directory.close()
