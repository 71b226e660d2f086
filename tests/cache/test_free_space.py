"""Blocks that no reader has asked for: they use free space, and nothing else goes for them."""

from pathlib import Path

import pytest

from cachefs.types import ObjectRef
from tests.cache.harness import (
    MIB,
    BlockCache,
    assert_right,
    key_of,
    open_tier,
    put_many,
    read_whole,
    serving,
)
from tests.memory_origin import MemoryOrigin

KIB = 1 << 10


async def fetch_unasked(cache: BlockCache, refs: list[ObjectRef]) -> None:
    """Fetch them as a guess, whether or not there is space, until all are stored or refused."""
    for ref in refs:
        fetch = cache.fetch_into_free_space(ref)
        await fetch.done.wait()
        assert fetch.data is not None
        assert not fetch.is_joined
    await cache.drain()


async def read_all(cache: BlockCache, refs: list[ObjectRef]) -> None:
    for ref in refs:
        await read_whole(cache, ref)
    await cache.drain()


def evicted(cache: BlockCache) -> int:
    return sum(tier.counters.evicted for tier in cache.status())


async def test_free_space_is_used(tmp_path: Path) -> None:
    origin = MemoryOrigin()
    guesses = put_many(origin, 20, MIB)
    async with serving(origin, open_tier(tmp_path / "c")) as cache:
        assert all(cache.has_free_space(key_of(ref), MIB) for ref in guesses)
        await fetch_unasked(cache, guesses)
        assert all(cache.is_stored(ref) for ref in guesses)
        await assert_right(cache, origin, guesses)
        assert origin.counters.gets == 20


async def test_above_the_low_watermark_nothing_is_stored(tmp_path: Path) -> None:
    origin = MemoryOrigin()
    read, guesses = put_many(origin, 42, MIB), put_many(origin, 20, MIB, "guess")
    # Slots of 1 MiB: three in a slab of 4 MiB, so 48 in the tier.
    async with serving(origin, open_tier(tmp_path / "c", low=0.5, high=0.95)) as cache:
        await read_all(cache, read)
        (tier,) = cache.status()
        assert tier.low_bytes < tier.used_bytes <= tier.high_bytes
        assert not any(cache.has_free_space(key_of(ref), MIB) for ref in guesses)
        await fetch_unasked(cache, guesses)
        assert evicted(cache) == 0
        assert all(cache.is_stored(ref) for ref in read)
        assert not any(cache.is_stored(ref) for ref in guesses)
        gets = origin.counters.gets
        await assert_right(cache, origin, guesses)
        assert origin.counters.gets == gets, "a reader still finds them in memory"


async def test_no_slab_is_taken_from_another_class(tmp_path: Path) -> None:
    """Little is used, but no slab has a slot of the size that is needed."""
    origin = MemoryOrigin()
    read, guesses = put_many(origin, 48, MIB), put_many(origin, 20, 20 * KIB, "guess")
    tier = open_tier(tmp_path / "c", low=0.9, high=0.99)
    async with serving(origin, tier) as cache:
        await read_all(cache, read)
        assert len(tier.slabs.by_id) == tier.slabs.max_slabs
        await cache.objects.evict(read[::3])
        assert tier.fits_below_low(20 * KIB)
        left = [ref for ref in read if cache.is_stored(ref)]
        gone = evicted(cache)
        assert not any(cache.has_free_space(key_of(ref), 20 * KIB) for ref in guesses)
        await fetch_unasked(cache, guesses)
        assert evicted(cache) == gone
        assert all(cache.is_stored(ref) for ref in left)
        await read_all(cache, put_many(origin, 1, 20 * KIB, "read"))
        assert evicted(cache) >= gone, "a refused guess does not stand in a reader's way"


@pytest.mark.long
async def test_a_block_that_a_reader_joins_is_stored_like_others(tmp_path: Path) -> None:
    origin = MemoryOrigin(delay_s=0.05)
    read, (guess,) = put_many(origin, 42, MIB), put_many(origin, 1, MIB, "guess")
    async with serving(origin, open_tier(tmp_path / "c", low=0.5, high=0.95)) as cache:
        await read_all(cache, read)
        fetch = cache.fetch_into_free_space(guess)
        await read_whole(cache, guess)
        assert fetch.is_joined
        await cache.drain()
        assert cache.is_stored(guess)
