"""Making room in one tier: watermarks, free space of the file system, and the mix of classes.

All of it goes slab by slab. Between two steps the loop runs and the lock is free, so that readers
never wait for it and an admission waits for one step at most. Blocks are chosen by the policy;
their keys come from the slot table on disk. A dropped block costs no write to the slab.
"""

import logging
import os
import time
from collections.abc import Callable

import trio

from cachefs.cache.store import TierStore
from cachefs.format.slab import class_of, entry_at
from cachefs.tiers.slabs import Slab
from cachefs.types import BlockKey

log = logging.getLogger(__name__)

_STEP_SLOTS = 4096
"""Most slots looked at without letting the loop run."""
_CHECK_INTERVAL_S = 1.0
"""Time between two looks at the file system's free space, and before growing is tried again."""
_PIN_PATIENCE_S = 2.0
"""How long an emptied slab may stay pinned by readers before the step is given up."""


class Evictor:
    """One per tier. `make_room` is for the admission, `run` for everything that is not urgent."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._slabs = store.slabs
        self._policy = store.policy
        self._marks = store.tier.watermarks
        # Held through every step: two steps at once could both choose the same slab.
        self._lock = trio.Lock()
        self._parked = trio.lowlevel.ParkingLot()
        self._cursor = 0
        self._no_growth_before = 0.0
        self._growth_failed = False

    def wake(self) -> None:
        self._parked.unpark_all()

    async def run(self) -> None:
        """Keep below the watermarks, for ever."""
        while True:
            with trio.move_on_after(_CHECK_INTERVAL_S):
                if not self._above_high():
                    await self._parked.park()
            await self._shrink_while_needed()
            if self._above_high() and not await self._evict_to_low():
                await trio.sleep(_CHECK_INTERVAL_S)  # nothing may go; don't spin

    async def make_room(self, key: BlockKey, length: int) -> bool:
        """See to it that the class of a block of `length` has a free slot; False if it can't be,
        or if the policy keeps what is there."""
        class_index = class_of(length)
        async with self._lock:
            if self._slabs.open_slab(class_index) or await self._grow(class_index):
                return True
            empty = self._empty_slab_of_other_class(class_index)
            if empty is not None:
                return await self._reassign(empty, class_index)
            if not self._policy.evicts or not self._policy.admits(key, length, True):
                return False
            donor = self._donor(class_index)
            if donor is None or self._above_high():
                await self._evict_for(class_index)
                if self._slabs.open_slab(class_index):
                    return True
            if donor is None or not await self._empty(donor):
                return False
            return await self._reassign(donor, class_index)

    # -- watermarks ----------------------------------------------------------------------------

    def _above_high(self) -> bool:
        return self._slabs.used_charge_bytes > self._marks.high_bytes

    def _at_low(self) -> bool:
        return self._slabs.used_charge_bytes <= self._marks.low_bytes

    def _plan(self) -> int | None:
        used = self._slabs.used_charge_bytes
        if used == 0:
            return None
        # At least one block, also when an admission asks below the low mark.
        fraction = max(0.0, (used - self._marks.low_bytes) / used)
        return self._policy.plan(list(self._slabs.by_id.values()), fraction)

    async def _evict_to_low(self) -> bool:
        """Rounds of one plan each, until the low mark is reached. False if nothing would go."""
        evicted_any = False
        while not self._at_low():
            plan = self._plan()
            if plan is None:
                return evicted_any
            before = self._store.counters.evicted
            for slab in self._in_turn():
                async with self._lock:
                    await self._evict_from(slab, plan, self._at_low)
                if self._at_low():
                    return True
            if self._store.counters.evicted == before:
                return evicted_any
            evicted_any = True
        return True

    async def _evict_for(self, class_index: int) -> None:
        """Evict, by the same plan as always, until the class has a free slot."""
        plan = self._plan()
        if plan is None:
            return

        def enough() -> bool:
            return self._slabs.open_slab(class_index) is not None

        for slab in self._in_turn():
            if slab.class_index == class_index and not enough():
                await self._evict_from(slab, plan, enough)

    def _in_turn(self) -> list[Slab]:
        """All slabs, from where the last sweep ended: no slab is always the first to give."""
        slabs = list(self._slabs.by_id.values())
        start = self._cursor % len(slabs) if slabs else 0
        self._cursor = start + 1
        return slabs[start:] + slabs[:start]

    async def _evict_from(self, slab: Slab, plan: int, enough: Callable[[], bool]) -> None:
        if slab.used_count == 0:
            return
        # Open it first: after a crash the header may turn out to say another class than the row.
        if slab.fd < 0 and not await self._store.open_slab(slab):
            return
        layout = slab.layout
        for first in range(0, slab.slot_count, _STEP_SLOTS):
            if slab.used_count == 0 or slab.fd < 0 or slab.layout is not layout:
                return
            victims = self._policy.victims(slab, plan, first, first + _STEP_SLOTS)
            if not victims:
                await trio.lowlevel.checkpoint()
                continue
            await self._evict_slots(slab, victims, first, enough)
            if enough():
                return

    async def _evict_slots(
        self, slab: Slab, victims: list[int], first: int, enough: Callable[[], bool]
    ) -> None:
        chosen_at = [slab.ticks[slot] for slot in victims]
        tier, layout = self._store.tier, slab.layout
        try:
            table = await self._store.readers.run(
                tier.read_table, slab.fd, layout, first, first + _STEP_SLOTS
            )
        except OSError:
            self._store.counters.read_errors += 1
            table = b""
        if slab.layout is not layout:
            return
        # Atomic from here on. A slot whose tick has moved was used, or given to another block
        # that this table may not know yet.
        for slot, tick in zip(victims, chosen_at, strict=True):
            if enough():
                break
            if slab.holds(slot) and slab.ticks[slot] == tick:
                self._store.evict(slab, slot, entry_at(table, slot - first))
        self._store.put_row(slab)

    # -- whole slabs ---------------------------------------------------------------------------

    async def _grow(self, class_index: int) -> bool:
        """A new slab file, if quota and free space allow."""
        tier, slabs = self._store.tier, self._slabs
        if len(slabs.by_id) >= slabs.max_slabs or time.monotonic() < self._no_growth_before:
            return False
        slab_id = slabs.take_id()
        try:
            fd = await self._store.writer.run(self._create_slab, slab_id, class_index)
        except OSError as error:
            self._no_growth_before = time.monotonic() + _CHECK_INTERVAL_S
            self._store.counters.write_errors += 1
            if not self._growth_failed:
                log.warning("%s: can't grow: %s", tier.paths.root, error.strerror)
            self._growth_failed = True
            return False
        if fd is None:
            self._no_growth_before = time.monotonic() + _CHECK_INTERVAL_S
            return False
        self._growth_failed = False
        slab = slabs.add(slab_id)
        slab.fd = fd
        slabs.reformat(slab, class_index, self._policy.clock)
        self._store.put_row(slab)
        return True

    def _create_slab(self, slab_id: int, class_index: int) -> int | None:
        """In the writer thread. None if it would leave too little free space."""
        tier = self._store.tier
        if not tier.has_free_space(tier.identity.slab_bytes):
            return None
        return tier.create_slab(slab_id, class_index)

    def _empty_slab_of_other_class(self, class_index: int) -> Slab | None:
        for slab in self._slabs.by_id.values():
            if slab.class_index != class_index and slab.is_empty():
                return slab
        return None

    def _donor(self, class_index: int) -> Slab | None:
        """The slab that is missed least, of the other class with the most free space."""
        free = self._slabs.free_charge_by_class()
        free.pop(class_index, None)
        if not free:
            return None
        richest = max(free, key=free.__getitem__)
        candidates = [
            slab
            for slab in self._slabs.by_id.values()
            if slab.class_index == richest and slab.writing_count == 0
        ]
        return min(candidates, key=self._policy.worth, default=None)

    async def _empty(self, slab: Slab) -> bool:
        """Drop every block of the slab and keep it from getting new ones. False (and the slab
        goes on as before) if a block is being written or read for too long."""
        if not await self._store.open_slab(slab) or slab.fd < 0 or slab.writing_count:
            return False
        self._slabs.drain(slab)
        layout = slab.layout
        # No slot is being written and none is given out: the table is as new as every block.
        for first in range(0, slab.slot_count, _STEP_SLOTS):
            try:
                table = await self._store.readers.run(
                    self._store.tier.read_table, slab.fd, layout, first, first + _STEP_SLOTS
                )
            except OSError:
                self._store.counters.read_errors += 1
                table = b""
            for slot in list(slab.used_slots(first, first + _STEP_SLOTS)):
                self._store.evict(slab, slot, entry_at(table, slot - first))
            self._store.put_row(slab)
        with trio.move_on_after(_PIN_PATIENCE_S):
            while not slab.is_empty():  # noqa: ASYNC110 - slabs know nothing of trio
                await trio.sleep(0.005)
        if not slab.is_empty():
            self._slabs.undrain(slab)
            return False
        return True

    async def _reassign(self, slab: Slab, class_index: int) -> bool:
        """Give an empty slab another class."""
        store = self._store
        if not await store.open_slab(slab) or slab.fd < 0 or not slab.is_empty():
            return False
        self._slabs.drain(slab)
        try:
            await store.writer.run(store.tier.format_slab, slab.fd, slab.slab_id, class_index)
        except OSError as error:
            store.counters.write_errors += 1
            log.warning("%s: can't be rewritten: %s", store.tier.paths.slab(slab.slab_id), error)
            self._slabs.reformat(slab, None, self._policy.clock)
            store.put_row(slab)
            return False
        self._slabs.reformat(slab, class_index, self._policy.clock)
        store.put_row(slab)
        store.counters.reassigned += 1
        return True

    async def _shrink_while_needed(self) -> None:
        """Delete slabs while there are more than the quota allows, or the disk is too full."""
        while self._slabs.by_id and await self._should_shrink():
            async with self._lock:
                if not await self._delete_one():
                    return

    async def _should_shrink(self) -> bool:
        if len(self._slabs.by_id) > self._slabs.max_slabs:
            return True
        try:
            return not await self._store.writer.run(self._store.tier.has_free_space)
        except OSError:
            return False

    async def _delete_one(self) -> bool:
        store, slabs = self._store, self._slabs
        slab = min(slabs.by_id.values(), key=self._policy.worth)
        if not slab.is_empty() and (not self._policy.evicts or not await self._empty(slab)):
            return False
        if slabs.by_id.get(slab.slab_id) is not slab or not slab.is_empty():
            return False
        slabs.drain(slab)
        try:
            await store.writer.run(store.tier.delete_slab, slab.slab_id)
        except OSError as error:
            store.counters.write_errors += 1
            log.warning("%s: can't be deleted: %s", store.tier.paths.slab(slab.slab_id), error)
            slabs.undrain(slab)
            return False
        # Counted until the file is gone, so that the sums never promise space that is still used.
        if slabs.by_id.get(slab.slab_id) is slab:
            slabs.remove(slab)
            store.index.delete_slab(slab.slab_id)
        if slab.fd >= 0:
            os.close(slab.fd)
            slab.fd = -1
        return True
