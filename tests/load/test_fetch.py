"""Fetching for a job: out of the way of readers, once, and with patience."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import OriginUnavailableError
from cachefs.load.fetch import Fetcher, FileQueue
from cachefs.load.spec import FAR_JOBS, NEAR_JOBS, Progress
from cachefs.load.walk import Failure
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.types import ObjectRef
from tests.cache.harness import MIB, open_tier, put, put_many, read_whole, until
from tests.memory_origin import MemoryOrigin

SETTINGS = Resilience(
    read_timeout_s=120, request_timeout_s=60, max_downloads=64, download_limit=None, hedge=False
)


def queue(refs: Iterable[ObjectRef]) -> FileQueue:
    """All files are known already."""
    files = FileQueue()
    files.end(iter(refs))
    return files


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
        await r.fetcher().run(queue(refs), 8)
        await r.cache.drain()
        assert all(r.cache.is_stored(ref) for ref in refs)
        assert r.memory.counters.gets == 53
        assert (r.progress.fetched_files, r.progress.failed_files) == (51, 0)
        assert r.progress.fetched_bytes == 500_000 + 20 * MIB + 5
        await r.fetcher().run(queue(refs), 8)
        assert r.memory.counters.gets == 53


async def test_files_are_fetched_while_others_are_still_looked_for(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        first, second, third = put_many(r.memory, 3, 10_000)
        files = FileQueue()
        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(r.fetcher().run, files, 8)
                files.put(first)
                await until(lambda: r.progress.fetched_files == 1)
                await trio.testing.wait_all_tasks_blocked()
                files.put(second)
                await until(lambda: r.progress.fetched_files == 2)
                files.end(iter([third]))
        assert r.progress.fetched_files == r.memory.counters.gets == 3


@pytest.mark.parametrize("is_far", [False, True])
async def test_a_far_origin_gets_more_requests_at_a_time(tmp_path: Path, is_far: bool) -> None:
    async with rig(tmp_path) as r:
        r.memory.reads_many = True
        r.origin.quickest_s = 0.03 if is_far else 0.001
        under_way = most = 0
        gate = trio.Event()

        async def count(path: str, offset: int, length: int) -> None:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await gate.wait()
            under_way -= 1

        r.memory.on_read = count
        expected = FAR_JOBS if is_far else NEAR_JOBS
        async with trio.open_nursery() as nursery:
            nursery.start_soon(r.fetcher().run, queue(put_many(r.memory, 300, 10_000)), None)
            await until(lambda: under_way == expected)
            gate.set()
        assert r.progress.fetched_files == 300
        assert most == expected


async def test_small_files_are_fetched_together(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.memory.reads_many = True
        small = put_many(r.memory, 50, 10_000)
        refs = [*small[:20], put(r.memory, "large", 20 * MIB + 5), *small[20:], small[0]]
        await r.fetcher().run(queue(refs), 8)
        await r.cache.drain()
        assert all(r.cache.is_stored(ref) for ref in refs)
        assert r.memory.counters.gets == 53
        assert (r.progress.fetched_files, r.progress.failed_files) == (52, 0)
        assert r.progress.fetched_bytes == 510_000 + 20 * MIB + 5
        assert r.cache.held_bytes == 0
        await r.fetcher().run(queue(refs), 8)
        assert r.memory.counters.gets == 53


@pytest.mark.parametrize("together", [False, True])
async def test_so_many_requests_at_a_time(tmp_path: Path, together: bool) -> None:
    async with rig(tmp_path) as r:
        r.memory.reads_many = together
        under_way = most = 0
        many = trio.Event()

        async def count(path: str, offset: int, length: int) -> None:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            if under_way >= 16:
                many.set()
            await many.wait()
            await trio.sleep(0.001)
            under_way -= 1

        r.memory.on_read = count
        with trio.fail_after(300):
            await r.fetcher().run(queue(put_many(r.memory, 150, 10_000)), 20)
        assert r.progress.fetched_files == 150
        assert most <= 20


async def test_what_does_not_come_together_comes_alone(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.memory.reads_many = True
        refs = put_many(r.memory, 40, 10_000)
        r.memory.fail_next(11, OriginUnavailableError("lost"))
        r.memory.put("f7", b"other")
        r.memory.delete("f9")
        await r.fetcher().run(queue(refs), 16)
        assert r.progress.fetched_files == 38
        assert sorted(failure.path for failure in r.failures) == ["f7", "f9"]
        await r.cache.drain()
        assert r.cache.held_bytes == 0


async def test_a_reader_joins_what_is_fetched_together(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.memory.reads_many = True
        refs = put_many(r.memory, 8, 10_000)
        gate = r.close_gate()
        read: list[bytes] = []

        async def reader() -> None:
            read.append(await read_whole(r.cache, refs[3]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(r.fetcher().run, queue(refs), 8)
            await until(lambda: r.memory.counters.gets == 8)
            nursery.start_soon(reader)
            await until(lambda: r.cache.waiting_readers == 1)
            gate.set()
        assert read == [r.memory.expected("f3")]
        assert r.memory.counters.gets == 8


async def test_while_a_reader_waits_no_more_are_asked_for_together(tmp_path: Path) -> None:
    """What is left of a call comes one by one, a few at a time."""
    async with rig(tmp_path) as r:
        r.memory.reads_many = True
        refs = put_many(r.memory, 60, 10_000)
        most = 0

        async def look(path: str, offset: int, length: int) -> None:
            nonlocal most
            if path == "f0":
                await gate.wait()
            elif gate.is_set():
                most = max(most, r.cache.fetching_count)

        gate = trio.Event()
        r.memory.on_read = look
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_whole, r.cache, refs[0])
            await until(lambda: r.cache.waiting_readers == 1)
            nursery.start_soon(r.fetcher().run, queue(refs), 8)
            await until(lambda: r.memory.counters.gets >= 20)
            assert r.cache.fetching_count <= 1 + 2
            gate.set()
        assert r.progress.fetched_files == 60
        assert most <= 1 + 2


async def test_a_call_stops_asking_when_a_reader_comes(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        refs = put_many(r.memory, 20, 10_000)
        others, last = trio.Event(), trio.Event()
        left: list[str] = []

        async def wait(path: str, offset: int, length: int) -> None:
            await (last if path == "f19" else others).wait()

        async def fetch() -> None:
            left.extend(ref.path for ref in await r.cache.fetch_together(refs[:19], 2))

        r.memory.on_read = wait

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch)
            await until(lambda: r.memory.counters.gets == 2)
            nursery.start_soon(read_whole, r.cache, refs[19])
            await until(lambda: r.cache.waiting_readers == 1)
            others.set()
            await until(lambda: len(left) == 17)
            last.set()


async def test_a_reader_who_joined_is_not_left_alone(tmp_path: Path) -> None:
    """What he waits for doesn't come together with the others, and the job is cancelled."""
    async with rig(tmp_path) as r:
        r.memory.reads_many = True
        refs = put_many(r.memory, 8, 10_000)
        gate = trio.Event()

        async def lose(path: str, offset: int, length: int) -> None:
            if not gate.is_set():
                await gate.wait()
                if path == "f3":
                    raise OriginUnavailableError("lost")

        r.memory.on_read = lose
        read: list[bytes] = []

        async def reader() -> None:
            read.append(await read_whole(r.cache, refs[3]))

        async with trio.open_nursery() as nursery, trio.open_nursery() as job:
            job.start_soon(r.fetcher().run, queue(refs), 8)
            await until(lambda: r.memory.counters.gets == 8)
            nursery.start_soon(reader)
            await until(lambda: r.cache.waiting_readers == 1)
            job.cancel_scope.cancel()
            gate.set()
        assert read == [r.memory.expected("f3")]
        assert r.memory.counters.gets == 9
        await until(lambda: r.cache.storing_count == 0)
        assert all(r.cache.is_stored(ref) for ref in refs)


@pytest.mark.parametrize("reads_many", [True, False])
async def test_readers_go_first(tmp_path: Path, reads_many: bool) -> None:
    """Beside them files are fetched one by one, and few at a time."""
    async with rig(tmp_path) as r:
        r.memory.reads_many = reads_many
        refs = put_many(r.memory, 40, 10_000)
        wanted = put(r.memory, "wanted", 10_000)
        gate = r.close_gate()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_whole, r.cache, wanted)
            await until(lambda: r.cache.waiting_readers == 1)
            nursery.start_soon(r.fetcher().run, queue(refs), 32)
            await until(lambda: r.memory.counters.gets == 1 + 2)
            await trio.sleep(0.05)
            assert r.memory.counters.gets == 1 + 2
            gate.set()
        assert r.memory.counters.gets == 41


async def test_beside_a_reader_of_a_far_origin_many_are_under_way(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        for _ in range(50):
            r.origin._pace.note(10_000, 0.03)
        refs = put_many(r.memory, 40, 10_000)
        wanted = put(r.memory, "wanted", 10_000)
        gate = r.close_gate()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_whole, r.cache, wanted)
            await until(lambda: r.cache.waiting_readers == 1)
            nursery.start_soon(r.fetcher().run, queue(refs), 32)
            await until(lambda: r.memory.counters.gets == 1 + 24)
            gate.set()
        assert r.memory.counters.gets == 41


async def test_half_of_the_memory_is_left_to_readers(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        refs = put_many(r.memory, 40, MIB)
        gate = r.close_gate()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(r.fetcher(4 * MIB).run, queue(refs), 32)
            await trio.sleep(0.05)
            assert r.cache.held_bytes <= 5 * MIB
            gate.set()
        assert r.progress.fetched_files == 40


async def test_what_is_gone_or_replaced_is_told(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        refs = put_many(r.memory, 3, 10_000)
        r.memory.put("f1", b"other")
        r.memory.delete("f2")
        await r.fetcher().run(queue(refs), 8)
        assert r.progress.failed_files == 2
        assert sorted(failure.path for failure in r.failures) == ["f1", "f2"]
        assert any("it was replaced" in failure.error for failure in r.failures)
