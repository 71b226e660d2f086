"""Check that a tier keeps to a changing quota, and measure what evictions cost hits.

The quota: new blocks with three times the quota in bytes arrive at a steady pace. The policy evicts
all the time, and the tier is resized meanwhile. The program samples the disk space of the slab
files all the time.

Hits: a program requests blocks that stay hot. Either nothing else happens (idle), or new blocks
arrive at the same pace, into free slots (loading) or into a full cache (evicting).
"""

import itertools
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import trio
from typing_extensions import override

from bench.engine.findings import Bar, Cell, Findings, Grid
from bench.engine.loop_rounds import LongRounds
from bench.engine.paced_reader import PacedReader
from bench.engine.rig import (
    MIB,
    Options,
    RollingOrigin,
    at_rest,
    go_first,
    make_ref,
    numbered_bytes,
    open_tier,
    read_numbered,
    running,
    stolen_s,
)
from cachefs.cache.block_cache import BlockCache
from cachefs.types import Buffer, ObjectMeta, ObjectRef

_LARGE_SHARE = 0.05
_LARGE_BYTES = MIB
_TICK_S = 0.003
_SAMPLE_S = 0.1

_LOAD_QUOTAS = 3
_RESIZES = ((0.5, 0.5), (1.0, 1.0), (1.5, 0.5), (2.0, 1.25), (2.5, 0.5))
"""Pairs of the load so far, in quotas, and the new quota, as a share of the first quota."""
_REST_SHARE = 0.25
"""The last quota, set after the load, as a share of the first."""
_PATIENCE_S = 10.0

_HIT_RATE = 500
_HOT_BLOCKS = 200
_HOT_BYTES = 100_000
_LOAD_BYTES_PER_S = 30_000_000
_WATCHED_S = 1.5
_PHASES = ("idle", "loading", "evicting")
_SLOWER = 2.0
_QUIET_US = 1_000
"""If hits wait for longer although the program is idle, other programs on the machine cause it."""


def run(directory: Path, options: Options) -> Findings:
    go_first()
    findings = Findings()
    options.say("resizing under load")
    quota_bytes, seconds = (256 * MIB, 4) if options.quick else (512 * MIB, 16)
    trio.run(_resize_under_load, directory / "resized", quota_bytes, seconds, findings)
    options.say("hits while evicting")
    rounds, phase_s = (6, 0.4) if options.quick else (14, 0.6)
    trio.run(_hit_while_evicting, directory, rounds, phase_s, options, findings)
    return findings


class _SourceOfBlocks(RollingOrigin):
    """Serves the hot files like `NumberedOrigin`. The other files cost the loop no work."""

    @override
    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        if int(path) < _HOT_BLOCKS:
            return numbered_bytes(path, length)
        return await super().read(path, meta, offset, length)


class _NewBlocks:
    """Fetches files that no reader has read before: 20-180 KB, and some of 1 MiB."""

    def __init__(self) -> None:
        self._numbers = itertools.count(_HOT_BLOCKS)
        self._chance = random.Random(3)

    def _refs(self) -> Iterator[ObjectRef]:
        while True:
            large = self._chance.random() < _LARGE_SHARE
            size_bytes = _LARGE_BYTES if large else self._chance.randrange(20_000, 180_001)
            yield make_ref(next(self._numbers), size_bytes)

    async def flow(self, cache: BlockCache, bytes_per_s: float, total_bytes: float) -> None:
        """Request blocks at that pace. If it falls behind, it requests them sooner, but never all
        at once."""
        began_s, asked_bytes = time.monotonic(), 0
        for ref in self._refs():
            while asked_bytes > (time.monotonic() - began_s) * bytes_per_s:  # noqa: ASYNC110
                await trio.sleep(_TICK_S)
            if asked_bytes >= total_bytes:
                return
            cache.fetch(ref, 0, 1)
            asked_bytes += ref.meta.size_bytes
            await trio.lowlevel.checkpoint()  # like many readers: not all requests in one round

    async def fill(self, cache: BlockCache, total_bytes: float) -> None:
        """Request blocks as fast as possible."""
        asked_bytes = 0
        for ref in self._refs():
            if asked_bytes >= total_bytes:
                break
            cache.fetch(ref, 0, 1)
            asked_bytes += ref.meta.size_bytes
            if asked_bytes % (8 * MIB) < ref.meta.size_bytes:
                await trio.sleep(_TICK_S / 10)
                await cache.drain()
        await cache.drain()


# -- the quota ----------------------------------------------------------------------------------


@dataclass
class _Stage:
    """The period from one change of the quota to the next."""

    name: str
    quota_bytes: int
    allowed_bytes: int
    """The limit of the check: until the files first fit, the size at the change if that is larger
    than the quota; then the quota."""
    began_s: float
    fits_after_s: float | None = None
    samples: int = 0
    most_bytes: int = 0
    most_over_bytes: int = 0
    """The most bytes above `allowed_bytes` at the time of a sample."""
    rejected_before: int = 0
    evicted_before: int = 0
    cells: list[Cell] = field(default_factory=list)


class _Watch:
    """Samples the slab files and compares them with the current quota."""

    def __init__(self, directory: Path, cache: BlockCache) -> None:
        self._slabs = directory / "slabs"
        self._cache = cache
        self.stages: list[_Stage] = []

    async def resize(self, root: Path, quota_bytes: int, name: str) -> None:
        present_bytes = self._on_disk()
        await self._cache.resize_tier(root, quota_bytes)
        self.begin(quota_bytes, max(quota_bytes, present_bytes), name)

    def begin(self, quota_bytes: int, allowed_bytes: int, name: str) -> None:
        if self.stages:
            self.end()
        counters = self._cache.status()[0].counters
        stage = _Stage(name, quota_bytes, allowed_bytes, time.monotonic())
        stage.rejected_before, stage.evicted_before = counters.rejected, counters.evicted
        self.stages.append(stage)
        self.look()

    def end(self) -> None:
        stage, counters = self.stages[-1], self._cache.status()[0].counters
        stage.cells = [
            stage.name,
            stage.quota_bytes / MIB,
            stage.samples,
            stage.most_bytes / MIB,
            stage.most_over_bytes / MIB,
            f"> {time.monotonic() - stage.began_s:.2f}"
            if stage.fits_after_s is None
            else f"{stage.fits_after_s:.2f}",
            counters.evicted - stage.evicted_before,
            counters.rejected - stage.rejected_before,
        ]

    async def run(self) -> None:
        while True:
            self.look()
            await trio.sleep(_SAMPLE_S)

    def look(self) -> bool:
        """Take one sample. Return True if the files are within the quota."""
        stage = self.stages[-1]
        present_bytes = self._on_disk()
        fits = present_bytes <= stage.quota_bytes
        if fits and stage.fits_after_s is None:
            stage.fits_after_s = time.monotonic() - stage.began_s
            stage.allowed_bytes = stage.quota_bytes
        stage.samples += 1
        stage.most_bytes = max(stage.most_bytes, present_bytes)
        over_bytes = present_bytes - stage.allowed_bytes
        stage.most_over_bytes = max(stage.most_over_bytes, over_bytes)
        return fits

    def _on_disk(self) -> int:
        """Return the allocated bytes of the slab files. A file that disappears after the listing
        counts 0."""
        total_bytes = 0
        for name in os.listdir(self._slabs):
            try:
                total_bytes += os.lstat(self._slabs / name).st_blocks * 512
            except FileNotFoundError:
                continue
        return total_bytes


async def _resize_under_load(
    directory: Path, quota_bytes: int, seconds: float, findings: Findings
) -> None:
    tier = open_tier(directory, quota_bytes)
    slab_bytes = tier.identity.slab_bytes
    blocks = _NewBlocks()
    pace = _LOAD_QUOTAS * quota_bytes / seconds
    async with running(_SourceOfBlocks(), tier) as cache, trio.open_nursery() as nursery:
        await blocks.fill(cache, quota_bytes)
        watch = _Watch(directory, cache)
        watch.begin(quota_bytes, quota_bytes, "load begins")
        nursery.start_soon(watch.run)
        loaded = 0.0
        for at, share in (*_RESIZES, (_LOAD_QUOTAS, _REST_SHARE)):
            await blocks.flow(cache, pace, (at - loaded) * quota_bytes)
            loaded = at
            name = f"{'load over' if share == _REST_SHARE else 'then'}: to {share:g} x"
            await watch.resize(directory, int(share * quota_bytes), name)
        with trio.move_on_after(_PATIENCE_S):
            while not watch.look():  # noqa: ASYNC110 - the evictor has no event for it
                await trio.sleep(_TICK_S)
        watch.end()
        nursery.cancel_scope.cancel()
    stages = watch.stages
    columns = ("", "quota", "samples", "most", "over", "within after", "evicted", "rejected")
    note = (
        f"MiB; slabs of {slab_bytes // MIB} MiB; {pace / 1e6:.0f} MB/s of new blocks. most: "
        "allocated bytes of the slab files. over: what was above quota, or after a shrink above "
        "what was there then until it first was within. within after: s. rejected: not kept."
    )
    rows = [stage.cells for stage in stages]
    findings.grids.append(Grid("bytes on disk while the quota changes", columns, rows, note))
    over_slabs = max(stage.most_over_bytes for stage in stages) / slab_bytes
    findings.bars.append(Bar("above the quota, in slabs, at most", over_slabs, at_most=1.0))
    at_rest_s = stages[-1].fits_after_s
    took_s = _PATIENCE_S * 2 if at_rest_s is None else at_rest_s
    findings.bars.append(Bar("shrink without load, s", took_s, at_most=_PATIENCE_S))


# -- hits ---------------------------------------------------------------------------------------


@dataclass
class _Phase:
    """The figures of one phase, in us."""

    p50_us: float
    p99_us: float
    service_p99_us: float
    not_now: int
    evicted: int
    stolen_s: float


class _Hot:
    """Blocks that a program requests again and again from the measured cache."""

    def __init__(self) -> None:
        self._refs = [make_ref(number, _HOT_BYTES) for number in range(_HOT_BLOCKS)]
        self._turn = itertools.cycle(self._refs)
        self.cache: BlockCache
        self.not_now = 0
        """The number of reads that needed a new fetch."""

    async def read_all(self, cache: BlockCache) -> None:
        for ref in self._refs:
            await read_numbered(cache, ref)
        await cache.drain()

    async def read(self) -> None:
        self.not_now += not await read_numbered(self.cache, next(self._turn))


async def _hit_while_evicting(
    directory: Path, rounds: int, phase_s: float, options: Options, findings: Findings
) -> None:
    # The space between the marks has room for all rounds.
    roomy_bytes = int(phase_s * _LOAD_BYTES_PER_S * (rounds + 4) * 3)
    roomy_tier = open_tier(directory / "roomy", roomy_bytes, high=0.55, low=0.15)
    full_tier = open_tier(directory / "full", 256 * MIB)
    blocks, hot = _NewBlocks(), _Hot()
    phases: dict[str, list[_Phase]] = {name: [] for name in _PHASES}
    watches = {name: LongRounds() for name in _PHASES[1:]}
    async with AsyncExitStack() as stack:
        roomy = await stack.enter_async_context(running(_SourceOfBlocks(), roomy_tier))
        full = await stack.enter_async_context(running(_SourceOfBlocks(), full_tier))
        options.say("  filling")
        await _make_room(roomy, blocks)
        await blocks.fill(full, 2 * 256 * MIB)
        await hot.read_all(roomy)
        await hot.read_all(full)
        caches = {"idle": full, "loading": roomy, "evicting": full}
        hot.cache = full
        options.say("  measuring")
        reader = PacedReader(hot.read)
        async with reader.running(_HIT_RATE):
            await trio.sleep(0.3)
            for _, name in itertools.product(range(rounds), _PHASES):
                hot.cache = caches[name]
                await hot.read_all(caches[name])
                found = await _phase(name, caches[name], hot, reader, blocks, phase_s)
                phases[name].append(found)
            for name, watch in watches.items():
                hot.cache = caches[name]
                await hot.read_all(caches[name])
                with watch.watching():
                    await _phase(name, caches[name], hot, reader, blocks, _WATCHED_S)
    for name in _PHASES:
        if any(bool(phase.evicted) is not (name == "evicting") for phase in phases[name]):
            raise RuntimeError(f"{name}: {phases[name]}: not what was to be measured")
    _report_hits(phases, findings)
    findings.grids += [_held(name, watch) for name, watch in watches.items()]


async def _make_room(cache: BlockCache, blocks: _NewBlocks) -> None:
    """Fill past the high mark, so that the evictor works down to the low one."""
    quota_bytes = cache.status()[0].quota_bytes
    while not cache.status()[0].counters.evicted:
        await blocks.fill(cache, quota_bytes * 0.05)
    await at_rest(cache)


async def _phase(
    name: str,
    cache: BlockCache,
    hot: _Hot,
    reader: PacedReader,
    blocks: _NewBlocks,
    phase_s: float,
) -> _Phase:
    counters = cache.status()[0].counters
    await at_rest(cache)
    evicted, not_now = counters.evicted, hot.not_now
    stolen_before_s = stolen_s()
    reader.take()
    if name == "idle":
        await trio.sleep(phase_s)
    else:
        await blocks.flow(cache, _LOAD_BYTES_PER_S, phase_s * _LOAD_BYTES_PER_S)
    waits_ns, service_ns = reader.take()
    return _Phase(
        statistics.median(waits_ns) / 1e3,
        percentile(waits_ns, 0.99) / 1e3,
        percentile(service_ns, 0.99) / 1e3,
        hot.not_now - not_now,
        counters.evicted - evicted,
        stolen_s() - stolen_before_s,
    )


def percentile(values: list[int], share: float) -> int:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def _report_hits(phases: dict[str, list[_Phase]], findings: Findings) -> None:
    grid = Grid(
        f"hits of {_HOT_BYTES:,} bytes, {_HIT_RATE}/s, medians of phases",
        ("", "phases", "p50 us", "p99 us", "from-to", "service p99", "missed", "evicted", "stolen"),
        note="What the program waits for, in us; service: the hit alone, once the loop is there. "
        f"loading: {_LOAD_BYTES_PER_S / 1e6:.0f} MB/s of new blocks into free slots; evicting: "
        "the same into a full cache. missed: hot blocks that were not there any more. stolen: ms "
        "of CPU time a phase that the virtual machine did not get; of each kind of phase the "
        "half counts in which that was least.",
    )
    findings.grids.append(grid)
    p99_us: dict[str, float] = {}
    for name, all_found in phases.items():
        found = sorted(all_found, key=lambda phase: phase.stolen_s)[: -(-len(all_found) // 2)]
        p99s = [phase.p99_us for phase in found]
        p99_us[name] = statistics.median(p99s)
        grid.rows.append(
            [
                name,
                len(found),
                round(statistics.median(phase.p50_us for phase in found)),
                round(p99_us[name]),
                f"{min(p99s):.0f}-{max(p99s):.0f}",
                round(statistics.median(phase.service_p99_us for phase in found)),
                sum(phase.not_now for phase in all_found),
                sum(phase.evicted for phase in all_found),
                round(statistics.mean(phase.stolen_s for phase in found) * 1e3),
            ]
        )
    slower = p99_us["evicting"] / p99_us["idle"]
    name = "p99 of hits, evicting / idle"
    if p99_us["idle"] > _QUIET_US:
        name += " (of no worth: the machine is busy)"
    findings.bars.append(Bar(name, slower, at_most=_SLOWER))


def _held(name: str, watch: LongRounds) -> Grid:
    grid = Grid(
        f"who held the loop for 1 ms and more, {_WATCHED_S:g} s of {name}",
        ("", "% of it", "longest ms"),
        note=f"{watch.count} rounds of the loop, {watch.total_ns / 1e6:.0f} ms in all, of which "
        f"{watch.cpu_ns / 1e6:.0f} ms on the CPU (the rest: waiting for it, or for Python's lock). "
        "Watching costs time itself. longest: round that was mostly this.",
    )
    looks = max(1, watch.found.total())
    for place, count in watch.found.most_common(10):
        longest_ns = watch.longest_ns.get(place)
        grid.rows.append(
            [place, round(100 * count / looks), None if longest_ns is None else longest_ns / 1e6]
        )
    return grid
