"""Bytes that change under a running cache, after they were proven."""

import os
from pathlib import Path

import pytest
import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import OriginUnavailableError
from cachefs.origin.memory import MemoryOrigin
from cachefs.types import ObjectRef
from tests.cache.harness import (
    assert_right,
    key_of,
    open_tier,
    put_many,
    recount,
    serving,
    stores,
    until,
)


def damage(cache: BlockCache, ref: ObjectRef) -> None:
    """Flip one byte of the block in its slot."""
    store = stores(cache)[0]
    location = store.index.locate(key_of(ref))
    assert location is not None
    slab = store.slabs.by_id[location.slab]
    position = slab.layout.slot_offset(location.slot) + location.length // 2
    (byte,) = os.pread(slab.fd, 1, position)
    os.pwrite(slab.fd, bytes([byte ^ 0x10]), position)


@pytest.mark.expect_log("a block is not what was stored")
async def test_the_scrubber_finds_it(tmp_path: Path) -> None:
    origin = MemoryOrigin()
    refs = put_many(origin, 40, 50_000)
    async with serving(origin, open_tier(tmp_path), scrub_interval_s=0.2) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
        for ref in refs[::10]:
            damage(cache, ref)
        counters = cache.status()[0].counters
        await until(lambda: counters.bad_blocks == 4)
        gets = origin.counters.gets
        await assert_right(cache, origin, refs)
        assert origin.counters.gets == gets + 4
        verified = counters.verified
        await until(lambda: counters.verified > verified + 40)
        assert counters.bad_blocks == 4
        recount(cache)


@pytest.mark.expect_log("a block is not what was stored")
async def test_full_verification_finds_it_at_the_next_read(tmp_path: Path) -> None:
    origin = MemoryOrigin()
    refs = put_many(origin, 20, 50_000)
    async with serving(origin, open_tier(tmp_path), verify_full=True) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
        part = cache.read_now(key_of(refs[0]), 10, 100)
        assert part == origin.expected(refs[0].path)[10:110]
        for ref in refs[::5]:
            damage(cache, ref)
        assert cache.read_now(key_of(refs[5]), 0, 10) is None
        gets = origin.counters.gets
        await assert_right(cache, origin, refs)
        assert origin.counters.gets == gets + 4
        assert cache.status()[0].counters.bad_blocks == 4
        await cache.drain()
        recount(cache)


@pytest.mark.expect_log("a block is not what was stored")
async def test_with_the_origin_down_it_is_an_error_and_no_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = MemoryOrigin()
    (ref,) = put_many(origin, 1, 50_000)

    async def down(*_: object) -> bytes:
        raise OriginUnavailableError("down")

    async with serving(origin, open_tier(tmp_path), verify_full=True) as cache:
        await assert_right(cache, origin, [ref])
        await cache.drain()
        damage(cache, ref)
        monkeypatch.setattr(origin, "read", down)
        with pytest.raises(OriginUnavailableError):
            await cache.read(ref, 0, 0, 10)
        monkeypatch.undo()
        await assert_right(cache, origin, [ref])


async def test_scrubbing_and_evicting_at_once(tmp_path: Path) -> None:
    origin = MemoryOrigin()
    refs = put_many(origin, 300, 100_000)
    async with serving(origin, open_tier(tmp_path, 8 << 20), scrub_interval_s=0.05) as cache:
        for ref in refs:
            await cache.read(ref, 0, 0, 1)
            await trio.lowlevel.checkpoint()
        await cache.drain()
        await assert_right(cache, origin, refs[::9])
        counters = cache.status()[0].counters
        await until(lambda: counters.verified > 0)
        assert counters.bad_blocks == 0
        recount(cache)
