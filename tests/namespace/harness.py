"""A namespace over an origin whose every request is on record and can be interfered with."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.cache_dir.disk import Disk
from cachefs.db import Database
from cachefs.errors import CachefsError
from cachefs.format.inode_record import TABLES, Inode
from cachefs.namespace.clock import Clock
from cachefs.namespace.namespace import ROOT_INO, Namespace, Ttls
from cachefs.namespace.reader import FileReader, Readers
from cachefs.origin.names import Pages
from cachefs.types import Buffer, Entry, Found, ObjectMeta
from tests.memory_origin import MemoryOrigin

NS = 1_000_000_000
TTLS = Ttls(attr_s=100, entry_s=100, negative_s=30, list_s=100)


class WallClock(Clock):
    """Stands still but for `advance`, and for the nanosecond that every look at it takes: so no
    two events have the same time."""

    def __init__(self) -> None:
        self._now_ns = 1_800_000_000 * NS
        super().__init__(self._tick)

    def _tick(self) -> int:
        self._now_ns += 1
        return self._now_ns

    def advance(self, seconds: float) -> None:
        self._now_ns += int(seconds * NS)


class ScriptedOrigin(MemoryOrigin):
    """`requests` is what was asked, in order. `after_stat(path)` is awaited when the answer is
    known and not yet given, `before_page(path, number)` before each page of a listing.

    While `down` is set every request fails with it, `silence_s` after it was sent."""

    def __init__(self, page_size: int = 1000) -> None:
        super().__init__(page_size=page_size)
        self.requests: list[tuple] = []
        self.after_stat: Callable[[str], Awaitable[None]] | None = None
        self.before_page: Callable[[str, int], Awaitable[None]] | None = None
        self.down: CachefsError | None = None
        self.silence_s = 0.0

    async def _request(self) -> None:
        if self.down is not None:
            error = self.down
            await trio.sleep(self.silence_s)
            raise type(error)(str(error))
        await super()._request()

    async def check(self) -> None:
        self.requests.append(("check", ""))
        await super().check()

    async def stat(self, path: str) -> Found:
        self.requests.append(("stat", path))
        try:
            return await super().stat(path)
        finally:
            if self.after_stat is not None:
                await self.after_stat(path)

    def list_dir(self, path: str, below: dict[str, list[Entry]] | None = None) -> Pages:
        self.requests.append(("list", path))
        pages = super().list_dir(path, below)
        number = 0

        async def next_page() -> list[Entry] | None:
            nonlocal number
            if self.before_page is not None:
                await self.before_page(path, number)
            number += 1
            try:
                return await pages.__anext__()
            except StopAsyncIteration:
                return None

        return Pages(next_page)

    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        self.requests.append(("read", path, offset, length))
        return await super().read(path, meta, offset, length)

    def take_requests(self) -> list[tuple]:
        taken, self.requests = self.requests, []
        return taken


class Kept(NamedTuple):
    """A directory that the kernel keeps: under which mtime; when it was listed, and read."""

    mtime_ns: int
    entries: dict[bytes, int]
    as_of_ns: int
    read_at_ns: int


class Kernel:
    """Keeps directories as Linux does where no OPENDIR is sent: what was read to its end stays for
    as long as the directory has the mtime that it had when the reading began, and that is asked for
    when its time is over (fs/fuse/readdir.c)."""

    def __init__(self, clock: WallClock) -> None:
        self.namespace: Namespace
        self.messages: list[str] = []
        self._clock = clock
        self._attributes: dict[int, tuple[int, float]] = {}
        """Mtime, and until when it is believed."""
        self._kept: dict[int, Kept] = {}

    def invalidate_attributes(self, ino: int) -> None:
        self._attributes.pop(ino, None)

    def take_messages(self) -> list[str]:
        taken, self.messages = self.messages, []
        return taken

    def mtime_ns(self, ino: int = ROOT_INO) -> int:
        """As `stat` shows it."""
        if self._attributes.get(ino, (0, 0))[1] <= self._clock.now_ns():
            self.messages.append("getattr")
            mtime_ns = self.namespace.inode(ino).mtime_ns
            mtime_ns, ttl_s = self.namespace.directory_mtime(ino, mtime_ns)
            self.namespace.write_ahead()
            self._attributes[ino] = mtime_ns, self._clock.now_ns() + ttl_s * NS
        return self._attributes[ino][0]

    async def read(self, ino: int = ROOT_INO) -> Kept:
        mtime_ns = self.mtime_ns(ino)
        if ino in self._kept and self._kept[ino].mtime_ns == mtime_ns:
            return self._kept[ino]
        self._kept.pop(ino, None)
        self.messages.append("readdir")
        entries, as_of_ns = await read_directory(self.namespace, ino)
        kept = self._kept[ino] = Kept(mtime_ns, entries, as_of_ns, self._clock.now_ns())
        return kept

    async def entries(self, ino: int = ROOT_INO) -> dict[bytes, int]:
        return (await self.read(ino)).entries

    async def names(self, ino: int = ROOT_INO) -> list[str]:
        return sorted(name.decode() for name in await self.entries(ino))


async def read_directory(namespace: Namespace, ino: int) -> tuple[dict[bytes, int], int]:
    """As a reader sees it who reads it to its end; and when that was listed."""
    snapshot = namespace.open_directory(ino)
    found: dict[bytes, int] = {}
    position = 0
    while await snapshot.has(position):
        name, child = snapshot.entry(position)
        now = namespace.listed_ino(ino, name, child, snapshot)
        assert name not in found
        if now is not None:
            found[name] = now
        position += 1
    namespace.write_ahead()
    return found, snapshot.as_of_ns


class Tree:
    """A namespace that can be restarted, with or without a crash, below a kernel that goes on."""

    def __init__(
        self, path: Path, nursery: trio.Nursery, origin: ScriptedOrigin, clock: WallClock
    ) -> None:
        self.path = path
        self._nursery = nursery
        self.origin = origin
        self.clock = clock
        self.unbound: list[tuple[int, bytes]] = []
        self.changed: list[int] = []
        self.purged = 0
        self.no_open = False
        self.kernel = Kernel(clock)
        self.db: Database
        self.namespace: Namespace

    async def start(self, ttls: Ttls = TTLS) -> None:
        self.db = Database.open(str(self.path), TABLES, 1 << 28)
        self.namespace = Namespace(
            self.db,
            self.origin,
            self._nursery,
            ttls,
            self.clock,
            lambda parent, name: self.unbound.append((parent, name)),
            self._on_changed,
        )
        self.kernel.namespace = self.namespace
        self.purged = self.namespace.table.purge_unnamed()
        await self.db.commit()
        if self.no_open:
            self.namespace.outlive()

    def _on_changed(self, ino: int) -> None:
        self.changed.append(ino)
        self.kernel.invalidate_attributes(ino)

    async def restart(self, ttls: Ttls = TTLS, crash: bool = False) -> None:
        if crash:
            self.db.abandon()
        else:
            self.db.close()
        await self.start(ttls)

    async def find(self, path: str) -> Inode:
        """Look up a path part by part, as the kernel does."""
        inode = self.namespace.inode(ROOT_INO)
        for part in path.encode("utf-8", "surrogateescape").split(b"/"):
            inode, _ = await self.namespace.lookup(inode.ino, part)
            self.namespace.write_ahead()
        return inode

    async def entries(self, ino: int = ROOT_INO) -> dict[bytes, int]:
        """The directory as a reader sees it who reads it to its end."""
        return (await read_directory(self.namespace, ino))[0]

    async def names(self, ino: int = ROOT_INO) -> list[str]:
        return sorted(name.decode() for name in await self.entries(ino))

    def mtime_ns(self, ino: int = ROOT_INO) -> int:
        return self.namespace.inode(ino).mtime_ns


class Reading:
    """A tree with a cache and readers."""

    def __init__(self, tree: Tree, cache: BlockCache, tier: CacheDirectory) -> None:
        self.tree = tree
        self.origin = tree.origin
        self.cache = cache
        self.tier = tier
        self.readers = Readers(tree.namespace, cache, 64 << 20)

    async def read(self, ino: int, offset: int, size: int) -> bytes:
        """As `fuse/operations.py` does it: at once if possible, else with waiting."""
        reader: FileReader = self.readers.get(ino)
        data = reader.read_now(offset, size)
        if data is not None:
            return bytes(data)
        return bytes(await self.readers.read(reader, offset, size))

    def gets(self) -> list[tuple[int, int]]:
        """(offset, length) of the GETs since the last call."""
        return [request[2:] for request in self.origin.take_requests() if request[0] == "read"]


def open_tier(
    path: Path, origin: MemoryOrigin, quota_bytes: int = 256 << 20, disk: Disk | None = None
) -> CacheDirectory:
    return CacheDirectory.open(path, quota_bytes, origin.identity, free_space_ratio=0.0, disk=disk)
