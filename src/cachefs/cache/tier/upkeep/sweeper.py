"""Empty slabs, in part or whole: choose blocks, then drop or demote them.

The policy chooses the blocks. Their keys come from the slot table on disk. Dropping a block writes
nothing to the slab. If there is a slower tier, blocks move there first (`levels/mover.py`), and
only those that it does not take are dropped. Callers must not run two steps at the same time."""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import trio

from cachefs.cache.tier.store import TierStore
from cachefs.cache.tier.upkeep.relocator import Relocator
from cachefs.cache_dir.slab import Slab
from cachefs.format.slab import SLOT_ENTRY, SlotEntry, entry_at

_STEP_SLOTS = 512
"""Most slots to check in one turn of the event loop."""
_REFERENCE_PATIENCE_S = 2.0
"""How long the sweeper waits for readers' references to an emptied slab before it gives
up."""
_MOVE_BLOCKS = 64
"""Blocks moved to a slower tier at a time."""
_DROP_BLOCKS = 16
"""Blocks to drop in one turn of the event loop. Each takes about 30 us."""


class Pick(NamedTuple):
    """A used slot that an eviction step has chosen, its tick at that time, and its entry in the
    slot table (None if damaged)."""

    slot: int
    tick: int
    entry: SlotEntry | None


Demote = Callable[[Slab, Sequence[Pick]], Awaitable[Sequence[Pick]]]
"""Moves blocks to slower tiers. Returns the picks that must be dropped instead."""


class Sweeper:
    """Empties the slabs of one tier; its `Evictor` owns it."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._slabs = store.slabs
        self._policy = store.policy
        self._relocator = Relocator(store, self._drop_slots)
        self._looked_at = 0
        """Slots checked since the event loop last ran."""
        self.demote: Demote | None = None
        """Set while there is a slower tier."""

    async def evict_from(self, slab: Slab, plan: float, enough: Callable[[], bool]) -> None:
        """Evict the blocks of the slab that the plan selects, until `enough` returns True."""
        if slab.evictable_count == 0:
            return
        # Open the slab first: after a crash its header may name another class than its row.
        if not slab.is_ready and not await self._store.reconcile(slab):
            return
        if slab.whole is not None:
            if not enough():
                await self._evict_whole(slab, plan)
            return
        with slab.in_use():
            await self._evict_from(slab, plan, enough)

    async def _evict_whole(self, slab: Slab, plan: float) -> None:
        """Evict all blocks of an object's slab if the plan selects all of them, and nobody has the
        file open or mapped through the kernel: its space is free only when it is deleted."""
        victims = self._policy.victims(slab, plan, 0, slab.slot_count)
        if len(victims) == slab.used_count and not self.is_held(slab):
            await self.empty(slab)

    def is_held(self, slab: Slab) -> bool:
        """Whether a process has the file of an object's slab open or mapped through the kernel."""
        return slab.fd >= 0 and self._store.directory.disk.is_used_elsewhere(slab.fd)

    async def _evict_from(self, slab: Slab, plan: float, enough: Callable[[], bool]) -> None:
        layout = slab.layout
        for first in range(0, slab.slot_count, _STEP_SLOTS):
            if slab.evictable_count == 0 or slab.fd < 0 or slab.layout is not layout:
                return
            victims = self._policy.victims(slab, plan, first, first + _STEP_SLOTS)
            if not victims:
                self._looked_at += min(_STEP_SLOTS, slab.slot_count - first)
                if self._looked_at >= _STEP_SLOTS:
                    self._looked_at = 0
                    await trio.lowlevel.checkpoint()
                continue
            await self._evict_slots(slab, victims, first, enough)
            if enough():
                return

    async def _evict_slots(
        self, slab: Slab, victims: list[int], first: int, enough: Callable[[], bool]
    ) -> None:
        chosen_at = [slab.ticks[slot] for slot in victims]
        layout = slab.layout
        table = await self._read_table(slab, first)
        if slab.layout is not layout:
            return
        # If its tick has changed, a slot was used, or it now holds another block that this table
        # may not contain yet.
        picks = [
            Pick(slot, tick, entry_at(table, slot - first, slab.mask))
            for slot, tick in zip(victims, chosen_at, strict=True)
            if slab.is_evictable(slot) and slab.ticks[slot] == tick
        ]
        count = _DROP_BLOCKS if self.demote is None else _MOVE_BLOCKS
        for start in range(0, len(picks), count):
            if enough() or slab.layout is not layout:
                return
            some = picks[start : start + count]
            if self.demote is None:
                self._drop(slab, some, enough)
                await trio.lowlevel.checkpoint()
            else:
                await self._give_away(slab, some, enough)

    async def _give_away(
        self, slab: Slab, picks: Sequence[Pick], enough: Callable[[], bool]
    ) -> None:
        """Move blocks to slower tiers; drop those that none takes."""
        assert self.demote is not None
        layout = slab.layout
        unwanted = await self.demote(slab, picks)
        if slab.layout is layout:
            self._drop(slab, unwanted, enough)

    def _drop(
        self,
        slab: Slab,
        picks: Sequence[Pick],
        enough: Callable[[], bool] | None = None,
    ) -> None:
        """Drop the blocks of these picks. With `enough`, stop when it returns True, and skip blocks
        that were used since they were picked."""
        for slot, tick, entry in picks:
            if self._store.retired or (enough is not None and enough()):
                break  # if retired, the tier is closing, and a slower tier may be closed already
            if slab.is_evictable(slot) and (enough is None or slab.ticks[slot] == tick):
                self._store.evict(slab, slot, entry)
        self._store.put_row(slab)

    async def _clear_pinned(self, slab: Slab) -> bool:
        is_clear = False
        try:
            is_clear = await self._relocator.clear(slab)
        finally:
            if not is_clear:
                self._slabs.undrain(slab)
        return is_clear

    async def _drop_slots(self, slab: Slab, slots: Sequence[int]) -> None:
        """Evict the blocks of these slots, as far as they are evictable."""
        for first in range(0, slab.slot_count, _STEP_SLOTS):
            some = [slot for slot in slots if first <= slot < first + _STEP_SLOTS]
            if some and slab.fd >= 0:
                await self._evict_slots(slab, some, first, lambda: False)

    async def _read_table(self, slab: Slab, first: int) -> bytes:
        """Return `_STEP_SLOTS` entries of the slot table, from slot `first` on; empty if they
        cannot be read."""
        directory, stop = self._store.directory, first + _STEP_SLOTS
        size_bytes = _STEP_SLOTS * SLOT_ENTRY.size
        try:
            with slab.in_use():
                return await self._store.io.read(
                    size_bytes, directory.read_table, slab.table_fd, slab.layout, first, stop
                )
        except OSError:
            self._store.counters.read_errors += 1
            return b""

    async def empty(self, slab: Slab, must: bool = False) -> bool:
        """Drop or demote every block of the slab, move its pinned blocks to other slabs, and
        let it allocate no slots. With `must`, drop what cannot be demoted yet.

        Return False, and leave the slab in use, if that is not possible, if a block is being
        written, or if a reader holds a slot longer than `_REFERENCE_PATIENCE_S`.
        """
        if not await self._store.reconcile(slab) or slab.fd < 0 or slab.writing_count:
            return False
        with slab.in_use():
            return await self._empty(slab, must)

    async def _empty(self, slab: Slab, must: bool) -> bool:
        self._slabs.drain(slab)
        if slab.pinned_count and not await self._clear_pinned(slab):
            return False
        # No slot is being written or allocated, so the table on disk is current for every block.
        for first in range(0, slab.slot_count, _STEP_SLOTS):
            slots = list(slab.evictable_slots(first, first + _STEP_SLOTS))
            if self.demote is not None:
                await self._evict_slots(slab, slots, first, lambda: False)
                if slab.used_count and not must and any(slab.holds(slot) for slot in slots):
                    # Blocks in cooldown cannot be demoted yet, and no new block may replace them.
                    self._slabs.undrain(slab)
                    return False
            table = await self._read_table(slab, first)
            if self._store.retired:
                return False
            picks = [
                Pick(slot, slab.ticks[slot], entry_at(table, slot - first, slab.mask))
                for slot in slab.evictable_slots(first, first + _STEP_SLOTS)
            ]
            for start in range(0, len(picks), _DROP_BLOCKS):
                self._drop(slab, picks[start : start + _DROP_BLOCKS])
                await trio.lowlevel.checkpoint()
        with trio.move_on_after(_REFERENCE_PATIENCE_S):
            # A user may have pinned one of its blocks in the meantime.
            while not slab.is_empty() and not slab.pinned_count:  # noqa: ASYNC110 - no event there
                await trio.sleep(0.005)
        if not slab.is_empty():
            self._slabs.undrain(slab)
            return False
        return True
