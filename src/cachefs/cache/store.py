"""One tier at work: its slabs, its index and its policy, kept in step.

Every method that isn't a coroutine is atomic on the loop. Those that change which block is where
change index, slots and slab row together (`index.py` says why): no await may come between.

A slot that a worker thread reads is pinned from before the thread starts until it is done; its
block may be evicted meanwhile, its bytes are not overwritten.
"""

import contextlib
import errno
import logging
import os
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import trio

from cachefs.cache.counters import TierCounters, TierStatus
from cachefs.cache.index import Index
from cachefs.cache.policies import History, make_policy
from cachefs.cache.tier_io import OverdueError, TierIo
from cachefs.format.slab import (
    SLOT_ENTRY,
    SlotEntry,
    checksum_of,
    entry_at,
    table_offset,
    used_entries,
)
from cachefs.tiers.disk import Disk
from cachefs.tiers.slabs import Slab
from cachefs.tiers.tier import OpenedSlab, Tier
from cachefs.types import BLOCK_BYTES, BlockKey, BlockLocation

log = logging.getLogger(__name__)

_OUT_OF_FDS = (errno.EMFILE, errno.ENFILE)
_OPEN_ATTEMPTS = 4
"""More than errors that make a disk count as sick."""
_COMMIT_INTERVAL_S = 1.0
_RECENCY_INTERVAL_S = 300.0


class _Checked(NamedTuple):
    """What a worker thread found in a slot. `data` is None if it wasn't the block."""

    data: bytes | None
    owner: SlotEntry | None


class Pick(NamedTuple):
    """A used slot that an eviction step has chosen, its tick then, and its row of the table."""

    slot: int
    tick: int
    entry: SlotEntry | None


class TierStore:
    """See the module docstring."""

    def __init__(
        self, tier: Tier, index: Index, policy_name: str, history: History, verify_full: bool
    ) -> None:
        self.tier = tier
        self.slabs = tier.slabs
        self.index = index
        self.counters = TierCounters(bad_index=int(index.replaced_bad))
        self.io = TierIo(tier)
        self.policy = make_policy(policy_name, history)
        self.history = history
        self.on_lower_hit: Callable[[BlockKey, int], None] | None = None
        """Told of hits (and the block's age) if there is a faster tier than this one."""
        self.retired = False
        """No block is served any more: the tier is about to be closed."""
        self._verify_full = verify_full
        self._by_id = tier.slabs.by_id
        self._disk = tier.disk
        self._read_now = tier.disk.read_now
        self._whole_block = memoryview(bytearray(BLOCK_BYTES if verify_full else 0))
        self._stale_rows: dict[int, Slab] = {}
        self._failed_opens: Counter[int] = Counter()
        self._closed = False
        index.before_commit(self._put_rows)
        self.must_adopt = not index.take_clean_mark()
        """The last daemon crashed: slot tables may know blocks that the index doesn't."""
        self._load_slabs()
        self.policy.resume(max((slab.tick for slab in self._by_id.values()), default=0))

    @classmethod
    def open(
        cls, tier: Tier, policy_name: str, history: History, verify_full: bool = False
    ) -> "TierStore":
        """Raises `CacheDirError`."""
        index = Index.open(str(tier.paths.index), tier.quota_bytes, tier.identity.uuid)
        return cls(tier, index, policy_name, history, verify_full)

    def _load_slabs(self) -> None:
        """From the rows and the names of the files alone, so that starting costs no scan."""
        on_disk = self.tier.slab_ids_on_disk()
        lost = []
        for slab_id, row in self.index.slab_rows():
            if slab_id in on_disk:
                on_disk.discard(slab_id)
                self.slabs.add(slab_id, row)
            else:
                lost.append(slab_id)
        for slab_id in lost:
            self.index.delete_slab(slab_id)
        self.counters.bad_slabs += len(lost)
        for slab_id in on_disk:
            self.slabs.add(slab_id)
        for slab in self._by_id.values():
            slab.load_ticks = self._load_ticks

    def _load_ticks(self, slab: Slab) -> "array[int] | None":
        return self.index.recency(slab.slab_id, slab.class_index, slab.slot_count)

    # -- reading ---------------------------------------------------------------------------

    def read_now(
        self, key: BlockKey, offset: int, length: int, buffer: memoryview
    ) -> memoryview | None:
        """Read into `buffer` (exactly `length` long) if that takes no waiting; None otherwise.

        None doesn't mean that the block isn't here, only that `read` must be asked.
        """
        found = self.index.find(key)
        flags = self.tier.read_flags
        if found is None or flags is None:
            return None
        slab_id, slot, stored_length, checksum = found
        slab = self._by_id.get(slab_id)
        if slab is None or slab.fd < 0 or offset + length > stored_length:
            return None
        if self._verify_full:
            return self._read_now_verified(key, slab, BlockLocation(*found), offset, length)
        try:
            if slab.proof[slot] != checksum:
                return None
            position = slab.data_offset + slot * slab.slot_bytes + offset
            if self._read_now(slab.fd, (buffer,), position, flags) != length:
                return None
        except (OSError, IndexError):  # not in memory; or an index that contradicts the slab
            return None
        self._hit(key, slab, slot, length)
        return buffer

    def _read_now_verified(
        self, key: BlockKey, slab: Slab, location: BlockLocation, offset: int, length: int
    ) -> memoryview | None:
        """The part of the block, if the whole is in memory and right."""
        if not self._fits(slab, location, offset + length):
            return None
        block = self._whole_block[: location.length]
        position = slab.layout.slot_offset(location.slot)
        try:
            read = self._read_now(slab.fd, (block,), position, self.tier.read_flags or 0)
        except OSError:
            return None
        if read != location.length or checksum_of(block) != location.checksum:
            return None  # `read` finds out which
        self.counters.verified += 1
        self._hit(key, slab, location.slot, length)
        return block[offset : offset + length]

    def _hit(self, key: BlockKey, slab: Slab, slot: int, length: int) -> None:
        if self.on_lower_hit is not None:
            self.on_lower_hit(key, self.policy.age(slab, slot))
        self.policy.on_hit(slab, slot)
        counters = self.counters
        counters.hits += 1
        counters.hit_bytes += length

    async def read(self, key: BlockKey, offset: int, length: int) -> bytes | None:
        """Read in a worker thread, verified. None if the block isn't here, if the disk takes too
        long, or if the block was bad (then it is dropped and counted)."""
        while self.io.health.usable and not self.retired:
            location = self.index.locate(key)
            if location is None:
                return None
            slab = self._by_id.get(location.slab)
            if slab is not None and slab.fd < 0:
                if not await self.open_slab(slab):
                    return None  # out of descriptors: the origin serves, the block stays
                continue  # the block may have moved or gone meanwhile
            if slab is None or not self._fits(slab, location, offset + length):
                self.drop_bad(key, slab, location, None)
                return None
            try:
                return await self._read_pinned(key, slab, location, offset, length)
            except OverdueError:
                return None
        return None

    @staticmethod
    def _fits(slab: Slab, location: BlockLocation, end: int) -> bool:
        return (
            end <= location.length <= slab.slot_bytes
            and location.checksum != 0
            and slab.holds(location.slot)
        )

    async def _read_pinned(
        self, key: BlockKey, slab: Slab, location: BlockLocation, offset: int, length: int
    ) -> bytes | None:
        slot = location.slot
        proven = slab.proof[slot] == location.checksum and not self._verify_full
        slab.pin(slot)
        unpin = partial(self.slabs.unpin, slab, slot)
        try:
            if proven:
                position = slab.layout.slot_offset(slot) + offset
                data = await self.io.read_patiently(
                    unpin, length, self._disk.read, slab.fd, length, position
                )
                checked = _Checked(data if len(data) == length else None, None)
            else:
                checked = await self.io.read_patiently(
                    unpin, location.length, _read_and_check, self._disk, slab, location
                )
                self.counters.verified += 1
        except OSError as error:
            self.counters.read_errors += 1
            self._report(slab, f"read failed: {error.strerror}")
            if not self.io.health.usable:
                return None  # the disk is sick as a whole: the block may well be right
            checked = _Checked(None, None)
        if checked.data is None:
            self.drop_bad(key, slab, location, checked.owner)
            return None
        if self.index.locate(key) == location and slab.holds(slot):  # not evicted meanwhile
            slab.proof[slot] = location.checksum
            self._hit(key, slab, slot, length)
        return checked.data if proven else checked.data[offset : offset + length]

    # -- changing what is where --------------------------------------------------------------

    def admit(
        self, key: BlockKey, slab: Slab, slot: int, length: int, checksum: int, age: int = 0
    ) -> None:
        """The slot's bytes are written: from now on the block is found there.

        The caller marks the slab's row (`put_row`) before its next await.
        """
        self.slabs.commit(slab, slot, length, checksum)
        self.policy.on_admit(slab, slot, age)
        self.index.put(key, BlockLocation(slab.slab_id, slot, length, checksum))
        self.counters.admitted += 1
        self.counters.admitted_bytes += length

    def put_row(self, slab: Slab) -> None:
        """The slab's row is to be part of the next commit. Costs nothing now."""
        self._stale_rows[slab.slab_id] = slab

    def _put_rows(self) -> None:
        for slab_id, slab in self._stale_rows.items():
            if self._by_id.get(slab_id) is slab:
                self.index.put_slab(slab_id, slab.row())
        self._stale_rows.clear()

    def drop_bad(
        self, key: BlockKey, slab: Slab | None, location: BlockLocation, owner: SlotEntry | None
    ) -> None:
        """Forget a block whose bytes are not what the index promised.

        `owner` is what the slot table says. If that is another block, and the index agrees, the
        slot was reused before a crash undid the change to the index, and stays as it is.
        """
        if self.index.locate(key) != location:
            return  # somebody else dropped it, or fetched it again, while we read
        self.index.delete(key)
        self.counters.bad_blocks += 1
        if slab is None:
            return
        self._report(slab, "a block is not what was stored; it will be fetched again")
        if not slab.holds(location.slot) or self._belongs_to_other(slab, location, owner):
            return
        self.slabs.free(slab, location.slot, location.length)
        self.put_row(slab)

    def _belongs_to_other(
        self, slab: Slab, location: BlockLocation, owner: SlotEntry | None
    ) -> bool:
        if owner is None:
            return False
        found = self.index.locate(owner.key)
        return found is not None and found[:2] == (slab.slab_id, location.slot)

    def evict(self, slab: Slab, slot: int, entry: SlotEntry | None) -> None:
        """Drop the block of a used slot. `entry` is the slot's in the table, read since the
        block was stored; None if it was damaged.

        The caller marks the slab's row before its next await.
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
        """Another tier has the block now. False if it is no longer here anyway.

        The caller marks the slab's row before its next await.
        """
        if self.index.locate(key) != location or not slab.holds(location.slot):
            return False
        self.index.delete(key)
        self.slabs.free(slab, location.slot, location.length)
        return True

    # -- slab files ----------------------------------------------------------------------------

    async def open_slab(self, slab: Slab) -> bool:
        """Open the slab's file if it isn't. False if that is not possible now: descriptors are
        used up, or the disk fails or takes too long.

        The slab may turn out to be missing (removed), foreign (left without a class) or of
        another class than its row said (the header wins): look at everything anew afterwards.
        """
        if slab.fd >= 0:
            return True
        found: list[OpenedSlab] = []
        try:
            await self.io.read_patiently(
                partial(self._opened, slab, found), 0, self._open_into, slab.slab_id, found
            )
        except OverdueError:
            return False
        except OSError as error:
            if error.errno in _OUT_OF_FDS:
                self._report(slab, "can't be opened: too many open files")
                return False
            return await self._cant_open(slab, error)
        return True

    def _open_into(self, slab_id: int, found: list[OpenedSlab]) -> None:
        """In a reader thread."""
        found.append(self.tier.open_slab(slab_id))

    def _opened(self, slab: Slab, found: list[OpenedSlab]) -> None:
        """The thread is done, perhaps long after everybody went."""
        for opened in found:
            if slab.fd >= 0 or self._by_id.get(slab.slab_id) is not slab or self._closed:
                os.close(opened.fd)
            else:
                self._install(slab, opened)

    def _install(self, slab: Slab, opened: OpenedSlab) -> None:
        slab.fd = opened.fd
        tick = self.policy.now
        if opened.header is None:
            self.counters.bad_slabs += 1
            self._report(slab, "the header is damaged or another slab's; its blocks are dropped")
            self.slabs.reformat(slab, None, tick)
        elif opened.header.class_index != slab.class_index:
            self.slabs.reformat(slab, opened.header.class_index, tick)
            self.adopt(slab, opened.table)
        else:
            slab.hydrate()
            if self.must_adopt:
                self.adopt(slab, opened.table)
            return
        self.put_row(slab)

    def adopt(self, slab: Slab, table: bytes) -> None:
        """Take blocks that the table knows and the index doesn't into the index, unproven."""
        adopted = False
        for slot, entry in used_entries(table, slab.layout):
            location = BlockLocation(slab.slab_id, slot, entry.length, entry.checksum)
            found = self.index.locate(entry.key)
            # The same location but no bit: the slab was reset since the index learnt of it.
            if found is not None and found != location:
                continue
            if self.slabs.adopt(slab, slot, entry.length):
                self.index.put(entry.key, location)
                self.counters.adopted += 1
                adopted = True
        if adopted:
            self.put_row(slab)

    async def _cant_open(self, slab: Slab, error: OSError) -> bool:
        """Give the slab up, unless it may be that only the disk is sick."""
        if error.errno == errno.EIO:
            self._failed_opens[slab.slab_id] += 1
            if not self.io.health.usable or self._failed_opens[slab.slab_id] < _OPEN_ATTEMPTS:
                return False
        await self._lose(slab, error)
        return True

    async def _lose(self, slab: Slab, error: OSError) -> None:
        """The slab's file can't be opened. Its blocks are dropped as they are asked for."""
        if self._by_id.get(slab.slab_id) is not slab or slab.fd >= 0:
            return
        self.counters.bad_slabs += 1
        self._report(slab, f"can't be opened: {error.strerror}; its blocks are dropped")
        self.slabs.remove(slab)
        self.index.delete_slab(slab.slab_id)
        # What is there instead, if anything, would use up space that nobody accounts for.
        with contextlib.suppress(OSError):
            await self.io.read(0, self.tier.delete_slab, slab.slab_id)

    def _report(self, slab: Slab, text: str) -> None:
        """Once per slab."""
        if not slab.reported:
            slab.reported = True
            log.warning("%s: %s", self.tier.paths.slab(slab.slab_id), text)

    # -- life ------------------------------------------------------------------------------------

    def status(self) -> TierStatus:
        return TierStatus(
            path=str(self.tier.paths.root),
            medium=self.tier.medium,
            health=self.io.health.state.value,
            quota_bytes=self.tier.quota_bytes,
            disk_bytes=self.slabs.disk_bytes,
            used_bytes=self.slabs.used_charge_bytes,
            high_bytes=self.tier.watermarks.high_bytes,
            low_bytes=self.tier.watermarks.low_bytes,
            cached_bytes=self.slabs.cached_bytes,
            cached_blocks=self.slabs.cached_blocks,
            counters=self.counters,
        )

    async def warm(self) -> None:
        """Bring the index into memory, so that look-ups don't wait for the disk."""
        await trio.to_thread.run_sync(self.index.warm, abandon_on_cancel=True)

    async def commit_loop(self) -> None:
        """Make changes durable, for ever: every second, and now and then the recency too."""
        next_recency = trio.current_time() + _RECENCY_INTERVAL_S
        while True:
            await trio.sleep(_COMMIT_INTERVAL_S)
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
        """Write what is pending, mark the directory as cleanly closed, give it back."""
        for slab in self._by_id.values():
            if slab.ticks:
                self.put_row(slab)  # recency has moved since the row was put
                self._put_recency(slab)
        self._closed = True
        self.index.put_clean_mark()
        self.index.close()
        self.tier.close()

    def abandon(self) -> None:
        """End as a crash would: nothing more is written."""
        self._closed = True
        self.index.abandon()
        self.tier.close()


def _read_and_check(disk: Disk, slab: Slab, location: BlockLocation) -> _Checked:
    """In a worker thread; the slot is pinned, so that neither fd nor layout can change."""
    data = disk.read(slab.fd, location.length, slab.layout.slot_offset(location.slot))
    if len(data) == location.length and checksum_of(data) == location.checksum:
        return _Checked(data, None)
    entry = disk.read(slab.fd, SLOT_ENTRY.size, table_offset(location.slot))
    return _Checked(None, entry_at(entry.ljust(SLOT_ENTRY.size, b"\0"), 0))
