"""What a restart keeps, clean or not, and what damage costs."""

import os
import random
from pathlib import Path

import pytest
import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.format.paths import TierPaths
from cachefs.format.slab import entry_at
from tests.cache.harness import (
    MIB,
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
    will_close_cleanly,
)
from tests.full_database import FullDatabase
from tests.memory_origin import MemoryOrigin


async def test_second_read_needs_no_thread_and_no_get(tmp_path: Path, origin: MemoryOrigin) -> None:
    ref = put(origin, "a", 100_000)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await cache.read_block(ref, 0, 0, 1)
        await cache.drain()
        for into in (None, memoryview(bytearray(100_000))):
            got = cache.read_block_now(key_of(ref), 10, 99_990, into)
            assert got == origin.expected("a")[10:]
        assert cache.read_block_now(key_of(ref, 1), 0, 1) is None
        assert cache.status()[0].counters.hits == 2
        recount(cache)
    assert origin.counters.gets == 1


async def test_blocks_being_stored_are_served(tmp_path: Path, origin: MemoryOrigin) -> None:
    ref = put(origin, "a", 100_000)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await cache.read_block(ref, 0, 0, 1)
        assert cache.storing_count == 1
        into = memoryview(bytearray(100_000))
        assert cache.read_block_now(key_of(ref), 5, 7) == origin.expected("a")[5:12]
        assert cache.read_block_now(key_of(ref), 5, 7, into) == origin.expected("a")[5:12]
        assert await cache.read_block(ref, 0, 5, 7) == origin.expected("a")[5:12]


async def test_clean_restart_serves_everything_and_opens_no_slab_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: MemoryOrigin
) -> None:
    refs = [*put_many(origin, 50, 30_000), put(origin, "big", 3 * MIB + 5)]
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs)
    gets = origin.counters.gets
    opened = []
    real_open = CacheDirectory.open_slab
    monkeypatch.setattr(
        CacheDirectory,
        "open_slab",
        lambda tier, number: opened.append(number) or real_open(tier, number),
    )
    async with serving(origin, open_tier(tmp_path)) as cache:
        assert cache.status()[0].cached_blocks == 54
        assert cache.status()[0].cached_bytes == 50 * 30_000 + 3 * MIB + 5
        assert (
            cache.read_block_now(key_of(refs[0]), 0, 30_000) is None
        )  # not verified since the start
        assert opened == []
        await assert_right(cache, origin, refs)
        assert cache.read_block_now(key_of(refs[0]), 0, 30_000) == origin.expected(refs[0].path)
        assert cache.status()[0].counters.verified == 54
        assert cache.status()[0].counters.adopted == 0
        recount(cache)
    assert origin.counters.gets == gets


async def test_crash_before_any_commit_loses_nothing_that_the_slabs_hold(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 20, 30_000)
    async with serving(origin, open_tier(tmp_path), crash=True) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
    gets = origin.counters.gets
    async with serving(origin, open_tier(tmp_path)) as cache:
        await until(lambda: cache.status()[0].counters.adopted == 20)
        await assert_right(cache, origin, refs)
        recount(cache)
    assert origin.counters.gets == gets


async def test_crash_between_commits_loses_only_the_rest(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    early, late = put_many(origin, 20, 30_000), put_many(origin, 20, 30_000, "late")
    async with serving(origin, open_tier(tmp_path), crash=True) as cache:
        await assert_right(cache, origin, early)
        await cache.drain()
        await stores(cache)[0].index.commit()
        await assert_right(cache, origin, late)
        await cache.drain()
    gets = origin.counters.gets
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, early)
        assert origin.counters.gets == gets
        await until(lambda: cache.status()[0].counters.adopted == 20)
        await assert_right(cache, origin, late)
        assert origin.counters.gets == gets
        recount(cache)


@pytest.mark.expect_log("a block is not what was stored")
async def test_crash_after_slots_were_reused(tmp_path: Path, origin: MemoryOrigin) -> None:
    """The index still has the old keys, the slots hold other blocks: never wrong bytes."""
    old, new = put_many(origin, 20, 30_000), put_many(origin, 20, 30_000, "new")
    async with serving(origin, open_tier(tmp_path), crash=True) as cache:
        await assert_right(cache, origin, old)
        await cache.drain()
        store = stores(cache)[0]
        await store.index.commit()
        for slab in store.slabs.by_id.values():
            table = store.directory.read_table(slab.fd, slab.layout)
            for slot in list(slab.used_slots()):
                store.evict(slab, slot, entry_at(table, slot, slab.mask))
            slab.free_hint = 0
        await assert_right(cache, origin, new)
        await cache.drain()
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, old + new + old + new)
        assert cache.status()[0].counters.bad_blocks == 20
        recount(cache)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(MIB)
        file.write(bytes(b ^ 0xFF for b in file.read(2 * MIB)))
        data = path.read_bytes()[MIB : 3 * MIB]
        file.seek(MIB)
        file.write(bytes(b ^ 0xFF for b in data))


def _header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"garbage")


@pytest.mark.parametrize(
    "damage",
    [
        _flip,
        lambda path: os.truncate(path, 2 * MIB),
        lambda path: path.unlink(),
        _header,
        lambda path: os.truncate(path, 0),
    ],
    ids=["flipped", "truncated", "deleted", "header", "emptied"],
)
@pytest.mark.expect_log("a block is not what|can't be opened|header is damaged", required=False)
async def test_damaged_slab_costs_fetches_never_wrong_bytes(
    tmp_path: Path, damage, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 100, 30_000)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs)
        await will_close_cleanly(cache)
    gets = origin.counters.gets
    slabs = sorted(TierPaths(tmp_path).slabs.iterdir())
    assert len(slabs) == 1
    damage(slabs[0])
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs)
        counters = cache.status()[0].counters
        assert counters.bad_blocks == origin.counters.gets - gets > 0
        await cache.drain()
        recount(cache)
    gets = origin.counters.gets
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs)
    assert origin.counters.gets == gets


@pytest.mark.expect_log("header is damaged")
async def test_swapped_slabs(tmp_path: Path, origin: MemoryOrigin) -> None:
    refs = put_many(origin, 40, 30_000) + put_many(origin, 8, 500_000, "g")
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs)
    first, second, *_ = sorted(TierPaths(tmp_path).slabs.iterdir())
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs + refs)
        assert cache.status()[0].counters.bad_slabs == 2


async def test_deleted_index_is_rebuilt_from_the_slabs(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 40, 30_000) + put_many(origin, 8, 500_000, "g")
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, refs)
    gets = origin.counters.gets
    for file in TierPaths(tmp_path).index.iterdir():
        file.unlink()
    async with serving(origin, open_tier(tmp_path)) as cache:
        await until(lambda: cache.status()[0].cached_blocks == 48)
        await assert_right(cache, origin, refs)
        recount(cache)
    assert origin.counters.gets == gets


async def test_several_directories_share_and_survive_the_loss_of_one(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 90, 30_000)
    quotas = {"a": 32 * MIB, "b": 64 * MIB}
    tiers = [open_tier(tmp_path / name, quota) for name, quota in quotas.items()]
    async with serving(origin, *tiers) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
        await assert_right(cache, origin, refs)
        blocks = [status.cached_blocks for status in cache.status()]
        assert sum(blocks) == 90
        assert 15 < blocks[0] < 45
    async with serving(origin, open_tier(tmp_path / "b")) as cache:
        await assert_right(cache, origin, refs)
    assert origin.counters.gets == 90 + blocks[0]
    async with serving(origin, *(open_tier(tmp_path / name) for name in "ab")) as cache:
        await assert_right(cache, origin, refs)
    assert origin.counters.gets == 90 + blocks[0]


@pytest.mark.expect_log("a block is not what was stored|can't be opened", required=False)
@pytest.mark.long
async def test_many_crashes_under_load_and_eviction(tmp_path: Path, origin: MemoryOrigin) -> None:
    """Crashes at random moments, with commits in between, over a cache that is too small."""
    choice = random.Random(7)
    refs = put_many(origin, 150, 60_000) + put_many(origin, 40, 400_000, "g")
    for generation in range(12):
        tier = open_tier(tmp_path, 12 * MIB)
        async with serving(origin, tier, crash=generation % 4 != 3) as cache:

            async def reader(seed: int, cache: BlockCache = cache) -> None:
                order = random.Random(seed)
                for _ in range(order.randrange(80)):
                    await assert_right(cache, origin, [order.choice(refs)])
                    await trio.sleep(0.0005)
                    if order.random() < 0.02:
                        await stores(cache)[0].index.commit()

            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(reader, choice.randrange(10**6))
                if generation % 2:
                    await trio.sleep(choice.random() / 10)
                    nursery.cancel_scope.cancel()
    async with serving(origin, open_tier(tmp_path, 12 * MIB)) as cache:
        await assert_right(cache, origin, refs)


@pytest.mark.expect_log("can't write the database", required=False)
async def test_no_slot_is_used_again_while_the_clean_mark_stands(
    tmp_path: Path, full_database: FullDatabase, origin: MemoryOrigin
) -> None:
    """A daemon that can't say that the directory is open changes nothing in it: the next one
    believes what the mark says."""
    old, new = put_many(origin, 20, 30_000), put_many(origin, 5, 30_000, "new")
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, old)
        await cache.drain()
        await until(lambda: not stores(cache)[0].files.must_reconcile)
    full_database.is_full = True
    async with serving(origin, open_tier(tmp_path), crash=True) as cache:
        await until(lambda: tiers_of(cache)[0].admission.closed)
        await assert_right(cache, origin, old + new)
        await cache.drain()
        assert cache.status()[0].counters.admitted == 0
    full_database.is_full = False
    gets = origin.counters.gets
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, old)
        assert origin.counters.gets == gets
        recount(cache)
        await until(lambda: not tiers_of(cache)[0].admission.closed)
        await assert_right(cache, origin, new)
        await cache.drain()
        assert cache.status()[0].counters.admitted == 5


@pytest.mark.expect_log("can't write the database")
async def test_blocks_are_stored_again_once_the_index_can_be_written(
    tmp_path: Path, full_database: FullDatabase, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 5, 30_000)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await until(lambda: not stores(cache)[0].files.must_reconcile)
    full_database.is_full = True
    async with serving(origin, open_tier(tmp_path)) as cache:
        await until(lambda: tiers_of(cache)[0].admission.closed)
        full_database.is_full = False
        await until(lambda: not tiers_of(cache)[0].admission.closed)
        await assert_right(cache, origin, refs)
        await cache.drain()
        assert cache.status()[0].counters.admitted == 5


async def test_a_new_directory_has_nothing_to_reconcile(tmp_path: Path) -> None:
    """So it is cleanly closed, however soon."""
    tier = open_tier(tmp_path)
    async with serving(MemoryOrigin(), tier) as cache:
        assert not stores(cache)[0].files.must_reconcile
