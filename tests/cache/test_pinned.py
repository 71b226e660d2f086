"""Blocks that users pin, and object versions that they drop at once."""

from pathlib import Path

import pytest
import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.check.directory import check_directory
from cachefs.cache.policies import POLICIES
from cachefs.cache.tier import cooldown
from cachefs.cache.tier import evictor as evictor_module
from cachefs.cache_dir.directory import CacheDirectory, Watermarks
from cachefs.errors import CacheDirError
from cachefs.types import Medium, ObjectRef
from tests.cache.faulty_disk import FaultyDisk
from tests.cache.harness import (
    MIB,
    PATIENCE_S,
    assert_right,
    key_of,
    moving,
    open_tier,
    put,
    put_many,
    read_whole,
    recount,
    serving,
    stores,
    tiers_of,
    until,
)
from tests.memory_origin import MemoryOrigin

BLOCK = 100_000


async def pinned_bytes(cache: BlockCache, refs: list[ObjectRef]) -> int:
    return sum([(await cache.objects.where(ref)).pinned_bytes for ref in refs])


async def cached_bytes(cache: BlockCache, refs: list[ObjectRef]) -> int:
    return sum([(await cache.objects.where(ref)).size_bytes for ref in refs])


async def read_all(cache: BlockCache, origin: MemoryOrigin, refs: list[ObjectRef]) -> None:
    await assert_right(cache, origin, refs)
    await cache.drain()


def below_high(cache: BlockCache) -> bool:
    return all(status.used_bytes <= status.high_bytes for status in cache.status())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Background work comes soon."""
    monkeypatch.setattr(evictor_module, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(cooldown, "COOLDOWN_S", 0.01)


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_pinned_blocks_stay_whatever_else_is_read(
    tmp_path: Path, policy: str, origin: MemoryOrigin
) -> None:
    pinned = put_many(origin, 50, BLOCK, "pinned")
    others = put_many(origin, 300, BLOCK, "other") + put_many(origin, 300, 7000, "small")
    async with serving(origin, open_tier(tmp_path, 16 * MIB), policy_name=policy) as cache:
        await read_all(cache, origin, pinned)
        done = await cache.objects.pin(pinned)
        assert (done.blocks, done.size_bytes, done.refused_blocks) == (50, 50 * BLOCK, 0)
        for _ in range(3):
            await read_all(cache, origin, others)
        if policy in ("lru", "sieve", "2-random"):
            await until(lambda: below_high(cache))
        assert await pinned_bytes(cache, pinned) == 50 * BLOCK
        assert cache.status()[0].pinned_bytes >= 50 * BLOCK
        before = origin.counters.gets
        await read_all(cache, origin, pinned)
        assert origin.counters.gets == before
        recount(cache)

        done = await cache.objects.unpin(pinned)
        assert (done.blocks, done.size_bytes) == (50, 50 * BLOCK)
        assert cache.status()[0].pinned_bytes == 0
        if policy == "lru":
            with trio.fail_after(PATIENCE_S):  # what can't be stored at once is not stored
                while await cached_bytes(cache, pinned) > 10 * BLOCK:
                    await read_all(cache, origin, others)


@pytest.mark.parametrize("crash", [False, True])
async def test_the_mark_outlives_the_daemon(
    tmp_path: Path, crash: bool, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 60, BLOCK)
    async with serving(origin, open_tier(tmp_path, 16 * MIB), crash=crash) as cache:
        await read_all(cache, origin, refs)
        await cache.objects.pin(refs[:20])
        await stores(cache)[0].index.commit()
    async with serving(origin, open_tier(tmp_path, 16 * MIB)) as cache:
        assert await pinned_bytes(cache, refs) == 20 * BLOCK
        if crash:
            await until(lambda: not stores(cache)[0].files.must_reconcile)
        await read_all(cache, origin, put_many(origin, 300, BLOCK, "other"))
        assert await pinned_bytes(cache, refs[:20]) == 20 * BLOCK
        recount(cache)
    report = check_directory(tmp_path)
    assert not report.counts


async def test_a_repair_keeps_the_marks(tmp_path: Path, origin: MemoryOrigin) -> None:
    refs = put_many(origin, 60, BLOCK)
    async with serving(origin, open_tier(tmp_path, 16 * MIB)) as cache:
        await read_all(cache, origin, refs)
        await cache.objects.pin(refs[:20])
        store = stores(cache)[0]
        location = store.index.locate(key_of(refs[3]))
        assert location is not None
        store.directory.disk.write(store.slabs.by_id[location.slab].fd, b"damage", 2 * MIB)
    assert check_directory(tmp_path, repair=True).repaired
    async with serving(origin, open_tier(tmp_path, 16 * MIB)) as cache:
        gone = 60 * BLOCK - await cached_bytes(cache, refs)
        assert gone == BLOCK
        assert 19 * BLOCK <= await pinned_bytes(cache, refs[:20]) <= 20 * BLOCK
        assert await pinned_bytes(cache, refs[20:]) == 0


async def test_nothing_else_is_stored_when_all_is_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: MemoryOrigin
) -> None:
    """And nobody looks for victims again and again."""
    refs = put_many(origin, 200, BLOCK)
    others = put_many(origin, 100, BLOCK, "other")
    tier = open_tier(tmp_path, 16 * MIB, high=0.5, low=0.4)
    tier.pin_ratio = 1.0
    async with serving(origin, tier) as cache:
        for ref in refs:
            with cache.admission_filter.pinning([ref]):
                await read_whole(cache, ref)
                await cache.drain()
        store = stores(cache)[0]
        assert store.slabs.pinned_charge_bytes == store.slabs.used_charge_bytes
        assert store.slabs.used_charge_bytes > tier.watermarks.high_bytes
        slots = 0
        policy_sample = store.policy._sample_slab

        def counted(slab: object, count: int) -> list[int]:
            nonlocal slots
            slots += count
            return policy_sample(slab, count)  # type: ignore[arg-type]

        monkeypatch.setattr(store.policy, "_sample_slab", counted)
        before = store.counters.admitted
        await read_all(cache, origin, others)
        await trio.sleep(0.2)
        assert store.counters.admitted == before
        assert store.counters.evicted == 0
        assert slots < 5000
        await read_all(cache, origin, refs[:100])


async def test_pinned_between_being_chosen_and_being_evicted(
    tmp_path: Path, origin: MemoryOrigin, disk: FaultyDisk
) -> None:
    refs = put_many(origin, 140, BLOCK)
    async with serving(origin, open_tier(tmp_path, 16 * MIB, disk=disk)) as cache:
        store = stores(cache)[0]
        await read_all(cache, origin, refs[:100])
        assert await cached_bytes(cache, refs) == 100 * BLOCK
        store.directory.watermarks = Watermarks(1, 1)
        disk.hang("read")
        tiers_of(cache)[0].evictor.wake()
        await until(lambda: disk.hanging)
        assert (await cache.objects.pin(refs[:100])).blocks == 100
        disk.heal()
        await trio.sleep(0.2)
        assert store.counters.evicted == 0
        assert await pinned_bytes(cache, refs) == 100 * BLOCK
        recount(cache)


async def test_pinned_while_its_slab_is_being_emptied(
    tmp_path: Path, origin: MemoryOrigin, disk: FaultyDisk
) -> None:
    refs = put_many(origin, 100, BLOCK)
    async with serving(origin, open_tier(tmp_path, 16 * MIB, disk=disk)) as cache:
        store = stores(cache)[0]
        await read_all(cache, origin, refs)
        disk.hang("read")
        await cache.resize_tier(tmp_path, 8 * MIB)  # one of the three slabs must go
        await until(lambda: disk.hanging)
        assert (await cache.objects.pin(refs)).refused_blocks > 0
        pinned = [ref for ref in refs if await pinned_bytes(cache, [ref])]
        disk.heal()
        await trio.sleep(0.3)
        assert len(pinned) > 50
        assert await pinned_bytes(cache, pinned) == len(pinned) * BLOCK
        recount(cache)
        assert len(store.slabs.by_id) <= 3


@pytest.mark.parametrize("crash", [False, True])
async def test_a_tier_shrinks_although_there_are_pinned_blocks_everywhere(
    tmp_path: Path, crash: bool, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 150, BLOCK)
    pinned = refs[::5]
    async with serving(origin, open_tier(tmp_path, 16 * MIB), crash=crash) as cache:
        slabs = stores(cache)[0].slabs.by_id
        await read_all(cache, origin, refs)
        await cache.objects.pin(pinned)
        assert all(slab.pinned_count for slab in slabs.values())
        assert len(slabs) == 4
        await cache.resize_tier(tmp_path, 8 * MIB)
        await until(lambda: len(slabs) == 2)
        assert await pinned_bytes(cache, refs) == len(pinned) * BLOCK
        gets = origin.counters.gets
        await read_all(cache, origin, pinned)
        assert origin.counters.gets == gets
        recount(cache)
    assert len(list((tmp_path / "slabs").iterdir())) == 2
    async with serving(origin, open_tier(tmp_path, 8 * MIB)) as cache:
        assert await pinned_bytes(cache, refs) == len(pinned) * BLOCK
        await read_all(cache, origin, pinned)
        assert origin.counters.gets == gets


@pytest.mark.long
async def test_other_sizes_find_room_although_there_are_pinned_blocks_everywhere(
    tmp_path: Path,
    origin: MemoryOrigin,
) -> None:
    refs = put_many(origin, 140, BLOCK)
    others = put_many(origin, 12, MIB, "other")
    async with serving(origin, open_tier(tmp_path, 16 * MIB)) as cache:
        await read_all(cache, origin, refs)
        await cache.objects.pin(refs[::10])
        assert all(slab.pinned_count for slab in stores(cache)[0].slabs.by_id.values())
        for _ in range(3):
            for ref in others:
                await read_all(cache, origin, [ref])
                await trio.sleep(0.06)  # a class that got no room is not tried again at once
        assert await cached_bytes(cache, others) >= 6 * MIB
        assert stores(cache)[0].counters.reassigned >= 2
        assert await pinned_bytes(cache, refs) == 14 * BLOCK
        gets = origin.counters.gets
        await read_all(cache, origin, refs[::10])
        assert origin.counters.gets == gets
        recount(cache)


async def test_dropped_and_unpinned_while_they_move_to_other_slabs(
    tmp_path: Path, origin: MemoryOrigin, disk: FaultyDisk
) -> None:
    refs = put_many(origin, 150, BLOCK)
    pinned = refs[::5]
    async with serving(origin, open_tier(tmp_path, 16 * MIB, disk=disk)) as cache:
        slabs = stores(cache)[0].slabs.by_id
        await read_all(cache, origin, refs)
        await cache.objects.pin(pinned)
        disk.hang("write")
        await cache.resize_tier(tmp_path, 12 * MIB)
        await until(lambda: disk.hanging)
        await cache.objects.evict(pinned[::3], pinned_too=True)
        await cache.objects.unpin(pinned[1::3])
        disk.heal()
        await until(lambda: len(slabs) == 3)
        assert await cached_bytes(cache, pinned[::3]) == 0
        assert await pinned_bytes(cache, pinned[1::3]) == 0
        assert await pinned_bytes(cache, pinned[2::3]) == len(pinned[2::3]) * BLOCK
        recount(cache)
        await assert_right(cache, origin, refs)


async def test_no_more_than_the_limit_is_pinned(tmp_path: Path, origin: MemoryOrigin) -> None:
    refs = put_many(origin, 100, BLOCK)
    tier = open_tier(tmp_path, 16 * MIB)
    tier.pin_ratio = 0.25
    async with serving(origin, tier) as cache:
        await read_all(cache, origin, refs)
        (charge,) = (await cache.objects.charge_to_pin(refs)).values()
        (room,) = cache.objects.pin_room()
        assert room.pinned_bytes == 0
        assert charge > room.limit_bytes == 4 * MIB
        done = await cache.objects.pin(refs)
        assert 30 < done.blocks < 42
        assert done.refused_blocks == 100 - done.blocks
        assert cache.status()[0].pinned_bytes <= 4 * MIB
        again = await cache.objects.pin(refs[: done.blocks])
        assert (again.blocks, again.refused_blocks) == (done.blocks, 0)
        with pytest.raises(CacheDirError, match=r"pinned in .*: nothing was changed; unpin"):
            await cache.resize_tier(tmp_path, 1 * MIB)


async def test_blocks_are_pinned_as_they_come(tmp_path: Path, origin: MemoryOrigin) -> None:
    wanted, other = put(origin, "wanted", 5 * MIB + 7), put(origin, "other", 3 * MIB)
    async with serving(origin, open_tier(tmp_path)) as cache:
        with cache.admission_filter.pinning([wanted]):
            await read_all(cache, origin, [wanted, other])
        assert await pinned_bytes(cache, [wanted]) == 5 * MIB + 7
        assert await pinned_bytes(cache, [other]) == 0


@pytest.mark.expect_log("not what was stored")
async def test_a_damaged_block_is_pinned_again_when_it_was_fetched_again(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 10, BLOCK)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await read_all(cache, origin, refs)
        await cache.objects.pin(refs)
        await until(lambda: cache.is_reconciled)  # closed cleanly: nothing is adopted later
    async with serving(origin, open_tier(tmp_path)) as cache:
        store = stores(cache)[0]
        location = store.index.locate(key_of(refs[0]))
        assert location is not None
        slab = store.slabs.by_id[location.slab]
        await store.open_slab(slab)
        store.directory.disk.write(slab.fd, b"damage", slab.layout.slot_offset(location.slot))
        await read_all(cache, origin, refs)
        assert store.counters.bad_blocks == 1
        assert await pinned_bytes(cache, refs) == 10 * BLOCK


@pytest.mark.expect_log("not what was stored")
async def test_a_damaged_block_that_was_unpinned_is_not_pinned_again(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 2, BLOCK)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await read_all(cache, origin, refs)
        await cache.objects.pin(refs)
        store = stores(cache)[0]
        for ref in refs:
            location = store.index.locate(key_of(ref))
            assert location is not None
            store.drop_bad(key_of(ref), store.slabs.by_id[location.slab], location, None)
        await cache.objects.unpin(refs[:1])
        await read_all(cache, origin, refs)
        assert [await pinned_bytes(cache, [ref]) for ref in refs] == [0, BLOCK]


# -- several tiers -------------------------------------------------------------------------------


def two_tiers(root: Path) -> tuple[CacheDirectory, CacheDirectory]:
    return (
        open_tier(root / "mem", 8 * MIB, medium=Medium.MEM),
        open_tier(root / "ssd", 32 * MIB, medium=Medium.SSD),
    )


async def test_what_is_pinned_stays_in_its_tier_and_moves_up_with_its_mark(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 30, BLOCK)
    async with serving(origin, open_tier(tmp_path / "ssd", 32 * MIB)) as cache:
        await read_all(cache, origin, refs)
        await cache.objects.pin(refs)
        await cache.add_tier(open_tier(tmp_path / "mem", 8 * MIB, medium=Medium.MEM))
        for _ in range(3):
            await read_all(cache, origin, refs)
            await trio.sleep(0.05)
        mem = stores(cache)[0]
        await until(lambda: not moving(cache))
        assert mem.counters.promoted > 10
        assert await pinned_bytes(cache, refs) == 30 * BLOCK
        up = mem.slabs.pinned_charge_bytes
        assert up > 10 * BLOCK
        await read_all(cache, origin, put_many(origin, 200, BLOCK, "other"))
        await until(lambda: below_high(cache))
        assert mem.slabs.pinned_charge_bytes >= up
        assert await pinned_bytes(cache, refs) == 30 * BLOCK
        recount(cache)


async def test_where_it_is_not_pinned_in_the_fastest_tier_it_goes_to_the_next(
    tmp_path: Path,
    origin: MemoryOrigin,
) -> None:
    refs = put_many(origin, 60, BLOCK)
    mem, ssd = two_tiers(tmp_path)
    mem.pin_ratio = 0.25
    async with serving(origin, mem, ssd) as cache:
        with cache.admission_filter.pinning(refs):
            await read_all(cache, origin, refs)
        assert await pinned_bytes(cache, refs) == 60 * BLOCK
        share = [
            sum(
                b.pinned_bytes
                for w in [await cache.objects.where(r) for r in refs]
                for b in w.tiers[number : number + 1]
            )
            for number in range(2)
        ]
        assert 0 < share[0] <= 2 * MIB
        assert share[1] == 60 * BLOCK - share[0]


async def test_pinned_while_it_moves(tmp_path: Path, origin: MemoryOrigin) -> None:
    """Blocks go up and down all the time; whatever is pinned at any moment stays pinned."""
    refs = put_many(origin, 150, BLOCK)
    async with serving(origin, *two_tiers(tmp_path)) as cache:
        pinned: list[ObjectRef] = []

        async def read_on() -> None:
            for _ in range(4):
                await read_all(cache, origin, refs)

        async def pin_on() -> None:
            for first in range(0, 60, 5):
                some = refs[first : first + 5]
                await trio.sleep(0.01)
                await read_all(cache, origin, some)
                done = await cache.objects.pin(some)
                if done.blocks >= 5 and not done.refused_blocks:
                    pinned.extend(some)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_on)
            nursery.start_soon(pin_on)
        assert len(pinned) > 20
        assert await pinned_bytes(cache, pinned) == len(pinned) * BLOCK
        await until(lambda: not moving(cache))
        assert await pinned_bytes(cache, pinned) == len(pinned) * BLOCK


async def test_dropped_while_it_moves(tmp_path: Path, origin: MemoryOrigin) -> None:
    refs = put_many(origin, 100, BLOCK)
    async with serving(origin, *two_tiers(tmp_path)) as cache:
        for _ in range(8):
            await read_all(cache, origin, refs)
            assert await cached_bytes(cache, refs) > 80 * BLOCK
            some = moving(cache)
            dropped = await cache.objects.evict(refs)
            assert dropped.size_bytes >= 80 * BLOCK
            assert await cached_bytes(cache, refs) == 0
            await until(lambda: not moving(cache))
            assert await cached_bytes(cache, refs) == 0, some
            assert all(status.cached_blocks == 0 for status in cache.status())


# -- dropping ------------------------------------------------------------------------------------


async def test_dropped_at_once_and_fetched_again(tmp_path: Path, origin: MemoryOrigin) -> None:
    refs = [put(origin, "large", 40 * MIB + 5), *put_many(origin, 20, BLOCK)]
    size_bytes = sum(ref.meta.size_bytes for ref in refs)
    async with serving(origin, open_tier(tmp_path, 128 * MIB)) as cache:
        await read_all(cache, origin, refs)
        told = await cache.objects.evict(refs, dry_run=True)
        assert (told.blocks, told.size_bytes) == (61, size_bytes)
        assert await cached_bytes(cache, refs) == size_bytes
        await cache.objects.pin(refs[1:5])
        done = await cache.objects.evict(refs)
        assert (done.blocks, done.size_bytes) == (57, size_bytes - 4 * BLOCK)
        assert (done.pinned_blocks, done.pinned_bytes) == (4, 4 * BLOCK)
        assert await cached_bytes(cache, refs) == 4 * BLOCK
        done = await cache.objects.evict(refs, pinned_too=True)
        assert (done.blocks, done.pinned_blocks) == (4, 0)
        status = cache.status()[0]
        assert status.used_bytes == status.pinned_bytes == status.cached_bytes == 0
        before = origin.counters.gets
        await read_all(cache, origin, refs)
        assert origin.counters.gets > before
        assert await cached_bytes(cache, refs) == size_bytes
        recount(cache)


async def test_what_is_being_fetched_does_not_come_back(tmp_path: Path) -> None:
    origin = MemoryOrigin(delay_s=0.1)
    refs = put_many(origin, 4, BLOCK)
    async with serving(origin, open_tier(tmp_path)) as cache:
        async with trio.open_nursery() as nursery:
            for ref in refs:
                nursery.start_soon(assert_right, cache, origin, [ref])
            await trio.sleep(0.02)
            await cache.objects.evict(refs[:2])
        await cache.drain()
        assert await cached_bytes(cache, refs[:2]) == 0
        assert await cached_bytes(cache, refs[2:]) == 2 * BLOCK
        await read_all(cache, origin, refs)
        assert await cached_bytes(cache, refs) == 4 * BLOCK


async def test_what_is_being_written_does_not_come_back(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 30, BLOCK)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs)  # queued, not stored
        await cache.objects.evict(refs)
        await cache.drain()
        assert await cached_bytes(cache, refs) == 0
        assert cache.status()[0].used_bytes == 0


async def test_after_a_restart_without_reading_anything(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 40, BLOCK)
    for crash in (False, True):
        async with serving(origin, open_tier(tmp_path), crash=crash) as cache:
            await read_all(cache, origin, refs)
            await stores(cache)[0].index.commit()
        async with serving(origin, open_tier(tmp_path)) as cache:
            assert (await cache.objects.evict(refs)).blocks == 40
            assert cache.status()[0].used_bytes == 0
            recount(cache)


async def test_where_counts_by_tier(tmp_path: Path, origin: MemoryOrigin) -> None:
    ref = put(origin, "large", 20 * MIB)
    async with serving(origin, *two_tiers(tmp_path)) as cache:
        assert (await cache.objects.where(ref)).blocks == 0
        await read_all(cache, origin, [ref])
        await until(lambda: not moving(cache))
        found = await cache.objects.where(ref)
        assert [share.medium for share in found.tiers] == [Medium.MEM, Medium.SSD]
        assert found.size_bytes == 20 * MIB
        assert sum(share.size_bytes for share in found.tiers) >= 20 * MIB
        assert all(share.blocks for share in found.tiers)
