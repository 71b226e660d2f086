"""Measure the cost of fetching a block of 100,000 bytes from memory and storing it on tmpfs."""

import os
import resource
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import trio
import xxhash

from bench.engine.findings import Bar, Findings, Grid
from bench.engine.rig import MIB, Options, RollingOrigin, at_rest, make_ref, open_tier, running
from cachefs.cache.block_cache import BlockCache
from cachefs.types import ObjectRef

_BLOCK_BYTES = 100_000
_UNDER_WAY = 256
"""The most requested blocks that are not fetched yet."""
_POLL_S = 0.001
"""The pause between two checks of their number. Checks without a pause would cost more than the
measured work."""
_READERS = 16
_BAR_PER_CPU_S = 5_000
_JUDGED = ("fetch, into free slots", "fetch, evicting")


@dataclass(frozen=True, slots=True)
class _Cost:
    """The cost of one block in microseconds."""

    wall_us: float
    user_us: float
    system_us: float

    @property
    def cpu_us(self) -> float:
        return self.user_us + self.system_us


class _Stopwatch:
    """Measures wall time, and CPU time of all threads of the process."""

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._usage = resource.getrusage(resource.RUSAGE_SELF)

    def per_block(self, count: int) -> _Cost:
        usage, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        scale = 1e6 / count
        return _Cost(
            (wall - self._wall) * scale,
            (usage.ru_utime - self._usage.ru_utime) * scale,
            (usage.ru_stime - self._usage.ru_stime) * scale,
        )


def run(directory: Path, options: Options) -> Findings:
    count, rounds = (2_000, 3) if options.quick else (5_000, 7)
    costs: dict[str, list[_Cost]] = {}
    costs["floor"] = [_floor(directory / "floor", count) for _ in range(rounds)]
    trio.run(_measure, directory / "cache", count, rounds, costs)
    return _report(costs)


def _floor(path: Path, count: int) -> _Cost:
    """Measure only xxh3 and pwrite into a file whose space is allocated already."""
    source = RollingOrigin()
    size_bytes = 256 * MIB
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        slots = size_bytes // _BLOCK_BYTES
        watch = _Stopwatch()
        for number in range(count):
            data = source.take(_BLOCK_BYTES)
            xxhash.xxh3_64_intdigest(data)
            os.pwrite(fd, data, number % slots * _BLOCK_BYTES)
        return watch.per_block(count)
    finally:
        os.close(fd)
        path.unlink()


class _Supply:
    """A source of files that no reader has read before."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> list[ObjectRef]:
        first, self._next = self._next, self._next + count
        return [make_ref(number, _BLOCK_BYTES) for number in range(first, self._next)]


async def _measure(directory: Path, count: int, rounds: int, costs: dict[str, list[_Cost]]) -> None:
    # The marks leave room for two and a half rounds between them, so that a round never evicts.
    quota_bytes = int(count * 120_320 * 3.5)
    tier = open_tier(directory, quota_bytes, high=0.95, low=0.15)
    supply = _Supply()
    async with running(RollingOrigin(), tier) as cache:
        costs["fetch, growing"] = [
            await _fetched(cache, supply.take(count // 2)) for _ in range(4)
        ][1:]
        for name, way in (("fetch", _fetched), ("16 readers", _read)):
            found = costs[f"{name}, into free slots"] = []
            for _ in range(rounds):
                await _make_room(cache, supply)
                before = _evicted(cache)
                found.append(await way(cache, supply.take(count)))
                assert _evicted(cache) == before
    tier = open_tier(directory, quota_bytes)
    async with running(RollingOrigin(), tier) as cache:
        await _fetched(cache, supply.take(count * 4))
        for name, way in (("fetch", _fetched), ("16 readers", _read)):
            costs[f"{name}, evicting"] = [
                await way(cache, supply.take(count)) for _ in range(rounds)
            ]
        assert _evicted(cache) > count * rounds


async def _make_room(cache: BlockCache, supply: _Supply) -> None:
    """Fill to a little above the high mark, so that the evictor works down to the low mark."""
    before = _evicted(cache)
    while _evicted(cache) == before:
        await _fetched(cache, supply.take(200))
        await trio.sleep(0.01)
    await at_rest(cache)


def _evicted(cache: BlockCache) -> int:
    return cache.status()[0].counters.evicted


async def _fetched(cache: BlockCache, refs: list[ObjectRef]) -> _Cost:
    """Prefetch `refs`, as read-ahead and warm-up do, until all are stored. Return the cost."""
    counters = cache.counters
    target = counters.fetched_bytes
    admitted = cache.status()[0].counters.admitted
    watch = _Stopwatch()
    for ref in refs:
        cache.fetch(ref, 0, 1)
        target += _BLOCK_BYTES
        while target - counters.fetched_bytes >= _UNDER_WAY * _BLOCK_BYTES:  # noqa: ASYNC110
            await trio.sleep(_POLL_S)
    while counters.fetched_bytes < target:  # noqa: ASYNC110
        await trio.sleep(_POLL_S)
    await cache.drain()
    return _checked(cache, watch.per_block(len(refs)), admitted, len(refs))


async def _read(cache: BlockCache, refs: list[ObjectRef]) -> _Cost:
    """Read `refs` with several readers, each of which waits for one block after another."""

    async def reader(first: int) -> None:
        for ref in refs[first::_READERS]:
            await cache.read_block(ref, 0, 0, _BLOCK_BYTES)

    admitted = cache.status()[0].counters.admitted
    watch = _Stopwatch()
    async with trio.open_nursery() as nursery:
        for first in range(_READERS):
            nursery.start_soon(reader, first)
    await cache.drain()
    return _checked(cache, watch.per_block(len(refs)), admitted, len(refs))


def _checked(cache: BlockCache, cost: _Cost, admitted: int, count: int) -> _Cost:
    stored = cache.status()[0].counters.admitted - admitted
    if stored < count * 0.99:
        raise RuntimeError(f"only {stored} of {count} blocks were stored: not what was measured")
    return cost


def _report(costs: dict[str, list[_Cost]]) -> Findings:
    floor_us = statistics.median(cost.cpu_us for cost in costs["floor"])
    grid = Grid(
        f"storing blocks of {_BLOCK_BYTES:,} bytes on tmpfs, medians",
        ("", "blocks/s", "per CPU s", "CPU us", "user", "system", "x floor", "spread"),
        note="floor: xxh3 and pwrite into allocated space. growing: into new slabs, whose memory "
        "the kernel has to clear. evicting: between the default marks. spread: CPU us of the best "
        "and the worst round.",
    )
    findings = Findings([grid])
    for name, rounds in costs.items():
        cpu_us = statistics.median(cost.cpu_us for cost in rounds)
        wall_us = statistics.median(cost.wall_us for cost in rounds)
        every = [cost.cpu_us for cost in rounds]
        grid.rows.append(
            [
                name,
                round(1e6 / wall_us),
                round(1e6 / cpu_us),
                round(cpu_us, 1),
                round(statistics.median(cost.user_us for cost in rounds), 1),
                round(statistics.median(cost.system_us for cost in rounds), 1),
                round(cpu_us / floor_us, 2),
                f"{min(every):.0f}-{max(every):.0f}",
            ]
        )
        if name in _JUDGED:
            findings.bars.append(
                Bar(f"blocks per CPU second: {name}", round(1e6 / cpu_us), at_least=_BAR_PER_CPU_S)
            )
    return findings
