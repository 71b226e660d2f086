"""A new process of `scale.py` that opens a large cache directory and prints figures as JSON.

It ends without closing anything, like a crash.
"""

import gc
import json
import os
import random
import resource
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trio

from bench.engine.rig import BenchOrigin, make_ref, open_tier, running
from cachefs.cache.block_cache import BlockCache
from cachefs.types import BlockKey, Buffer, ObjectMeta, ObjectRef

_READS = 20_000
_LOOK_UPS = 200_000
_ABSENT = 0.25
"""The share of look-ups of blocks that are not cached."""
_EVICTION_S = 200


class _NoOrigin(BenchOrigin):
    """Serves only new files: the cache must not request what it has."""

    def __init__(self, first_number: int) -> None:
        super().__init__()
        self._first = first_number

    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        if int(path) < self._first:
            raise RuntimeError(f"file {path} was to be cached")
        self.counters.gets += 1
        await trio.lowlevel.checkpoint()
        return bytes(length)


class _Probe:
    def __init__(self, directory: str, quota_bytes: int, blocks: int, block_bytes: int) -> None:
        self._directory = Path(directory)
        self._quota_bytes = quota_bytes
        self._blocks = blocks
        self._block_bytes = block_bytes
        self._chance = random.Random(os.getpid())
        self.figures: dict[str, float] = {}

    async def run(self, evict: bool) -> None:
        first = self._random_ref()
        began = time.perf_counter()
        tier = open_tier(self._directory, self._quota_bytes)
        # lru evicts blocks whether or not they were read; nothing else depends on the policy
        policy = "lru" if evict else "epoch"
        async with running(_NoOrigin(self._blocks), tier, policy_name=policy) as cache:
            await self._read(cache, first)
            self.figures["open to first read, s"] = time.perf_counter() - began
            await self._look_up(cache, "at the start")
            self.figures["memory at the start, MiB"] = _memory_mib()
            await self._read_many(cache)
            self.figures[f"memory after {_READS:,} reads, MiB"] = _memory_mib()
            await self._look_up(cache, "later")
            if evict:
                await self._evict(cache)
                self.figures["memory after eviction, MiB"] = _memory_mib()
            print(json.dumps(self.figures), flush=True)
            os._exit(0)

    def _random_ref(self) -> ObjectRef:
        return make_ref(self._chance.randrange(self._blocks), self._block_bytes)

    async def _read(self, cache: BlockCache, ref: ObjectRef) -> bool:
        """Read and check a block. Return True if the loop could answer without waiting."""
        found = cache.read_block_now(BlockKey(ref.object_id, 0), 0, self._block_bytes)
        data = found
        if data is None:
            data = memoryview(await cache.read_block(ref, 0, 0, self._block_bytes))
        if len(data) != self._block_bytes or any(data[:64]):
            raise RuntimeError(f"wrong bytes of file {ref.path}")
        return found is not None

    async def _look_up(self, cache: BlockCache, when: str) -> None:
        found_ns, present, correct = array("Q"), 0, 0
        clock = time.perf_counter_ns
        for count, absent in enumerate(self._absences()):
            number = self._chance.randrange(self._blocks) + (self._blocks if absent else 0)
            key = BlockKey(make_ref(number, self._block_bytes).object_id, 0)
            began = clock()
            found = cache.is_cached_or_inflight(key)
            found_ns.append(clock() - began)
            present += not absent
            correct += found is not absent
            if count % 1_000 == 0:
                await trio.lowlevel.checkpoint()
        if correct < _LOOK_UPS:
            raise RuntimeError(f"{_LOOK_UPS - correct} blocks were lost or made up")
        self._percentiles(f"look-up {{}}, {when}, us", found_ns)

    def _absences(self) -> Iterator[bool]:
        return (self._chance.random() < _ABSENT for _ in range(_LOOK_UPS))

    async def _read_many(self, cache: BlockCache) -> None:
        """Read random blocks of all slabs: first as after a start, verified in a thread, then
        again on the loop."""
        first_ns, again_ns = array("Q"), array("Q")
        refs = [self._random_ref() for _ in range(_READS)]
        for ref in refs:
            began = time.perf_counter_ns()
            await self._read(cache, ref)
            first_ns.append(time.perf_counter_ns() - began)
        waited = 0
        for ref in refs:
            key = BlockKey(ref.object_id, 0)
            began = time.perf_counter_ns()
            found = cache.read_block_now(key, 0, self._block_bytes)
            again_ns.append(time.perf_counter_ns() - began)
            waited += found is None
            if found is None:
                await cache.read_block(ref, 0, 0, self._block_bytes)
            if len(again_ns) % 100 == 0:
                await trio.lowlevel.checkpoint()
        self._percentiles("first read {}, us", first_ns)
        self._percentiles("read_now {}, us", again_ns)
        self.figures["read_now that would have waited"] = waited / _READS

    def _percentiles(self, name: str, durations_ns: "array[int]") -> None:
        ordered = sorted(durations_ns)
        for label, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            at = min(len(ordered) - 1, int(len(ordered) * share))
            self.figures[name.format(label)] = ordered[at] / 1e3

    async def _evict(self, cache: BlockCache) -> None:
        """Add new blocks until the evictor has worked down to the low mark."""
        began, number, most_mib = time.perf_counter(), self._blocks, 0.0
        longest_ns, last_ns = 0, time.perf_counter_ns()
        with trio.fail_after(_EVICTION_S):
            while True:
                tier = cache.status()[0]
                if tier.counters.evicted and tier.used_bytes <= tier.low_bytes:
                    break
                under_way = number - self._blocks - cache.counters.fetches
                if not tier.counters.evicted and under_way < 256:
                    for _ in range(64):
                        cache.fetch(make_ref(number, self._block_bytes), 0, 1)
                        number += 1
                await trio.sleep(0.001)
                now_ns = time.perf_counter_ns()
                longest_ns, last_ns = max(longest_ns, now_ns - last_ns), now_ns
                most_mib = max(most_mib, _memory_mib())
        self.figures["evicted blocks"] = cache.status()[0].counters.evicted
        self.figures["eviction, s"] = time.perf_counter() - began
        self.figures["longest turn of the loop meanwhile, ms"] = longest_ns / 1e6
        for _ in range(25):  # wait for the commits of the evictions
            await trio.sleep(0.1)
            most_mib = max(most_mib, _memory_mib())
        self.figures["memory at most while evicting, MiB"] = most_mib


def _memory_mib() -> float:
    fields: dict[str, Any] = {}
    with open("/proc/self/status", encoding="ascii") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            fields[name] = value.split()
    return (int(fields["RssAnon"][0]) + int(fields["RssShmem"][0])) / 1024


def main() -> None:
    arguments = json.loads(sys.argv[1])
    evict = arguments.pop("evict")
    gc.freeze()  # this and the thresholds are as in the daemon
    gc.set_threshold(50_000, 50, 100)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    trio.run(_Probe(**arguments).run, evict)


if __name__ == "__main__":
    main()
