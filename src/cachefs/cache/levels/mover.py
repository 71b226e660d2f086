"""Moves blocks between tiers: down (demotion) to make room, up (promotion) if they are read often.

A block is copied first. It is dropped from its old tier in the loop step in which the copy enters
the index of the new tier. So it is always in one of the two tiers, and two moves of the same block
cannot each rely on the other's copy. (The two indexes are committed one after the other. A crash
may therefore leave the block in both, with the same bytes, or the copy may be adopted from its slot
table.) Readers wait for none of these steps. A pinned block is pinned in the
new tier in the same step; it can move up, but never down. The move verifies the bytes, so it never
copies a damaged block.

A tier that had room at first may still refuse the block: its disk became unhealthy, it is being
removed, or its policy keeps its blocks. A demoted block is then offered to the next tier that takes
it, once to each; a promoted block stays where it is.

Moving blocks are held in memory: up to `_BATCH_BYTES` in one demotion and one promotion batch at a
time per source tier.
"""

import time
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import NamedTuple

import trio

from cachefs.cache.policies.base import CLOCK_MASK
from cachefs.cache.tier.admission import Admission, Candidate
from cachefs.cache.tier.cooldown import Cooldown
from cachefs.cache.tier.slot_io import Checked, read_and_check
from cachefs.cache.tier.store import TierStore
from cachefs.cache.tier.upkeep.sweeper import Pick
from cachefs.cache_dir.disk import Disk
from cachefs.cache_dir.slab import Slab
from cachefs.types import BLOCK_BYTES, BlockKey, BlockLocation, Buffer

_BATCH_BYTES = 8 << 20
_PROMOTIONS = 256
"""Maximum number of blocks that wait for promotion; further ones stay where they are."""

Target = Callable[[BlockKey, int], Admission | None]
"""Returns the admission of the tier that takes a block of that key and length now, or None."""


class _Move(NamedTuple):
    """A block to be moved, its current location, the tick of its last use, and the function that
    finds its target."""

    key: BlockKey
    slab: Slab
    location: BlockLocation
    tick: int
    target: Target


class _Delivery:
    """One batch of blocks of a tier that is offered to other tiers."""

    def __init__(self, store: TierStore, cooldown: Cooldown, insist: bool) -> None:
        """With `insist`, a block that one tier refuses is offered to the next."""
        self.arrived: dict[BlockKey, Admission] = {}
        """The stored blocks, and the admission that stored each."""
        self._store = store
        self._cooldown = cooldown
        self._insist = insist
        self._asked: set[tuple[BlockKey, Admission]] = set()
        self._open = 0
        self._over = trio.Event()
        self._called_off = False

    def offer(self, move: _Move, data: memoryview) -> None:
        """Offer the block to a tier that takes it and has not refused it, if there is one."""
        if move.key in self._cooldown or self._store.index.locate(move.key) != move.location:
            return
        admission = move.target(move.key, move.location.length)
        if admission is None or (move.key, admission) in self._asked:
            return
        self._asked.add((move.key, admission))
        self._open += 1
        finished = partial(self._finished, move, admission)
        checksum = move.location.checksum
        admission.offer(Candidate(move.key, data, finished, move.tick, checksum=checksum))

    def _finished(
        self, move: _Move, admission: Admission, candidate: Candidate, stored: bool
    ) -> None:
        """Called in the loop step in which the copy enters the other index, or is given up."""
        if self._called_off:
            return
        if stored:
            self.arrived[move.key] = admission
            if move.slab.is_pinned(move.location.slot):
                admission.store.pin_moved(move.key)
            if self._store.moved_away(move.key, move.slab, move.location):
                self._store.put_row(move.slab)
        elif self._insist:
            self.offer(move, candidate.data)
        self._open -= 1
        if self._open == 0:
            self._over.set()

    async def over(self) -> None:
        """Wait until each block is stored or all tiers have refused it."""
        if self._open:
            await self._over.wait()

    def call_off(self) -> None:
        """Ignore further results: a block whose copy is stored later also stays in this tier."""
        self._called_off = True


class Mover:
    """Moves blocks out of one tier; its `ActiveTier` owns it."""

    def __init__(self, store: TierStore, cooldown: Cooldown, demote_to: Target) -> None:
        self._store = store
        self._cooldown = cooldown
        self._demote_to = demote_to
        self._moving: set[BlockKey] = set()

    async def demote(self, slab: Slab, picks: Sequence[Pick]) -> list[Pick]:
        """Move blocks to slower tiers. Returns those that no tier took: the caller drops them.

        A block that was moved lately or is being moved stays, and is not returned.
        """
        unwanted: list[Pick] = []
        moves: dict[int, _Move] = {}
        for pick in picks:
            if pick.entry is None:
                unwanted.append(pick)
            elif not self.must_stay(pick.entry.key):
                move = self.plan(pick.entry.key, slab, pick.slot, self._demote_to)
                if move is None:
                    unwanted.append(pick)
                else:
                    moves[pick.slot] = move
        arrived = await self.move(list(moves.values()), insist=True)
        self._store.counters.demoted += len(arrived)
        if not self._store.io.health.usable:
            return []  # the disk is unhealthy: blocks that could not be read may be correct
        refused = [pick for pick in picks if pick.slot in moves]
        refused = [pick for pick in refused if moves[pick.slot].key not in arrived]
        return unwanted + [pick for pick in refused if not self.must_stay(moves[pick.slot].key)]

    @property
    def moving(self) -> Set[BlockKey]:
        """The blocks that are being moved out of the tier."""
        return self._moving

    def must_stay(self, key: BlockKey) -> bool:
        """Whether the block is in its cooldown (copied in the last second), or is being moved."""
        self._cooldown.expire(time.monotonic())
        return key in self._cooldown or key in self._moving

    def plan(self, key: BlockKey, slab: Slab, slot: int | None, target: Target) -> _Move | None:
        """Describe the move of a block; None if `slab` does not have it (in `slot`, unless that is
        None), or if `target` finds no tier for it."""
        location = self._store.index.locate(key)
        if location is None or location.slab != slab.slab_id or slot not in (None, location.slot):
            return None
        if location.length > slab.slot_bytes or not slab.holds(location.slot):
            return None
        if target(key, location.length) is None:
            return None
        age = self._store.policy.age(slab, location.slot)
        tick = (self._store.history.now - age) & CLOCK_MASK
        return _Move(key, slab, location, tick, target)

    async def move(self, moves: Sequence[_Move], insist: bool) -> dict[BlockKey, Admission]:
        """Copy each block, and drop it here when the copy is stored.

        Returns the moved blocks and their targets. `_Delivery` describes `insist`.
        """
        keys = {move.key for move in moves}
        arrived: dict[BlockKey, Admission] = {}
        self._moving |= keys
        try:
            for batch in _batches(moves):
                arrived |= await self._move_batch(batch, insist)
        finally:
            self._moving -= keys
        return arrived

    async def _move_batch(self, batch: list[_Move], insist: bool) -> dict[BlockKey, Admission]:
        delivery = _Delivery(self._store, self._cooldown, insist)
        try:
            for move, data in await self._read(batch):
                delivery.offer(move, memoryview(data))
            await delivery.over()
        finally:
            delivery.call_off()
        return delivery.arrived

    async def _read(self, batch: list[_Move]) -> list[tuple[_Move, Buffer]]:
        """Read and verify the blocks of a batch.

        The result lacks damaged blocks and blocks whose slot belongs to another block: they are
        dropped from the tier. It also lacks blocks that can't be read.
        """
        store = self._store
        # An earlier batch has awaited: some blocks may have been dropped or moved since.
        batch = [
            move
            for move in batch
            if store.index.locate(move.key) == move.location
            and move.slab.fd >= 0
            and move.slab.holds(move.location.slot)
        ]
        if not batch:
            return []
        size_bytes = sum(move.location.length for move in batch)
        try:
            with store.slabs.references((move.slab, move.location.slot) for move in batch):
                blocks = await store.io.read(size_bytes, _read_all, store.directory.disk, batch)
        except OSError:
            store.counters.read_errors += len(batch)
            return []
        found: list[tuple[_Move, Buffer]] = []
        for move, block in zip(batch, blocks, strict=True):
            if isinstance(block, OSError):
                store.counters.read_errors += 1
                continue
            at = (move.key, move.slab, move.location, block.owner)
            if block.data is None or store.belongs_to_other(*at):
                store.drop_bad(*at)
            else:
                found.append((move, block.data))
        return found


class Promoter:
    """Moves blocks of one tier to the next faster level if they are read often enough."""

    def __init__(
        self, mover: Mover, store: TierStore, cooldown: Cooldown, promote_to: Target
    ) -> None:
        self._mover = mover
        self._store = store
        self._cooldown = cooldown
        self._promote_to = promote_to
        self._queue: dict[BlockKey, None] = {}
        """The keys to promote, in order, each once."""
        self._parked = trio.lowlevel.ParkingLot()

    def want(self, key: BlockKey) -> None:
        """Queue a block for promotion. Very cheap."""
        self._cooldown.expire(time.monotonic())
        if len(self._queue) < _PROMOTIONS and key not in self._cooldown:
            self._queue[key] = None
            self._parked.unpark()

    async def run(self) -> None:
        """Run forever: move the queued blocks."""
        while True:
            while not self._queue:
                await self._parked.park()
            moves = []
            size_bytes = 0
            while self._queue and size_bytes < _BATCH_BYTES - BLOCK_BYTES:
                key = next(iter(self._queue))
                del self._queue[key]
                move = self._plan(key)
                if move is not None:
                    moves.append(move)
                    size_bytes += move.location.length
            arrived = await self._mover.move(moves, insist=False)
            for admission in arrived.values():
                admission.counters.promoted += 1
            await trio.lowlevel.checkpoint()

    def _plan(self, key: BlockKey) -> _Move | None:
        location = self._store.index.locate(key)
        slab = None if location is None else self._store.slabs.by_id.get(location.slab)
        if slab is None or location is None or self._mover.must_stay(key):
            return None
        is_pinned = slab.is_pinned(location.slot)
        target = self._target_for_pinned if is_pinned else self._promote_to
        return self._mover.plan(key, slab, None, target)

    def _target_for_pinned(self, key: BlockKey, length: int) -> Admission | None:
        target = self._promote_to(key, length)
        return target if target is not None and target.store.may_pin(length) else None


def _batches(moves: Sequence[_Move]) -> Iterator[list[_Move]]:
    batch: list[_Move] = []
    size_bytes = 0
    for move in moves:
        batch.append(move)
        size_bytes += move.location.length
        if size_bytes >= _BATCH_BYTES - BLOCK_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _read_all(disk: Disk, batch: list[_Move]) -> list[Checked | OSError]:
    """Read and verify a batch, in a reader thread; the caller holds references to the slots.

    Raises `OSError` only if no block can be read: one bad sector must not fail the other blocks,
    and says little about the health of the disk.
    """
    blocks: list[Checked | OSError] = []
    for move in batch:
        try:
            blocks.append(read_and_check(disk, move.slab, move.location))
        except OSError as error:
            blocks.append(error)
    errors = [block for block in blocks if isinstance(block, OSError)]
    if len(errors) == len(batch):
        raise errors[-1]
    return blocks
