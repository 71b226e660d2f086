"""Storing blocks: one task per tier, one hop to its writer thread per batch.

The way of a block: slot allocated (loop) -> checksum, table entry and data written (writer) ->
slot committed, index put, `done` called (loop, no await between). Until the last step readers
get the bytes from where they came; from it on, from the slot. A write that fails costs this copy
and no reader.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import trio

from cachefs.cache.counters import TierCounters
from cachefs.cache.evictor import Evictor
from cachefs.cache.flights import Flight
from cachefs.cache.placement import Resting
from cachefs.cache.store import TierStore
from cachefs.cache.sums import Sums
from cachefs.cache.tier_io import Step
from cachefs.format.slab import SlotEntry, checksum_of, class_of, encode_entry, table_offset
from cachefs.tiers.disk import Disk
from cachefs.tiers.slabs import Allocation, Slab
from cachefs.types import BlockKey

log = logging.getLogger(__name__)

_BATCH_BLOCKS = 64
_BATCH_BYTES = 8 << 20
_FINISH_BLOCKS = 8
"""Committed without letting the loop run: some 50 us each."""
_GATHER_S = 0.02
_FAILURE_PAUSE_S = 1.0
_STALL_S = 3.0
"""A batch without progress for that long gives up what it holds, and so does the queue."""


class Candidate:
    """A block that waits to be stored. `done(candidate, stored)` is called exactly once, by the
    first `settle`.

    `checksum` is 0 if it isn't known yet; `age` is that of a block that comes from another tier.
    """

    __slots__ = (
        "_done",
        "age",
        "began_at",
        "checksum",
        "data",
        "flight",
        "key",
        "level",
        "must_keep",
        "settled",
    )

    def __init__(
        self,
        key: BlockKey,
        data: memoryview,
        done: "Callable[[Candidate, bool], None]",
        flight: Flight | None = None,
        checksum: int = 0,
        age: int = 0,
    ) -> None:
        self.key = key
        self.data = data
        self._done = done
        self.settled = False
        self.flight = flight
        self.checksum = checksum
        self.age = age
        self.began_at = trio.current_time() if flight is None else flight.began_at
        """When the block was asked for, or known to be in the tier that it comes from."""
        self.level = 0
        """Of the tier that it was offered to."""
        self.must_keep = False
        """If users want it kept from eviction: where it can't be kept it doesn't go."""

    def settle(self, stored: bool) -> None:
        """The block is stored, or won't be as far as anybody waits for it. Only the first call
        counts: a write that was given up may still succeed."""
        if not self.settled:
            self.settled = True
            self._done(self, stored)

    def anew(self) -> "Candidate":
        """The same, to be offered to another tier."""
        return Candidate(self.key, self.data, self._done, self.flight, self.checksum, self.age)


class _Write(NamedTuple):
    candidate: Candidate
    slab: Slab
    slot: int


class Admission:
    """The queue into one tier."""

    def __init__(self, store: TierStore, evictor: Evictor, resting: Resting | None) -> None:
        """`resting` is told of every block that was stored, if there is more than one level."""
        self._store = store
        self._evictor = evictor
        self._resting = resting
        self._queue: deque[Candidate] = deque()
        self._parked = trio.lowlevel.ParkingLot()
        self._idle_parked = trio.lowlevel.ParkingLot()
        self._hurried = trio.lowlevel.ParkingLot()
        self._drainers = 0
        self._batch: list[Candidate] = []
        """Those that are being stored."""
        self._progress_s = 0.0
        self._stalled = False
        self._failing = False
        self._no_room_before = 0.0
        self.closed = False

    @property
    def store(self) -> TierStore:
        """Where it stores."""
        return self._store

    @property
    def counters(self) -> TierCounters:
        """Those of the tier."""
        return self._store.counters

    def takes(self, length: int) -> bool:
        """Whether a block of this length would probably be stored. Costs next to nothing."""
        return (
            not self.closed
            and not self._stalled
            and self._store.io.health.usable
            and time.monotonic() >= self._no_room_before
            and self._evictor.has_or_makes_room(class_of(length))
        )

    def offer(self, candidate: Candidate) -> None:
        self._queue.append(candidate)
        self._parked.unpark()

    def give_up(self) -> None:
        """Settle everything without waiting for the disk, which is out of use. What is being
        written just now may still turn up in the tier."""
        batch, self._batch = self._batch, []
        queue, self._queue = self._queue, deque()
        for candidate in (*batch, *queue):
            self._store.counters.rejected += not candidate.settled
            candidate.settle(False)
        self._idle_parked.unpark_all()

    async def watch(self) -> None:
        """For ever: notice when nothing moves, whatever is in the way. Else the memory of blocks
        that wait for one tier would soon be what all reads wait for."""
        while True:
            await trio.sleep(_STALL_S / 4)
            if self._batch and time.monotonic() - self._progress_s >= _STALL_S:
                self._stalled = True
                self.give_up()

    async def drained(self) -> None:
        """Wait until everything offered so far is settled."""
        self._drainers += 1
        self._hurried.unpark_all()
        try:
            while self._queue or self._batch:
                await self._idle_parked.park()
        finally:
            self._drainers -= 1

    async def run(self) -> None:
        """Store what is offered, for ever."""
        while True:
            while not self._queue:
                self._idle_parked.unpark_all()
                await self._parked.park()
                # Readers have the bytes already: gathering a batch costs them nothing, and saves
                # a hop to the writer thread and a commit of slots for each block.
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
        # Each block may go to another slab, whose file is open until it is written.
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
                if waiting[0].settled:  # given up meanwhile
                    waiting.popleft()
                    continue
                allocation = await self._place(waiting[0], writes)
                candidate = waiting.popleft()
                if isinstance(allocation, bool):
                    candidate.settle(allocation)
                else:
                    writes.append(_Write(candidate, *allocation))
            await self._flush(writes)
        except BaseException:  # cancelled while looking for room
            for write in writes:
                self._store.slabs.abort(write.slab, write.slot)
                write.candidate.settle(False)
            for candidate in waiting:
                candidate.settle(False)
            raise
        if self._store.slabs.used_charge_bytes > self._store.tier.watermarks.high_bytes:
            self._evictor.wake()

    async def _place(self, candidate: Candidate, writes: list[_Write]) -> Allocation | bool:
        """A slot for the block. True if it is here already, False if it can't be stored."""
        store = self._store
        if store.index.find(candidate.key) is not None:
            return True
        refused = self._refuses(candidate)
        if store.io.health.usable and not refused:
            allocation = await self._allocate(candidate)
            if allocation is None and writes:
                await self._flush(writes)  # slots being written may be what is in the way
                allocation = await self._allocate(candidate)
            if allocation is not None:
                return allocation
            self._evictor.refuse(class_of(len(candidate.data)))
        store.counters.rejected += not refused
        return False

    def _refuses(self, candidate: Candidate) -> bool:
        """The block was evicted on its way, or wouldn't be kept as it must be."""
        store, key = self._store, candidate.key
        if store.intents.is_unwanted(key, candidate.began_at):
            return True
        if not candidate.must_keep or not store.intents.wants_kept(key):
            return False
        return not store.may_keep(len(candidate.data))

    async def _allocate(self, candidate: Candidate) -> Allocation | None:
        slabs = self._store.slabs
        class_index = class_of(len(candidate.data))
        while True:
            slab = slabs.open_slab(class_index)
            if slab is None:
                if time.monotonic() < self._no_room_before:
                    return None
                slab = await self._evictor.make_room(class_index)
                if slab is None:
                    return None
            if slab.settled:
                return Allocation(slab, slabs.allocate(slab))
            if not await self._store.settle_slab(slab):
                return None

    async def _flush(self, writes: list[_Write]) -> None:
        """Write, then commit. Neither can be cancelled: a slot that was written is always either
        committed or aborted."""
        if not writes:
            return
        size_bytes = max(len(write.candidate.data) for write in writes)
        store = self._store
        self._progress_s = time.monotonic()
        sums = store.sums if store.is_on_disk else None
        results = await store.io.write_in_steps(
            size_bytes, _write_all, store.tier.disk, writes, sums
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
        for (candidate, slab, slot), result in zip(writes, results, strict=True):
            stored = not isinstance(result, OSError)
            if isinstance(result, OSError):
                self._write_failed(result)
                store.slabs.abort(slab, slot)
            elif store.index.find(candidate.key) is not None:  # adopted from a table meanwhile
                store.slabs.abort(slab, slot)
            elif self._refuses(candidate):
                stored = False
                store.slabs.abort(slab, slot)
            else:
                store.admit(candidate.key, slab, slot, len(candidate.data), result, candidate.age)
                touched[slab.slab_id] = slab
                self._failing = False
                if self._resting is not None:
                    self._resting.note(candidate.key, now_s)
            candidate.settle(stored)
        for slab in touched.values():
            store.put_row(slab)

    def _write_failed(self, error: OSError) -> None:
        self._store.counters.write_errors += 1
        # Nobody is evicted for a block that can't be written either.
        self._no_room_before = time.monotonic() + _FAILURE_PAUSE_S
        if not self._failing:
            log.warning("%s: can't store blocks: %s", self._store.tier.paths.root, error.strerror)
        self._failing = True


def _write_all(
    step: Step, disk: Disk, writes: list[_Write], sums: Sums | None
) -> list[int | OSError]:
    """In the writer thread: checksum and write each block. The result is the checksum, or why
    the block could not be written; then its slot holds nothing of use."""
    results: list[int | OSError] = []
    for candidate, slab, slot in writes:
        key, data = candidate.key, candidate.data
        checksum = candidate.checksum or checksum_of(data)
        entry = encode_entry(SlotEntry(key, len(data), checksum))
        try:
            disk.write(slab.fd, entry, table_offset(slot))
            disk.write(slab.fd, data, slab.layout.slot_offset(slot))
        except OSError as error:
            results.append(error)
            step(error)
        else:
            results.append(checksum)
            step(None)
            if sums is not None:
                sums.note(checksum, data)
    return results
