"""Hints: fetch files in the order in which a job will read them.

A job sends the paths that it will read, in order (docs/HINTS.md). The daemon fetches a window of
these files ahead of the readers. A read of a hinted file moves the window on. All jobs share
`_MOST_BYTES`, so wrong hints waste no more than that. If the reader of a job stops, so does its
window, and the job does not displace the files that it needs first.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import CachefsError
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import Namespace
from cachefs.prefetch.bug_reports import report_bug
from cachefs.types import BLOCK_BYTES, BlockKey

_MOST_JOBS, _MOST_JOBS_OF_USER = 16, 4
_QUEUED = 1_024
"""Most paths of one job that wait in its queue."""
_MOST_BYTES = 32 << 20
"""Most bytes that are fetched ahead and not read yet, over all jobs."""
_MOST_FILES = 256
"""Most files of one job that are fetched ahead and not read yet."""
_FIRST_BLOCKS = 8
"""Most blocks of a file to fetch ahead. For the rest its reader has read-ahead in the file."""
_REQUESTS = 32
_OVERTAKEN_S = 10.0
"""If a file is read, earlier hinted files that were fetched at least this long ago count as read
too: the kernel may have served them from its page cache."""
_IDLE_S = 60.0

JobKey = tuple[int, bytes]
"""The user id, and the name that the job has chosen for itself."""


class _Ahead(NamedTuple):
    """A file that was fetched ahead: the bytes fetched, and when the fetch began (trio's clock)."""

    size_bytes: int
    at_s: float


@dataclass(slots=True, eq=False)
class _TrainingJob:
    """The queue and the window of one job; `Hints` owns it."""

    paths: deque[tuple[int, bytes]] = field(default_factory=deque)
    """Inode numbers of directories, and paths below them."""
    ahead: OrderedDict[int, _Ahead] = field(default_factory=OrderedDict)
    """Files fetched ahead and not read yet, by inode number, in order of fetching."""
    ahead_bytes: int = 0
    started: int = 0
    """Fetches that are not in `ahead` yet."""
    used_at: float = field(default_factory=trio.current_time)
    changed: trio.Event = field(default_factory=trio.Event)

    def drop(self, ino: int) -> None:
        """Remove a file from `ahead`: it was read, or its fetch failed."""
        ahead = self.ahead.pop(ino, None)
        if ahead is not None:
            self.ahead_bytes -= ahead.size_bytes

    def wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class Hints:
    """The hints of one mount; its `Prefetch` owns it. It runs on the event loop, and only tasks in
    `nursery` wait."""

    def __init__(
        self,
        namespace: Namespace,
        cache: BlockCache,
        nursery: trio.Nursery,
        may_fetch: Callable[[], bool],
        forget_reader: Callable[[int], None],
    ) -> None:
        """`may_fetch()` returns False while the origin is overloaded or unavailable.
        `forget_reader(ino)` makes the next read of a file count as its first."""
        self._namespace = namespace
        self._cache = cache
        self._nursery = nursery
        self._may_fetch = may_fetch
        self._forget_reader = forget_reader
        self._requests = trio.Semaphore(_REQUESTS)
        self._jobs: OrderedDict[JobKey, _TrainingJob] = OrderedDict()

    def take(self, job_key: JobKey, directory: int, path: bytes) -> bool:
        """Queue a hint: the job will read `path` below the directory with that inode number, after
        its earlier hints. Return False if the queue is full; the job must send the path again a
        little later."""
        job = self._jobs.get(job_key)
        if job is None:
            job = self._begin(job_key)
        job.used_at = trio.current_time()
        if len(job.paths) >= _QUEUED:
            return False
        job.paths.append((directory, path))
        job.wake()
        return True

    def note_first_read(self, inode: Inode) -> None:
        """Note the first read of this file: move the windows of jobs that have hinted it."""
        for job in self._jobs.values():
            if inode.ino in job.ahead:
                self._note_used(job, inode.ino)

    def _begin(self, job_key: JobKey) -> _TrainingJob:
        """Begin a job. If there are too many, first end the one that was used longest ago."""
        same_user = [key for key in self._jobs if key[0] == job_key[0]]
        candidates = same_user if len(same_user) >= _MOST_JOBS_OF_USER else list(self._jobs)
        if len(same_user) >= _MOST_JOBS_OF_USER or len(self._jobs) >= _MOST_JOBS:
            oldest = min(candidates, key=lambda key: self._jobs[key].used_at)
            self._jobs.pop(oldest).wake()
        job = self._jobs[job_key] = _TrainingJob()
        self._nursery.start_soon(self._run, job_key, job)
        return job

    def _note_used(self, job: _TrainingJob, ino: int) -> None:
        now = trio.current_time()
        for earlier, ahead in list(job.ahead.items()):
            if earlier == ino or ahead.at_s + _OVERTAKEN_S > now:
                break
            job.drop(earlier)
        job.drop(ino)
        job.used_at = now
        job.wake()

    # -- the window ----------------------------------------------------------------------------

    async def _run(self, job_key: JobKey, job: _TrainingJob) -> None:
        """Fetch ahead until the job is idle for `_IDLE_S`, or ends to make room for another."""
        while self._jobs.get(job_key) is job:
            if job.paths and self._has_room(job) and self._may_fetch():
                await self._requests.acquire()
                # Other tasks may have filled the window during the await.
                if job.paths and self._has_room(job):
                    job.started += 1
                    self._nursery.start_soon(self._fetch_next, job, *job.paths.popleft())
                else:
                    self._requests.release()
                continue
            changed = job.changed
            with trio.move_on_after(_IDLE_S) as waited:
                await changed.wait()
            if waited.cancelled_caught and trio.current_time() - job.used_at >= _IDLE_S:
                if self._jobs.get(job_key) is job:
                    del self._jobs[job_key]
                return

    def _has_room(self, job: _TrainingJob) -> bool:
        share_bytes = _MOST_BYTES // len(self._jobs) if self._jobs else 0
        return job.ahead_bytes < share_bytes and len(job.ahead) + job.started < _MOST_FILES

    async def _fetch_next(self, job: _TrainingJob, directory: int, path: bytes) -> None:
        try:
            await self._fetch(job, directory, path)
        except (CachefsError, LookupError):
            pass  # a wrong hint is no error, and readers get their own errors
        except Exception as error:
            report_bug(error)
        finally:
            self._requests.release()
            job.wake()

    async def _fetch(self, job: _TrainingJob, directory: int, path: bytes) -> None:
        try:
            inode = self._namespace.inode(directory)
            for part in path.split(b"/"):
                if part == b"..":
                    return
                if part not in (b"", b"."):
                    inode, _ = await self._namespace.lookup(inode.ino, part)
        finally:
            job.started -= 1
        if inode.is_dir or not inode.size_bytes or inode.ino in job.ahead:
            return
        ref = self._namespace.object_ref(inode)
        if self._cache.is_cached_or_inflight(BlockKey(ref.object_id, 0)):
            return
        # No await may come between check and fetch: otherwise a block could be fetched twice.
        count = min(ref.block_count, _FIRST_BLOCKS)
        size_bytes = min(inode.size_bytes, count * BLOCK_BYTES)
        job.ahead[inode.ino] = _Ahead(size_bytes, trio.current_time())
        job.ahead_bytes += size_bytes
        self._forget_reader(inode.ino)
        try:
            self._cache.fetch(ref, 0, count, ahead=True)
            await self._cache.fetched(ref, 0, count)
        except CachefsError:
            job.drop(inode.ino)
            raise
