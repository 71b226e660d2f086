"""What must hold of cache directories after whatever happened to them."""

import os
import random
from pathlib import Path

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.check.directory import check_directory
from cachefs.cache.tier.store import TierStore
from cachefs.cache_dir.slab import FREE, PINNED, USED
from cachefs.format.paths import TierPaths, slab_name
from cachefs.format.slab import entry_at
from cachefs.types import BLOCK_BYTES, BlockLocation, ObjectRef
from tests.cache.harness import assert_right, block_rows, serving, stores, until
from tests.crash.load import TIERS, open_tiers
from tests.memory_origin import MemoryOrigin


async def verify(
    root: Path,
    names: list[str],
    policy: str,
    origin: MemoryOrigin,
    refs: list[ObjectRef],
    choice: random.Random,
) -> None:
    """Open the directories, prove every byte and every number, and close them.

    What is done first is left to `choice`: reading (as users do, with all its evictions and
    moves), or looking at every block where it is.
    """
    async with serving(origin, *open_tiers(root, names), policy_name=policy) as cache:
        if choice.random() < 0.5:
            await _read_all(cache, origin, refs, choice)
        await _prove(cache, origin, refs)
        await _recount(cache)
        await _read_all(cache, origin, refs, choice)
        await _quiet(cache)
        await _recount(cache)
        for store in stores(cache):
            _no_slab_leaked(store)


def check(root: Path, names: list[str]) -> None:
    """Nothing is left over once everything was looked at: what `cachefs check` says."""
    for name in names:
        report = check_directory(root / name)
        assert not report.counts, (name, report)
        assert report.clean


async def _read_all(
    cache: BlockCache, origin: MemoryOrigin, refs: list[ObjectRef], choice: random.Random
) -> None:
    await assert_right(cache, origin, choice.sample(refs, len(refs)))
    await cache.drain()


async def _quiet(cache: BlockCache) -> None:
    """Until the quota holds: the worker may have grown the tiers."""
    await until(lambda: all(status.disk_bytes <= status.quota_bytes for status in cache.status()))
    await cache.drain()


async def _prove(cache: BlockCache, origin: MemoryOrigin, refs: list[ObjectRef]) -> None:
    """Every block in every index is right, or is dropped when it is read.

    A key of no file is dropped too: after a power cut, a slab with a new class may have the old
    class's blocks where its empty table was written (docs/formats/slab.md).
    """
    path_of = {ref.object_id: ref.path for ref in refs}
    for store in stores(cache):
        for key, location in block_rows(store):
            data = await store.read_slot(key, 0, location.length)
            if data is not None:
                path = path_of[key.object_id]
                start = key.block_index * BLOCK_BYTES
                expected = origin.expected(path, start)[:BLOCK_BYTES]
                assert bytes(data) == expected, (store.directory.paths.root, path, key)


async def _recount(cache: BlockCache) -> None:
    """The sums are those of the slots; each used slot has its one block, and the bytes of these
    are what is accounted."""
    for store in stores(cache):
        slabs = store.slabs
        for slab in list(slabs.by_id.values()):
            await store.reconcile(slab)
        blocks = size_bytes = charge_bytes = pinned_bytes = 0
        for slab in slabs.by_id.values():
            table = store.directory.read_table(slab.fd, slab.layout)
            slab_bytes = 0
            for slot in slab.used_slots():
                entry = entry_at(table, slot, slab.mask)
                assert entry is not None, (slab.slab_id, slot)
                location = BlockLocation(slab.slab_id, slot, entry.length, entry.checksum)
                assert store.index.locate(entry.key) == location
                slab_bytes += entry.length
                blocks += 1
            # Once in some runs they differed, and nobody knew more than the slab's number.
            counted = (slab_bytes, slab.used_bytes, slab.used_count, slab.slot_bytes)
            assert slab_bytes == slab.used_bytes, (
                store.directory.paths.root,
                slab.slab_id,
                counted,
            )
            assert slab.pinned_count == slab.state.count(PINNED)
            assert slab.used_count == slab.state.count(USED) + slab.pinned_count
            pinned_bytes += slab.pinned_count * slab.charge_bytes
            assert slab.free_count == slab.state.count(FREE)
            size_bytes += slab_bytes
            charge_bytes += slab.used_count * slab.charge_bytes
        assert slabs.cached_blocks == blocks
        assert slabs.cached_bytes == size_bytes
        assert slabs.used_charge_bytes == charge_bytes
        assert slabs.pinned_charge_bytes == pinned_bytes


def _no_slab_leaked(store: TierStore) -> None:
    """The files are those that are accounted for; the quota holds."""
    slabs = store.slabs
    paths: TierPaths = store.directory.paths
    assert sorted(os.listdir(paths.slabs)) == sorted(map(slab_name, slabs.by_id))
    on_disk = sum(path.stat().st_size for path in paths.slabs.iterdir())
    # Less if a power cut has left a new file without its space: it is allocated with its next use.
    assert on_disk <= slabs.disk_bytes <= TIERS[paths.root.name][1]
    for slab_id, row in store.index.slab_rows():
        assert slab_id in slabs.by_id, (slab_id, row)
