"""Read-ahead over a directory: fetch the next files for a reader that reads in name order.

`cp -r`, `tar`, `grep -r`, validation runs and many loaders read the files of a directory in the
order of its listing. Without read-ahead, one reader waits for the origin once per file.

A *run* consists of files of one directory that were read for the first time in name order.
After `_FILES_IN_ORDER` files the next ones are fetched. The number of files that are fetched ahead
doubles with each of them that is read, up to `_MOST_FILES`, and halves when files are skipped.
Files are only fetched ahead in listed directories: elsewhere the next name is not known. Readers in
random order very rarely start one: three files in order are improbable, and files of the directory
that were read out of order count against it.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import CachefsError
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import Namespace
from cachefs.prefetch.budget import AheadBudget
from cachefs.prefetch.bug_reports import report_bug
from cachefs.types import BLOCK_BYTES, BlockKey, ObjectRef

_FILES_IN_ORDER = 3
"""Files that are read in order before the next ones are fetched. The first name of a directory
counts as two of them, because readers that begin there mostly continue."""
_NEAR_NAMES = 4
"""A name is in order if it is one of this many names after the last one. Workers that share the
files of a directory read slightly out of order, and subdirectories are between files."""
_FIRST_FILES = 4
_MOST_FILES = 64
_MOST_BYTES = 32 << 20
"""Most bytes of files that were fetched ahead and not read yet, over all runs."""
_FILE_BYTES = 8 << 20
"""Larger files are not fetched ahead, because their readers have read-ahead within the file."""
_REQUESTS = 24
"""Most files to fetch at a time. With 30 ms per request, 24 give about 700 files/s."""
_NAMES_AT_A_TIME = 32
"""Names that are read from the table at a time, because one read for each name costs too much.
Each run may keep so many, so this also bounds the memory."""
_RUNS = 8
"""Most runs of one directory."""
_DIRECTORIES = 1_024
_OVERTAKEN = 32
"""Most unread prefetched files before the one that is read; more of them count as skipped."""


@dataclass(slots=True, eq=False)
class _FileRun:
    """A run of files of one directory that a reader reads in name order."""

    parent: int
    head: bytes
    """The greatest name that was read."""
    length: int
    """Number of files that were read in order."""
    asked: bytes
    """The last name that was considered for fetching; `head` at first."""
    next_names: frozenset[bytes] | None = None
    """The names that follow `head`; None until they are needed. They are cached because a read in
    random order would otherwise cost one table look-up for each run."""
    files: int = _FIRST_FILES
    """Number of files that may be fetched ahead."""
    following: deque[tuple[bytes, int]] = field(default_factory=deque)
    """Names after `asked` and their inode numbers, as the table had them when they were read. It
    may be empty although there are more."""
    ahead: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    """Sizes in bytes of the files that were fetched ahead and not read yet, in name order."""


class OrderPrefetcher:
    """Directory read-ahead of one mount; its `Prefetch` owns it. It runs on the event loop.
    `note_first_read` never waits; fetches run in `nursery`."""

    def __init__(
        self,
        namespace: Namespace,
        cache: BlockCache,
        nursery: trio.Nursery,
        may_fetch: Callable[[], bool],
        budget: AheadBudget | None = None,
    ) -> None:
        """`may_fetch()` returns False while the origin is overloaded or unavailable. If there is a
        `budget`, it bounds the bytes too, and only files of at most one block are fetched."""
        self._namespace = namespace
        self._cache = cache
        self._nursery = nursery
        self._may_fetch = may_fetch
        self._budget = budget
        self._file_bytes = _FILE_BYTES if budget is None else BLOCK_BYTES
        self._limiter = trio.CapacityLimiter(_REQUESTS)
        self._directories: OrderedDict[int, list[_FileRun]] = OrderedDict()
        self._ahead_bytes = 0

    def note_first_read(self, inode: Inode) -> None:
        """Note the first read of this file since the daemon started (or since many other files were
        read). Begin to fetch the files that probably follow, without waiting for them."""
        run = self._run_of(inode.parent, inode.name)
        if run is not None and self._is_in_order(run) and self._may_fetch():
            self._fetch_next(run)

    def stop(self) -> None:
        """Forget all runs. Files that wait for their turn are not fetched."""
        while self._directories:
            self._drop_oldest_directory()

    # -- runs -------------------------------------------------------------------------------

    def _run_of(self, parent: int, name: bytes) -> _FileRun | None:
        """Return the run that this file continues or begins; None if the directory is not
        listed."""
        runs = self._directories.get(parent)
        if runs is None:
            if self._namespace.table.listing(parent) is None:
                return None
            runs = self._directories[parent] = []
            if len(self._directories) > _DIRECTORIES:
                self._drop_oldest_directory()
        self._directories.move_to_end(parent)
        for run in runs:
            if name in run.ahead:
                self._note_used(run, name)
                return run
        for run in runs:
            if run.next_names is None:
                run.next_names = self._names_after(parent, run.head)
            if name in run.next_names:
                run.length += 1
                run.head = name
                run.next_names = None
                run.asked = max(run.asked, name)
                return run
        is_first = not runs and next(self._namespace.table.dirents(parent), (b"",))[0] == name
        run = _FileRun(parent, name, 2 if is_first else 1, asked=name)
        runs.insert(0, run)
        if len(runs) > _RUNS:
            self._drop(runs.pop())
        return run

    def _is_in_order(self, run: _FileRun) -> bool:
        """Return whether enough files of the run were read in order. In a small directory readers
        in random order now and then read three files in order. So each file of the directory that
        began a run and was not followed by the next one counts against it."""
        if run.length >= _FILES_IN_ORDER + _RUNS:
            return True
        single = sum(other.length == 1 for other in self._directories[run.parent])
        return run.length >= _FILES_IN_ORDER + single

    def _names_after(self, parent: int, name: bytes) -> frozenset[bytes]:
        following = islice(self._namespace.table.dirents(parent, name), _NEAR_NAMES)
        return frozenset(found for found, _ in following)

    def _note_used(self, run: _FileRun, name: bytes) -> None:
        self._ahead_bytes -= run.ahead.pop(name)
        run.length += 1
        if name > run.head:
            run.head, run.next_names = name, None
        run.files = min(2 * run.files, _MOST_FILES)
        overtaken = 0
        for earlier in run.ahead:
            if earlier > name:
                break
            overtaken += 1
        for _ in range(overtaken - _OVERTAKEN):
            self._ahead_bytes -= run.ahead.popitem(last=False)[1]
            run.files = max(run.files // 2, _FIRST_FILES)

    def _drop_oldest_directory(self) -> None:
        _, runs = self._directories.popitem(last=False)
        for run in runs:
            self._drop(run)

    def _drop(self, run: _FileRun) -> None:
        self._ahead_bytes -= sum(run.ahead.values())
        run.ahead.clear()

    # -- fetching ------------------------------------------------------------------------------

    def _fetch_next(self, run: _FileRun) -> None:
        """Fetch ahead as many files as the run may have. It considers at most twice as many
        names, so that many cached files in a row cost little."""
        # More than `run.files` may be ahead, if that number has halved since.
        most = max(0, 2 * run.files - len(run.ahead))
        for _ in range(most):
            if len(run.ahead) >= run.files or not self._has_room(run):
                return
            following = self._following(run)
            if not following:
                return
            name, ino = following.popleft()
            run.asked = name
            inode = self._namespace.table.get(ino)
            if inode is None or inode.is_dir or not 0 < inode.size_bytes <= self._file_bytes:
                continue
            ref = self._namespace.object_ref(inode)
            if self._cache.is_cached_or_inflight(BlockKey(ref.object_id, 0)):
                continue
            run.ahead[name] = inode.size_bytes
            self._ahead_bytes += inode.size_bytes
            self._nursery.start_soon(self._fetch, run, name, ino, ref)

    def _following(self, run: _FileRun) -> deque[tuple[bytes, int]]:
        """Return the names to consider next. Read more from the table if none are left; the result
        is empty at the end of the directory."""
        run.asked = max(run.asked, run.head)
        following = run.following
        while following and following[0][0] <= run.asked:
            following.popleft()
        if not following:
            names = self._namespace.table.dirents(run.parent, run.asked)
            found = islice(names, _NAMES_AT_A_TIME)
            following.extend((name, dirent.ino) for name, dirent in found)
        return following

    def _has_room(self, run: _FileRun) -> bool:
        """Return whether the run may fetch one more file. To make room, drop the runs of the
        least recently read directories."""
        while self._ahead_bytes >= _MOST_BYTES:
            oldest = next(iter(self._directories))
            if oldest == run.parent:
                return False
            self._drop_oldest_directory()
        return True

    async def _fetch(self, run: _FileRun, name: bytes, ino: int, ref: ObjectRef) -> None:
        async with self._limiter:
            if name not in run.ahead or not self._may_fetch():
                return  # the file was read or dropped meanwhile, or the origin is overloaded
            # No await may come between check and fetch: otherwise a block could be fetched twice.
            if self._cache.is_cached_or_inflight(BlockKey(ref.object_id, 0)):
                return
            if self._budget is not None and not self._budget.take(ino, ref.meta.size_bytes):
                return
            try:
                self._cache.fetch(ref, 0, ref.block_count, ahead=True)
                await self._cache.fetched(ref, 0, ref.block_count)
            except CachefsError:  # readers get their own error
                if self._budget is not None:
                    self._budget.note_failed(ino)
            except Exception as error:
                report_bug(error)
