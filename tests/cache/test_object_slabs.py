"""Large objects that have a slab of their own: a file with exactly their bytes."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.check.directory import check_directory
from cachefs.cache.check.slab import Problem
from cachefs.format.paths import TierPaths
from cachefs.types import BlockKey, Medium, ObjectRef
from tests.cache.harness import (
    MIB,
    assert_kept,
    assert_right,
    key_of,
    open_tier,
    put,
    put_many,
    read_whole,
    recount,
    serving,
    stores,
    until,
    will_close_cleanly,
)
from tests.memory_origin import MemoryOrigin

SIZE = 9 * MIB + 12_345


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks may move at once."""
    monkeypatch.setattr("cachefs.cache.tier.cooldown.COOLDOWN_S", 0.0)


FROM = {"object_slabs_from_bytes": 8 * MIB}


async def keep(cache: BlockCache, ref: ObjectRef) -> bool:
    made: list[bool] = []
    await cache.object_slabs.keep(ref, True, made.append)
    return made == [True]


async def load(cache: BlockCache, origin: MemoryOrigin, *refs: ObjectRef) -> None:
    """Give them slabs of their own, and fetch them."""
    for ref in refs:
        assert await keep(cache, ref)
        await assert_right(cache, origin, [ref])
        await cache.drain()


def file_of(cache: BlockCache, ref: ObjectRef) -> Path | None:
    """The file with the object's bytes, if it has a slab of its own."""
    for store in stores(cache):
        slab = store.slabs.of_object.get(ref.object_id)
        if slab is not None:
            return store.directory.paths.slab(slab.slab_id)
    return None


def is_complete(cache: BlockCache, ref: ObjectRef) -> bool:
    return cache.object_slabs.complete(ref.object_id) is not None


def slab_files(path: Path) -> set[str]:
    return set(os.listdir(TierPaths(path).slabs))


async def test_the_file_has_the_bytes_of_the_object(tmp_path: Path, origin: MemoryOrigin) -> None:
    ref, other = put(origin, "w", SIZE), put(origin, "small", 3 * MIB)
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        assert cache.object_slabs.wants(ref)
        assert not cache.object_slabs.wants(other)
        await load(cache, origin, ref)
        await assert_right(cache, origin, [other])
        await cache.drain()
        file = file_of(cache, ref)
        assert file is not None
        assert file.read_bytes() == origin.expected(ref.path)
        assert file_of(cache, other) is None
        assert is_complete(cache, ref)
        gets = origin.counters.gets
        await assert_right(cache, origin, [ref, other])
        assert origin.counters.gets == gets
        recount(cache)


async def test_what_is_cached_before_moves_there(tmp_path: Path, origin: MemoryOrigin) -> None:
    ref = put(origin, "w", SIZE)
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        await assert_right(cache, origin, [ref])
        await cache.drain()
        assert file_of(cache, ref) is None
        gets = origin.counters.gets
        assert await keep(cache, ref)
        assert is_complete(cache, ref)
        file = file_of(cache, ref)
        assert file is not None
        assert file.read_bytes() == origin.expected(ref.path)
        await assert_right(cache, origin, [ref])
        assert origin.counters.gets == gets
        recount(cache)


async def test_pinned_blocks_stay_pinned(tmp_path: Path, origin: MemoryOrigin) -> None:
    ref = put(origin, "w", SIZE)
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        await assert_right(cache, origin, [ref])
        await cache.drain()
        assert (await cache.objects.pin([ref])).blocks == ref.block_count
        assert await keep(cache, ref)
        slab = stores(cache)[0].slabs.of_object[ref.object_id]
        assert slab.pinned_count == ref.block_count
        # Nothing evicts them.
        others = put_many(origin, 8, SIZE, "o")
        for other in others:
            await keep(cache, other)
            await assert_right(cache, origin, [other])
            await cache.drain()
        assert is_complete(cache, ref)
        recount(cache)


async def test_from_a_memory_tier_it_moves_to_a_disk(tmp_path: Path, origin: MemoryOrigin) -> None:
    ref = put(origin, "w", SIZE)
    mem = open_tier(tmp_path / "m", medium=Medium.MEM)
    ssd = open_tier(tmp_path / "s", medium=Medium.SSD)
    async with serving(origin, mem, ssd, **FROM) as cache:
        await assert_right(cache, origin, [ref])
        await cache.drain()
        assert await keep(cache, ref)
        file = file_of(cache, ref)
        assert file is not None
        assert file.is_relative_to(tmp_path / "s")
        assert file.read_bytes() == origin.expected(ref.path)
        memory, _ = cache.status()
        assert memory.cached_bytes == 0
        for _ in range(3):  # it stays there, however often it is read
            await assert_right(cache, origin, [ref])
        await cache.drain()
        assert is_complete(cache, ref)
        recount(cache)


async def test_a_memory_tier_takes_it_if_there_is_no_other(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    ref = put(origin, "w", SIZE)
    async with serving(origin, open_tier(tmp_path, medium=Medium.MEM), **FROM) as cache:
        await load(cache, origin, ref)
        file = file_of(cache, ref)
        assert file is not None
        assert file.read_bytes() == origin.expected(ref.path)


@pytest.mark.parametrize("crash", [False, True])
async def test_after_a_restart_it_is_complete_when_it_was_read(
    tmp_path: Path, origin: MemoryOrigin, crash: bool
) -> None:
    ref = put(origin, "w", SIZE)
    async with serving(origin, open_tier(tmp_path), crash=crash, **FROM) as cache:
        await load(cache, origin, ref)
        await stores(cache)[0].index.commit()
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        await will_close_cleanly(cache)
        assert not is_complete(cache, ref)  # nobody has looked at its bytes yet
        await assert_kept(cache, origin, [ref])
        assert is_complete(cache, ref)
        recount(cache)


async def test_without_an_index_its_table_tells_what_it_is(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    """As after a power cut that has lost the rows of the last second."""
    ref = put(origin, "w", SIZE)
    async with serving(origin, open_tier(tmp_path), crash=True, **FROM) as cache:
        await load(cache, origin, ref)
    for file in TierPaths(tmp_path).index.iterdir():
        file.unlink()
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        await until(lambda: cache.is_reconciled and cache.is_stored(ref))
        await assert_kept(cache, origin, [ref])
        assert is_complete(cache, ref)
        recount(cache)


@pytest.mark.parametrize("crash", [False, True])
async def test_half_of_it_is_continued(tmp_path: Path, origin: MemoryOrigin, crash: bool) -> None:
    ref = put(origin, "w", SIZE)
    async with serving(origin, open_tier(tmp_path), crash=crash, **FROM) as cache:
        assert await keep(cache, ref)
        for index in range(4):
            await cache.read_block(ref, index, 0, 1)
        await cache.drain()
        await stores(cache)[0].index.commit()
        assert not is_complete(cache, ref)
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        await load(cache, origin, ref)
        assert is_complete(cache, ref)
        recount(cache)


# -- eviction ---------------------------------------------------------------------------------


async def test_it_is_evicted_as_a_whole(tmp_path: Path, origin: MemoryOrigin) -> None:
    refs = put_many(origin, 8, SIZE)
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        for number, ref in enumerate(refs):
            await load(cache, origin, ref)
            assert is_complete(cache, ref)
            await until(lambda: cache.status()[0].used_bytes <= cache.status()[0].high_bytes)
            for other in refs[:number]:
                await until(
                    lambda other=other: is_complete(cache, other) or not file_of(cache, other)
                )
        kept = [ref for ref in refs if file_of(cache, ref) is not None]
        assert 4 <= len(kept) <= 6
        assert refs[-1] in kept
        assert refs[0] not in kept
        await until(lambda: len(slab_files(tmp_path)) == 2 * len(kept))
        status = cache.status()[0]
        assert status.disk_bytes <= status.capacity_bytes
        recount(cache)


@pytest.mark.usefixtures("restless")
async def test_with_a_slower_tier_its_blocks_go_there(tmp_path: Path, origin: MemoryOrigin) -> None:
    refs = put_many(origin, 8, SIZE)
    ssd = open_tier(tmp_path / "s", medium=Medium.SSD)
    hdd = open_tier(tmp_path / "h", 256 * MIB, medium=Medium.HDD)
    async with serving(origin, ssd, hdd, **FROM) as cache:
        for ref in refs:
            await load(cache, origin, ref)
            await until(lambda: cache.status()[0].used_bytes <= cache.status()[0].high_bytes)
        await until(lambda: all(map(cache.is_stored, refs)))
        assert cache.status()[1].cached_blocks >= refs[0].block_count
        gets = origin.counters.gets
        await load(cache, origin, refs[0])  # back again, or where it is
        assert origin.counters.gets == gets
        recount(cache)


async def test_what_a_process_has_open_is_not_evicted(tmp_path: Path, origin: MemoryOrigin) -> None:
    refs = put_many(origin, 8, SIZE)
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        await load(cache, origin, refs[0])
        file = file_of(cache, refs[0])
        assert file is not None
        with file.open("rb") as opened:
            for ref in refs[1:]:
                await load(cache, origin, ref)
                await until(lambda: cache.status()[0].used_bytes <= cache.status()[0].high_bytes)
            assert is_complete(cache, refs[0])
            assert opened.read() == origin.expected(refs[0].path)
        recount(cache)


async def test_small_blocks_get_the_space_of_objects(tmp_path: Path, origin: MemoryOrigin) -> None:
    refs = put_many(origin, 6, SIZE)
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        await load(cache, origin, *refs)
        small = put_many(origin, 30, 500_000, "s")
        for ref in small:
            await assert_right(cache, origin, [ref])
            await cache.drain()
        await until(lambda: cache.is_stored(small[-1]))
        status = cache.status()[0]
        assert status.disk_bytes <= status.capacity_bytes
        recount(cache)


async def test_what_does_not_fit_is_stored_in_blocks(tmp_path: Path, origin: MemoryOrigin) -> None:
    huge, ref = put(origin, "huge", 60 * MIB), put(origin, "w", SIZE)
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        assert not await keep(cache, huge)
        await load(cache, origin, ref)
        assert await keep(cache, ref)  # once more
        await assert_right(cache, origin, [huge])
        recount(cache)


async def test_an_evicted_one_leaves_no_files(tmp_path: Path, origin: MemoryOrigin) -> None:
    ref = put(origin, "w", SIZE)
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        await load(cache, origin, ref)
        assert len(slab_files(tmp_path)) == 2
        dropped = await cache.objects.evict([ref])
        assert dropped.blocks == ref.block_count
        stores_evictor = next(iter(cache._tiers)).evictor
        stores_evictor.wake()
        await until(lambda: not slab_files(tmp_path))
        assert cache.status()[0].disk_bytes == 0
        await load(cache, origin, ref)
        assert is_complete(cache, ref)
        recount(cache)


async def test_one_with_a_smaller_quota_is_deleted(tmp_path: Path, origin: MemoryOrigin) -> None:
    refs = put_many(origin, 4, SIZE)
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        await load(cache, origin, *refs)
        await cache.resize_tier(tmp_path, 24 * MIB)
        await until(lambda: cache.status()[0].disk_bytes <= 24 * MIB)
        await assert_right(cache, origin, refs)
        recount(cache)


# -- damage -----------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


@pytest.mark.expect_log("a block is not what was stored")
async def test_a_damaged_block_is_fetched_again_into_its_place(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    ref = put(origin, "w", SIZE)
    async with serving(origin, open_tier(tmp_path), scrub_interval_s=0.05, **FROM) as cache:
        await load(cache, origin, ref)
        file = file_of(cache, ref)
        assert file is not None
        flip(file, 3 * MIB + 17)
        await until(lambda: not cache.is_stored(ref))
        assert not is_complete(cache, ref)
        await assert_right(cache, origin, [ref])
        await cache.drain()
        await until(lambda: is_complete(cache, ref))
        assert file.read_bytes() == origin.expected(ref.path)
        recount(cache)


@pytest.mark.expect_log("damaged or another slab's|can't be opened")
@pytest.mark.parametrize(
    "damage",
    [
        lambda table: table.unlink(),
        lambda table: flip(table, 50),
        lambda table: table.write_bytes(b""),
        lambda table: os.truncate(table.with_suffix(".slab"), 4 * MIB),
    ],
    ids=["no table", "header", "empty table", "short file"],
)
async def test_one_with_damaged_files_is_given_up(
    tmp_path: Path, origin: MemoryOrigin, damage: Callable[[Path], None]
) -> None:
    ref = put(origin, "w", SIZE)
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        await load(cache, origin, ref)
    (table,) = TierPaths(tmp_path).slabs.glob("*.table")
    damage(table)
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        await load(cache, origin, ref)
        assert is_complete(cache, ref)
        await until(lambda: len(slab_files(tmp_path)) == 2)
        recount(cache)


async def test_a_table_without_its_file_is_removed(tmp_path: Path, origin: MemoryOrigin) -> None:
    ref = put(origin, "w", SIZE)
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        await load(cache, origin, ref)
        file = file_of(cache, ref)
    assert file is not None
    file.unlink()
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        await until(lambda: not slab_files(tmp_path))
        await load(cache, origin, ref)
        assert is_complete(cache, ref)
        recount(cache)


async def test_a_file_of_an_object_is_never_taken_for_an_ordinary_slab(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    """Somebody could have the file mapped: nothing else may be written to it."""
    ref = put(origin, "w", SIZE)
    async with serving(origin, open_tier(tmp_path), crash=True, **FROM) as cache:
        await load(cache, origin, ref)
        file = file_of(cache, ref)
    assert file is not None
    for part in TierPaths(tmp_path).index.iterdir():
        part.unlink()
    with file.open("rb") as opened:
        async with serving(origin, open_tier(tmp_path), **FROM) as cache:
            small = put_many(origin, 30, 500_000, "s")
            await assert_right(cache, origin, small)
            await cache.drain()
            assert opened.read() == origin.expected(ref.path)


# -- `cachefs check` --------------------------------------------------------------------------


async def test_a_check_finds_nothing_in_a_right_one(tmp_path: Path, origin: MemoryOrigin) -> None:
    refs = [put(origin, "w", SIZE), *put_many(origin, 5, 300_000)]
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        await load(cache, origin, refs[0])
        await assert_right(cache, origin, refs)
        await cache.drain()
    report = check_directory(tmp_path)
    assert not report.counts
    assert report.blocks == sum(ref.block_count for ref in refs)


async def test_a_repair_keeps_what_is_right(tmp_path: Path, origin: MemoryOrigin) -> None:
    ref = put(origin, "w", SIZE)
    async with serving(origin, open_tier(tmp_path), crash=True, **FROM) as cache:
        await load(cache, origin, ref)
        file = file_of(cache, ref)
    assert file is not None
    gc.collect()
    flip(file, 2 * MIB)
    for part in TierPaths(tmp_path).index.iterdir():
        part.unlink()
    report = check_directory(tmp_path, repair=True)
    assert report.recovered == ref.block_count - 1
    assert not check_directory(tmp_path).counts
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        gets = origin.counters.gets
        await load(cache, origin, ref)
        assert origin.counters.gets == gets + 1
        assert is_complete(cache, ref)
        assert file_of(cache, ref) == file


async def test_a_repair_removes_files_that_belong_to_none(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    ref = put(origin, "w", SIZE)
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        await load(cache, origin, ref)
        file = file_of(cache, ref)
    assert file is not None
    file.unlink()
    report = check_directory(tmp_path, repair=True)
    assert report.counts[Problem.BAD_HEADER] == 1
    assert not slab_files(tmp_path)


async def test_a_key_beyond_the_object_is_refused(tmp_path: Path, origin: MemoryOrigin) -> None:
    ref = put(origin, "w", SIZE)
    async with serving(origin, open_tier(tmp_path), **FROM) as cache:
        await load(cache, origin, ref)
        slabs = stores(cache)[0].slabs
        slab = slabs.of_object[ref.object_id]
        assert not slabs.allocate_for(slab, BlockKey(ref.object_id, ref.block_count))
        assert not slabs.allocate_for(slab, key_of(ref))
        assert await read_whole(cache, ref) == origin.expected(ref.path)
