"""Fetching siblings ahead: the other files of directories whose files are read in any order.

A shuffled epoch reads each file of a tree once. Any file that it has not read yet is an equally
good guess, so the files of the directories that readers have touched are fetched, one directory
after the other. Smaller files come first, among `_CANDIDATES` of them, because the same bytes then
answer more reads. `budget.py` bounds the cost for readers that need only a few files of a tree.

Nothing here sends a LIST: only the names of listed directories are used. A fetch ahead begins only
if the cache has free space, the origin has a request to spare, and load jobs would begin one, too.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.fetch.in_flight import InFlightFetch
from cachefs.errors import CachefsError
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import Namespace
from cachefs.prefetch.budget import AheadBudget
from cachefs.prefetch.bug_reports import report_bug
from cachefs.types import BLOCK_BYTES, BlockKey, ObjectRef

MOST_FILE_BYTES = BLOCK_BYTES
"""Larger files are neither fetched ahead nor counted as read. A file of one block is cached as a
whole, so a reader of any part has used it."""
_FILES_READ = 16
"""Files that must come from the origin for readers before the first sibling is fetched. A look at a
few files then costs nothing."""
_REQUESTS = 24
"""Most files to fetch at a time. With 30 ms per request, 24 give about 700 files/s."""
_NAMES_AT_A_TIME = 32
"""Names that are read from the table in one turn of the event loop: about 0.4 ms."""
_CANDIDATES = 4_096
"""Most files to keep that may be fetched next, at about 50 bytes each."""
_DIRECTORIES = 4_096
"""Most directories to remember that wait for their turn, and most that had theirs."""
_SIZE_SHIFT = 64
_INO_MASK = (1 << _SIZE_SHIFT) - 1
"""A candidate is kept as one integer, which takes little memory: bytes of the file << 64 | inode
number."""


class Throttle(Protocol):
    """What makes background requests give way to readers' requests, such as `LoadThrottle`."""

    async def begin(self, size_bytes: int = 0, requests: int = 1) -> None:
        """Wait until one more request may begin."""

    def end(self, size_bytes: int = 0, requests: int = 1) -> None:
        """Note the end of a request; pass the same arguments as to `begin`."""


@dataclass(slots=True)
class _Walk:
    """A walk over the names of one directory, from the name after `first` to the last, and then
    from the first name to `first`."""

    directory: int
    first: bytes
    listed_at_ns: int
    """Which listing the names come from."""
    after: bytes | None
    """The last name that was considered; None at the beginning of the directory."""
    is_second_part: bool = False


class _Candidate(NamedTuple):
    """A file of one block that may be fetched next."""

    ino: int
    ref: ObjectRef


class SiblingPrefetcher:
    """The siblings of one mount; its `Prefetch` owns it. It runs on the event loop. `run` fetches;
    the other methods never wait."""

    def __init__(
        self,
        namespace: Namespace,
        cache: BlockCache,
        nursery: trio.Nursery,
        may_fetch: Callable[[], bool],
        throttle: Throttle,
    ) -> None:
        """`may_fetch()` returns False while the origin is overloaded or unavailable."""
        self.budget = AheadBudget()
        self._namespace = namespace
        self._cache = cache
        self._nursery = nursery
        self._may_fetch = may_fetch
        self._throttle = throttle
        self._requests = trio.Semaphore(_REQUESTS)
        self._scope = trio.CancelScope()
        self._changed = trio.Event()
        self._walk: _Walk | None = None
        self._queue: OrderedDict[int, bytes] = OrderedDict()
        """Directories that wait for their turn, and a name in each, after which to begin."""
        self._done: OrderedDict[int, int] = OrderedDict()
        """Directories that had their turn, and `listed_at_ns` of the listing that was used."""
        self._candidates: list[int] = []
        """A heap, smallest file first."""

    # -- readers -------------------------------------------------------------------------------

    def note_first_read(self, inode: Inode) -> None:
        """Note that a reader is about to read this file for the first time, as far as is known."""
        size_bytes = inode.size_bytes
        if not 0 < size_bytes <= MOST_FILE_BYTES:
            return
        key = BlockKey(self._namespace.object_ref(inode).object_id, 0)
        is_in_flight = self._cache.is_in_flight(key)
        if is_in_flight or not self._cache.is_cached_or_inflight(key):
            self.budget.note_miss(inode.ino, is_in_flight)
            self._queue_directory(inode.parent, inode.name)
        elif self.budget.note_hit(inode.ino, size_bytes):
            self._changed.set()

    def note_read(self, inode: Inode) -> None:
        """Note that a reader of this file has received bytes for which it had to wait."""
        if self.budget.note_read(inode.ino, inode.size_bytes):
            self._changed.set()

    def _queue_directory(self, directory: int, name: bytes) -> None:
        """Let the directory have its turn, if it is listed and has not had one since then."""
        is_walked = self._walk is not None and self._walk.directory == directory
        if is_walked or directory in self._queue or len(self._queue) >= _DIRECTORIES:
            return
        listing = self._namespace.table.listing(directory)
        if listing is not None and self._done.get(directory) != listing.listed_at_ns:
            self._queue[directory] = name

    # -- fetching ------------------------------------------------------------------------------

    def stop(self) -> None:
        """End `run`. Fetches that are under way continue."""
        self._scope.cancel()

    async def run(self) -> None:
        """Fetch siblings until `stop`. After an error it continues with the next read."""
        with self._scope:
            while True:
                changed = self._changed = trio.Event()
                goes_on = False
                try:
                    goes_on = await self._start_next()
                except CachefsError:
                    pass  # the cache is shutting down
                except Exception as error:
                    report_bug(error)
                if not goes_on:
                    await changed.wait()

    async def _start_next(self) -> bool:
        """Consider some more names, and start to fetch the best candidate. Return False if nothing
        can begin before a reader has read or a fetch has ended."""
        if self.budget.recent_files < _FILES_READ or not self._may_fetch():
            return False
        if len(self._candidates) < _CANDIDATES:
            self._consider_names()
        best = self._best()
        if best is None:
            await self._cache.give_way()
            return bool(self._candidates or self._walk or self._queue)
        if not self._may_begin(best):
            return False
        await self._nursery.start(self._fetch, best)
        return True

    def _may_begin(self, file: _Candidate) -> bool:
        size_bytes = file.ref.meta.size_bytes
        return (
            self._may_fetch()
            and size_bytes <= self.budget.room_bytes
            and self._cache.has_free_space(BlockKey(file.ref.object_id, 0), size_bytes)
        )

    async def _fetch(
        self, file: _Candidate, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Fetch the best candidate when it has its turn, if it still is one and may be fetched.
        `task_status` reports when this is decided."""
        size_bytes = file.ref.meta.size_bytes
        async with self._requests:
            await self._throttle.begin(size_bytes)
            try:
                fetch = self._begin(file)
                task_status.started()
                if fetch is not None:
                    await fetch.done.wait()
                    if fetch.data is None:  # readers get their own errors
                        self.budget.note_failed(file.ino)
            finally:
                self._throttle.end(size_bytes)
                self._changed.set()

    def _begin(self, file: _Candidate) -> InFlightFetch | None:
        """Begin the fetch, and count its bytes in the same step."""
        if not self._is_wanted(file) or not self._may_begin(file):
            return None
        if not self.budget.take(file.ino, file.ref.meta.size_bytes):
            return None
        heapq.heappop(self._candidates)
        return self._cache.fetch_into_free_space(file.ref)

    # -- candidates ----------------------------------------------------------------------------

    def _best(self) -> _Candidate | None:
        """Return the first candidate that is still wanted, and drop those before it. The result is
        None also after many that are not."""
        for _ in range(min(_NAMES_AT_A_TIME, len(self._candidates))):
            file = self._candidate(self._candidates[0] & _INO_MASK)
            if file is not None:
                return file
            heapq.heappop(self._candidates)
        return None

    def _candidate(self, ino: int) -> _Candidate | None:
        """Return the file if it is small, not cached, and still stands in its directory."""
        table = self._namespace.table
        inode = table.get(ino)
        if inode is None or inode.is_dir or not 0 < inode.size_bytes <= MOST_FILE_BYTES:
            return None
        dirent = table.dirent(inode.parent, inode.name)
        if dirent is None or dirent.ino != ino:
            return None
        try:
            file = _Candidate(ino, self._namespace.object_ref(inode))
        except CachefsError:  # its directory is gone
            return None
        return file if self._is_wanted(file) else None

    def _is_wanted(self, file: _Candidate) -> bool:
        is_here = self._cache.is_cached_or_inflight(BlockKey(file.ref.object_id, 0))
        return not is_here and not self.budget.was_fetched(file.ino)

    def _consider_names(self) -> None:
        """Add the next names of the directory whose turn it is to the candidates."""
        walk = self._walk or self._next_walk()
        if walk is None:
            return
        names = self._namespace.table.dirents(walk.directory, walk.after)
        found = list(islice(names, _NAMES_AT_A_TIME))
        for name, dirent in found:
            if walk.is_second_part and name > walk.first:
                break
            walk.after = name
            file = self._candidate(dirent.ino)
            if file is not None:
                heapq.heappush(self._candidates, file.ref.meta.size_bytes << _SIZE_SHIFT | file.ino)
        else:
            if len(found) == _NAMES_AT_A_TIME:
                return
        if walk.is_second_part:
            self._walk = None
            self._done[walk.directory] = walk.listed_at_ns
            if len(self._done) > _DIRECTORIES:
                self._done.popitem(last=False)
        else:
            walk.is_second_part, walk.after = True, None

    def _next_walk(self) -> _Walk | None:
        """Begin the walk over the next directory."""
        while self._queue:
            directory, first = self._queue.popitem(last=False)
            listing = self._namespace.table.listing(directory)
            if listing is not None:
                self._walk = _Walk(directory, first, listing.listed_at_ns, after=first)
                return self._walk
        return None
