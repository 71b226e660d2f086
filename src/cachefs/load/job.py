"""One run of a load job, from its paths to the verified files in the cache.

Expand: find the files, and which of them are missing. Preflight: compute how many of those fit.
Load: fetch what fits. Verify: look up every file in the cache again. No state is kept between
runs: a second run finds which files are cached and fetches the others.

The first missing files are fetched while the job still looks for others, as long as they fit into
free space.
"""

import logging
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import CachefsError
from cachefs.load.fetch import Fetcher, FileQueue
from cachefs.load.job_files import JobFiles
from cachefs.load.paths import PathReader
from cachefs.load.preflight import charge_bytes, room_by_tier
from cachefs.load.spec import JobReport, State
from cachefs.load.throttle import LoadThrottle
from cachefs.load.walk import Failure, Walk
from cachefs.namespace.namespace import Namespace
from cachefs.origin.resilience import ResilientOrigin
from cachefs.types import ObjectRef

log = logging.getLogger(__name__)

_FILES_PER_TURN = 40
"""Files to look up in one turn of the event loop. Each takes about 15 us."""
_FAILURES_AT_A_TIME = 1000
_MOST_EARLY = 65_536
"""Files to look up as soon as they are found, and to fetch if they are missing. So many keep the
job fetching for some time, and a job whose files are cached does not look up millions of them
twice."""
_RECONCILE_POLL_S = 0.1
_MOST_RECONCILING_S = 60.0
_NO_ROOM = "there is no room for it in the cache"
_NOT_CACHED = "it is not cached"
_NOT_STORED = "it should be in the cache, and is not: it had to go for others, or the disk failed"
_REPLACED = "it was replaced meanwhile"


@dataclass(frozen=True, slots=True)
class JobContext:
    """The objects of a mount that all its jobs use. `most_held_bytes` is the limit for the cache's
    memory of blocks in flight, at which a job waits."""

    namespace: Namespace
    cache: BlockCache
    origin: ResilientOrigin
    files: JobFiles
    paths: PathReader
    most_held_bytes: int


class Job:
    """One run of one job; `Jobs` owns it. It keeps `report` up to date and calls `changed` after
    each change of `report.state`, except the last."""

    def __init__(
        self,
        context: JobContext,
        report: JobReport,
        changed: Callable[[], None],
    ) -> None:
        self._context = context
        self.report = report
        self._progress = report.progress
        self._changed = changed
        self._failures: list[Failure] = []
        self._inos = array("Q")
        self._missing = array("Q")
        """Missing files: a subsequence of `_inos`, in the same order."""
        self._excess = array("Q")
        """Missing files for which there is no room: also a subsequence of `_inos`."""
        self._queue = FileQueue()
        self._early: set[int] = set()
        """Missing files that were put into the queue before all files were found."""
        self._early_bytes = 0
        """Their size, in bytes of slots."""
        self._early_look_ups = 0
        self._early_room_bytes = 0
        """The free space for such files, in bytes of slots."""
        self._reported: set[bytes] = set()
        """Ids of objects that are in the list of failures because their fetch failed."""

    async def run(self) -> None:
        """Run the job. Afterwards the state is final. Only cancellation is raised."""
        report = self.report
        try:
            report.state = await self._run()
        except CachefsError as error:
            report.state, report.problem = State.FAILED, str(error)
        except Exception as error:
            log.exception("bug in load job %s", report.id)
            report.state = State.FAILED
            report.problem = f"internal error: {type(error).__name__}: {error}; see the log"
        finally:
            self._progress.waiting_for = None

    async def _run(self) -> State:
        spec, progress = self.report.spec, self._progress
        await trio.to_thread.run_sync(self._context.files.clear_failures, self.report.id)
        if spec.mode == "load":
            await self._load()
        else:
            await self._find()
        if spec.mode == "metadata":
            await self._write_failures()
            return State.INCOMPLETE if progress.failed_files else State.DONE
        if spec.mode != "dry-run":
            self._enter(State.VERIFYING)
            await self._verify()
        await self._write_failures()
        if spec.mode == "dry-run":
            return State.DONE
        complete = progress.verified_files == progress.files and not progress.failed_files
        return State.DONE if complete else State.INCOMPLETE

    def _enter(self, state: State) -> None:
        self.report.state = state
        self._changed()

    # -- expand --------------------------------------------------------------------------------

    async def _find(self) -> None:
        """Find the files, and which of them are missing and fit."""
        self._enter(State.EXPANDING)
        await self._expand()
        self._early_room_bytes = 0
        if self.report.spec.mode != "metadata":
            await self._wait_until_reconciled()
            await self._compare()
            await self._preflight()

    async def _expand(self) -> None:
        context, spec = self._context, self.report.spec
        throttle = LoadThrottle(context.cache, context.origin, context.most_held_bytes)
        since_ns = context.namespace.clock.now_ns()
        walk = Walk(
            context.namespace,
            spec,
            since_ns,
            self._progress,
            throttle,
            self._fail,
            context.origin,
            self._fetch_early,
        )
        await walk.run(spec.paths, self._lines(), context.paths)
        self._inos = walk.inos

    async def _lines(self) -> AsyncIterator[bytes]:
        if not self.report.spec.has_list:
            return
        chunks = self._context.files.list_chunks(self.report.id)
        while True:
            lines = await trio.to_thread.run_sync(next, chunks, None)
            if lines is None:
                return
            for line in lines:
                yield line
            await self._write_failures_if_many()

    async def _wait_until_reconciled(self) -> None:
        """Wait until the cache has reconciled its slabs, at most 60 s. After a crash it may hold
        blocks that are not in its index yet; the job must not fetch them again."""
        cache = self._context.cache
        with trio.move_on_after(_MOST_RECONCILING_S):
            while not cache.is_reconciled:
                self._progress.waiting_for = "what the last daemon left is being looked through"
                await trio.sleep(_RECONCILE_POLL_S)
        self._progress.waiting_for = None

    async def _compare(self) -> None:
        """Find out which files are missing. An empty file never is."""
        progress, cache = self._progress, self._context.cache
        async for ino in self._in_turns(self._inos):
            if ino in self._early:
                self._note_missing(ino, self._size_bytes(ino))
            elif (ref := self._ref(ino)) is None:
                continue
            elif cache.is_stored(ref):
                progress.cached_files += 1
                progress.cached_bytes += ref.meta.size_bytes
                if self.report.spec.mode == "load" and cache.object_slabs.wants(ref):
                    await cache.object_slabs.keep(ref, may_evict=False)
            else:
                self._note_missing(ino, ref.meta.size_bytes)

    def _note_missing(self, ino: int, size_bytes: int) -> None:
        self._missing.append(ino)
        self._progress.wanted_files += 1
        self._progress.wanted_bytes += size_bytes

    async def _in_turns(self, inos: "array[int]") -> AsyncIterator[int]:
        """Yield `inos`, and let the event loop run every `_FILES_PER_TURN` files."""
        for number, ino in enumerate(inos):
            if number % _FILES_PER_TURN == 0:
                await self._context.namespace.give_way()
            yield ino

    def _ref(self, ino: int) -> ObjectRef | None:
        """Return the file's present version; None if the file was removed or replaced since the job
        began. Verifying counts that as a failure."""
        try:
            namespace, slabs = self._context.namespace, self._context.cache.object_slabs
            ref = namespace.object_ref(namespace.inode(ino))
        except (CachefsError, LookupError):
            return None
        if slabs.wants(ref):
            slabs.note_inode(ino, ref)
        return ref

    # -- preflight -----------------------------------------------------------------------------

    async def _preflight(self) -> None:
        """Compute how the job spreads over the tiers, and leave out the files that do not fit."""
        progress = self._progress
        tiers = self._context.cache.status()
        cached_bytes, wanted_bytes = await self._charges()
        progress.tiers = room_by_tier(tiers, cached_bytes + wanted_bytes)
        pinned_bytes = sum(tier.pinned_bytes for tier in tiers)
        room_bytes = sum(tier.high_bytes for tier in tiers) - max(pinned_bytes, cached_bytes)
        if wanted_bytes > room_bytes:
            await self._leave_out(room_bytes)

    async def _charges(self) -> tuple[int, int]:
        """Return the bytes of slots of the cached files, and those of the missing files."""
        is_missing = _Subsequence(self._missing)
        cached_bytes = wanted_bytes = 0
        async for ino in self._in_turns(self._inos):
            charge = charge_bytes(self._size_bytes(ino))
            if is_missing.takes(ino):
                wanted_bytes += charge
            else:
                cached_bytes += charge
        return cached_bytes, wanted_bytes

    def _size_bytes(self, ino: int) -> int:
        """Return the size of a file; 0 if it was removed."""
        stat = self._context.namespace.table.stat(ino)
        return 0 if stat is None else stat[1]

    async def _leave_out(self, room_bytes: int) -> None:
        """Select the missing files that fit into `room_bytes`: those that are fetched already, then
        the others in their order. To fetch more would only evict files that the job has just
        fetched."""
        fitting = array("Q")
        room_bytes -= self._early_bytes
        async for ino in self._in_turns(self._missing):
            size_bytes = self._size_bytes(ino)
            charge = charge_bytes(size_bytes)
            if ino in self._early:
                fitting.append(ino)
            elif charge <= room_bytes:
                room_bytes -= charge
                fitting.append(ino)
            else:
                self._excess.append(ino)
                self._progress.excess_files += 1
                self._progress.excess_bytes += size_bytes
        self._missing = fitting

    # -- load and verify -----------------------------------------------------------------------

    async def _load(self) -> None:
        """Find the files and fetch the missing ones, the first of them while others are found."""
        context, spec = self._context, self.report.spec
        fetcher = Fetcher(
            context.cache,
            context.origin,
            context.most_held_bytes,
            self._progress,
            self._fail,
            spec.pin,
        )
        self._reported = fetcher.failed
        if not spec.pin:  # the limit of pinned bytes is applied when all files are known
            tiers = context.cache.status()
            self._early_room_bytes = sum(max(0, t.high_bytes - t.used_bytes) for t in tiers)
        problem: CachefsError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._fetch_all, fetcher, nursery.cancel_scope)
            try:
                await self._find()
                self._enter(State.LOADING)
            except CachefsError as error:  # outside the nursery it would be an ExceptionGroup
                problem = error
                nursery.cancel_scope.cancel()
            else:
                self._queue.end(self._missing_refs())
                await self._write_failures_now_and_then()
        if problem is not None:
            raise problem
        await context.cache.drain()

    async def _fetch_all(self, fetcher: Fetcher, scope: trio.CancelScope) -> None:
        """Fetch all files of the queue. Cancel `scope` afterwards."""
        await fetcher.run(self._queue, self.report.spec.jobs)
        scope.cancel()

    def _fetch_early(self, ino: int, size_bytes: int) -> None:
        """Let a file that was just found be fetched now if it is missing and certainly fits."""
        charge = charge_bytes(size_bytes)
        if (
            self._early_bytes + charge > self._early_room_bytes
            or not self._context.cache.is_reconciled
        ):
            return
        if self._early_look_ups >= _MOST_EARLY or ino in self._early:
            return
        self._early_look_ups += 1
        ref = self._ref(ino)
        if ref is not None and not self._context.cache.is_stored(ref):
            self._early.add(ino)
            self._early_bytes += charge
            self._queue.put(ref)

    def _missing_refs(self) -> Iterator[ObjectRef]:
        for ino in self._missing:
            ref = None if ino in self._early else self._ref(ino)
            if ref is not None:
                yield ref

    async def _verify(self) -> None:
        """Look up all files in the cache again, and report each missing file with the reason."""
        is_excess = _Subsequence(self._excess)
        inos = iter(self._inos)
        while batch := list(islice(inos, _FILES_PER_TURN)):
            stored = [ref for ino in batch if (ref := self._verified(ino, is_excess.takes(ino)))]
            if self.report.spec.pin and self.report.spec.mode == "load":
                await self._pin(stored)
            await self._context.namespace.give_way()
            await self._write_failures_if_many()

    def _verified(self, ino: int, is_excess: bool) -> ObjectRef | None:
        """Return the file's version if all of it is cached; otherwise report why not."""
        progress, ref = self._progress, self._ref(ino)
        if ref is None:
            progress.failed_files += 1
            self._fail(Failure(f"inode {ino}", _REPLACED))
        elif self._context.cache.is_stored(ref):
            progress.verified_files += 1
            progress.verified_bytes += ref.meta.size_bytes
            return ref
        elif self.report.spec.mode == "check":
            self._fail(Failure(ref.path, _NOT_CACHED))
        elif is_excess:
            self._fail(Failure(ref.path, _NO_ROOM))
        elif ref.object_id not in self._reported:
            progress.failed_files += 1
            self._fail(Failure(ref.path, _NOT_STORED))
        return None

    async def _pin(self, refs: list[ObjectRef]) -> None:
        pinned = await self._context.cache.objects.pin(refs)
        if pinned.refused_blocks and self.report.problem is None:
            self.report.problem = (
                "not everything could be pinned: the limit of pinned bytes is reached (--pin-limit)"
            )

    # -- failures ------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> None:
        self._failures.append(failure)

    async def _write_failures_if_many(self) -> None:
        if len(self._failures) >= _FAILURES_AT_A_TIME:
            await self._write_failures()

    async def _write_failures_now_and_then(self) -> None:
        while True:
            await trio.sleep(1.0)
            await self._write_failures()

    async def _write_failures(self) -> None:
        failures, self._failures = self._failures, []
        if failures:
            files = self._context.files
            # The shield keeps the failures: a cancellation before the thread starts loses them.
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(files.append_failures, self.report.id, failures)


class _Subsequence:
    """Tells which numbers of a sequence belong to a given subsequence of it, in one pass."""

    def __init__(self, numbers: "array[int]") -> None:
        self._numbers = numbers
        self._position = 0

    def takes(self, number: int) -> bool:
        """Return whether the number belongs to the subsequence. Call this for each number of the
        sequence, in order."""
        position = self._position
        if position == len(self._numbers) or self._numbers[position] != number:
            return False
        self._position += 1
        return True
