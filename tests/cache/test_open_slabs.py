"""Far more slabs than may be open at a time."""

import random
from pathlib import Path

import pytest
import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache_dir.directory import CacheDirectory, slab_bytes_for
from cachefs.cache_dir.slabs import SlabSet
from cachefs.format.index_record import SlabRow
from cachefs.format.slab import SlabHeader, class_of, decode_header, encode_header, slab_layout
from tests.cache.faulty_disk import FaultyDisk
from tests.cache.harness import (
    assert_right,
    put_many,
    recount,
    serving,
    stores,
    until,
)
from tests.memory_origin import MemoryOrigin

SLAB_BYTES = 72 << 10
MOST = 6
TIB = 1 << 40

pytestmark = pytest.mark.usefixtures("few_descriptors")


@pytest.fixture
def few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachefs.cache_dir.open_slabs.descriptors_for_slabs", lambda: MOST)


def open_tier(path: Path, slabs: int, disk: FaultyDisk | None = None) -> CacheDirectory:
    return CacheDirectory.open(
        path,
        slabs * SLAB_BYTES,
        MemoryOrigin().identity,
        free_space_ratio=0.0,
        slab_bytes=SLAB_BYTES,
        disk=disk,
    )


def open_count(cache: BlockCache) -> int:
    return sum(slab.fd >= 0 for store in stores(cache) for slab in store.slabs.by_id.values())


@pytest.mark.parametrize("crash", [False, True])
async def test_reads_of_a_hundred_slabs(tmp_path: Path, crash: bool, origin: MemoryOrigin) -> None:
    refs = put_many(origin, 100, 40_000)
    async with serving(origin, open_tier(tmp_path, 120), crash=crash) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
        assert len(stores(cache)[0].slabs.by_id) >= 100
        assert open_count(cache) <= MOST
        await until(lambda: not stores(cache)[0].files.must_reconcile)
    gets = origin.counters.gets
    async with serving(origin, open_tier(tmp_path, 120)) as cache:
        # What was not committed is adopted, slab by slab.
        await until(lambda: not stores(cache)[0].files.must_reconcile)
        for _ in range(2):
            random.shuffle(refs)
            await assert_right(cache, origin, refs)
        assert open_count(cache) <= MOST
        recount(cache)
    assert origin.counters.gets == gets


async def test_eviction_moves_and_many_readers(tmp_path: Path, origin: MemoryOrigin) -> None:
    """More readers than descriptors, more data than room, and pinned files."""
    refs = put_many(origin, 120, 40_000)
    async with serving(origin, open_tier(tmp_path, 60), scrub_interval_s=1) as cache:

        async def read_some(seed: int) -> None:
            some = random.Random(seed).sample(refs, 60)
            for ref in some:
                await assert_right(cache, origin, [ref])
                await trio.lowlevel.checkpoint()

        for _ in range(2):
            async with trio.open_nursery() as readers:
                for seed in range(2 * MOST):
                    readers.start_soon(read_some, seed)
        await cache.drain()
        assert cache.status()[0].counters.evicted
        assert cache.status()[0].counters.bad_blocks == 0
        assert cache.status()[0].counters.read_errors == 0
        recount(cache)


async def test_reads_in_threads_keep_their_descriptors(
    tmp_path: Path, origin: MemoryOrigin, disk: FaultyDisk
) -> None:
    """A disk that dawdles: slots are being read while others' slabs are opened."""
    refs = put_many(origin, 40, 40_000)
    async with serving(origin, open_tier(tmp_path, 60, disk)) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
        disk.cold = True
        disk.delay(0.003, "read")
        async with trio.open_nursery() as readers:
            for part in range(10):
                readers.start_soon(assert_right, cache, origin, refs[part::10])
        # On a busy machine the origin may be asked, too: readers wait only so long for a disk.
        assert cache.status()[0].counters.bad_blocks == 0
        assert cache.status()[0].counters.read_errors == 0
        assert disk.calls["read"] >= len(refs) // 2


@pytest.mark.long
def test_a_hundred_tebibytes() -> None:
    """Slabs whose number, size and tables fit, and their sums."""
    slab_bytes = slab_bytes_for(100 * TIB)
    count = 100 * TIB // slab_bytes
    assert count < 1 << 17
    assert slab_bytes_for(4 * TIB) == (64 << 20) + 8192
    assert slab_bytes_for(400 * TIB) < 1 << 32
    header = SlabHeader(count, class_of(1 << 20), slab_bytes, bytes(16))
    assert decode_header(encode_header(header)) == header
    slabs = SlabSet(slab_bytes, count)
    layout = slab_layout(class_of(1 << 20), slab_bytes)
    used = layout.slot_count
    assert used == 1024
    bitmap = b"\xff" * (used // 8)
    row = SlabRow(layout.class_index, layout.slot_count, used, 1, used << 20, bitmap, b"")
    for slab_id in range(count):
        slabs.add(slab_id, row)
    assert slabs.cached_bytes == count * used << 20
    assert slabs.capacity_bytes > 99 * TIB
    slab = slabs.by_id[count - 1]
    slab.hydrate()
    slabs.free(slab, 7, 1 << 20)
    assert slabs.open_slab(layout.class_index) is slab
    assert slabs.allocate(slab) == 7
