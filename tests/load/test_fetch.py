"""Fetching for a job: out of the way of readers, once, and with patience."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.load.fetch import Fetcher
from cachefs.load.spec import Progress
from cachefs.load.walk import Failure
from cachefs.origin.memory import MemoryOrigin
from cachefs.origin.resilience import Resilience, ResilientOrigin
from tests.cache.harness import MIB, open_tier, put, put_many, read_whole, until

SETTINGS = Resilience(
    read_timeout_s=2, request_timeout_s=1, max_downloads=64, download_limit=None, hedge=False
)


class Rig:
    def __init__(self, memory: MemoryOrigin, origin: ResilientOrigin, cache: BlockCache) -> None:
        self.memory = memory
        self.origin = origin
        self.cache = cache
        self.progress = Progress()
        self.failures: list[Failure] = []

    def fetcher(self, most_held_bytes: int = 64 * MIB) -> Fetcher:
        return Fetcher(
            self.cache, self.origin, most_held_bytes, self.progress, self.failures.append
        )

    def close_gate(self) -> trio.Event:
        """The origin answers no read until it is set."""
        gate = trio.Event()

        async def wait(path: str, offset: int, length: int) -> None:
            await gate.wait()

        self.memory.on_read = wait
        return gate


@asynccontextmanager
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    memory = MemoryOrigin()
    origin = ResilientOrigin(memory, SETTINGS)
    tier = open_tier(tmp_path / "tier", 128 * MIB)
    cache = BlockCache(origin, (tier,), "lru")
    async with trio.open_nursery() as nursery:
        await nursery.start(origin.run)
        await nursery.start(cache.run)
        yield Rig(memory, origin, cache)
        await cache.aclose()
        nursery.cancel_scope.cancel()
    tier.close()


async def test_everything_is_fetched_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        refs = [*put_many(r.memory, 50, 10_000), put(r.memory, "large", 20 * MIB + 5)]
        await r.fetcher().run(iter(refs), 8)
        await r.cache.drain()
        assert all(r.cache.is_stored(ref) for ref in refs)
        assert r.memory.counters.gets == 53
        assert (r.progress.fetched_files, r.progress.failed_files) == (51, 0)
        assert r.progress.fetched_bytes == 500_000 + 20 * MIB + 5
        await r.fetcher().run(iter(refs), 8)
        assert r.memory.counters.gets == 53


async def test_readers_go_first(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        refs = put_many(r.memory, 40, 10_000)
        wanted = put(r.memory, "wanted", 10_000)
        gate = r.close_gate()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_whole, r.cache, wanted)
            await until(lambda: r.cache.waiting_readers == 1)
            nursery.start_soon(r.fetcher().run, iter(refs), 32)
            await trio.sleep(0.05)
            assert r.memory.counters.gets == 1 + 2
            gate.set()
        assert r.memory.counters.gets == 41


async def test_half_of_the_memory_is_left_to_readers(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        refs = put_many(r.memory, 40, MIB)
        gate = r.close_gate()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(r.fetcher(4 * MIB).run, iter(refs), 32)
            await trio.sleep(0.05)
            assert r.cache.held_bytes <= 5 * MIB
            gate.set()
        assert r.progress.fetched_files == 40


async def test_what_is_gone_or_replaced_is_told(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        refs = put_many(r.memory, 3, 10_000)
        r.memory.put("f1", b"other")
        r.memory.delete("f2")
        await r.fetcher().run(iter(refs), 8)
        assert r.progress.failed_files == 2
        assert sorted(failure.path for failure in r.failures) == ["f1", "f2"]
        assert any("it was replaced" in failure.error for failure in r.failures)
