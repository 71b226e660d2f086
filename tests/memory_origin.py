"""An origin in memory for tests, which can change objects, delay requests and fail on demand."""

import hashlib
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import trio

from cachefs.errors import NotADirError, NotFoundError, ObjectChangedError, OriginError
from cachefs.origin.base import Origin, OriginCounters
from cachefs.origin.names import Pages, chunked, is_name, resolve_twins
from cachefs.types import (
    READER_TURN,
    Buffer,
    Directory,
    Entry,
    Found,
    ObjectMeta,
    Posix,
    Turn,
)

_STRIPE_BYTES = 4096
_NS_PER_S = 1_000_000_000
_FIRST_MTIME_NS = 1_700_000_000 * _NS_PER_S


_NOISE_BYTES = 1 << 20
_NOISE = random.Random(0).randbytes(_NOISE_BYTES + _STRIPE_BYTES)


def _stripe(name: str) -> bytes:
    """Return bytes that no other name has, from a store of random ones: tests need gigabytes, and a
    random generator would take a third of their time."""
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    start = int.from_bytes(digest[:8], "little") % _NOISE_BYTES
    return digest + _NOISE[start : start + _STRIPE_BYTES - len(digest)]


def content_of(name: str, start: int, end: int) -> bytes:
    """Return the bytes from `start` to `end` of the endless content that has this name."""
    first = start // _STRIPE_BYTES
    stripes = range(first, -(-end // _STRIPE_BYTES))
    data = b"".join(_stripe(f"{name}/{index}") for index in stripes)
    return data[start - first * _STRIPE_BYTES : end - first * _STRIPE_BYTES]


@dataclass(frozen=True, slots=True)
class _Generated:
    """Content that is computed at each read."""

    size: int
    seed: int

    def slice(self, start: int, end: int) -> bytes:
        return content_of(str(self.seed), start, end)


@dataclass(frozen=True, slots=True)
class _Object:
    content: bytes | _Generated
    meta: ObjectMeta


class MemoryOrigin(Origin):
    """Objects by key. Every request sleeps `delay_s` (on trio's clock). If `on_read` is set, `read`
    awaits it after it has checked the version and before it copies the bytes. While `reads_many` is
    set, callers may use `read_many`. While `shows_trees` is set, a listing fills `below` if all
    keys below the directory fit on one page."""

    reads_many = False
    shows_trees = False

    def __init__(self, name: str = "test", page_size: int = 1000, delay_s: float = 0) -> None:
        self.url = f"fake://{name}"
        self.identity = self.url
        self.counters = OriginCounters()
        self.page_size = page_size
        self.delay_s = delay_s
        self.on_read: Callable[[str, int, int], Awaitable[None]] | None = None
        self.objects: dict[str, _Object] = {}
        self._dirs: dict[str, Directory] = {}
        self._failures: list[Exception] = []
        self.puts = 0

    def put(self, path: str, data: bytes, version: str | None = None) -> ObjectMeta:
        """Create or replace an object. Every put has a new mtime, and a new version unless
        `version` is given."""
        return self._store(path, bytes(data), len(data), version)

    def put_generated(self, path: str, size: int, seed: int = 0) -> ObjectMeta:
        """Do `put` with pseudo-random content that takes no memory; see `expected`."""
        return self._store(path, _Generated(size, seed), size, None)

    def chmod(self, path: str, posix: Posix) -> None:
        """Change owner, group and mode of an object or a directory, without a new version."""
        self.tells_owners = True
        if path in self.objects:
            item = self.objects[path]
            self.objects[path] = replace(item, meta=replace(item.meta, posix=posix))
        else:
            self._dirs[path] = Directory(posix)

    def delete(self, path: str) -> None:
        """Remove one object. A directory disappears with its last object."""
        del self.objects[path]

    def delete_tree(self, path: str) -> None:
        """Remove every object below `path`, and the object at `path` itself."""
        for key in [k for k in self.objects if k == path or k.startswith(path + "/")]:
            del self.objects[key]

    def expected(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return the bytes that `read` should return now. Sends no request."""
        found = self.objects[path]
        end = found.meta.size_bytes if length is None else offset + length
        return _slice(found, offset, end)

    def fail_next(self, count: int, error: Exception) -> None:
        """Make the next `count` requests raise `error`."""
        self._failures += [error] * count

    def heal(self) -> None:
        """Let no further request fail."""
        self._failures.clear()

    async def check(self) -> None:
        """Send one request, which fails only on demand."""
        self.counters.lists += 1
        await self._request()

    async def stat(self, path: str) -> Found:
        """See `Origin.stat`."""
        if not path and not self.tells_owners:
            return None
        self._checked(path)
        self.counters.heads += 1
        await self._request()
        found = self.objects.get(path)
        if found is None or not found.meta.size_bytes:
            self.counters.lists += 1
            if self._has_keys(path):
                return self._dirs.get(path)
        if found is None:
            raise NotFoundError(f"{self.url}/{path} does not exist")
        return found.meta

    async def stat_unlisted(self, path: str) -> Found:
        """See `Origin.stat_unlisted`."""
        self._checked(path)
        self.counters.heads += 1
        await self._request()
        if path in self.objects:
            return self.objects[path].meta
        if self.tells_owners and self._has_keys(path):
            return self._dirs.get(path)
        raise NotFoundError(f"{self.url}/{path} does not exist")

    def list_dir(self, path: str, below: dict[str, list[Entry]] | None = None) -> Pages:
        """See `Origin.list_dir`. A listing is a snapshot, taken at its first page."""
        pages: list[list[Entry]] | None = None

        async def next_page() -> list[Entry] | None:
            nonlocal pages
            if pages is None:
                self._checked(path)
                self.counters.lists += 1
                await self._request()
                pages = list(chunked(self._entries(path), self.page_size))
                pages.reverse()
                if below is not None and self.shows_trees:
                    below.update(self._below(path))
            elif pages:
                self.counters.lists += 1
                await self._request()
            return pages.pop() if pages else None

        return Pages(next_page)

    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        """See `Origin.read`."""
        assert length >= 1
        assert 0 <= offset <= meta.size_bytes - length
        self.counters.gets += 1
        await self._request()
        found = self.objects.get(path)
        if found is None:
            raise NotFoundError(f"{self.url}/{path} does not exist")
        if self.on_read is not None and found.meta.version == meta.version:
            await self.on_read(path, offset, length)
        if found.meta.version != meta.version:
            raise ObjectChangedError(f"{self.url}/{path} has changed since it was listed")
        self.counters.get_bytes += length
        return _slice(found, offset, offset + length)

    async def read_many(
        self,
        wanted: Sequence[tuple[str, ObjectMeta]],
        at_a_time: int,
        stopped: Callable[[], bool],
        turn: Turn = READER_TURN,
    ) -> list[memoryview | None]:
        """See `Origin.read_many`."""
        found: list[memoryview | None] = [None] * len(wanted)
        places = trio.Semaphore(at_a_time)

        async def read(number: int, path: str, meta: ObjectMeta) -> None:
            async with places:
                if stopped():
                    return
                with suppress(OriginError):
                    found[number] = memoryview(await self.read(path, meta, 0, meta.size_bytes))

        async with trio.open_nursery() as nursery:
            for number, (path, meta) in enumerate(wanted):
                nursery.start_soon(read, number, path, meta)
        return found

    async def aclose(self) -> None:
        """Keep all objects and counters, because tests inspect them afterwards."""
        await trio.lowlevel.checkpoint()

    async def _request(self) -> None:
        await trio.sleep(self.delay_s)
        if self._failures:
            self.counters.errors += 1
            raise self._failures.pop(0)

    def _store(
        self, path: str, content: bytes | _Generated, size: int, version: str | None
    ) -> ObjectMeta:
        self.puts += 1
        mtime_ns = _FIRST_MTIME_NS + self.puts * _NS_PER_S
        meta = ObjectMeta(size, mtime_ns, version or f"v{self.puts}")
        self.objects[path] = _Object(content, meta)
        return meta

    def _checked(self, path: str) -> None:
        if path and not all(is_name(part) for part in path.split("/")):
            raise NotFoundError(f"{self.url}/{path!r} can't be a name")

    def _has_keys(self, path: str) -> bool:
        return not path or any(key.startswith(path + "/") for key in self.objects)

    def _entries(self, path: str) -> list[Entry]:
        prefix = path + "/" if path else ""
        found: dict[tuple[str, bool], Entry | None] = {}
        for key, item in sorted(self.objects.items()):
            if not key.startswith(prefix):
                continue
            name, slash, _ = key[len(prefix) :].partition("/")
            if key == prefix:
                found["", False] = None
            elif is_name(name):
                meta = self._dirs.get(prefix + name) if slash else item.meta
                found[name, bool(slash)] = Entry(name, meta)
            elif (name, bool(slash)) not in found:
                found[name, bool(slash)] = None
                self.counters.note_unshown(path, key)
        if path and not found:
            if path in self.objects:
                raise NotADirError(f"{self.url}/{path} is an object, not a directory")
            raise NotFoundError(f"{self.url}/{path} does not exist")
        return resolve_twins(entry for entry in found.values() if entry)

    def _below(self, path: str) -> dict[str, list[Entry]]:
        """Return the directories below `path` if all keys below it fit on one page; else none."""
        prefix = path + "/" if path else ""
        keys = [key for key in self.objects if key.startswith(prefix)]
        if len(keys) > self.page_size:
            return {}
        below = {above for key in keys for above in _directories_above(key[len(prefix) :])}
        return {prefix + directory: self._entries(prefix + directory) for directory in below}


def _directories_above(path: str) -> list[str]:
    return [path[:end] for end, letter in enumerate(path) if letter == "/"]


def _slice(found: _Object, start: int, end: int) -> bytes:
    if isinstance(found.content, _Generated):
        return found.content.slice(start, end)
    return found.content[start:end]
