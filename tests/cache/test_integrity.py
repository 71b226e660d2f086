"""Bytes that change under a running cache, after they were proven."""

import os
from pathlib import Path

import pytest
import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.errors import OriginUnavailableError
from cachefs.format.slab import checksum_of
from cachefs.types import ObjectRef
from tests.cache.faulty_disk import FaultyDisk
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
from tests.memory_origin import MemoryOrigin


def damage(cache: BlockCache, ref: ObjectRef) -> None:
    """Flip one byte of the block in its slot."""
    store = stores(cache)[0]
    location = store.index.locate(key_of(ref))
    assert location is not None
    slab = store.slabs.by_id[location.slab]
    position = slab.layout.slot_offset(location.slot) + location.length // 2
    (byte,) = os.pread(slab.fd, 1, position)
    os.pwrite(slab.fd, bytes([byte ^ 0x10]), position)


class CountingDisk(FaultyDisk):
    """Knows the largest read there was."""

    largest = 0

    def read(self, fd: int, length: int, offset: int) -> bytes:
        self.largest = max(self.largest, length)
        return super().read(fd, length, offset)

    def read_nowait(self, fd: int, buffers: tuple[memoryview], offset: int, flags: int) -> int:
        self.largest = max(self.largest, len(buffers[0]))
        return super().read_nowait(fd, buffers, offset, flags)


async def read_part(cache: BlockCache, ref: ObjectRef, offset: int, length: int) -> bytes:
    """Of the first block, on the loop if it can be, else the slow way."""
    now = cache.read_block_now(key_of(ref), offset, length)
    return bytes(await cache.read_block(ref, 0, offset, length) if now is None else now)


@pytest.mark.long
@pytest.mark.expect_log("a block is not what was stored")
async def test_the_scrubber_finds_it(tmp_path: Path, origin: MemoryOrigin) -> None:
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
async def test_full_verification_finds_it_at_the_next_read(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    refs = put_many(origin, 20, 50_000)
    async with serving(origin, open_tier(tmp_path), verify_full=True) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
        part = cache.read_block_now(key_of(refs[0]), 10, 100)
        assert part == origin.expected(refs[0].path)[10:110]
        for ref in refs[::5]:
            damage(cache, ref)
        assert cache.read_block_now(key_of(refs[5]), 0, 10) is None
        gets = origin.counters.gets
        await assert_right(cache, origin, refs)
        assert origin.counters.gets == gets + 4
        assert cache.status()[0].counters.bad_blocks == 4
        await cache.drain()
        recount(cache)


@pytest.mark.expect_log("a block is not what was stored")
async def test_with_the_origin_down_it_is_an_error_and_no_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: MemoryOrigin
) -> None:
    (ref,) = put_many(origin, 1, 50_000)

    async def down(*_: object) -> bytes:
        raise OriginUnavailableError("down")

    async with serving(origin, open_tier(tmp_path), verify_full=True) as cache:
        await assert_right(cache, origin, [ref])
        await cache.drain()
        damage(cache, ref)
        monkeypatch.setattr(origin, "read", down)
        with pytest.raises(OriginUnavailableError):
            await cache.read_block(ref, 0, 0, 10)
        monkeypatch.undo()
        await assert_right(cache, origin, [ref])


@pytest.mark.parametrize("size_bytes", [700, 100_000, 128 * 1024, 600_001, 1 << 20])
@pytest.mark.parametrize("is_cold", [True, False])
@pytest.mark.expect_log("a block is not what was stored")
async def test_damage_is_found_at_the_next_read(
    tmp_path: Path, size_bytes: int, is_cold: bool, origin: MemoryOrigin
) -> None:
    """Of any part, by a reader on the loop or in a thread, of blocks that we have written."""
    refs = put_many(origin, 3, size_bytes)
    disk = FaultyDisk()
    tier = CacheDirectory.open(tmp_path, 64 << 20, origin.identity, free_space_ratio=0.0, disk=disk)
    async with serving(origin, tier) as cache:
        await assert_right(cache, origin, refs)
        await cache.drain()
        disk.cold = is_cold
        for ref in refs:
            expected, middle = origin.expected(ref.path), size_bytes // 2
            await read_part(cache, ref, 0, 1)
            damage(cache, ref)
            gets = origin.counters.gets
            for offset, length in ((middle, 1), (middle - 7, 9), (0, size_bytes), (0, 4096)):
                length = min(length, size_bytes - offset)
                data = await read_part(cache, ref, offset, length)
                assert data == expected[offset : offset + length]
            assert origin.counters.gets == gets + 1
            await cache.drain()
        assert cache.status()[0].counters.bad_blocks == len(refs)
        recount(cache)


async def test_a_small_read_takes_a_small_part_from_the_disk(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    """Of a large block whose parts' checksums are known, if a thread reads it or the loop."""
    (ref,) = put_many(origin, 1, (1 << 20) - 3)
    expected = origin.expected(ref.path)
    disk = CountingDisk()
    tier = CacheDirectory.open(tmp_path, 64 << 20, origin.identity, free_space_ratio=0.0, disk=disk)
    async with serving(origin, tier) as cache:
        await assert_right(cache, origin, [ref])
        await cache.drain()
        for disk.cold in (False, True):
            disk.largest = 0
            for offset in (0, 4096, 8191, 500_000, (1 << 20) - 10):
                length = min(4096, len(expected) - offset)
                data = await read_part(cache, ref, offset, length)
                assert data == expected[offset : offset + length]
            assert 4096 < disk.largest <= 2 * 8192
        # What was known of the parts may be lost, or be another block's.
        cache.partial_checksums.note(checksum_of(expected), bytes(1 << 20))
        assert await read_part(cache, ref, 5, 10) == expected[5:15]
        assert cache.status()[0].counters.bad_blocks == 0
        assert origin.counters.gets == 1
        disk.largest = 0
        assert await read_part(cache, ref, 5, 10) == expected[5:15]
        assert disk.largest <= 8192  # it is known again


async def test_scrubbing_and_evicting_at_once(tmp_path: Path, origin: MemoryOrigin) -> None:
    refs = put_many(origin, 300, 100_000)
    async with serving(origin, open_tier(tmp_path, 8 << 20), scrub_interval_s=0.05) as cache:
        for ref in refs:
            await cache.read_block(ref, 0, 0, 1)
            await trio.lowlevel.checkpoint()
        await cache.drain()
        await assert_right(cache, origin, refs[::9])
        counters = cache.status()[0].counters
        await until(lambda: counters.verified > 0)
        assert counters.bad_blocks == 0
        recount(cache)
