"""Moving kept blocks to other slabs of their tier, so that theirs can be given away.

Without it a few pinned files, spread over all slabs, would keep the tier from ever changing its mix
of classes, or from becoming smaller. A block is copied, and in one step found in its new slot and
gone from the old one; what is unpinned or dropped meanwhile is left to the others. Room is made by
dropping blocks that may go.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import trio

from cachefs.cache.store import TierStore
from cachefs.cache.tier_io import Step
from cachefs.format.slab import (
    SLOT_ENTRY,
    SlotEntry,
    checksum_of,
    encode_entry,
    entry_at,
    table_offset,
)
from cachefs.tiers.disk import Disk
from cachefs.tiers.slabs import Allocation, Slab
from cachefs.types import BlockLocation

_BATCH_BYTES = 8 << 20

DropSome = Callable[[Slab, Sequence[int]], Awaitable[None]]
"""Evicts the blocks of these slots."""


class _Source(NamedTuple):
    """A kept block, as its slot and the table have it."""

    slot: int
    entry: SlotEntry
    data: bytes


class Relocator:
    """One per tier, the sweeper's."""

    def __init__(self, store: TierStore, drop: DropSome) -> None:
        self._store = store
        self._slabs = store.slabs
        self._drop = drop

    async def clear(self, slab: Slab) -> bool:
        """Move all kept blocks out of a slab that is settled and gives out no slots. False if
        that is not possible, or not wholly."""
        layout = slab.layout
        moved = False
        while slab.kept_count:
            count = max(1, _BATCH_BYTES // slab.slot_bytes)
            slots = list(slab.kept_slots(count))
            before = slab.kept_count
            targets = await self._targets(slab, len(slots))
            try:
                if targets:
                    await self._move(slab, slots[: len(targets)], targets)
            finally:
                for target in targets:
                    self._slabs.abort(*target)
            if slab.layout is not layout or self._store.retired or slab.kept_count >= before:
                return False
            moved = True
        if moved:
            # Else a crash after the slab was given away could leave its rows pointing to nowhere.
            return await self._store.index.commit()
        return True

    # -- where to ------------------------------------------------------------------------------

    async def _targets(self, slab: Slab, count: int) -> list[Allocation]:
        """Up to so many slots in other slabs of the class, or of one a little above."""
        class_index = slab.class_index
        if self._slabs.open_slab_near(class_index) is None:
            await self._make_room(slab, count)
        targets: list[Allocation] = []
        while len(targets) < count:
            near = self._slabs.open_slab_near(class_index)
            if near is None:
                break
            if not near.settled:
                if targets or not await self._store.settle_slab(near):
                    break
                continue
            targets.append(Allocation(near, self._slabs.allocate(near)))
        return targets

    async def _make_room(self, slab: Slab, count: int) -> None:
        """Drop the oldest of the slab of the class that has the most to drop."""
        others = [
            other
            for other in self._slabs.slabs_of(slab.class_index)
            if other is not slab and not other.draining and other.loose_count
        ]
        giver = max(others, key=lambda other: other.loose_count, default=None)
        if giver is None or not await self._store.settle_slab(giver) or giver.fd < 0:
            return
        age = self._store.policy.age
        oldest = sorted(giver.loose_slots(), key=lambda slot: age(giver, slot), reverse=True)
        await self._drop(giver, sorted(oldest[:count]))

    # -- moving --------------------------------------------------------------------------------

    async def _move(self, slab: Slab, slots: list[int], targets: list[Allocation]) -> None:
        """Those of the targets that were used are taken out of the list."""
        store = self._store
        size_bytes = len(slots) * slab.slot_bytes
        for slot in slots:
            slab.pin(slot)
        try:
            found = await store.io.read(size_bytes, _read_blocks, store.tier.disk, slab, slots)
        except OSError:
            store.counters.read_errors += 1
            return
        finally:
            for slot in slots:
                self._slabs.unpin(slab, slot)
        sources = [
            source for source in found if source is not None and self._is_right(slab, source)
        ]
        pairs = list(zip(sources, targets, strict=False))
        results = await store.io.write_in_steps(
            slab.slot_bytes, _write_blocks, store.tier.disk, pairs
        )
        for (source, target), is_written in zip(pairs, results, strict=True):
            if is_written and self._arrive(slab, source, target):
                targets.remove(target)
        store.put_row(slab)
        await trio.lowlevel.checkpoint()

    def _location(self, slab: Slab, source: _Source) -> BlockLocation | None:
        """The block's row, if it is still in that slot, and kept."""
        location = self._store.index.locate(source.entry.key)
        if location is None or location[:2] != (slab.slab_id, source.slot):
            return None
        return location if slab.keeps(source.slot) else None

    def _is_right(self, slab: Slab, source: _Source) -> bool:
        location = self._location(slab, source)
        if location is None:
            return False
        block = source.data[: location.length]
        if len(block) == location.length and checksum_of(block) == location.checksum:
            return location.length == source.entry.length
        self._store.drop_bad(source.entry.key, slab, location, None)
        return False

    def _arrive(self, slab: Slab, source: _Source, target: Allocation) -> bool:
        """In one step: the block is found where it was copied to, and no longer where it was."""
        location = self._location(slab, source)
        if location is None:
            return False
        to, slot = target
        tick = slab.ticks[source.slot]
        self._slabs.commit(to, slot, location.length, location.checksum)
        to.ticks[slot] = tick
        self._slabs.keep(to, slot)
        self._slabs.free(slab, source.slot, location.length)
        moved = location._replace(slab=to.slab_id, slot=slot)
        self._store.index.put(source.entry.key, moved)
        self._store.put_row(to)
        return True


def _read_blocks(disk: Disk, slab: Slab, slots: list[int]) -> list[_Source | None]:
    """In a reader thread; the slots are pinned. None where the table makes no sense."""
    found: list[_Source | None] = []
    for slot in slots:
        row = disk.read(slab.fd, SLOT_ENTRY.size, table_offset(slot))
        entry = entry_at(row.ljust(SLOT_ENTRY.size, b"\0"), 0)
        if entry is None or entry.length > slab.slot_bytes:
            found.append(None)
            continue
        data = disk.read(slab.fd, entry.length, slab.layout.slot_offset(slot))
        found.append(_Source(slot, entry, data))
    return found


def _write_blocks(step: Step, disk: Disk, pairs: list[tuple[_Source, Allocation]]) -> list[bool]:
    """In the writer thread. Whether each was written."""
    written = []
    for source, (slab, slot) in pairs:
        try:
            disk.write(slab.fd, encode_entry(source.entry), table_offset(slot))
            disk.write(slab.fd, source.data, slab.layout.slot_offset(slot))
        except OSError as error:
            step(error)
            written.append(False)
        else:
            step(None)
            written.append(True)
    return written
