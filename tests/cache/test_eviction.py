"""Watermarks, classes, full disks, and slots that are read while they are evicted."""

import errno
import os
import random
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.tier import store as store_module
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.cache_dir.open_slabs import close_slab
from cachefs.format.slab import class_of
from tests.cache.harness import (
    MIB,
    PATIENCE_S,
    assert_right,
    key_of,
    open_tier,
    put,
    put_many,
    recount,
    serving,
    stores,
    until,
)
from tests.memory_origin import MemoryOrigin


async def settle(cache: BlockCache) -> None:
    """Until everything is stored and the evictors have nothing to do."""
    await cache.drain()
    await until(lambda: all(status.used_bytes <= status.high_bytes for status in cache.status()))


async def test_watermarks_and_quota_hold_under_three_times_the_quota(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    quota = 32 * MIB
    refs = put_many(origin, 960, 100_000)
    async with serving(origin, open_tier(tmp_path, quota)) as cache:
        for number, ref in enumerate(refs):
            await cache.read_block(ref, 0, 0, 100)
            if number % 20 == 0:
                await cache.drain()
                on_disk = sum(p.stat().st_blocks * 512 for p in (tmp_path / "slabs").iterdir())
                assert on_disk <= quota
        await settle(cache)
        status = cache.status()[0]
        assert status.low_bytes * 0.9 <= status.used_bytes <= status.high_bytes
        assert status.counters.evicted > 500
        assert status.counters.rejected == 0
        recount(cache)
        recent = sum(cache.is_cached_or_inflight(key_of(ref)) for ref in refs[-150:])
        assert recent == 150
        await assert_right(cache, origin, refs[::7])


async def test_hits_keep_blocks(tmp_path: Path, origin: MemoryOrigin) -> None:
    hot = put_many(origin, 20, 100_000, "hot")
    async with serving(origin, open_tier(tmp_path, 16 * MIB)) as cache:
        for ref in put_many(origin, 500, 100_000):
            await assert_right(cache, origin, hot)
            await cache.read_block(ref, 0, 0, 1)
            await cache.drain()
        assert origin.counters.gets == 520
        assert cache.status()[0].counters.evicted > 300


async def test_policy_none_fills_up_and_keeps_what_is_there(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 300, 100_000)
    async with serving(origin, open_tier(tmp_path, 16 * MIB), policy_name="none") as cache:
        for ref in refs:
            await cache.read_block(ref, 0, 0, 1)
            await cache.drain()
        status = cache.status()[0]
        assert status.counters.evicted == 0
        assert status.counters.rejected + status.cached_blocks == 300
        assert status.disk_bytes == 16 * MIB
        gets = origin.counters.gets
        await assert_right(cache, origin, refs[: status.cached_blocks])
        assert origin.counters.gets == gets


async def test_slabs_go_to_other_classes_when_the_mix_changes(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    async with serving(origin, open_tier(tmp_path, 32 * MIB)) as cache:
        for prefix, size in (("s", 3_000), ("m", 100_000), ("l", MIB), ("s2", 20_000)):
            refs = put_many(origin, min(1500, 48 * MIB // size), size, prefix)
            for ref in refs:
                await cache.read_block(ref, 0, 0, 1)
                if random.random() < 0.1:
                    await cache.drain()
            await settle(cache)
            recount(cache)
            assert cache.is_cached_or_inflight(key_of(refs[-1]))
            await assert_right(cache, origin, refs[-5:])
        status = cache.status()[0]
        assert status.counters.reassigned > 3
        assert status.disk_bytes <= 32 * MIB


async def test_blocks_that_wait_for_their_slots_keep_the_order_of_their_reads(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 48, MIB)
    async with serving(origin, open_tier(tmp_path, 32 * MIB)) as cache:
        for ref in refs:
            await cache.read_block(ref, 0, 0, 1)
        await settle(cache)
        assert cache.status()[0].counters.evicted > 0
        assert all(cache.is_cached_or_inflight(key_of(ref)) for ref in refs[-8:])


async def test_smaller_quota_after_a_restart(tmp_path: Path, origin: MemoryOrigin) -> None:
    refs = put_many(origin, 250, 100_000)
    async with serving(origin, open_tier(tmp_path, 32 * MIB)) as cache:
        await assert_right(cache, origin, refs)
    async with serving(origin, open_tier(tmp_path, 8 * MIB)) as cache:
        await until(lambda: cache.status()[0].disk_bytes <= 8 * MIB)
        recount(cache)
        assert len(os.listdir(tmp_path / "slabs")) <= 2
        await assert_right(cache, origin, refs)


@pytest.mark.expect_log("can't store blocks|can't grow")
async def test_failing_writes_cost_cache_and_no_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 14, 2 * MIB)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs[:2])
        await cache.drain()
        real = os.pwrite

        def full(fd: int, data: bytes, offset: int) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        await assert_right(cache, origin, refs)
        await cache.drain()
        status = cache.status()[0]
        assert status.counters.write_errors > 0
        assert status.counters.evicted <= 8  # those of one batch: then the error is known
        recount(cache)
        monkeypatch.setattr(os, "pwrite", real)
        await trio.sleep(1.1)
        await assert_right(cache, origin, refs)
        await cache.drain()
        assert cache.status()[0].cached_blocks == 28


@pytest.mark.expect_log("can't grow")
async def test_full_disk_when_growing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 14, 2 * MIB)

    def full(*_args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
        assert cache.status()[0].counters.rejected == 28
        assert os.listdir(tmp_path / "slabs") == []


async def test_low_free_space_shrinks_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 100, 100_000)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
        monkeypatch.setattr(CacheDirectory, "has_free_space", lambda _tier, _more=0: False)
        await until(lambda: cache.status()[0].disk_bytes == 0)
        assert os.listdir(tmp_path / "slabs") == []
        await assert_right(cache, origin, refs)
        recount(cache)


async def test_the_descriptor_of_a_deleted_slab_stays_while_it_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: MemoryOrigin
) -> None:
    """Its number must not become another file's: a thread may read a table with it."""
    refs = put_many(origin, 10, 100_000)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
        slabs = list(stores(cache)[0].slabs.by_id.values())
        with ExitStack() as uses:
            for slab in slabs:
                uses.enter_context(slab.in_use())
            monkeypatch.setattr(CacheDirectory, "has_free_space", lambda _tier, _more=0: False)
            await until(lambda: cache.status()[0].disk_bytes == 0)
            assert all(slab.fd >= 0 for slab in slabs)
        for slab in slabs:
            close_slab(slab)


async def test_a_slot_that_is_being_read_is_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: MemoryOrigin
) -> None:
    """A thread is stopped between finding the slot and reading it; meanwhile its block is
    evicted and every other slot is filled."""
    victim = put(origin, "victim", 900_000)
    quota = 4 * MIB
    async with serving(origin, open_tier(tmp_path, quota)) as cache:
        await cache.read_block(victim, 0, 0, 1)
    async with serving(origin, open_tier(tmp_path, quota, high=1.0, low=0.9)) as cache:
        store = stores(cache)[0]
        go = trio.Event()
        entered = trio.Event()
        token = trio.lowlevel.current_trio_token()
        real = store_module.read_and_check

        def slow(disk, slab, location):
            token.run_sync_soon(entered.set)
            trio.from_thread.run(go.wait, trio_token=token)
            return real(disk, slab, location)

        monkeypatch.setattr(store_module, "read_and_check", slow)
        got = []

        async def reader() -> None:
            got.append(await cache.read_block(victim, 0, 0, 900_000))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader)
            await entered.wait()
            location = store.index.locate(key_of(victim))
            slab = store.slabs.by_id[location.slab]
            table = store.directory.read_table(slab.fd, slab.layout)
            store.evict(slab, location.slot, store_module.entry_at(table, location.slot, slab.mask))
            assert not cache.is_cached_or_inflight(key_of(victim))
            monkeypatch.setattr(store_module, "read_and_check", real)
            for ref in put_many(origin, 12, 900_000):
                await cache.read_block(ref, 0, 0, 1)
                await cache.drain()
                assert not slab.holds(location.slot)
            go.set()
        assert got == [origin.expected("victim")]
        assert cache.status()[0].counters.bad_blocks == 0
        for ref in put_many(origin, 12, 900_000, "more"):
            await cache.read_block(ref, 0, 0, 1)
            await cache.drain()
        assert slab.holds(location.slot)
        recount(cache)


@pytest.mark.long
async def test_readers_writers_and_eviction_at_once(tmp_path: Path, origin: MemoryOrigin) -> None:
    refs = put_many(origin, 150, 60_000) + put_many(origin, 40, 400_000, "g")
    async with serving(origin, open_tier(tmp_path, 12 * MIB)) as cache:
        counters = stores(cache)[0].counters

        async def reader(seed: int) -> None:
            choice = random.Random(seed)
            while counters.evicted < 1000 or counters.hits < 200:
                await assert_right(cache, origin, [choice.choice(refs)])
                await trio.sleep(0.0005)

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for seed in range(12):
                    nursery.start_soon(reader, seed)
        await settle(cache)
        assert counters.bad_blocks == 0
        assert counters.rejected == 0
        recount(cache)


@pytest.mark.expect_log("it will be fetched again")
async def test_a_header_that_contradicts_its_row_while_evicting(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    """After a crash a slab can turn out to have another class, with fewer slots, than its row
    says: the evictor, being the first to open it, must not look for slots of the old class."""
    refs = put_many(origin, 1200, 6_000)
    async with serving(origin, open_tier(tmp_path, 16 * MIB)) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
    tier = open_tier(tmp_path, 16 * MIB)
    for slab_id in tier.files_on_disk()[0]:
        fd = tier.open_slab(slab_id).fd
        tier.format_slab(fd, slab_id, class_of(400_000))
        os.close(fd)
    tier.close()
    low = open_tier(tmp_path, 16 * MIB, high=0.02, low=0.01)
    async with serving(origin, low) as cache:
        await assert_right(cache, origin, put_many(origin, 20, 6_000, "g"))
        await cache.drain()
        await until(lambda: cache.status()[0].used_bytes <= low.watermarks.high_bytes)
        await assert_right(cache, origin, refs[:50])
