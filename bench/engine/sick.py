"""Measure hits on one disk while another disk fails, is full, or takes two seconds.

One mount has two directories of the same speed. Programs request blocks on the healthy disk, which
are hits. Meanwhile other reads request blocks of both disks, those of the sick one from its disk,
and new blocks arrive. Each round begins with new directories and without a fault for a while, and
then has the fault until its end. In that time the cache must detect the fault and bypass the disk.
"""

import errno
import itertools
import logging
import shutil
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio
from typing_extensions import override

from bench.engine.findings import Bar, Findings, Grid
from bench.engine.paced_reader import PacedReader
from bench.engine.quota import percentile
from bench.engine.rig import (
    IDENTITY,
    MIB,
    NumberedOrigin,
    Options,
    go_first,
    make_ref,
    read_numbered,
    running,
)
from cachefs.cache.block_cache import BlockCache
from cachefs.cache.levels.placement import Placement, TierPlace
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.errors import CachefsError
from cachefs.types import BlockKey, Buffer, ObjectMeta, ObjectRef
from tests.cache.faulty_disk import FaultyDisk

_QUOTA_BYTES = 512 * MIB
_BLOCK_BYTES = 100_000
_OLD_BLOCKS = 400
"""The number of blocks stored before a round, about half of them in each directory."""
_HIT_RATE = 200
"""Requests per second of each program: one for hits in memory, one for hits through the threads of
the healthy disk."""
_OLD_RATE = 40
"""Reads of old blocks per second, on both disks."""
_NEW_RATE = 40
_SLOWER = 2.0
_WAYS = ("in memory", "from disk")

_FAULTS: dict[str, Callable[[FaultyDisk], None]] = {
    "EIO": lambda disk: disk.fail(errno.EIO),
    "ENOSPC": lambda disk: disk.fail(errno.ENOSPC, "write", "create"),
    "2 s": lambda disk: disk.delay(2.0),
}
_NOTICED_LATE = "2 s"
"""The fault that the cache detects late: it takes some 3 s to bypass such a disk. The rest of the
time is for the reads after that."""


@dataclass
class _Phase:
    waits_ns: dict[str, list[int]]
    """The waits of hits on the healthy disk, by program."""
    missed: int
    """The number of these hits that needed a new fetch."""
    reads: int
    """The number of other reads; the slowest took `slowest_s`."""
    slowest_s: float
    failed: int
    """The number of all reads that failed."""
    health: str


class _CountingOrigin(NumberedOrigin):
    """Counts the GETs for some of its files."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: set[str] = set()
        self.watched_gets = 0

    @override
    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        self.watched_gets += path in self.watched
        return await super().read(path, meta, offset, length)


def run(directory: Path, options: Options) -> Findings:
    go_first()
    logging.getLogger("cachefs").addHandler(logging.NullHandler())  # drop its many warnings
    rounds, well_s, ill_s, late_s = (2, 0.6, 0.7, 3) if options.quick else (3, 2.0, 2.5, 3.0)
    phases: dict[str, list[tuple[_Phase, _Phase]]] = {name: [] for name in _FAULTS}
    for number, name in itertools.product(range(rounds), _FAULTS):
        options.say(f"round {number + 1}: {name}")
        fault_s = ill_s + (late_s if name == _NOTICED_LATE else 0)
        phases[name].append(trio.run(_round, directory, _FAULTS[name], well_s, fault_s))
    return _report(phases)


async def _round(
    directory: Path, fault: Callable[[FaultyDisk], None], well_s: float, ill_s: float
) -> tuple[_Phase, _Phase]:
    paths = directory / "healthy", directory / "sick"
    origin = _CountingOrigin()
    with FaultyDisk() as disk:
        tiers = [
            CacheDirectory.open(path, _QUOTA_BYTES, IDENTITY, free_space_ratio=0.01, disk=of)
            for path, of in zip(paths, (None, disk), strict=True)
        ]
        async with running(origin, *tiers) as cache:
            refs = [make_ref(number, _BLOCK_BYTES) for number in range(_OLD_BLOCKS)]
            for ref in refs:
                await read_numbered(cache, ref)
            await cache.drain()
            disk.cold = True
            healthy = _on_first(tiers, refs)
            origin.watched = {ref.path for ref in healthy}
            async with trio.open_nursery() as under_way:
                readers = _Readers(cache, origin, refs, healthy, under_way)
                async with readers.running():
                    await trio.sleep(0.3)
                    well = await readers.phase(well_s)
                    fault(disk)
                    ill = await readers.phase(ill_s)
                    ill.health = cache.status()[1].health
            ill.failed += readers.failed
            disk.heal()
    for path in paths:
        shutil.rmtree(path)
    return well, ill


def _on_first(tiers: Sequence[CacheDirectory], refs: Sequence[ObjectRef]) -> list[ObjectRef]:
    """Return the files whose blocks lie in the first directory."""
    placement = Placement([TierPlace(tier.identity.uuid, tier.quota_bytes, 0) for tier in tiers])
    return [ref for ref in refs if placement.order(BlockKey(ref.object_id, 0))[0] == 0]


class _Readers:
    """The programs with hits on the healthy disk, and all other reads."""

    def __init__(
        self,
        cache: BlockCache,
        origin: _CountingOrigin,
        refs: Sequence[ObjectRef],
        healthy: Sequence[ObjectRef],
        under_way: trio.Nursery,
    ) -> None:
        """`under_way` runs the other reads; it ends when the last of them has its bytes."""
        self._cache = cache
        self._origin = origin
        self._under_way = under_way
        self._programs = {
            "in memory": PacedReader(partial(self._hit, itertools.cycle(healthy))),
            "from disk": PacedReader(partial(self._hit_by_thread, itertools.cycle(healthy))),
        }
        self._old = itertools.cycle(refs)
        self._new = (make_ref(number, _BLOCK_BYTES) for number in itertools.count(len(refs)))
        self._reads = 0
        self._slowest_s = 0.0
        self.failed = 0
        """The number of failed reads since the last phase."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for reader in self._programs.values():
                await stack.enter_async_context(reader.running(_HIT_RATE))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._flow, _OLD_RATE, self._old)
                nursery.start_soon(self._flow, _NEW_RATE, self._new)
                yield
                nursery.cancel_scope.cancel()

    async def phase(self, seconds: float) -> _Phase:
        self._take()
        await trio.sleep(seconds)
        return self._take()

    def _take(self) -> _Phase:
        """Return the results since the last call."""
        phase = _Phase(
            {way: reader.take()[0] for way, reader in self._programs.items()},
            self._origin.watched_gets,
            self._reads,
            self._slowest_s,
            self.failed,
            self._cache.status()[1].health,
        )
        self._origin.watched_gets = self._reads = self.failed = 0
        self._slowest_s = 0.0
        return phase

    async def _hit(self, refs: Iterator[ObjectRef]) -> None:
        await self._read(next(refs))

    async def _hit_by_thread(self, refs: Iterator[ObjectRef]) -> None:
        """Read through the threads of the disk, as if the bytes were not in memory."""
        try:
            await self._cache.read_block(next(refs), 0, 0, _BLOCK_BYTES)
        except CachefsError:
            self.failed += 1

    async def _flow(self, rate: float, refs: Iterator[ObjectRef]) -> None:
        """Start reads at `rate` per second; no read waits for the one before."""
        for ref in refs:
            self._under_way.start_soon(self._timed, ref)
            await trio.sleep(1 / rate)

    async def _timed(self, ref: ObjectRef) -> None:
        began_s = trio.current_time()
        await self._read(ref)
        self._reads += 1
        self._slowest_s = max(self._slowest_s, trio.current_time() - began_s)

    async def _read(self, ref: ObjectRef) -> None:
        try:
            await read_numbered(self._cache, ref)
        except CachefsError:
            self.failed += 1


def _report(phases: dict[str, list[tuple[_Phase, _Phase]]]) -> Findings:
    grid = Grid(
        "hits on the healthy one of two disks, medians of rounds",
        ("", "", "p50 us", "p99 us", "p99 of rounds", "missed", "other reads", "slowest", "failed"),
        note="What a program waits for a block of 100,000 bytes, in us. from disk: by a thread of "
        "the healthy disk. missed: hits that were none, on both ways. other reads: of old blocks "
        "on both disks, and of new ones; their slowest in ms. In brackets: what the sick disk "
        "was held for at the end of each round.",
    )
    findings = Findings([grid])
    failed = 0
    for fault, rounds in phases.items():
        p99_us: dict[str, list[float]] = {}
        for way, (state, column) in itertools.product(_WAYS, (("well", 0), (fault, 1))):
            found = [pair[column] for pair in rounds]
            p99s = [percentile(phase.waits_ns[way], 0.99) / 1e3 for phase in found]
            p99_us.setdefault(way, []).append(statistics.median(p99s))
            first = way == _WAYS[0]
            failed += sum(phase.failed for phase in found) * first
            p50s = [percentile(phase.waits_ns[way], 0.5) / 1e3 for phase in found]
            health = ", ".join(dict.fromkeys(phase.health for phase in found))
            grid.rows.append(
                [
                    f"{state} ({health})",
                    way,
                    round(statistics.median(p50s)),
                    round(p99_us[way][-1]),
                    f"{min(p99s):.0f}-{max(p99s):.0f}",
                    sum(phase.missed for phase in found) if first else None,
                    sum(phase.reads for phase in found) if first else None,
                    round(max(phase.slowest_s for phase in found) * 1e3) if first else None,
                    sum(phase.failed for phase in found) if first else None,
                ]
            )
        for way, (well_us, ill_us) in p99_us.items():
            name = f"p99 of hits {way}, {fault} on the other disk / well"
            findings.bars.append(Bar(name, ill_us / well_us, at_most=_SLOWER))
    findings.bars.append(Bar("failed reads", failed, at_most=0))
    return findings
