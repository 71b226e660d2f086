"""A running `BlockCache` over an origin that costs next to nothing."""

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
from cachefs.format.object_id import object_id
from cachefs.origin.base import Origin, OriginCounters
from cachefs.tiers.tier import Tier
from cachefs.types import BlockKey, Buffer, Entry, ObjectMeta, ObjectRef


def go_first() -> None:
    """Before all other programs of the machine, if that is allowed: what they do would be most of
    what a measurement of single reads sees. Call this before there are threads."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _FIRST)
        # Within the session, that was. The sandbox is one of its own.
        Path("/proc/self/autogroup").write_text(str(_FIRST), encoding="ascii")


def stolen_s() -> float:
    """CPU time that a virtual machine did not get, since it was started."""
    with open("/proc/stat", encoding="ascii") as lines:
        return int(lines.readline().split()[_STEAL]) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for. No names: all."""

    quick: bool
    policies: Sequence[str]
    workloads: Sequence[str]
    say: Callable[[str], None]


_FIRST = -15
"""As `nice` has it."""
_STEAL = 8
"""The column of /proc/stat."""
IDENTITY = "bench://"
MIB = 1 << 20


class BenchOrigin(Origin):
    """Objects of one block. Children say what is in them."""

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
    """The first `length` bytes of a file of `NumberedOrigin`."""
    return (int(path).to_bytes(8, "little") * (-(-length // 8)))[:length]


class NumberedOrigin(BenchOrigin):
    """File N consists of the number N, eight bytes each time: a wrong byte can't hide."""

    @override
    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        self.counters.gets += 1
        await trio.lowlevel.checkpoint()
        return numbered_bytes(path, length)


class RollingOrigin(BenchOrigin):
    """Answers from 64 MiB of noise, further on every time: no copy, no allocation, and the
    bytes are not in the processor's caches, as they wouldn't be after a download."""

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
    """File number `number`; its name and id depend on nothing else."""
    path = str(number)
    return ObjectRef(object_id(IDENTITY, path, "v"), path, ObjectMeta(size_bytes, 0, "v"))


def open_tier(path: Path, quota_bytes: int, **options: Any) -> Tier:
    """`options` are those of `Tier.open`."""
    return Tier.open(path, quota_bytes, IDENTITY, free_space_ratio=0.01, **options)


@asynccontextmanager
async def running(
    origin: Origin,
    *tiers: Tier,
    policy_name: str = "lru",
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
) -> AsyncIterator[BlockCache]:
    """A cache that is closed at the end."""
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
    """Read a whole file of `NumberedOrigin`, on the loop if it can be. True: no GET was needed."""
    length = ref.meta.size_bytes
    misses = cache.counters.misses
    data = cache.read_now(BlockKey(ref.object_id, 0), 0, length)
    if data is None:
        data = memoryview(await cache.read(ref, 0, 0, length))
    if len(data) != length or data[:8] != int(ref.path).to_bytes(8, "little")[:length]:
        raise WrongBytesError(f"file {ref.path} begins with {bytes(data[:8])!r}")
    return cache.counters.misses == misses


async def at_rest(cache: BlockCache) -> None:
    """Wait until what was fetched is stored, and no tier is above its high mark any more."""
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
    """Allocated bytes of everything below `path`: of the slab files, and of all else."""
    slabs = rest = 0
    for root, names, files in os.walk(path):
        for name in (*names, *files):
            allocated = os.lstat(os.path.join(root, name)).st_blocks * 512
            if name.endswith(".slab"):
                slabs += allocated
            else:
                rest += allocated
    return slabs, rest
