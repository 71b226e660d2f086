"""Several tiers: blocks go down before they are dropped, and come up when they are read often."""

import threading
from pathlib import Path

import pytest
import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.counters import TierStatus
from cachefs.cache_dir.disk import Disk
from cachefs.cache_dir.slab import Slab
from cachefs.errors import CacheDirError
from cachefs.types import Medium
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
    tiers_of,
    until,
)
from tests.memory_origin import MemoryOrigin


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks may move at once."""
    monkeypatch.setattr("cachefs.cache.tier.cooldown.COOLDOWN_S", 0.0)


def tier_of(cache: BlockCache, medium: Medium) -> TierStatus:
    return next(status for status in cache.status() if status.medium is medium)


async def calm(cache: BlockCache) -> None:
    await cache.drain()
    await until(lambda: all(status.used_bytes <= status.high_bytes for status in cache.status()))
    await until(lambda: cache.held_bytes == 0)


@pytest.mark.long
@pytest.mark.usefixtures("restless")
async def test_blocks_go_down_before_they_are_dropped(tmp_path: Path, origin: MemoryOrigin) -> None:
    refs = put_many(origin, 400, 100_000)
    mem = open_tier(tmp_path / "m", 8 * MIB, medium=Medium.MEM)
    ssd = open_tier(tmp_path / "s", 16 * MIB, medium=Medium.SSD)
    hdd = open_tier(tmp_path / "h", 64 * MIB, medium=Medium.HDD)
    async with serving(origin, hdd, mem, ssd) as cache:
        for number, ref in enumerate(refs):
            await cache.read_block(ref, 0, 0, 1)
            if number % 20 == 0:
                await calm(cache)
        await calm(cache)
        assert [status.medium for status in cache.status()] == list(Medium)
        assert tier_of(cache, Medium.MEM).counters.demoted > 200
        assert tier_of(cache, Medium.SSD).counters.demoted > 100
        assert tier_of(cache, Medium.HDD).counters.evicted == 0
        gets = origin.counters.gets
        await assert_right(cache, origin, refs)
        assert origin.counters.gets == gets == 400
        await calm(cache)
        recount(cache)


@pytest.mark.usefixtures("restless")
async def test_reads_are_right_while_blocks_move(tmp_path: Path, origin: MemoryOrigin) -> None:
    refs = [*put_many(origin, 120, 100_000), *put_many(origin, 40, 9_000, "s")]
    mem = open_tier(tmp_path / "m", 8 * MIB, medium=Medium.MEM)
    ssd = open_tier(tmp_path / "s", 32 * MIB)
    async with serving(origin, mem, ssd) as cache, trio.open_nursery() as nursery:
        for start in range(6):
            nursery.start_soon(assert_right, cache, origin, refs[start::6] * 4 + refs[start::5])
    assert origin.counters.gets == len(refs)


@pytest.mark.usefixtures("restless")
async def test_what_is_read_often_comes_up(tmp_path: Path, origin: MemoryOrigin) -> None:
    refs = put_many(origin, 200, 100_000)
    mem = open_tier(tmp_path / "m", 8 * MIB, medium=Medium.MEM)
    async with serving(origin, mem, open_tier(tmp_path / "s", 64 * MIB)) as cache:
        for ref in refs:
            await cache.read_block(ref, 0, 0, 1)
            await calm(cache)
        below = stores(cache)[1]
        hot = next(ref for ref in refs if below.index.find(key_of(ref)) is not None)
        await until(lambda: tiers_of(cache)[0].evictor.oldest_age > 20)
        for _ in range(3):
            await cache.read_block(hot, 0, 0, 1)
        await until(lambda: tier_of(cache, Medium.MEM).counters.promoted >= 1)
        assert stores(cache)[0].index.find(key_of(hot)) is not None
        assert below.index.find(key_of(hot)) is None
        await assert_right(cache, origin, refs)
        await calm(cache)
        recount(cache)
    assert origin.counters.gets == 200


async def test_a_block_that_moves_while_it_is_looked_for_is_found(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    """One reader waits for the disk; meanwhile another's hit moves the block up."""

    class SecondReadWaits(Disk):
        go = threading.Event()
        reads = 0

        def read(self, fd: int, length: int, offset: int) -> bytes:
            if length == 100_000:
                self.reads += 1
                if self.reads == 2:
                    self.go.wait()
            return super().read(fd, length, offset)

    ref = put(origin, "f", 100_000)
    async with serving(origin, open_tier(tmp_path / "s")) as cache:
        await assert_right(cache, origin, [ref])
    disk = SecondReadWaits()
    mem = open_tier(tmp_path / "m", medium=Medium.MEM)
    async with serving(origin, mem, open_tier(tmp_path / "s", disk=disk)) as cache:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(assert_right, cache, origin, [ref])
                nursery.start_soon(assert_right, cache, origin, [ref])
                await until(lambda: tier_of(cache, Medium.MEM).counters.promoted == 1)
                assert disk.reads >= 2
                disk.go.set()
        finally:
            disk.go.set()
    assert origin.counters.gets == 1


async def test_nothing_is_copied_twice_in_a_second(tmp_path: Path, origin: MemoryOrigin) -> None:
    """With MEM full of blocks that just came, newcomers go to the next tier."""
    refs = put_many(origin, 160, 100_000)
    mem = open_tier(tmp_path / "m", 8 * MIB, medium=Medium.MEM)
    async with serving(origin, mem, open_tier(tmp_path / "s", 64 * MIB)) as cache:
        with trio.fail_after(PATIENCE_S):
            for ref in refs:
                await cache.read_block(ref, 0, 0, 1)
            await cache.drain()
        admitted = sum(status.counters.admitted for status in cache.status())
        moved = sum(status.counters.demoted for status in cache.status())
        assert admitted - moved == 160
        await assert_right(cache, origin, refs)
    assert origin.counters.gets == 160


async def test_a_tier_comes_and_goes_under_load(tmp_path: Path, origin: MemoryOrigin) -> None:
    refs = put_many(origin, 100, 50_000)
    done = trio.Event()

    async def keep_reading(cache: BlockCache) -> None:
        while not done.is_set():
            await assert_right(cache, origin, refs)
            await trio.lowlevel.checkpoint()

    async with serving(origin, open_tier(tmp_path / "a", 32 * MIB)) as cache:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_reading, cache)
            await cache.add_tier(open_tier(tmp_path / "b", 32 * MIB))
            await trio.sleep(0.2)
            await cache.resize_tier(tmp_path / "a", 4 * MIB)
            await until(lambda: cache.status()[0].disk_bytes <= 4 * MIB)
            await cache.remove_tier(tmp_path / "a")
            await until(lambda: cache.status()[0].cached_blocks >= 20)
            await cache.add_tier(open_tier(tmp_path / "a", 32 * MIB))
            await cache.remove_tier(tmp_path / "b")
            await trio.sleep(0.2)
            done.set()
        with pytest.raises(CacheDirError, match="no cache directory of this mount"):
            await cache.remove_tier(tmp_path / "b")
        await cache.drain()
        recount(cache)
        await cache.remove_tier(tmp_path / "a")
        assert cache.status() == []
        await assert_right(cache, origin, refs)
        gets = origin.counters.gets
        await cache.add_tier(open_tier(tmp_path / "b", 32 * MIB))
        held = {ref.path for ref in refs if cache.is_cached_or_inflight(key_of(ref))}
        await assert_right(cache, origin, [ref for ref in refs if ref.path in held])
        assert held
        assert origin.counters.gets == gets


async def test_recency_outlives_a_restart(tmp_path: Path, origin: MemoryOrigin) -> None:
    """Which blocks of one slab were read last decides who goes after the restart."""
    refs = put_many(origin, 60, 100_000)
    hot = refs[::2]
    async with serving(origin, open_tier(tmp_path, 8 * MIB)) as cache:
        for ref in [*refs, *hot, *hot]:
            await cache.read_block(ref, 0, 0, 1)
            await cache.drain()
    gets = origin.counters.gets
    new = put_many(origin, 35, 100_000, "new")
    async with serving(origin, open_tier(tmp_path, 8 * MIB)) as cache:
        for ref in new:
            await cache.read_block(ref, 0, 0, 1)
            await calm(cache)
        kept = sum(cache.is_cached_or_inflight(key_of(ref)) for ref in hot)
        lost = sum(not cache.is_cached_or_inflight(key_of(ref)) for ref in refs[1::2])
        assert kept > 0.9 * len(hot) - 1
        assert lost >= 10
    assert origin.counters.gets == gets + 35


async def test_several_tiers_outlive_a_restart_and_a_change_of_policy(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    refs = [*put_many(origin, 100, 100_000), put(origin, "big", 3 * MIB)]

    def tiers():
        return (
            open_tier(tmp_path / "m", 8 * MIB, medium=Medium.MEM),
            open_tier(tmp_path / "s", 16 * MIB),
            open_tier(tmp_path / "t", 48 * MIB),
        )

    async with serving(origin, *tiers(), policy_name="lru") as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
        held = [ref for ref in refs if await cache.cached_fraction(ref) == 1.0]
    gets = origin.counters.gets
    assert len(held) == len(refs)
    for policy in ("sieve", "epoch", "2-random", "none"):
        async with serving(origin, *tiers(), policy_name=policy) as cache:
            await assert_right(cache, origin, held)
            recount(cache)
    assert origin.counters.gets == gets


async def test_a_tier_goes_while_blocks_are_dropped_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: MemoryOrigin
) -> None:
    """After a crash slot tables are asked whose a block is. Nobody can be asked any more: what the
    other tiers hold is dropped all the same."""
    refs = put_many(origin, 10, 50_000)
    async with serving(origin, open_tier(tmp_path / "a"), crash=True) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
        await stores(cache)[0].index.commit()
    async with serving(origin, open_tier(tmp_path / "a"), open_tier(tmp_path / "b")) as cache:
        store = stores(cache)[0]
        assert store.files.may_have_stale_rows
        reconcile = store.reconcile

        async def remove_first(slab: Slab) -> bool:
            is_reconciled = await reconcile(slab)
            await cache.remove_tier(tmp_path / "a")
            return is_reconciled

        await until(lambda: cache.is_reconciled)
        for slab in store.slabs.by_id.values():
            slab.is_reconciled = False
        monkeypatch.setattr(store, "reconcile", remove_first)
        assert (await cache.objects.evict(refs)).blocks == 0
        assert len(cache.status()) == 1
