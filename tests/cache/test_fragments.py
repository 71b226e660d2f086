"""Random reads of large files: the range that a reader needs comes first, its block follows."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.fetch import fragments
from cachefs.errors import BadDataError, ObjectChangedError, OriginUnavailableError
from cachefs.format.object_id import object_id
from cachefs.types import BLOCK_BYTES, ObjectRef
from tests.cache.harness import key_of, open_tier, put_many, read_whole, serving, until
from tests.memory_origin import MemoryOrigin

LARGE_BYTES = 160 << 20
KIB = 1 << 10
OFFSET = 12_288
"""Where the readers of this file read in a block."""


class Holding(MemoryOrigin):
    """Holds back the answers with whole blocks until `let_go`, and records the GETs as (block,
    length)."""

    def __init__(self) -> None:
        super().__init__()
        self.gets: list[tuple[int, int]] = []
        self.freed = trio.Event()
        self.on_read = self._hold
        self.on_fragment: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint

    async def _hold(self, path: str, offset: int, length: int) -> None:
        self.gets.append((offset // BLOCK_BYTES, length))
        await (self.freed.wait() if length == BLOCK_BYTES else self.on_fragment())

    def let_go(self) -> None:
        self.freed.set()

    def large(self, seed: int = 1) -> ObjectRef:
        meta = self.put_generated("large", LARGE_BYTES, seed)
        return ObjectRef(object_id(self.identity, "large", meta.version), "large", meta)

    def piece(self, block: int) -> bytes:
        return self.expected("large", block * BLOCK_BYTES + OFFSET, 4 * KIB)


async def read(cache: BlockCache, ref: ObjectRef, block: int) -> bytes:
    return bytes(await cache.read_block(ref, block, OFFSET, 4 * KIB, is_random=True))


async def settled(cache: BlockCache) -> None:
    """Wait until no block follows, is in flight or waits for its tier."""
    await until(lambda: not (cache._fragments.queued or cache.fetching_count))
    await cache.drain()
    await until(lambda: not cache.held_bytes)


async def test_a_random_read_is_answered_before_its_block_has_arrived(tmp_path: Path) -> None:
    origin = Holding()
    ref = origin.large()
    async with serving(origin, open_tier(tmp_path)) as cache:
        with trio.fail_after(300):
            assert await read(cache, ref, 77) == origin.piece(77)
        assert not cache.is_stored(ref)
        assert cache.read_block_now(key_of(ref, 77), OFFSET, 4 * KIB) is None
        origin.let_go()
        await settled(cache)
        found = cache.read_block_now(key_of(ref, 77), 0, BLOCK_BYTES)
        assert found == origin.expected("large", 77 * BLOCK_BYTES, BLOCK_BYTES)
    assert sorted(origin.gets) == [(77, 4 * KIB), (77, BLOCK_BYTES)]


async def test_a_second_reader_of_the_block_waits_for_the_block(tmp_path: Path) -> None:
    origin = Holding()
    ref = origin.large()
    async with serving(origin, open_tier(tmp_path)) as cache:
        await read(cache, ref, 5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, cache, ref, 5)
            await trio.testing.wait_all_tasks_blocked()
            origin.let_go()
        await settled(cache)
    assert sorted(origin.gets) == [(5, 4 * KIB), (5, BLOCK_BYTES)]


async def test_a_second_reader_does_not_wait_behind_queued_blocks(tmp_path: Path) -> None:
    origin = Holding()
    ref = origin.large()
    async with serving(origin, open_tier(tmp_path)) as cache:
        for block in (10, 20, 30):
            await read(cache, ref, block)
        await until(lambda: (10, BLOCK_BYTES) in origin.gets)
        assert (30, BLOCK_BYTES) not in origin.gets
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, cache, ref, 30)
            await until(lambda: (30, BLOCK_BYTES) in origin.gets)
            origin.let_go()
        await settled(cache)
        for block in (10, 20, 30):
            assert cache.is_cached_or_inflight(key_of(ref, block))
    assert len(origin.gets) == 6, "no block twice"


@pytest.mark.parametrize("quickest_s", [0.001, 0.03])
async def test_blocks_from_a_near_origin_wait_until_the_readers_pause(
    tmp_path: Path, quickest_s: float
) -> None:
    origin = Holding()
    origin.quickest_s = quickest_s
    ref = origin.large()
    origin.on_fragment = origin.freed.wait
    async with serving(origin, open_tier(tmp_path)) as cache:
        async with trio.open_nursery() as nursery:
            for block in (2, 4):
                nursery.start_soon(read, cache, ref, block)
            await until(lambda: len(origin.gets) >= 2)
            if quickest_s > 0.02:
                await until(lambda: len(origin.gets) == 4)
            else:
                await trio.sleep(0.05)
                assert sorted(origin.gets) == [(2, 4 * KIB), (4, 4 * KIB)]
            origin.let_go()
        await settled(cache)
        assert cache.is_cached_or_inflight(key_of(ref, 2))
        assert cache.is_cached_or_inflight(key_of(ref, 4))


async def test_many_queued_blocks_do_not_wait_for_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fragments, "_MANY_QUEUED", 3)
    origin = Holding()
    ref = origin.large()
    answered = trio.Event()
    origin.on_fragment = answered.wait
    async with serving(origin, open_tier(tmp_path)) as cache:
        async with trio.open_nursery() as nursery:
            for block in (2, 4, 6):
                nursery.start_soon(read, cache, ref, block)
            await until(lambda: len(origin.gets) == 4)
            answered.set()
            origin.let_go()
        await settled(cache)


async def test_a_failed_fragment_fails_its_reader_only(tmp_path: Path) -> None:
    origin = Holding()
    ref = origin.large()

    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise OriginUnavailableError("the line is cut")

    origin.on_fragment = fail
    async with serving(origin, open_tier(tmp_path)) as cache:
        with pytest.raises(OriginUnavailableError, match="is cut"):
            await read(cache, ref, 3)
        origin.let_go()
        await settled(cache)
        assert await read(cache, ref, 3) == origin.piece(3)
    assert sorted(origin.gets) == [(3, 4 * KIB), (3, BLOCK_BYTES)]


async def test_a_block_that_fails_later_costs_its_reader_nothing(tmp_path: Path) -> None:
    origin = Holding()
    ref = origin.large()
    hold = origin.on_read

    async def fail(path: str, offset: int, length: int) -> None:
        assert hold is not None
        await hold(path, offset, length)
        if length == BLOCK_BYTES:
            raise BadDataError("the body ended in the middle")

    origin.on_read = fail
    async with serving(origin, open_tier(tmp_path)) as cache:
        assert await read(cache, ref, 3) == origin.piece(3)
        assert await read(cache, ref, 9) == origin.piece(9)
        origin.let_go()
        await settled(cache)
        assert not cache.is_cached_or_inflight(key_of(ref, 3))
        origin.on_read = hold
        assert bytes(await cache.read_block(ref, 3, OFFSET, 4 * KIB)) == origin.piece(3)


async def test_a_replaced_object_never_mixes_two_versions(tmp_path: Path) -> None:
    origin = Holding()
    ref = origin.large(seed=1)
    old = {block: origin.piece(block) for block in (1, 2)}
    async with serving(origin, open_tier(tmp_path)) as cache:
        assert await read(cache, ref, 1) == old[1]
        assert await read(cache, ref, 2) == old[2]
        await until(lambda: (1, BLOCK_BYTES) in origin.gets)
        origin.large(seed=2)
        origin.let_go()
        await settled(cache)
        # The first block was asked for before, and is of the old version. The second one is gone.
        assert await read(cache, ref, 1) == old[1]
        with pytest.raises(ObjectChangedError):
            await read(cache, ref, 2)
        with pytest.raises(ObjectChangedError):
            await cache.read_block(ref, 2, OFFSET, 4 * KIB)


async def test_a_cancelled_reader_leaves_no_memory_held(tmp_path: Path) -> None:
    origin = Holding()
    ref = origin.large()
    origin.on_fragment = origin.freed.wait
    async with serving(origin, open_tier(tmp_path)) as cache:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, cache, ref, 4)
            await until(lambda: (4, 4 * KIB) in origin.gets)
            nursery.cancel_scope.cancel()
        assert cache.waiting_readers == 0
        origin.let_go()
        await settled(cache)
        assert cache.read_block_now(key_of(ref, 4), OFFSET, 4 * KIB) == origin.piece(4)


async def test_the_buffer_bounds_fragments_and_their_blocks(tmp_path: Path) -> None:
    origin = MemoryOrigin(delay_s=0.002)
    meta = origin.put_generated("large", LARGE_BYTES, 1)
    ref = ObjectRef(object_id(origin.identity, "large", meta.version), "large", meta)
    most = 0
    async with serving(origin, open_tier(tmp_path), buffer_bytes=2 * BLOCK_BYTES) as cache:

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, cache.held_bytes)
                await trio.sleep(0.0005)

        async def read_right(block: int) -> None:
            found = await read(cache, ref, block)
            assert found == origin.expected("large", block * BLOCK_BYTES + OFFSET, 4 * KIB)

        async with trio.open_nursery() as watching:
            watching.start_soon(watch)
            async with trio.open_nursery() as nursery:
                for block in range(0, 80, 2):
                    nursery.start_soon(read_right, block)
            watching.cancel_scope.cancel()
        await settled(cache)
    assert 0 < most <= 2 * BLOCK_BYTES


async def test_when_many_blocks_are_due_readers_wait_for_whole_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fragments, "_MOST_QUEUED", 4)
    monkeypatch.setattr(fragments, "_FEW_QUEUED", 1)
    origin = Holding()
    ref = origin.large()
    async with serving(origin, open_tier(tmp_path)) as cache:
        blocks = range(0, 40, 2)
        async with trio.open_nursery() as nursery:
            for block in blocks:
                nursery.start_soon(read, cache, ref, block)
            await until(lambda: cache.waiting_readers > 10)
            assert len(cache._fragments.queued) <= 4
            origin.let_go()
        await settled(cache)
        origin.gets.clear()
        assert await read(cache, ref, 101) == origin.piece(101)
        await settled(cache)
    assert sorted(origin.gets) == [(101, 4 * KIB), (101, BLOCK_BYTES)]


async def test_an_evicted_object_brings_no_block_back(tmp_path: Path) -> None:
    origin = Holding()
    ref = origin.large()
    async with serving(origin, open_tier(tmp_path)) as cache:
        for block in (1, 3, 5):
            await read(cache, ref, block)
        await cache.objects.evict([ref])
        origin.let_go()
        await settled(cache)
        assert await cache.cached_fraction(ref) == 0


async def test_small_files_and_limited_lines_get_whole_blocks(tmp_path: Path) -> None:
    origin = Holding()
    origin.let_go()
    ref = origin.large()
    (small,) = put_many(origin, 1, 3 * BLOCK_BYTES)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await read(cache, small, 1)
        origin.held_back_at = trio.current_time()
        await read(cache, ref, 1)
        assert await read_whole(cache, small) == origin.expected(small.path)
    assert {length for _, length in origin.gets} == {BLOCK_BYTES}
