"""Move pinned blocks to other slabs of their tier, so that their slab can be reused.

Otherwise a few pinned files, spread over all slabs, would prevent the tier from changing its mix
of slot classes and from shrinking. A block is copied first. Then one atomic step enters the new
slot in the index and frees the old one. A block that is unpinned or dropped during the copy is not
moved. To make room, the relocator drops evictable blocks.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import trio

from cachefs.cache.tier.disk_threads import Step
from cachefs.cache.tier.slot_io import is_right, read_data, read_entry, write_block
from cachefs.cache.tier.store import TierStore
from cachefs.cache_dir.disk import Disk
from cachefs.cache_dir.slab import Allocation, Slab
from cachefs.format.slab import SlotEntry
from cachefs.types import BlockLocation

_BATCH_BYTES = 8 << 20

DropSome = Callable[[Slab, Sequence[int]], Awaitable[None]]
"""Evicts the blocks of these slots, as far as they are evictable."""


class _Source(NamedTuple):
    """A pinned block: its slot, its entry in the slot table and its bytes."""

    slot: int
    entry: SlotEntry
    data: bytes


class Relocator:
    """Moves the pinned blocks of one tier; its `Sweeper` owns it."""

    def __init__(self, store: TierStore, drop: DropSome) -> None:
        self._store = store
        self._slabs = store.slabs
        self._drop = drop

    async def clear(self, slab: Slab) -> bool:
        """Move all pinned blocks out of a slab. The slab must be reconciled and must allocate no
        slots. Return False if not all blocks could be moved."""
        layout = slab.layout
        moved = False
        while slab.pinned_count:
            count = max(1, _BATCH_BYTES // slab.slot_bytes)
            slots = list(slab.pinned_slots(count))
            before = slab.pinned_count
            targets = await self._targets(slab, len(slots))
            try:
                if targets:
                    await self._move(slab, slots[: len(targets)], targets)
            finally:
                for target in targets:
                    self._slabs.abort(*target)
            if slab.layout is not layout or self._store.retired or slab.pinned_count >= before:
                return False
            moved = True
        if moved:
            # Without a commit, a crash after the slab is reused could restore index rows that
            # point to slots which no longer exist.
            return await self._store.index.commit()
        return True

    # -- where to ------------------------------------------------------------------------------

    async def _targets(self, slab: Slab, count: int) -> list[Allocation]:
        """Allocate up to `count` slots in other slabs of the class, or of a slightly larger one."""
        class_index = slab.class_index
        if self._slabs.open_slab_near(class_index) is None:
            await self._make_room(slab, count)
        targets: list[Allocation] = []
        while len(targets) < count:
            near = self._slabs.open_slab_near(class_index)
            if near is None:
                break
            if not near.is_ready:
                if targets or not await self._store.reconcile(near):
                    break
                continue
            targets.append(Allocation(near, self._slabs.allocate(near)))
        return targets

    async def _make_room(self, slab: Slab, count: int) -> None:
        """Drop the oldest evictable blocks of one slab: the slab of the class with the most."""
        others = [
            other
            for other in self._slabs.slabs_of(slab.class_index)
            if other is not slab and not other.draining and other.evictable_count
        ]
        giver = max(others, key=lambda other: other.evictable_count, default=None)
        if giver is None or not await self._store.reconcile(giver) or giver.fd < 0:
            return
        age = self._store.policy.age
        oldest = sorted(giver.evictable_slots(), key=lambda slot: age(giver, slot), reverse=True)
        await self._drop(giver, sorted(oldest[:count]))

    # -- moving --------------------------------------------------------------------------------

    async def _move(self, slab: Slab, slots: list[int], targets: list[Allocation]) -> None:
        """Move the blocks of these slots. Remove each used target from `targets`."""
        store = self._store
        size_bytes = len(slots) * slab.slot_bytes
        try:
            with self._slabs.references((slab, slot) for slot in slots):
                found = await store.io.read(
                    size_bytes, _read_blocks, store.directory.disk, slab, slots
                )
        except OSError:
            store.counters.read_errors += 1
            return
        sources = [
            source for source in found if source is not None and self._is_right(slab, source)
        ]
        pairs = list(zip(sources, targets, strict=False))
        results = await store.io.write_in_steps(
            slab.slot_bytes, _write_blocks, store.directory.disk, pairs
        )
        for (source, target), is_written in zip(pairs, results, strict=True):
            if is_written and self._arrive(slab, source, target):
                targets.remove(target)
        store.put_row(slab)
        await trio.lowlevel.checkpoint()

    def _location(self, slab: Slab, source: _Source) -> BlockLocation | None:
        """Return the block's location if it is still in that slot and pinned, else None."""
        location = self._store.index.locate(source.entry.key)
        if location is None or location[:2] != (slab.slab_id, source.slot):
            return None
        return location if slab.is_pinned(source.slot) else None

    def _is_right(self, slab: Slab, source: _Source) -> bool:
        location = self._location(slab, source)
        if location is None:
            return False
        if is_right(location, source.data[: location.length]):
            return location.length == source.entry.length
        self._store.drop_bad(source.entry.key, slab, location, None)
        return False

    def _arrive(self, slab: Slab, source: _Source, target: Allocation) -> bool:
        """Enter the block's new slot in the index and free the old one. This must stay atomic.
        Return False if the block has left its old slot or is no longer pinned."""
        location = self._location(slab, source)
        if location is None:
            return False
        to, slot = target
        tick = slab.ticks[source.slot]
        self._slabs.commit(to, slot, location.length, location.checksum)
        to.ticks[slot] = tick
        self._slabs.pin(to, slot)
        self._slabs.free(slab, source.slot, location.length)
        moved = location._replace(slab=to.slab_id, slot=slot)
        self._store.index.put(source.entry.key, moved)
        self._store.put_row(to)
        return True


def _read_blocks(disk: Disk, slab: Slab, slots: list[int]) -> list[_Source | None]:
    """Read table entry and bytes of each slot; None for a slot whose entry is damaged. This runs in
    a reader thread. The caller holds references to the slots."""
    found: list[_Source | None] = []
    for slot in slots:
        entry = read_entry(disk, slab, slot)
        if entry is None or entry.length > slab.slot_bytes:
            found.append(None)
        else:
            found.append(_Source(slot, entry, read_data(disk, slab, slot, entry.length)))
    return found


def _write_blocks(step: Step, disk: Disk, pairs: list[tuple[_Source, Allocation]]) -> list[bool]:
    """Write each block to its target. Return for each whether it was written. This runs in the
    writer thread."""
    written = []
    for source, (slab, slot) in pairs:
        try:
            write_block(disk, slab, slot, source.entry, source.data)
        except OSError as error:
            step(error)
            written.append(False)
        else:
            step(None)
            written.append(True)
    return written
