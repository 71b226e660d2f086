"""Hints: files are fetched in the order in which a job says that it will read them.

A job sends the paths that it will read, in order (docs/HINTS.md). The daemon keeps a window of them
fetched ahead of the readers. When a hinted file is read, the window moves on. All jobs share
`_MOST_BYTES`, so wrong hints cost at most that, and a job whose reader stands still never pushes
out what it will need first.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import CachefsError
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import Namespace
from cachefs.prefetch import bugs
from cachefs.types import BLOCK_BYTES, BlockKey

_MOST_JOBS, _MOST_JOBS_OF_USER = 16, 4
_QUEUED = 1_024
"""Paths of one job that were sent and not looked at yet."""
_MOST_BYTES = 32 << 20
"""Of all jobs: fetched ahead and not read yet."""
_MOST_FILES = 256
"""The same of one job, in files."""
_FIRST_BLOCKS = 8
"""Of a larger file only the beginning is fetched ahead: its reader has read-ahead in the file."""
_REQUESTS = 32
_OVERTAKEN_S = 10.0
"""A file that was fetched so long ago counts as read when one that was hinted later is read: the
kernel may have had its pages."""
_IDLE_S = 60.0

JobKey = tuple[int, bytes]
"""The user and the name that the job gave itself."""


class _Ahead(NamedTuple):
    size_bytes: int
    at_s: float


class _Job:
    __slots__ = ("ahead", "ahead_bytes", "changed", "paths", "started", "used_at")

    def __init__(self) -> None:
        self.paths: deque[tuple[int, bytes]] = deque()
        """Directory inodes and paths below them."""
        self.ahead: OrderedDict[int, _Ahead] = OrderedDict()
        """What was fetched ahead and is not read yet, by inode number, in order."""
        self.ahead_bytes = 0
        self.started = 0
        """Fetches that have not been noted in `ahead` yet."""
        self.used_at = trio.current_time()
        self.changed = trio.Event()

    def drop(self, ino: int) -> None:
        """The file is read, or will not come."""
        ahead = self.ahead.pop(ino, None)
        if ahead is not None:
            self.ahead_bytes -= ahead.size_bytes

    def wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class Hints:
    """Of one mount, on the loop. Only tasks in `nursery` wait."""

    def __init__(
        self,
        namespace: Namespace,
        cache: BlockCache,
        nursery: trio.Nursery,
        may_fetch: Callable[[], bool],
        forget_reader: Callable[[int], None],
    ) -> None:
        """`may_fetch()` is False while the origin is away. `forget_reader(ino)` makes the next read
        of a file count as its first."""
        self._namespace = namespace
        self._cache = cache
        self._nursery = nursery
        self._may_fetch = may_fetch
        self._forget_reader = forget_reader
        self._requests = trio.Semaphore(_REQUESTS)
        self._jobs: OrderedDict[JobKey, _Job] = OrderedDict()

    def take(self, job_key: JobKey, directory: int, path: bytes) -> bool:
        """The job will read `path` below a directory after all that it has hinted so far. False if
        the job has sent enough: it sends this path again a little later."""
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
        """Somebody begins to read this file."""
        for job in self._jobs.values():
            if inode.ino in job.ahead:
                self._note_used(job, inode.ino)

    def _begin(self, job_key: JobKey) -> _Job:
        """Begin a job; the one that was used longest ago ends if there are too many."""
        same_user = [key for key in self._jobs if key[0] == job_key[0]]
        candidates = same_user if len(same_user) >= _MOST_JOBS_OF_USER else list(self._jobs)
        if len(same_user) >= _MOST_JOBS_OF_USER or len(self._jobs) >= _MOST_JOBS:
            oldest = min(candidates, key=lambda key: self._jobs[key].used_at)
            self._jobs.pop(oldest).wake()
        job = self._jobs[job_key] = _Job()
        self._nursery.start_soon(self._run, job_key, job)
        return job

    def _note_used(self, job: _Job, ino: int) -> None:
        now = trio.current_time()
        for earlier, ahead in list(job.ahead.items()):
            if earlier == ino or ahead.at_s + _OVERTAKEN_S > now:
                break
            job.drop(earlier)
        job.drop(ino)
        job.used_at = now
        job.wake()

    # -- the window ----------------------------------------------------------------------------

    async def _run(self, job_key: JobKey, job: _Job) -> None:
        """Fetch ahead until nothing has been heard of the job for a while."""
        while self._jobs.get(job_key) is job:
            if job.paths and self._has_room(job) and self._may_fetch():
                await self._requests.acquire()
                # Others may have filled the window meanwhile.
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

    def _has_room(self, job: _Job) -> bool:
        share_bytes = _MOST_BYTES // len(self._jobs) if self._jobs else 0
        return job.ahead_bytes < share_bytes and len(job.ahead) + job.started < _MOST_FILES

    async def _fetch_next(self, job: _Job, directory: int, path: bytes) -> None:
        try:
            await self._fetch(job, directory, path)
        except (CachefsError, LookupError):
            pass  # a wrong hint costs nothing, and readers get their own errors
        except Exception as error:
            bugs.report(error)
        finally:
            self._requests.release()
            job.wake()

    async def _fetch(self, job: _Job, directory: int, path: bytes) -> None:
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
        # No await between the look and the fetch, so no block is fetched twice.
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
