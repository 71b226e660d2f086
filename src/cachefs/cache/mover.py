"""Moving blocks between tiers: down to make room, up because they are read often.

A block is copied first and dropped from where it was when the copy is stored: in between both
tiers have it, and a crash leaves it in both, with the same bytes. Readers wait for none of it. The
bytes are proven on the way, so that a move never hands on a damaged block.

What moves is in memory meanwhile: `_BATCH_BYTES` for each tier that gives, in one batch at a time.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import trio

from cachefs.cache.admission import Admission, Candidate
from cachefs.cache.placement import Resting
from cachefs.cache.store import Pick, TierStore
from cachefs.format.slab import checksum_of
from cachefs.tiers.disk import Disk
from cachefs.tiers.slabs import Slab
from cachefs.types import BLOCK_BYTES, BlockKey, BlockLocation

_BATCH_BYTES = 8 << 20
_PROMOTIONS = 256
"""Blocks that may wait for a move up; with more hits than that the rest stays where it is."""


class _Load(NamedTuple):
    """A block on its way, and where to."""

    key: BlockKey
    slab: Slab
    location: BlockLocation
    age: int
    target: Admission


class _Arrivals:
    """Counts what is settled of a batch."""

    def __init__(self, count: int) -> None:
        self.stored: set[BlockKey] = set()
        self.over = trio.Event()
        self._open = count

    def settle(self, candidate: Candidate, stored: bool) -> None:
        if stored:
            self.stored.add(candidate.key)
        self._open -= 1
        if self._open == 0:
            self.over.set()


Target = Callable[[BlockKey, int], Admission | None]
"""Where a block of that length may go; None: nowhere."""


class Mover:
    """Moves blocks out of one tier."""

    def __init__(self, store: TierStore, resting: Resting, demote_to: Target) -> None:
        self._store = store
        self._resting = resting
        self._demote_to = demote_to

    async def demote(self, _: TierStore, slab: Slab, picks: Sequence[Pick]) -> list[Pick]:
        """Move blocks to slower tiers. Returns those that no tier took, to be dropped; what was
        moved lately stays, and is in neither."""
        self._resting.forget(time.monotonic())
        unwanted: list[Pick] = []
        loads: dict[int, _Load] = {}
        for pick in picks:
            if pick.entry is None:
                unwanted.append(pick)
            elif pick.entry.key not in self._resting:
                load = self._load(pick.entry.key, slab, pick.slot, self._demote_to)
                if load is None:
                    unwanted.append(pick)
                else:
                    loads[pick.slot] = load
        moved = await self.move(list(loads.values()))
        self._store.counters.demoted += len(moved)
        unwanted += [
            pick for pick in picks if pick.slot in loads and loads[pick.slot].key not in moved
        ]
        return unwanted

    def _load(self, key: BlockKey, slab: Slab, slot: int | None, target: Target) -> _Load | None:
        """The block as it is in the tier now; None if it isn't, or has nowhere to go."""
        location = self._store.index.locate(key)
        if location is None or location.slab != slab.slab_id or slot not in (None, location.slot):
            return None
        if location.length > slab.slot_bytes or not slab.holds(location.slot):
            return None
        admission = target(key, location.length)
        if admission is None:
            return None
        return _Load(key, slab, location, self._store.policy.age(slab, location.slot), admission)

    async def move(self, loads: Sequence[_Load]) -> set[BlockKey]:
        """Copy, wait until the copies are stored, drop the originals. Returns what has moved."""
        moved: set[BlockKey] = set()
        for batch in _batches(loads):
            moved |= await self._move_batch(batch)
        return moved

    async def _move_batch(self, batch: list[_Load]) -> set[BlockKey]:
        # A load may have gone while an earlier batch was under way.
        batch = [load for load in batch if self._store.index.locate(load.key) == load.location]
        blocks = await self._read(batch)
        arrivals = _Arrivals(len(blocks))
        for load, data in blocks:
            checksum = load.location.checksum
            load.target.offer(
                Candidate(
                    load.key, memoryview(data), arrivals.settle, checksum=checksum, age=load.age
                )
            )
        if blocks:
            await arrivals.over.wait()
        moved = set()
        for load, _ in blocks:
            if load.key in arrivals.stored:
                self._store.moved_away(load.key, load.slab, load.location)
                self._store.put_row(load.slab)
                moved.add(load.key)
        return moved

    async def _read(self, batch: list[_Load]) -> list[tuple[_Load, bytes]]:
        """Their bytes. A block that turns out to be damaged is dropped and missing here."""
        store, slabs = self._store, self._store.slabs
        batch = [
            load for load in batch if load.slab.fd >= 0 and load.slab.holds(load.location.slot)
        ]
        if not batch:
            return []
        for load in batch:
            load.slab.pin(load.location.slot)
        try:
            size_bytes = sum(load.location.length for load in batch)
            blocks = await store.io.read(size_bytes, _read_all, store.tier.disk, batch)
        except OSError:
            store.counters.read_errors += 1
            return []
        finally:
            for load in batch:
                slabs.unpin(load.slab, load.location.slot)
        found = []
        for load, data in zip(batch, blocks, strict=True):
            if data is None:
                store.drop_bad(load.key, load.slab, load.location, None)
            else:
                found.append((load, data))
        return found


class Promoter:
    """Moves blocks of one tier up when they are read often enough."""

    def __init__(self, mover: Mover, store: TierStore, resting: Resting, wanted: Target) -> None:
        self._mover = mover
        self._store = store
        self._resting = resting
        self._target = wanted
        self._queue: deque[BlockKey] = deque(maxlen=_PROMOTIONS)
        self._parked = trio.lowlevel.ParkingLot()

    def want(self, key: BlockKey) -> None:
        """The block should go up. Costs next to nothing."""
        if len(self._queue) < _PROMOTIONS and key not in self._resting:
            self._queue.append(key)
            self._parked.unpark()

    async def run(self) -> None:
        """Move what is wanted, for ever."""
        while True:
            while not self._queue:
                await self._parked.park()
            self._resting.forget(time.monotonic())
            loads = []
            size_bytes = 0
            while self._queue and size_bytes < _BATCH_BYTES:
                load = self._load(self._queue.popleft())
                if load is not None:
                    loads.append(load)
                    size_bytes += load.location.length
            moved = await self._mover.move(loads)
            for load in loads:
                if load.key in moved:
                    load.target.counters.promoted += 1
            await trio.lowlevel.checkpoint()

    def _load(self, key: BlockKey) -> _Load | None:
        location = self._store.index.locate(key)
        slab = None if location is None else self._store.slabs.by_id.get(location.slab)
        if slab is None or key in self._resting:
            return None
        return self._mover._load(key, slab, None, self._target)


def _batches(loads: Sequence[_Load]) -> Iterator[list[_Load]]:
    batch: list[_Load] = []
    size_bytes = 0
    for load in loads:
        batch.append(load)
        size_bytes += load.location.length
        if size_bytes >= _BATCH_BYTES - BLOCK_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _read_all(disk: Disk, batch: list[_Load]) -> list[bytes | None]:
    """In a reader thread; the slots are pinned. None for a block that isn't what it should be."""
    blocks: list[bytes | None] = []
    for load in batch:
        location = load.location
        position = load.slab.layout.slot_offset(location.slot)
        data = disk.read(load.slab.fd, location.length, position)
        right = len(data) == location.length and checksum_of(data) == location.checksum
        blocks.append(data if right else None)
    return blocks
