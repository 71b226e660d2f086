"""Verify cached blocks again, at low priority, because disks can lose data.

The scrubber compares every block of a tier with its checksum once in `interval_s`. The rate is the
amount of cached data divided by `interval_s`, at most `_MAX_BYTES_PER_S`. A pass begins at a random
slab, so that all blocks get their turn even if the daemon restarts often.
"""

import random

import trio

from cachefs.cache.tier.store import TierStore
from cachefs.format.slab import SLOT_ENTRY, checksum_of, entry_at, table_offset
from cachefs.tiers.disk import Disk
from cachefs.tiers.slabs import Slab
from cachefs.types import BlockLocation

_MAX_BYTES_PER_S = 64 << 20
_IDLE_S = 1.0
_STEP_BYTES = 4 << 20
"""Bytes to read before the scrubber sleeps to keep its rate."""


class Scrubber:
    """Verifies the blocks of one tier; its `ActiveTier` owns it."""

    def __init__(self, store: TierStore, interval_s: float) -> None:
        """`interval_s` is the time for one pass in seconds; 0 or infinite switches it off."""
        self._store = store
        self._interval_s = interval_s

    async def run(self) -> None:
        """Verify block after block. Returns only if the scrubber is switched off."""
        if not 0 < self._interval_s < float("inf"):
            return
        while True:
            slabs = list(self._store.slabs.by_id.values())
            start = random.randrange(len(slabs)) if slabs else 0
            for slab in slabs[start:] + slabs[:start]:
                await self._scrub(slab)
            await trio.sleep(_IDLE_S)

    async def _scrub(self, slab: Slab) -> None:
        store = self._store
        while not store.io.health.usable:  # noqa: ASYNC110 - long, and no task waits
            await trio.sleep(_IDLE_S)
        if store.slabs.by_id.get(slab.slab_id) is not slab or slab.used_count == 0:
            return
        if not await store.open_slab(slab):
            return
        with slab.in_use():
            await self._scrub_open(slab)

    async def _scrub_open(self, slab: Slab) -> None:
        step: list[int] = []
        size_bytes = 0
        for slot in list(slab.used_slots()):
            step.append(slot)
            size_bytes += slab.slot_bytes
            if size_bytes >= _STEP_BYTES:
                await self._verify(slab, step, size_bytes)
                step, size_bytes = [], 0
        await self._verify(slab, step, size_bytes)

    async def _verify(self, slab: Slab, slots: list[int], size_bytes: int) -> None:
        store = self._store
        if store.slabs.by_id.get(slab.slab_id) is not slab or slab.fd < 0:
            return
        slots = [slot for slot in slots if slab.holds(slot)]
        for slot in slots:
            slab.add_reference(slot)
        try:
            found = await store.io.read(size_bytes, _read_slots, store.tier.disk, slab, slots)
        except OSError:
            store.counters.read_errors += 1
            return
        finally:
            for slot in slots:
                store.slabs.drop_reference(slab, slot)
        for slot, entry in found.items():
            self._judge(slab, slot, *entry)
        await trio.sleep(size_bytes / self._pace())

    def _judge(self, slab: Slab, slot: int, row: bytes, data: bytes) -> None:
        """Compare one slot's bytes with the index, and drop the block if they differ. This must
        stay atomic. A block that was evicted during the read is skipped."""
        store = self._store
        entry = entry_at(row, 0)
        location = None if entry is None else store.index.locate(entry.key)
        if entry is None or location is None or location[:2] != (slab.slab_id, slot):
            # Table and index name no block for this slot. The next read of its block verifies it.
            if slab.holds(slot):
                slab.verified[slot] = 0
            return
        store.counters.verified += 1
        if not _is_right(location, data):
            store.drop_bad(entry.key, slab, location, None)

    def _pace(self) -> float:
        """Return the rate in bytes per second."""
        wanted = self._store.slabs.used_charge_bytes / self._interval_s
        return min(_MAX_BYTES_PER_S, max(wanted, 1.0))


def _is_right(location: BlockLocation, data: bytes) -> bool:
    block = data[: location.length]
    return len(block) == location.length and checksum_of(block) == location.checksum


def _read_slots(disk: Disk, slab: Slab, slots: list[int]) -> dict[int, tuple[bytes, bytes]]:
    """Read table entry and all bytes of each slot, by slot. This runs in a reader thread."""
    found = {}
    for slot in slots:
        row = disk.read(slab.fd, SLOT_ENTRY.size, table_offset(slot))
        data = disk.read(slab.fd, slab.slot_bytes, slab.layout.slot_offset(slot))
        found[slot] = (row.ljust(SLOT_ENTRY.size, b"\0"), data)
    return found
