"""A cache over the memory origin, to be started, stopped and crashed."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.levels.tier_set import TierSet
from cachefs.cache.tier.store import TierStore
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.format.index_record import BLOCKS_TABLE, decode_block_key, decode_location
from cachefs.format.object_id import object_id
from cachefs.types import BLOCK_BYTES, BlockKey, BlockLocation, ObjectRef
from tests.cache.faulty_disk import FaultyDisk
from tests.memory_origin import MemoryOrigin, content_of

MIB = 1 << 20
PATIENCE_S = 300
"""How long to wait for what comes within a second or two on a quiet machine."""


def put(origin: MemoryOrigin, path: str, size: int, seed: int = 0) -> ObjectRef:
    """An object with reproducible random content."""
    meta = origin.put(path, content_of(f"{path} {seed}", 0, size))
    return ObjectRef(object_id(origin.identity, path, meta.version), path, meta)


def put_many(origin: MemoryOrigin, count: int, size: int, prefix: str = "f") -> list[ObjectRef]:
    return [put(origin, f"{prefix}{number}", size) for number in range(count)]


def key_of(ref: ObjectRef, block_index: int = 0) -> BlockKey:
    return BlockKey(ref.object_id, block_index)


def open_tier(path: Path, quota_bytes: int = 64 * MIB, **ratios: float) -> CacheDirectory:
    """With slabs of 4 MiB, whatever the quota."""
    options = {"free_space_ratio": 0.0, "high": 0.95, "low": 0.85, "slab_bytes": 4 * MIB} | ratios
    return CacheDirectory.open(path, quota_bytes, MemoryOrigin().identity, **options)


@asynccontextmanager
async def serving(
    origin: MemoryOrigin, *tiers: CacheDirectory, crash: bool = False, **options: object
) -> AsyncIterator[BlockCache]:
    """A running cache; it is closed at the end, or left as a crash would leave it."""
    options.setdefault("policy_name", "lru")
    cache = BlockCache(origin, tiers, **options)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        try:
            yield cache
        except BaseException:
            # A thread that hangs could not be cancelled, and would hide why the test failed.
            for tier in tiers:
                if isinstance(tier.disk, FaultyDisk):
                    tier.disk.heal()
            raise
        if not crash:
            await cache.aclose()
        nursery.cancel_scope.cancel()
    if crash:
        await _end_of_threads(cache)
        cache.abandon()


async def _end_of_threads(cache: BlockCache) -> None:
    """A process that crashes takes its threads along. Here they would go on, with descriptors that
    the next cache may have been given for files of its own."""
    with trio.move_on_after(PATIENCE_S):
        for store in stores(cache):
            store.io.stop()
            await store.io.idle()


async def until(condition: Callable[[], object]) -> None:
    """Wait for background work."""
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - the cache has no event for its idleness
            await trio.sleep(0.005)


async def will_close_cleanly(cache: BlockCache) -> None:
    """Wait until the cache has looked through what was there at its start. One that is closed
    before leaves no mark, and the next takes in what the slot tables tell: also blocks that it has
    just found damaged and dropped, which costs a second GET of them."""
    await until(lambda: cache.is_reconciled)


async def read_whole(cache: BlockCache, ref: ObjectRef) -> bytes:
    """As a reader would: on the loop if it can be, else the slow way."""
    parts = []
    for index in range(ref.block_count):
        length = ref.block_length(index)
        now = cache.read_block_now(BlockKey(ref.object_id, index), 0, length)
        if now is not None:
            parts.append(bytes(now))
        else:
            parts.append(bytes(await cache.read_block(ref, index, 0, length)))
    return b"".join(parts)


async def assert_right(cache: BlockCache, origin: MemoryOrigin, refs: list[ObjectRef]) -> None:
    for ref in refs:
        assert await read_whole(cache, ref) == origin.expected(ref.path)


async def assert_kept(cache: BlockCache, origin: MemoryOrigin, refs: list[ObjectRef]) -> None:
    """All of it is served without the origin: at once, or, where a busy machine has kept a disk's
    answer for longer than a reader's patience, the next time."""
    with trio.fail_after(PATIENCE_S):
        while True:
            gets = origin.counters.gets
            await assert_right(cache, origin, refs)
            if origin.counters.gets == gets:
                return
            await cache.drain()


def tiers_of(cache: BlockCache) -> TierSet:
    """The only place where these tests look into a cache: a move has to be seen from inside."""
    return cache._tiers


def stores(cache: BlockCache) -> list[TierStore]:
    return [active.store for active in tiers_of(cache)]


def moving(cache: BlockCache) -> set[BlockKey]:
    """The blocks that are on their way from one tier to another."""
    return {key for active in tiers_of(cache) for key in active.mover.moving}


def block_rows(store: TierStore) -> list[tuple[BlockKey, BlockLocation]]:
    """All blocks in the index of a tier."""
    return [
        (decode_block_key(key), decode_location(value))
        for key, value in store.index._database.scan(BLOCKS_TABLE, b"")
    ]


def recount(cache: BlockCache) -> None:
    """The running sums must equal what the slots say, and each used slot have its one key."""
    for store in stores(cache):
        slabs = store.slabs
        used = [(slab, slot) for slab in slabs.by_id.values() for slot in slab.used_slots()]
        assert slabs.cached_blocks == len(used)
        assert slabs.used_charge_bytes == sum(slab.charge_bytes for slab, _ in used)
        assert slabs.cached_bytes == sum(slab.used_bytes for slab in slabs.by_id.values())
        places = {}
        for key, location in block_rows(store):
            assert location[:2] not in places
            places[location[:2]] = (key, location)
        assert places.keys() == {(slab.slab_id, slot) for slab, slot in used}
        assert slabs.cached_bytes == sum(location.length for _, location in places.values())


__all__ = ["BLOCK_BYTES", "MIB"]
