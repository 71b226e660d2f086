"""The slab files of a tier: which there are, opening them, and what a crash left in them.

Starting opens no file. A slab is opened when it is first read. It is *settled* before its slots
are given out or freed: after a crash that means that slots, index and slot table are reconciled.
From then on these hold (without damage for ever: blocks are stored and dropped with row, slot and
table entry in step):
- a used slot's table entry names the one block whose row of the index points back to the slot;
- `used_bytes` is the sum of those blocks' lengths.
Other rows may point to the slot too; nobody is served by them, and no block is moved for them
(`TierStore.read`, `Mover`): a slot is freed for its own block, with that one's length.
"""

import contextlib
import errno
import logging
import os
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from cachefs.cache.counters import TierCounters
from cachefs.cache.index import Index
from cachefs.cache.tier_io import OverdueError, TierIo
from cachefs.format.index_record import NO_CLASS
from cachefs.format.slab import entry_at
from cachefs.tiers.open_slabs import OpenSlabs
from cachefs.tiers.slabs import FREE, Slab
from cachefs.tiers.tier import OpenedSlab, Tier
from cachefs.types import BlockLocation

log = logging.getLogger(__name__)

_OUT_OF_FDS = (errno.EMFILE, errno.ENFILE)
_OPEN_ATTEMPTS = 4
"""More than errors that make a disk count as sick."""
_STEP_SLOTS = 256
"""Most slots reconciled without letting the loop run: some 3 us each."""


class SlabFiles:
    """One per tier. Making it reads the rows of the slabs and the names of the files."""

    def __init__(
        self,
        tier: Tier,
        index: Index,
        io: TierIo,
        counters: TierCounters,
        clock: Callable[[], int],
        open_slabs: OpenSlabs,
    ) -> None:
        self.closed = False
        self.open_slabs = open_slabs
        """Those of the mount."""
        self._tier = tier
        self._slabs = tier.slabs
        self._by_id = tier.slabs.by_id
        self._index = index
        self._io = io
        self._counters = counters
        self._clock = clock
        self._stale_rows: dict[int, Slab] = {}
        self._failed_opens: Counter[int] = Counter()
        self._under_way: dict[int, trio.Event] = {}
        self._opened: dict[int, OpenedSlab] = {}
        """Files that were opened for somebody who had left."""
        self._late: set[int] = set()
        """Slabs that could not be opened within a reader's patience the last time."""
        index.before_commit(self._put_rows)
        self.must_reconcile = not index.take_clean_mark()
        """The last daemon crashed: index, slot tables and slots may differ."""
        self._load()
        if self.must_reconcile and self._by_id:
            index.note_crash()
        self.may_have_stale_rows = index.has_seen_crash
        """A daemon has crashed once: rows of the index may point to slots that hold another's
        block, until somebody comes for them."""

    def _load(self) -> None:
        """From the rows and the names of the files alone, so that starting costs no scan."""
        on_disk = self._tier.slab_ids_on_disk()
        lost = []
        for slab_id, row in self._index.slab_rows():
            if slab_id in on_disk:
                on_disk.discard(slab_id)
                self._slabs.add(slab_id, row)
            else:
                lost.append(slab_id)
        for slab_id in lost:
            self._index.delete_slab(slab_id)
        self._slabs.skip_ids(self._index.next_slab_id)
        self._counters.bad_slabs += len(lost)
        for slab_id in on_disk:
            self._slabs.add(slab_id)
        for slab in self._by_id.values():
            slab.load_ticks = self._load_ticks

    def _load_ticks(self, slab: Slab) -> "array[int] | None":
        return self._index.recency(slab.slab_id, slab.class_index, slab.slot_count)

    def take_id(self) -> int:
        """The id of a slab that is about to be made. None gets that of one before it, which blocks
        may still be said to be in: a slab may be lost with its blocks, and these are forgotten
        one by one, as they are asked for."""
        slab_id = self._slabs.take_id()
        self._index.put_next_slab_id(slab_id + 1)
        return slab_id

    # -- rows ----------------------------------------------------------------------------------

    def put_row(self, slab: Slab) -> None:
        """The slab's row is to be part of the next commit. Costs nothing now."""
        self._stale_rows[slab.slab_id] = slab

    def _put_rows(self) -> None:
        for slab_id, slab in self._stale_rows.items():
            if self._by_id.get(slab_id) is slab:
                self._index.put_slab(slab_id, slab.row())
        self._stale_rows.clear()

    # -- opening -------------------------------------------------------------------------------

    async def open(self, slab: Slab) -> bool:
        """Open the slab's file if it isn't: enough to read what the index says is there. False if
        that is not possible now: descriptors are used up, or the disk fails or takes too long.

        The slab may turn out to be missing (removed), foreign (left without a class) or of
        another class than its row said (the header wins): look at everything anew afterwards.
        """
        return await self._one_at_a_time(slab, lambda: slab.fd >= 0, self._open)

    async def settle(self, slab: Slab) -> bool:
        """Open the slab and, after a crash, reconcile it: before slots are given out or freed on
        purpose. More patient than `open`; the answer, and what may have changed, as there."""
        if slab.settled:
            return True
        while not await self.open(slab):
            if slab.slab_id not in self._late or not self._io.health.usable:
                return False
        if slab.fd < 0:
            return True
        return await self._one_at_a_time(slab, lambda: slab.agrees, self._settle)

    async def _one_at_a_time(
        self, slab: Slab, is_done: Callable[[], bool], do: Callable[[Slab], Awaitable[bool]]
    ) -> bool:
        while not is_done():
            under_way = self._under_way.get(slab.slab_id)
            if under_way is None:
                done = self._under_way[slab.slab_id] = trio.Event()
                try:
                    return await do(slab)
                finally:
                    del self._under_way[slab.slab_id]
                    done.set()
            await under_way.wait()
            if not self._is_ours(slab):
                return True
        return True

    def _is_ours(self, slab: Slab) -> bool:
        return self._by_id.get(slab.slab_id) is slab and not self.closed

    async def _open(self, slab: Slab) -> bool:
        try:
            if slab.slab_id not in self._opened:
                await self._io.read_patiently(
                    lambda: None, 0, partial(self._open_into, slab.slab_id)
                )
        except OverdueError:
            self._late.add(slab.slab_id)
            return False
        except OSError as error:
            self._late.discard(slab.slab_id)
            if error.errno in _OUT_OF_FDS:
                self.report(slab, "can't be opened: too many open files")
                return False
            return await self._cant_open(slab, error)
        self._late.discard(slab.slab_id)
        self._install(slab, self._opened.pop(slab.slab_id))
        return True

    def _open_into(self, slab_id: int) -> None:
        """In a reader thread, which may be done long after everybody went."""
        self._opened[slab_id] = self._tier.open_slab(slab_id)

    def _install(self, slab: Slab, opened: OpenedSlab) -> None:
        if not self._is_ours(slab):
            os.close(opened.fd)
            return
        slab.fd = opened.fd
        self.open_slabs.note(slab)
        if not slab.was_opened:
            slab.was_opened = True
            slab.agrees = not self.must_reconcile
        if opened.header is None:
            # Without a row, too, nothing was ever stored there: that is no damage.
            if not opened.is_blank or slab.class_index != NO_CLASS:
                self._counters.bad_slabs += 1
                text = "the header is damaged or another slab's; its blocks are dropped"
                self.report(slab, text)
            self._slabs.reformat(slab, None, self._clock())
            self.put_row(slab)
            slab.agrees = True
        elif opened.header.class_index != slab.class_index:
            self._slabs.reformat(slab, opened.header.class_index, self._clock())
            self.put_row(slab)
            slab.agrees = False
        slab.hydrate()

    # -- after a crash -------------------------------------------------------------------------

    async def _settle(self, slab: Slab) -> bool:
        if slab.fd < 0:  # closed while we waited for another
            return False
        with slab.in_use():
            return await self._reconcile(slab)

    async def _reconcile(self, slab: Slab) -> bool:
        layout = slab.layout
        try:
            table = await self._io.read(layout.data_offset, self._tier.read_table, slab.fd, layout)
        except OSError:
            self._counters.read_errors += 1
            if self._may_get_better(slab):
                return False
            table = b""  # its blocks can't be told apart any more
        lengths = array("I", [0]) * layout.slot_count
        for first in range(0, layout.slot_count, _STEP_SLOTS):
            if slab.layout is not layout or not self._is_ours(slab):
                return True
            for slot in range(first, min(first + _STEP_SLOTS, layout.slot_count)):
                lengths[slot] = self._settle_slot(slab, slot, table)
            self.put_row(slab)
            if first + _STEP_SLOTS < layout.slot_count:
                await trio.lowlevel.checkpoint()
        used_bytes = sum(lengths[slot] for slot in slab.used_slots())
        self._slabs.set_used_bytes(slab, used_bytes)
        slab.agrees = True
        return True

    def _settle_slot(self, slab: Slab, slot: int, table: bytes) -> int:
        """Returns the bytes that the slot holds: those of the table's block if the index knows
        it to be here, or doesn't know it at all; then it is taken in, unproven."""
        if slab.state[slot] != FREE and not slab.holds(slot):
            return 0
        entry = entry_at(table, slot)
        found = location = None
        if entry is not None and entry.length <= slab.slot_bytes:
            location = BlockLocation(slab.slab_id, slot, entry.length, entry.checksum)
            found = self._index.locate(entry.key)
        if slab.holds(slot):
            if location is not None and found == location:
                return location.length
            self._slabs.free(slab, slot, 0)
        if entry is None or location is None or found not in (None, location):
            return 0
        if not self._slabs.adopt(slab, slot, entry.length):
            return 0
        self._index.put(entry.key, location)
        self._counters.adopted += 1
        return entry.length

    async def settle_all(self) -> None:
        """In the background, while the cache already serves: settle the slabs that have no row,
        or after a crash all.

        Those without a row first: they were made within the last second before the crash, and
        nobody would come for what they hold.
        """
        orphans = [slab for slab in self._by_id.values() if slab.class_index == NO_CLASS]
        settled = [await self.settle(slab) for slab in orphans]
        for slab in list(self._by_id.values()) if self.must_reconcile else ():
            if not await self.settle(slab):
                return  # the rest as they are needed
        self.must_reconcile = not all(settled)

    # -- files that can't be opened ------------------------------------------------------------

    async def _cant_open(self, slab: Slab, error: OSError) -> bool:
        """Give the slab up, unless it may be that only the disk is sick."""
        if error.errno == errno.EIO and self._may_get_better(slab):
            return False
        await self._lose(slab, error)
        return True

    def _may_get_better(self, slab: Slab) -> bool:
        """Whether an error in opening may be the disk's, and not this file's."""
        self._failed_opens[slab.slab_id] += 1
        return not self._io.health.usable or self._failed_opens[slab.slab_id] < _OPEN_ATTEMPTS

    async def _lose(self, slab: Slab, error: OSError) -> None:
        """The slab's file can't be opened. Its blocks are dropped as they are asked for."""
        if self._by_id.get(slab.slab_id) is not slab or slab.fd >= 0:
            return
        self._counters.bad_slabs += 1
        self.report(slab, f"can't be opened: {error.strerror}; its blocks are dropped")
        self._slabs.remove(slab)
        self._index.delete_slab(slab.slab_id)
        # What is there instead, if anything, would use up space that nobody accounts for.
        with contextlib.suppress(OSError):
            await self._io.read(0, self._tier.delete_slab, slab.slab_id)

    def report(self, slab: Slab, text: str) -> None:
        """Once per slab."""
        if not slab.reported:
            slab.reported = True
            log.warning("%s: %s", self._tier.paths.slab(slab.slab_id), text)

    def close(self) -> None:
        """Close what nobody came for. The open slabs' descriptors are the tier's."""
        self.closed = True
        for opened in self._opened.values():
            os.close(opened.fd)
        self._opened.clear()
