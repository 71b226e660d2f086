"""Verify cached blocks again, at low priority, because disks can lose data.

The scrubber compares every block of a tier with its checksum once in `interval_s`. The rate is the
amount of cached data divided by `interval_s`, at most `_MAX_BYTES_PER_S`. A pass begins at a random
slab, so that all blocks get their turn even if the daemon restarts often.
"""

import random

import trio

from cachefs.cache.tier.slot_io import is_right, read_data, read_entry
from cachefs.cache.tier.store import TierStore
from cachefs.cache_dir.disk import Disk
from cachefs.cache_dir.slab import Slab
from cachefs.format.slab import SlotEntry

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
        try:
            with store.slabs.references((slab, slot) for slot in slots):
                found = await store.io.read(
                    size_bytes, _read_slots, store.directory.disk, slab, slots
                )
        except OSError:
            store.counters.read_errors += 1
            return
        for slot, (entry, data) in found.items():
            self._judge(slab, slot, entry, data)
        await trio.sleep(size_bytes / self._pace())

    def _judge(self, slab: Slab, slot: int, entry: SlotEntry | None, data: bytes) -> None:
        """Compare one slot's bytes with the index, and drop the block if they differ. This must
        stay atomic. A block that was evicted during the read is skipped."""
        store = self._store
        location = None if entry is None else store.index.locate(entry.key)
        if entry is None or location is None or location[:2] != (slab.slab_id, slot):
            # Table and index name no block for this slot. The next read of its block verifies it.
            if slab.holds(slot):
                slab.verified[slot] = 0
            return
        store.counters.verified += 1
        if not is_right(location, data[: location.length]):
            store.drop_bad(entry.key, slab, location, None)
        elif slab.holds(slot):
            slab.verified[slot] = location.checksum

    def _pace(self) -> float:
        """Return the rate in bytes per second."""
        wanted = self._store.slabs.used_charge_bytes / self._interval_s
        return min(_MAX_BYTES_PER_S, max(wanted, 1.0))


def _read_slots(
    disk: Disk, slab: Slab, slots: list[int]
) -> dict[int, tuple[SlotEntry | None, bytes]]:
    """Read table entry and all bytes of each slot, by slot. This runs in a reader thread."""
    return {
        slot: (read_entry(disk, slab, slot), read_data(disk, slab, slot, slab.slot_bytes))
        for slot in slots
    }
