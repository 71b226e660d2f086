"""Measure the share of the disk space that contains data, and the causes of lost space.

The space is the allocated bytes of all files in the cache directory: slab files and index. Lost
space is unused slots (occupancy), the free rest of used slots (filling), and the index.
"""

import itertools
import os
import random
import shutil
import sysconfig
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import trio

from bench.engine.findings import Bar, Findings, Grid
from bench.engine.rig import (
    MIB,
    Options,
    RollingOrigin,
    at_rest,
    directory_bytes,
    make_ref,
    open_tier,
    running,
)
from cachefs.cache.block_cache import BlockCache
from cachefs.types import BlockKey, ObjectRef

_STEP_BYTES = 24 * MIB
"""The bytes fetched between two checks of the cache's fill level."""
_RUN_BLOCKS = 8
_POLL_S = 0.001
_KINDS = ("20-180 KB", "site-packages")
_FILLED_BARS = {"20-180 KB": 0.88, "site-packages": 0.80}
_REWRITTEN_BAR = 0.80


def run(directory: Path, options: Options) -> Findings:
    quotas = (512 * MIB,) if options.quick else (2048 * MIB, 512 * MIB)
    findings = Findings()
    for quota_bytes in quotas:
        grid = Grid(
            f"useful share of a cache of {quota_bytes // MIB:,} MiB",
            ("", "useful", "occupancy", "filling", "index", "slabs", "blocks", "evicted", "recent"),
            note="useful = bytes of blocks / bytes on disk. occupancy: slots in use / slab files. "
            "filling: bytes of blocks / slots in use. index: its share of the bytes on disk. "
            "slabs: files / quota. evicted: so far. recent: how much of what was read last, half "
            "a quota of it, is still there.",
        )
        findings.grids.append(grid)
        for kind in _KINDS:
            options.say(f"{quota_bytes // MIB} MiB: {kind}")
            trio.run(_fill_and_rewrite, directory / "cache", quota_bytes, kind, findings)
    return findings


async def _fill_and_rewrite(
    directory: Path, quota_bytes: int, kind: str, findings: Findings
) -> None:
    other = next(name for name in _KINDS if name != kind)
    files = _Files(quota_bytes // 2)
    judged = len(findings.grids) == 1
    try:
        async with running(RollingOrigin(), open_tier(directory, quota_bytes)) as cache:
            await _fill(cache, files.of(kind))
            useful = await _measure(cache, files, directory, f"filled with {kind}", findings)
            if judged:
                name = f"useful share, filled with {kind}"
                findings.bars.append(Bar(name, useful, at_least=_FILLED_BARS[kind]))
            newcomers = files.of(other)
            for share in (1.0, 1.25, 1.5):
                await _rewrite(cache, newcomers, quota_bytes * (1.0 if share == 1.0 else 0.25))
                label = f"then {share:.2f} x quota of {other}"
                useful = await _measure(cache, files, directory, label, findings)
                if judged and share != 1.25:
                    name = f"useful share, {kind}, {label}"
                    findings.bars.append(Bar(name, useful, at_least=_REWRITTEN_BAR))
    finally:
        shutil.rmtree(directory)


class _Files:
    """A source of new files with sizes of one kind. It also has the files that were read last."""

    def __init__(self, recent_bytes: int) -> None:
        self._numbers = itertools.count()
        self._recent: deque[ObjectRef] = deque()
        self._spare_bytes = recent_bytes

    def of(self, kind: str) -> Iterator[ObjectRef]:
        for size_bytes in _uniform() if kind == _KINDS[0] else itertools.cycle(_package_sizes()):
            ref = make_ref(next(self._numbers), size_bytes)
            self._recent.append(ref)
            self._spare_bytes -= size_bytes
            while self._spare_bytes < 0:
                self._spare_bytes += self._recent.popleft().meta.size_bytes
            yield ref

    def recent_share(self, cache: BlockCache) -> float:
        """Return the cached share of the recently read bytes."""
        total = cached = 0
        for ref in self._recent:
            for index in range(ref.block_count):
                total += ref.block_length(index)
                if cache.is_cached_or_inflight(BlockKey(ref.object_id, index)):
                    cached += ref.block_length(index)
        return cached / total


def _uniform() -> Iterator[int]:
    chance = random.Random(20_180)
    while True:
        yield chance.randrange(20_000, 180_001)


def _package_sizes() -> list[int]:
    """Return the sizes of all files of this Python's packages, in the order of their names."""
    sizes = []
    for root, names, files in os.walk(sysconfig.get_path("purelib")):
        names.sort()
        sizes += [os.lstat(os.path.join(root, name)).st_size for name in sorted(files)]
    return [size for size in sizes if size > 0]


async def _fill(cache: BlockCache, files: Iterator[ObjectRef]) -> None:
    """Fill the cache to just below the high mark, where the evictor does nothing yet. Stop after
    two quotas of bytes if the cache can't reach the mark."""
    quota_bytes = left_bytes = cache.status()[0].quota_bytes
    while left_bytes > -quota_bytes:
        tier = cache.status()[0]
        room_bytes = tier.high_bytes - tier.used_bytes
        if room_bytes < quota_bytes * 0.002:
            return
        left_bytes -= await _fetch(cache, files, min(_STEP_BYTES, room_bytes * 0.7))
    await at_rest(cache)


async def _rewrite(cache: BlockCache, files: Iterator[ObjectRef], total_bytes: float) -> None:
    """Fetch `total_bytes` of new files."""
    while total_bytes > 0:
        total_bytes -= await _fetch(cache, files, min(_STEP_BYTES, total_bytes))
    await at_rest(cache)


async def _fetch(cache: BlockCache, files: Iterator[ObjectRef], least_bytes: float) -> int:
    """Fetch whole files of at least `least_bytes` together. Return their bytes when all are
    stored."""
    fetched_before, size_bytes = cache.counters.fetched_bytes, 0
    while size_bytes < least_bytes:
        ref = next(files)
        size_bytes += ref.meta.size_bytes
        for first in range(0, ref.block_count, _RUN_BLOCKS):
            cache.fetch(ref, first, _RUN_BLOCKS)
    while cache.counters.fetched_bytes - fetched_before < size_bytes:  # noqa: ASYNC110
        await trio.sleep(_POLL_S)
    await cache.drain()
    return size_bytes


async def _measure(
    cache: BlockCache, files: _Files, directory: Path, name: str, findings: Findings
) -> float:
    tier = cache.status()[0]
    slab_bytes, rest_bytes = directory_bytes(directory)
    useful = tier.cached_bytes / (slab_bytes + rest_bytes)
    findings.grids[-1].rows.append(
        [
            name,
            useful,
            tier.used_bytes / slab_bytes,
            tier.cached_bytes / tier.used_bytes,
            rest_bytes / (slab_bytes + rest_bytes),
            slab_bytes / tier.quota_bytes,
            tier.cached_blocks,
            tier.counters.evicted,
            files.recent_share(cache),
        ]
    )
    return useful
