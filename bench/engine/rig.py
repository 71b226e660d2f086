"""Run a `BlockCache` over an origin with almost no cost."""

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from typing_extensions import override

from cachefs.cache.block_cache import DEFAULT_BUFFER_BYTES, BlockCache
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.format.object_id import object_id
from cachefs.origin.base import Origin, OriginCounters
from cachefs.types import BlockKey, Buffer, Entry, ObjectMeta, ObjectRef


def go_first() -> None:
    """Run before all other programs of the machine, if allowed, because their load would dominate
    a measurement of single reads. Call this before the process has threads."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _FIRST)
        # That priority counts only within the session, and the sandbox is a separate session.
        Path("/proc/self/autogroup").write_text(str(_FIRST), encoding="ascii")


def stolen_s() -> float:
    """Return the CPU seconds that this virtual machine did not get since its start."""
    with open("/proc/stat", encoding="ascii") as lines:
        return int(lines.readline().split()[_STEAL]) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line. An empty list of names means all."""

    quick: bool
    policies: Sequence[str]
    workloads: Sequence[str]
    say: Callable[[str], None]


_FIRST = -15
"""The priority in the scale of `nice`."""
_STEAL = 8
"""The column of /proc/stat."""
IDENTITY = "bench://"
MIB = 1 << 20


class BenchOrigin(Origin):
    """An origin of objects of one block. Subclasses define their content."""

    url = identity = IDENTITY

    def __init__(self) -> None:
        self.counters = OriginCounters()

    @override
    async def check(self) -> None:
        pass

    @override
    async def stat(self, path: str) -> ObjectMeta | None:
        raise NotImplementedError

    @override
    def list_dir(
        self, path: str, below: dict[str, list[Entry]] | None = None
    ) -> AsyncIterator[list[Entry]]:
        raise NotImplementedError

    @override
    async def aclose(self) -> None:
        pass


def numbered_bytes(path: str, length: int) -> bytes:
    """Return the first `length` bytes of a file of `NumberedOrigin`."""
    return (int(path).to_bytes(8, "little") * (-(-length // 8)))[:length]


class NumberedOrigin(BenchOrigin):
    """An origin whose file N repeats the number N in eight bytes, so that wrong bytes are
    detected."""

    @override
    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        self.counters.gets += 1
        await trio.lowlevel.checkpoint()
        return numbered_bytes(path, length)


class RollingOrigin(BenchOrigin):
    """Answers with the next piece of 64 MiB of noise, without a copy or an allocation. As after a
    download, the bytes are not in the processor's caches."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = memoryview(os.urandom(64 * MIB))
        self._position = 0

    def take(self, length: int) -> memoryview:
        start = self._position
        if start + length > len(self.noise):
            start = 0
        self._position = start + length
        return self.noise[start : start + length]

    @override
    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        self.counters.gets += 1
        await trio.lowlevel.checkpoint()
        return self.take(length)


def make_ref(number: int, size_bytes: int) -> ObjectRef:
    """Return file number `number`; its name and id depend on nothing else."""
    path = str(number)
    return ObjectRef(object_id(IDENTITY, path, "v"), path, ObjectMeta(size_bytes, 0, "v"))


def open_tier(path: Path, quota_bytes: int, **options: Any) -> CacheDirectory:
    """Open a tier with the `options` of `CacheDirectory.open`."""
    return CacheDirectory.open(path, quota_bytes, IDENTITY, free_space_ratio=0.01, **options)


@asynccontextmanager
async def running(
    origin: Origin,
    *tiers: CacheDirectory,
    policy_name: str = "lru",
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
) -> AsyncIterator[BlockCache]:
    """Run a cache within the context and close it at the end."""
    cache = BlockCache(origin, tiers, policy_name=policy_name, buffer_bytes=buffer_bytes)
    async with trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        try:
            yield cache
        finally:
            await cache.aclose()
        nursery.cancel_scope.cancel()


class WrongBytesError(Exception):
    """The cache answered with bytes of another file."""


async def read_numbered(cache: BlockCache, ref: ObjectRef) -> bool:
    """Read a whole file of `NumberedOrigin`, on the loop if possible. Return True if it needed no
    GET. Raises `WrongBytesError`."""
    length = ref.meta.size_bytes
    misses = cache.counters.misses
    data = cache.read_block_now(BlockKey(ref.object_id, 0), 0, length)
    if data is None:
        data = memoryview(await cache.read_block(ref, 0, 0, length))
    if len(data) != length or data[:8] != int(ref.path).to_bytes(8, "little")[:length]:
        raise WrongBytesError(f"file {ref.path} begins with {bytes(data[:8])!r}")
    return cache.counters.misses == misses


async def at_rest(cache: BlockCache) -> None:
    """Wait until all fetched blocks are stored, no tier is above its high mark, and evictions have
    stopped."""
    await cache.drain()
    with trio.fail_after(60):
        while any(  # noqa: ASYNC110 - the evictor has no event for its rest
            tier.used_bytes > tier.high_bytes for tier in cache.status()
        ):
            await trio.sleep(0.05)
    evicted = -1
    while evicted != (now := sum(tier.counters.evicted for tier in cache.status())):
        evicted = now
        await trio.sleep(0.2)


def directory_bytes(path: Path) -> tuple[int, int]:
    """Return the allocated bytes below `path`: of the slab files, and of everything else."""
    slabs = rest = 0
    for root, names, files in os.walk(path):
        for name in (*names, *files):
            allocated = os.lstat(os.path.join(root, name)).st_blocks * 512
            if name.endswith(".slab"):
                slabs += allocated
            else:
                rest += allocated
    return slabs, rest
