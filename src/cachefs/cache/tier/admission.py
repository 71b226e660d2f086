"""Stores blocks: one task per tier, one call of its writer thread per batch.

The steps for a block: allocate a slot (loop) -> write table entry and data (writer thread, which
also computes the checksum) -> commit the slot, put the index row and call `done` (loop, no await
between). Before the last step readers get the bytes from the block's source; after it, from the
slot. A failed write loses this copy only: no read fails.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import trio

from cachefs.cache.counters import TierCounters
from cachefs.cache.fetch.in_flight import InFlightFetch
from cachefs.cache.policies.base import CLOCK_MASK
from cachefs.cache.tier.cooldown import Cooldown
from cachefs.cache.tier.disk_threads import Step
from cachefs.cache.tier.evictor import Evictor
from cachefs.cache.tier.partial_checksums import PartialChecksums
from cachefs.cache.tier.slot_io import write_block
from cachefs.cache.tier.store import TierStore
from cachefs.cache_dir.disk import Disk
from cachefs.cache_dir.slab import Allocation, Slab
from cachefs.format.slab import SlotEntry, checksum_of, class_of
from cachefs.types import BlockKey

log = logging.getLogger(__name__)

_BATCH_BLOCKS = 64
_BATCH_BYTES = 8 << 20
_FINISH_BLOCKS = 8
"""Blocks committed between two checkpoints of the loop: about 50 us each."""
_GATHER_S = 0.02
_FAILURE_PAUSE_S = 1.0
STALL_S = 3.0
"""If a batch makes no progress for so long, all blocks of the batch and the queue are given up."""


class Candidate:
    """A block that waits to be stored. The first `finish` calls `done(candidate, stored)`, so it
    is called exactly once.

    `tick` is the value of the mount's clock (`policies/base.py`) when the block was last used, or
    when its fetch had its bytes. So blocks that wait together keep their order of use. `checksum`
    is 0 if not computed yet. `fetch` is the fetch that brought it, or None.
    """

    __slots__ = (
        "_done",
        "began_at",
        "checksum",
        "data",
        "fetch",
        "finished",
        "key",
        "level",
        "must_pin",
        "tick",
    )

    def __init__(
        self,
        key: BlockKey,
        data: memoryview,
        done: "Callable[[Candidate, bool], None]",
        tick: int,
        fetch: InFlightFetch | None = None,
        checksum: int = 0,
    ) -> None:
        self.key = key
        self.data = data
        self._done = done
        self.finished = False
        self.fetch = fetch
        self.checksum = checksum
        self.tick = tick
        self.began_at = trio.current_time() if fetch is None else fetch.began_at
        """When its fetch began, or when it was read from another tier to be moved (trio clock)."""
        self.level = 0
        """Level of the tier that it was offered to."""
        self.must_pin = False
        """If users pinned it: refuse it unless this tier can pin it."""

    def finish(self, stored: bool) -> None:
        """Report whether the block is stored. Only the first call has an effect: a write that was
        given up may still succeed later."""
        if not self.finished:
            self.finished = True
            self._done(self, stored)

    @property
    def may_evict(self) -> bool:
        """Whether other blocks may be evicted for this one; see `InFlightFetch.into_free_space`."""
        fetch = self.fetch
        return fetch is None or fetch.is_joined or not fetch.into_free_space

    def anew(self) -> "Candidate":
        """Return a new candidate for the same block, to offer it to another tier."""
        return Candidate(self.key, self.data, self._done, self.tick, self.fetch, self.checksum)


class _Write(NamedTuple):
    candidate: Candidate
    slab: Slab
    slot: int


class Admission:
    """The queue of blocks to be stored in one tier. Used on the loop only."""

    def __init__(self, store: TierStore, evictor: Evictor, cooldown: Cooldown | None) -> None:
        """`cooldown` records every stored block, so that it is not moved during its cooldown."""
        self._store = store
        self._evictor = evictor
        self._cooldown = cooldown
        self._queue: deque[Candidate] = deque()
        self._parked = trio.lowlevel.ParkingLot()
        self._idle_parked = trio.lowlevel.ParkingLot()
        self._hurried = trio.lowlevel.ParkingLot()
        self._drainers = 0
        self._batch: list[Candidate] = []
        """The candidates that are being stored."""
        self._progress_s = 0.0
        self._stalled = False
        self._failing = False
        self._no_room_before = 0.0
        self.closed = False

    @property
    def store(self) -> TierStore:
        """The tier's store."""
        return self._store

    @property
    def counters(self) -> TierCounters:
        """The tier's counters."""
        return self._store.counters

    def takes(self, length: int) -> bool:
        """Whether a block of `length` bytes would probably be stored. Very cheap."""
        return self.is_open and self._evictor.has_or_makes_room(class_of(length))

    @property
    def is_open(self) -> bool:
        """Whether a block would probably be stored for which there is a slot. Very cheap."""
        return (
            not self.closed
            and not self._stalled
            and self._store.io.health.usable
            and time.monotonic() >= self._no_room_before
        )

    def offer(self, candidate: Candidate) -> None:
        """Queue a block; returns at once. `candidate.finish` reports the outcome."""
        self._queue.append(candidate)
        self._parked.unpark()

    def give_up(self) -> None:
        """Finish all candidates as not stored, without waiting for the disk.

        A block that is being written at this moment may still be stored.
        """
        batch, self._batch = self._batch, []
        queue, self._queue = self._queue, deque()
        for candidate in (*batch, *queue):
            self._store.counters.rejected += not candidate.finished
            candidate.finish(False)
        self._idle_parked.unpark_all()

    async def watch(self) -> None:
        """Run forever: give up the queue when a batch makes no progress, for whatever reason.

        Otherwise blocks that wait for one tier would fill the buffer memory, and all reads would
        wait for it.
        """
        while True:
            await trio.sleep(STALL_S / 4)
            if self._batch and time.monotonic() - self._progress_s >= STALL_S:
                self._stalled = True
                self.give_up()

    async def drained(self) -> None:
        """Wait until queue and batch are empty. Meanwhile batches start without delay."""
        self._drainers += 1
        self._hurried.unpark_all()
        try:
            while self._queue or self._batch:
                await self._idle_parked.park()
        finally:
            self._drainers -= 1

    async def run(self) -> None:
        """Run forever: store the offered blocks."""
        while True:
            while not self._queue:
                self._idle_parked.unpark_all()
                await self._parked.park()
                # Readers already have the bytes, so gathering a batch does not delay them. It
                # saves a call of the writer thread and a commit of slots per block.
                if not self._drainers:
                    with trio.move_on_after(_GATHER_S):
                        await self._hurried.park()
            self._batch = batch = self._take_batch()
            self._progress_s = time.monotonic()
            try:
                await self._store_batch(batch)
            finally:
                self._batch = []
                self._stalled = False

    def _take_batch(self) -> list[Candidate]:
        batch: list[Candidate] = []
        size_bytes = 0
        # Each block may go to a different slab, whose file stays open until the block is written.
        most = min(_BATCH_BLOCKS, max(1, self._store.files.open_slabs.limit // 2))
        while self._queue and len(batch) < most and size_bytes < _BATCH_BYTES:
            batch.append(self._queue.popleft())
            size_bytes += len(batch[-1].data)
        return batch

    async def _store_batch(self, batch: list[Candidate]) -> None:
        waiting = deque(batch)
        writes: list[_Write] = []
        try:
            while waiting:
                self._progress_s = time.monotonic()
                if waiting[0].finished:  # `give_up` finished it meanwhile
                    waiting.popleft()
                    continue
                allocation = await self._place(waiting[0], writes)
                candidate = waiting.popleft()
                if isinstance(allocation, bool):
                    candidate.finish(allocation)
                else:
                    writes.append(_Write(candidate, *allocation))
            await self._flush(writes)
        except BaseException:  # cancelled while looking for room
            for write in writes:
                self._store.slabs.abort(write.slab, write.slot)
                write.candidate.finish(False)
            for candidate in waiting:
                candidate.finish(False)
            raise
        if self._store.slabs.used_charge_bytes > self._store.directory.watermarks.high_bytes:
            self._evictor.wake()

    async def _place(self, candidate: Candidate, writes: list[_Write]) -> Allocation | bool:
        """Return a slot for the block; True if the tier already has it, False if it can't."""
        store = self._store
        if store.has_in_place(candidate.key):
            return True
        refused = self._refuses(candidate)
        if store.io.health.usable and not refused:
            allocation = await self._allocate(candidate)
            if allocation is None and writes:
                await self._flush(writes)  # slots that wait for their write can block eviction
                allocation = await self._allocate(candidate)
            if allocation is not None:
                return allocation
            if candidate.may_evict:
                self._evictor.refuse(class_of(len(candidate.data)))
        store.counters.rejected += not refused
        return False

    def _refuses(self, candidate: Candidate) -> bool:
        """Whether the block was evicted on its way, can't be pinned although it must be, or would
        use space that eviction keeps free for others."""
        store, key = self._store, candidate.key
        has_space = candidate.may_evict or key.object_id in store.slabs.of_object
        if not has_space and not store.directory.fits_below_low(len(candidate.data)):
            return True
        if store.admission_filter.is_unwanted(key, candidate.began_at):
            return True
        if not candidate.must_pin or not store.admission_filter.must_be_pinned(key):
            return False
        return not store.may_pin(len(candidate.data))

    async def _allocate(self, candidate: Candidate) -> Allocation | None:
        slabs = self._store.slabs
        whole = slabs.of_object.get(candidate.key.object_id)
        if whole is not None:
            if not whole.is_ready and not await self._store.reconcile(whole):
                return None
            if slabs.of_object.get(candidate.key.object_id) is not whole or whole.fd < 0:
                return None
            is_free = slabs.allocate_for(whole, candidate.key)
            return Allocation(whole, candidate.key.block_index) if is_free else None
        class_index = class_of(len(candidate.data))
        while True:
            slab = slabs.open_slab(class_index)
            if slab is None:
                if time.monotonic() < self._no_room_before:
                    return None
                slab = await self._evictor.make_room(class_index, candidate.may_evict)
                if slab is None:
                    return None
            if slab.is_ready:
                return Allocation(slab, slabs.allocate(slab))
            if not await self._store.reconcile(slab):
                return None

    async def _flush(self, writes: list[_Write]) -> None:
        """Write, then commit. Neither step can be cancelled: a written slot is always either
        committed or aborted."""
        if not writes:
            return
        size_bytes = max(len(write.candidate.data) for write in writes)
        store = self._store
        self._progress_s = time.monotonic()
        partial_checksums = store.partial_checksums if store.is_on_disk else None
        results = await store.io.write_in_steps(
            size_bytes, _write_all, store.directory.disk, writes, partial_checksums
        )
        with trio.CancelScope(shield=True):
            for first in range(0, len(writes), _FINISH_BLOCKS):
                last = first + _FINISH_BLOCKS
                self._finish(writes[first:last], results[first:last])
                if last < len(writes):
                    await trio.lowlevel.checkpoint()
        writes.clear()

    def _finish(self, writes: list[_Write], results: list[int | OSError]) -> None:
        store = self._store
        touched = {}
        now_s = time.monotonic()
        clock = store.history.now
        for (candidate, slab, slot), result in zip(writes, results, strict=True):
            stored = not isinstance(result, OSError)
            if isinstance(result, OSError):
                self._write_failed(result)
                store.slabs.abort(slab, slot)
            elif store.has_in_place(candidate.key):  # adopted from a slot table meanwhile
                store.slabs.abort(slab, slot)
            elif self._refuses(candidate):
                stored = False
                store.slabs.abort(slab, slot)
            else:
                age = (clock - candidate.tick) & CLOCK_MASK
                is_pinned = slab.whole is not None and store.drop_misplaced(candidate.key)
                store.admit(candidate.key, slab, slot, len(candidate.data), result, age)
                if is_pinned:
                    store.pin_moved(candidate.key)
                touched[slab.slab_id] = slab
                self._failing = False
                if self._cooldown is not None:
                    self._cooldown.begin(candidate.key, now_s)
            candidate.finish(stored)
        for slab in touched.values():
            store.put_row(slab)

    def _write_failed(self, error: OSError) -> None:
        self._store.counters.write_errors += 1
        # Don't evict blocks for a block that can't be written either.
        self._no_room_before = time.monotonic() + _FAILURE_PAUSE_S
        if not self._failing:
            log.warning(
                "%s: can't store blocks: %s", self._store.directory.paths.root, error.strerror
            )
        self._failing = True


def _write_all(
    step: Step, disk: Disk, writes: list[_Write], partial_checksums: PartialChecksums | None
) -> list[int | OSError]:
    """In the writer thread: checksum and write each block.

    Returns for each block its checksum, or the error if it could not be written; its slot's
    content is then undefined.
    """
    results: list[int | OSError] = []
    for candidate, slab, slot in writes:
        key, data = candidate.key, candidate.data
        checksum = candidate.checksum or checksum_of(data)
        try:
            write_block(disk, slab, slot, SlotEntry(key, len(data), checksum), data)
        except OSError as error:
            results.append(error)
            step(error)
        else:
            results.append(checksum)
            step(None)
            if partial_checksums is not None:
                partial_checksums.note(checksum, data)
    return results
