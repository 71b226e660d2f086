"""What the cache costs without kernel and network: hit path, slow hits, admission. Prints JSON.

python bench/cache_micro.py [DIRECTORY]      (default: /dev/shm)
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator

import trio
from typing_extensions import override

from cachefs.cache.block_cache import BlockCache
from cachefs.origin.base import Origin, OriginCounters
from cachefs.tiers.tier import Tier
from cachefs.types import BlockKey, Buffer, Entry, ObjectMeta, ObjectRef

BLOCK = 100_000
COUNT = 5_000


class InstantOrigin(Origin):
    """Answers at once, always with the same memory: what remains is the cache's own cost."""

    url = identity = "instant://"

    def __init__(self) -> None:
        self.counters = OriginCounters()
        self._bytes = memoryview(os.urandom(8 << 20))

    async def check(self) -> None:
        pass

    async def stat(self, path: str) -> ObjectMeta | None:
        raise NotImplementedError

    def list_dir(self, path: str) -> AsyncIterator[list[Entry]]:
        raise NotImplementedError

    @override
    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        self.counters.gets += 1
        await trio.lowlevel.checkpoint()
        return self._bytes[:length]

    async def aclose(self) -> None:
        pass


def refs() -> list[ObjectRef]:
    meta = ObjectMeta(BLOCK, 0, "v")
    return [ObjectRef(i.to_bytes(16, "little"), f"f{i}", meta) for i in range(COUNT)]


async def admission(cache: BlockCache, objects: list[ObjectRef]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for ref in objects:
        cache.fetch(ref, 0, 1)
        if ref.object_id[0] % 64 == 0:
            await trio.lowlevel.checkpoint()
    while cache.counters.fetches < COUNT:
        await trio.lowlevel.checkpoint()
    await cache.drain()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "admission_blocks_per_s": round(COUNT / wall),
        "admission_cpu_us_per_block": round(cpu / COUNT * 1e6, 1),
    }


async def slow_hits(cache: BlockCache, objects: list[ObjectRef], name: str) -> dict[str, float]:
    start = time.perf_counter()

    async def reader(first: int) -> None:
        for ref in objects[first::16]:
            await cache.read(ref, 0, 0, BLOCK)

    async with trio.open_nursery() as nursery:
        for first in range(16):
            nursery.start_soon(reader, first)
    return {f"{name}_us": round((time.perf_counter() - start) / COUNT * 1e6, 1)}


def hits(cache: BlockCache, objects: list[ObjectRef]) -> dict[str, float]:
    keys = [BlockKey(ref.object_id, 0) for ref in objects]
    result: dict[str, float] = {}
    for length in (4096, BLOCK):
        rounds = []
        for _ in range(5):
            start = time.perf_counter()
            served = sum(cache.read_now(key, 0, length) is not None for key in keys)
            rounds.append((time.perf_counter() - start) / COUNT * 1e6)
        result[f"hit_{length}_us"] = round(statistics.median(rounds), 2)
        result[f"hit_{length}_share"] = round(served / COUNT, 4)
    return result


async def main(directory: str) -> None:
    path = tempfile.mkdtemp(prefix="cachefs-micro-", dir=directory)
    objects = refs()
    report: dict[str, object] = {"directory": directory, "cpus": os.cpu_count()}
    try:
        for phase in ("first", "restarted"):
            start = time.perf_counter()
            tier = Tier.open(path, 2 << 30, "instant://", free_space_ratio=0.01)
            cache = BlockCache(InstantOrigin(), [tier])
            report[f"open_{phase}_ms"] = round((time.perf_counter() - start) * 1e3, 2)
            async with trio.open_nursery() as nursery:
                await nursery.start(cache.run)
                if phase == "first":
                    report |= await admission(cache, objects)
                else:
                    report |= await slow_hits(cache, objects, "first_read_verified")
                    report |= await slow_hits(cache, objects, "slow_path_again")
                    report |= hits(cache, objects)
                await cache.aclose()
    finally:
        shutil.rmtree(path)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "/dev/shm")
