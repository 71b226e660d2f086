"""One GET per block, whoever waits, whoever gives up, whatever fails."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from cachefs.db import Get
from cachefs.errors import BadDataError, ObjectChangedError, OriginUnavailableError
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.types import BLOCK_BYTES, BlockKey, BlockLocation, ObjectMeta, ObjectRef, Priority
from tests.cache.harness import key_of, open_tier, put, put_many, read_whole, serving
from tests.memory_origin import MemoryOrigin


async def test_64_readers_of_one_cold_block_cause_one_get(tmp_path: Path) -> None:
    origin = MemoryOrigin(delay_s=0.02)
    ref = put(origin, "a", 100_000)
    got = []
    async with serving(origin, open_tier(tmp_path)) as cache:

        async def reader() -> None:
            got.append(await read_whole(cache, ref))

        async with trio.open_nursery() as nursery:
            for _ in range(64):
                nursery.start_soon(reader)
        assert cache.counters.misses == 64
    assert got == [origin.expected("a")] * 64
    assert origin.counters.gets == 1


async def test_a_cancelled_reader_does_not_cancel_the_flight(tmp_path: Path) -> None:
    origin = MemoryOrigin(delay_s=0.1)
    ref = put(origin, "a", 5000)
    async with serving(origin, open_tier(tmp_path)) as cache:
        with trio.move_on_after(0.02) as scope:
            await cache.read_block(ref, 0, 0, 5000)
        assert scope.cancelled_caught
        assert cache.is_cached_or_inflight(key_of(ref))
        assert await read_whole(cache, ref) == origin.expected("a")
    assert origin.counters.gets == 1


async def test_an_error_reaches_all_waiters_and_the_next_read_tries_again(tmp_path: Path) -> None:
    origin = MemoryOrigin(delay_s=0.02)
    ref = put(origin, "a", 5000)
    origin.fail_next(1, OriginUnavailableError("the store is on fire"))
    errors: list[Exception] = []
    async with serving(origin, open_tier(tmp_path)) as cache:

        async def reader() -> None:
            with pytest.raises(OriginUnavailableError, match="on fire") as caught:
                await cache.read_block(ref, 0, 0, 5000)
            errors.append(caught.value)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(reader)
        assert len({id(error) for error in errors}) == 8
        assert not cache.is_cached_or_inflight(key_of(ref))
        assert await read_whole(cache, ref) == origin.expected("a")
    assert origin.counters.gets == 2


async def test_error_class_is_kept(tmp_path: Path) -> None:
    origin = MemoryOrigin()
    ref = put(origin, "a", 5000)
    put(origin, "a", 5000, seed=1)
    async with serving(origin, open_tier(tmp_path)) as cache:
        with pytest.raises(ObjectChangedError):
            await cache.read_block(ref, 0, 0, 5000)


@pytest.mark.expect_log("unexpected error while fetching")
async def test_a_bug_in_the_origin_fails_the_read_and_nothing_else(tmp_path: Path) -> None:
    origin = MemoryOrigin()
    ref = put(origin, "a", 5000)
    origin.fail_next(1, ZeroDivisionError("oops"))
    async with serving(origin, open_tier(tmp_path)) as cache:
        with pytest.raises(OriginUnavailableError, match="oops"):
            await cache.read_block(ref, 0, 0, 5000)
        assert await read_whole(cache, ref) == origin.expected("a")


async def test_wrong_length_is_bad_data_and_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = MemoryOrigin()
    ref = put(origin, "a", 5000)

    async def short(*_args: object) -> bytes:
        await trio.lowlevel.checkpoint()
        return b"short"

    monkeypatch.setattr(origin, "read", short)
    async with serving(origin, open_tier(tmp_path)) as cache:
        with pytest.raises(BadDataError):
            await cache.read_block(ref, 0, 0, 5000)
        assert not cache.is_cached_or_inflight(key_of(ref))


async def test_a_window_is_one_get_and_split_into_blocks(tmp_path: Path) -> None:
    origin = MemoryOrigin()
    ref = put(origin, "a", 5 * BLOCK_BYTES + 17)
    async with serving(origin, open_tier(tmp_path)) as cache:
        cache.fetch(ref, 0, 99)
        cache.fetch(ref, 0, 99)
        assert await read_whole(cache, ref) == origin.expected("a")
        await cache.drain()
        assert await cache.cached_fraction(ref) == 1.0
        assert origin.counters.gets == 1
        assert cache.held_bytes == 0


async def test_a_window_leaves_out_what_is_here(tmp_path: Path) -> None:
    origin = MemoryOrigin()
    ref = put(origin, "a", 5 * BLOCK_BYTES)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await cache.read_block(ref, 2, 5, 10)
        cache.fetch(ref, 0, 5)
        assert await read_whole(cache, ref) == origin.expected("a")
        assert origin.counters.gets == 3
        assert origin.counters.get_bytes == 5 * BLOCK_BYTES


async def test_the_buffer_bounds_what_is_fetched_and_not_stored(tmp_path: Path) -> None:
    origin = MemoryOrigin(delay_s=0.005)
    refs = put_many(origin, 20, 100_000)
    big = put(origin, "big", 3 * BLOCK_BYTES)
    async with serving(origin, open_tier(tmp_path), buffer_bytes=250_000) as cache:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, cache.held_bytes)
                await trio.sleep(0.001)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            for ref in refs:
                cache.fetch(ref, 0, 1)
            cache.fetch(big, 0, 3)
            assert await read_whole(cache, big) == origin.expected("big")
            for ref in refs:
                assert await read_whole(cache, ref) == origin.expected(ref.path)
            nursery.cancel_scope.cancel()
        assert 200_000 <= most <= 250_000
        await cache.drain()
        assert cache.held_bytes == 0


async def test_without_tiers_blocks_are_served_and_forgotten() -> None:
    origin = MemoryOrigin()
    ref = put(origin, "a", 5000)
    async with serving(origin) as cache:
        for _ in range(2):
            assert await read_whole(cache, ref) == origin.expected("a")
        assert cache.held_bytes == 0
    assert origin.counters.gets == 2


async def test_reads_fail_clearly_once_the_cache_is_closed(tmp_path: Path) -> None:
    origin = MemoryOrigin(delay_s=5)
    ref = put(origin, "a", 5000)
    async with serving(origin, open_tier(tmp_path)) as cache:

        async def reader() -> None:
            with pytest.raises(OriginUnavailableError, match="shutting down"):
                await cache.read_block(ref, 0, 0, 5000)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader)
            await trio.testing.wait_all_tasks_blocked()
            await cache.aclose()
        await reader()


async def test_counting_what_is_cached_of_a_huge_file_lets_others_run(tmp_path: Path) -> None:
    origin = MemoryOrigin()
    size_bytes = 3_000 * BLOCK_BYTES
    ref = ObjectRef(b"o" * 16, "huge", ObjectMeta(size_bytes, 0, "v"))
    async with serving(origin, open_tier(tmp_path)) as cache:
        index = next(iter(cache._tiers)).store.index
        for number in range(0, 3_000, 2):
            index.put(BlockKey(ref.object_id, number), BlockLocation(1, number, BLOCK_BYTES, 0))
        turns = 0
        give_way = cache.give_way

        async def counted() -> None:
            nonlocal turns
            turns += 1
            await give_way()

        cache.give_way = counted
        assert await cache.cached_fraction(ref) == 0.5
        assert turns == 5
        for number in range(0, 3_000, 2):
            index.delete(BlockKey(ref.object_id, number))


async def test_with_a_cold_index_nothing_is_looked_up_before_it_was_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = MemoryOrigin()
    ref = put(origin, "a", 5000)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await read_whole(cache, ref)
        await cache.drain()
        index = next(iter(cache._tiers)).store.index
        await index.commit()

        async def look() -> bool:
            await trio.lowlevel.checkpoint()
            return False

        monkeypatch.setattr(index._database.residency, "measure", look)
        monkeypatch.setattr(index._database.residency, "is_cold", True)
        brought: list[bytes] = []
        bring = index._database.residency.bring

        async def noted(look_up: Callable[[Get], bytes]) -> None:
            await bring(lambda get: brought.append(look_up(get)))

        monkeypatch.setattr(index._database.residency, "bring", noted)
        assert cache.read_block_now(key_of(ref), 0, 5000) is None
        assert await read_whole(cache, ref) == origin.expected("a")
        assert len(brought) == 1
        assert brought[0] is not None
        monkeypatch.setattr(index._database.residency, "is_cold", False)
    assert origin.counters.gets == 1


SLOW = Resilience(download_limit=64 << 10)
"""With it a block of a load takes 16 s."""


@pytest.mark.parametrize("priority", [Priority.READ_AHEAD, Priority.LOAD])
async def test_a_fetch_that_a_reader_joins_overtakes_the_others(
    tmp_path: Path, priority: Priority
) -> None:
    store = MemoryOrigin()
    ref, other = put(store, "a", 8 * BLOCK_BYTES), put(store, "b", 1000)
    origin = ResilientOrigin(store, SLOW)
    async with serving(origin, open_tier(tmp_path)) as cache:  # type: ignore[arg-type]
        cache.fetch(ref, 0, 8, priority=priority)
        await trio.lowlevel.checkpoint()
        assert await read_whole(cache, other) == store.expected("b")
        await cache.read_block(ref, 7, 0, 1000)
        assert [cache.is_in_flight(key_of(ref, index)) for index in range(8)] == [True] * 7 + [
            False
        ]
    assert store.counters.gets == 2


async def test_a_small_file_of_a_load_that_a_reader_joins(tmp_path: Path) -> None:
    store = MemoryOrigin()
    store.reads_many = True
    ref, refs = put(store, "a", 8 * BLOCK_BYTES), put_many(store, 8, 50_000)
    origin = ResilientOrigin(store, SLOW)
    async with (
        serving(origin, open_tier(tmp_path)) as cache,  # type: ignore[arg-type]
        trio.open_nursery() as nursery,
    ):
        cache.fetch(ref, 0, 8)
        nursery.start_soon(cache.fetch_together, refs, 4)
        while not cache.is_in_flight(key_of(refs[7])):
            await trio.lowlevel.checkpoint()
        assert await read_whole(cache, refs[7]) == store.expected(refs[7].path)
        assert cache.fetching_count >= 8, "the large file waits"
        nursery.cancel_scope.cancel()
