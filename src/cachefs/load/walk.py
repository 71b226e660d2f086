"""Find the files of a load job: list directories, and look up the names of a list.

The walk uses no answer that the origin gave before the job began, so that a nightly job sees all
changes. It needs one LIST per directory page and at most one request per name of a list. If a list
names much of a directory, the namespace lists the directory instead.
"""

from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import NamedTuple, TypeVar

import trio

from cachefs.errors import CachefsError, OriginUnavailableError, UsageError
from cachefs.format.inode_record import KIND_DIR
from cachefs.load.paths import Line, PathReader, path_filter
from cachefs.load.spec import LoadSpec, Progress
from cachefs.load.throttle import LoadThrottle
from cachefs.namespace.namespace import ROOT_INO, Namespace
from cachefs.namespace.work_stack import work_off
from cachefs.origin.resilience import ResilientOrigin

T = TypeVar("T")

_NAMES_AT_A_TIME = 32
_ENTRIES_PER_TURN = 200
"""Entries to process in one turn of the event loop. Each takes about 3 us; the first 65,536 files
of a load job take some 15 us more, because they are also looked up in the cache."""
_KNOWN_DIRECTORIES = 10_000
_WAIT_S = 1.0
_TRIES = 3


class Failure(NamedTuple):
    """One line of a job's list of failures."""

    path: str
    error: str


class Walk:
    """Finds the files of one run of a job; its `Job` owns it. `inos` are their inode numbers, in
    the order found. A file that the job names twice may be there twice."""

    def __init__(
        self,
        namespace: Namespace,
        spec: LoadSpec,
        since_ns: int,
        progress: Progress,
        throttle: LoadThrottle,
        on_failure: Callable[[Failure], None],
        origin: ResilientOrigin,
        on_file: Callable[[int, int], None] = lambda ino, size_bytes: None,
    ) -> None:
        """`on_file(ino, size_bytes)` is called as soon as a file is known, also before the listing
        of its directory has ended. If this listing then fails, it is called again for the same
        file. It must not wait."""
        self._namespace = namespace
        self._origin = origin
        self._since_ns = since_ns
        self._progress = progress
        self._throttle = throttle
        self._on_failure = on_failure
        self._on_file = on_file
        self._wanted = path_filter(spec.include, spec.exclude)
        self.inos = array("Q")
        self._directories: list[int] = []
        self._known: OrderedDict[str, int] = OrderedDict({"": ROOT_INO})

    async def run(
        self, paths: Iterable[str], lines: AsyncIterator[bytes], reader: PathReader
    ) -> None:
        """Look up all paths and lines, and find all files below those that are directories. Calls
        `on_failure` for each path that fails."""
        send, receive = trio.open_memory_channel[Line](_NAMES_AT_A_TIME)
        async with trio.open_nursery() as nursery:
            async with receive:
                for _ in range(_NAMES_AT_A_TIME):
                    nursery.start_soon(self._look_up_all, receive.clone())
            async with send:
                for path in paths:
                    await send.send(Line(path or "/", path))
                async for raw in lines:
                    await self._send_line(raw, reader, send)
        await work_off(self._directories, self._walk_and_note)

    async def _send_line(
        self, raw: bytes, reader: PathReader, send: trio.MemorySendChannel[Line]
    ) -> None:
        try:
            line = reader.line(raw)
        except UsageError as error:
            self._fail(raw.decode("utf-8", "surrogateescape").strip(), error)
            return
        if line is not None:
            await send.send(line)

    def _fail(self, path: str, error: CachefsError) -> None:
        self._progress.failed_files += 1
        self._on_failure(Failure(path, str(error)))

    # -- names ---------------------------------------------------------------------------------

    async def _look_up_all(self, lines: trio.MemoryReceiveChannel[Line]) -> None:
        async with lines:
            async for line in lines:
                try:
                    await self._patiently(self._look_up, line.path)
                except CachefsError as error:
                    self._fail(line.written, error)

    async def _look_up(self, path: str) -> None:
        ino = await self._ino_of(path)
        inode = self._namespace.inode(ino)
        if inode.is_dir:
            self._directories.append(ino)
        elif self._wanted is None or self._wanted(path):
            self._on_file(ino, inode.size_bytes)
            self._found(array("Q", (ino,)), inode.size_bytes)

    async def _ino_of(self, path: str) -> int:
        names: list[str] = []
        while path not in self._known and path:
            path, _, name = path.rpartition("/")
            names.append(name)
        ino = self._known.get(path, ROOT_INO)
        if path in self._known:
            self._known.move_to_end(path)
        while names:
            name = names.pop()
            path = f"{path}/{name}" if path else name
            ino = await self._ino_below(ino, path, name.encode("utf-8", "surrogateescape"))
        return ino

    async def _ino_below(self, parent: int, path: str, name: bytes) -> int:
        await self._throttle.begin()
        try:
            inode = await self._namespace.lookup_since(parent, name, self._since_ns)
        finally:
            self._throttle.end()
        if inode.is_dir:
            self._known[path] = inode.ino
            if len(self._known) > _KNOWN_DIRECTORIES:
                self._known.popitem(last=False)
        return inode.ino

    def _found(self, inos: "array[int]", size_bytes: int) -> None:
        """Count files of `size_bytes` in total."""
        self.inos.extend(inos)
        self._progress.files += len(inos)
        self._progress.bytes += size_bytes

    # -- directories ---------------------------------------------------------------------------

    async def _walk_and_note(self, ino: int) -> None:
        try:
            await self._patiently(self._walk, ino)
        except CachefsError as error:
            self._fail(self._path_of(ino), error)

    def _path_of(self, ino: int) -> str:
        try:
            return self._namespace.table.path(self._namespace.inode(ino))
        except (CachefsError, LookupError):
            return f"inode {ino}"

    async def _walk(self, ino: int) -> None:
        """Find what is in a directory. Nothing counts before the listing has ended well: a failed
        listing is repeated."""
        namespace = self._namespace
        snapshot = await namespace.list_since(ino, self._since_ns)
        prefix = self._path_of(ino)
        files, directories, size_bytes, seen = array("Q"), [], 0, 0
        while await snapshot.has(seen):
            for position in range(seen, min(len(snapshot), seen + _ENTRIES_PER_TURN)):
                seen += 1
                name, child = snapshot.entry(position)
                stat = namespace.table.stat(child)
                if stat is None:
                    continue
                if stat[0] == KIND_DIR:
                    directories.append(child)
                elif self._wanted is None or self._wanted(_join(prefix, name)):
                    files.append(child)
                    size_bytes += stat[1]
                    self._on_file(child, stat[1])
            await namespace.give_way()
        namespace.check_listed_since(snapshot, self._since_ns)
        self._progress.directories += 1
        self._directories += directories
        self._found(files, size_bytes)

    async def _patiently(self, function: Callable[[T], Awaitable[None]], argument: T) -> None:
        """Await `function(argument)`, and repeat it while the origin is unavailable, so that a long
        job survives an outage. While the origin answers other requests, give up after `_TRIES`.
        Failures during an outage do not count: the last one may be told when it has just ended."""
        tries = 0
        while True:
            try:
                await function(argument)
                return
            except OriginUnavailableError as error:
                tries = 0 if self._origin.is_down else tries + 1
                if tries >= _TRIES:
                    raise
                self._progress.waiting_for = str(error)
                await self._namespace.outage.wait(_WAIT_S)
                self._progress.waiting_for = None


def _join(prefix: str, name: bytes) -> str:
    text = name.decode("utf-8", "surrogateescape")
    return f"{prefix}/{text}" if prefix else text
