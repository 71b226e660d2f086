"""All load jobs of a mount: accept them, run a few at a time, continue them after a restart."""

import copy
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import suppress

import trio

from cachefs.errors import CachefsError, NotFoundError, UsageError
from cachefs.load.job import Job, JobContext
from cachefs.load.spec import JobReport, LoadSpec, Progress, State

log = logging.getLogger(__name__)

_AT_A_TIME = 4
_SAVE_INTERVAL_S = 2.0
_WATCH_INTERVAL_S = 0.25


class _Run:
    """One run of a job that is queued or running."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.is_cancelled = False
        """A user has cancelled the run."""
        self.ended = trio.Event()
        self.changed = trio.Event()
        """The report's state has changed and is not saved yet."""

    def note_change(self) -> None:
        self.changed.set()


class Jobs:
    """The load jobs of one mount. Usable while `run` runs. Methods raise `CachefsError`."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._files = context.files
        self._reports: dict[str, JobReport] = {}
        """All jobs by id, oldest first."""
        self._running: dict[str, _Run] = {}
        self._writing = trio.Lock()
        self._turn = trio.CapacityLimiter(_AT_A_TIME)
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Start the jobs again that the last daemon did not finish."""
        reports = await trio.to_thread.run_sync(self._files.read_all)
        self._reports = {report.id: report for report in reports}
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for report in reports:
                if not report.state.is_final:
                    log.info("load job %s is continued", report.id)
                    self._start(report)
            task_status.started()
            await trio.sleep_forever()

    # -- requests of users -------------------------------------------------------------------------

    async def create(self, spec: LoadSpec) -> JobReport:
        """Create a job. It waits for its list (`extend`), if it has one, and for `start`."""
        paths = tuple(self._context.paths.path(path) for path in spec.paths)
        try:
            job_id = await trio.to_thread.run_sync(self._files.new_id)
        except OSError as error:
            raise _cant_be_kept(error) from error
        spec = LoadSpec({**spec.values(), "paths": paths})
        report = JobReport(id=job_id, spec=spec, created_at=time.time())
        self._reports[job_id] = report
        return report

    async def extend(self, job_id: str, lines: bytes) -> None:
        """Append lines to the list of a new job."""
        report = self._new(job_id)
        try:
            await trio.to_thread.run_sync(self._files.append_to_list, report.id, lines)
        except OSError as error:
            raise _cant_be_kept(error) from error

    async def start(self, job_id: str) -> JobReport:
        """Accept a new job and queue it. From now on the job survives a restart of the daemon."""
        report = self._new(job_id)
        report.state = State.QUEUED
        try:
            await trio.to_thread.run_sync(self._files.write, report)
        except OSError as error:
            report.state = State.NEW
            raise _cant_be_kept(error) from error
        self._start(report)
        for gone in await trio.to_thread.run_sync(self._files.prune, self.all()):
            self._reports.pop(gone.id, None)
        return report

    def _new(self, job_id: str) -> JobReport:
        report = self.get(job_id)
        if report.state is not State.NEW:
            raise CachefsError(f"load job {job_id} has been started already")
        return report

    @property
    def running_count(self) -> int:
        """Number of jobs that are queued or running."""
        return len(self._running)

    def all(self) -> list[JobReport]:
        """Return the reports of all jobs, oldest first."""
        return list(self._reports.values())

    def get(self, job_id: str) -> JobReport:
        """Return the report of a job. Raises `NotFoundError`."""
        if job_id not in self._reports:
            raise NotFoundError(f"there is no load job {job_id} on this mount; see cachefs jobs")
        return self._reports[job_id]

    async def watch(self, job_id: str) -> AsyncGenerator[JobReport, None]:
        """Yield the report now, then every `_WATCH_INTERVAL_S`, and once more after the end."""
        while True:
            report, run = self.get(job_id), self._running.get(job_id)
            yield report
            if run is None:
                return
            with trio.move_on_after(_WATCH_INTERVAL_S):
                await run.ended.wait()

    async def cancel(self, job_id: str) -> JobReport:
        """Stop a job and return its report. Fetched blocks stay. No effect if the job has ended."""
        report = self.get(job_id)
        run = self._running.get(job_id)
        if run is not None:
            run.is_cancelled = True
            run.scope.cancel()
            await run.ended.wait()
        return report

    async def resume(self, job_id: str) -> JobReport:
        """Run a job again that has ended in any state, or start a new one. No effect if it is
        queued or running."""
        report = self.get(job_id)
        if report.state is State.NEW:
            return await self.start(job_id)
        if job_id not in self._running:
            report.state = State.QUEUED
            self._start(report)
        return report

    async def failures(self, job_id: str) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a job's list of failures. A list of paths may have this format."""
        self.get(job_id)
        lines = self._files.failures(job_id)
        while (line := await trio.to_thread.run_sync(next, lines, None)) is not None:
            yield line

    # -- carrying out --------------------------------------------------------------------------

    def _start(self, report: JobReport) -> None:
        if self._nursery is None:
            raise UsageError("the mount is shutting down")
        run = self._running[report.id] = _Run()
        self._nursery.start_soon(self._carry_out, report, run)

    async def _carry_out(self, report: JobReport, run: _Run) -> None:
        try:
            with run.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._save_changes, report, run)
                    async with self._turn:
                        await self._run_job(report, run)
                    nursery.cancel_scope.cancel()
            if run.is_cancelled:
                report.state = State.CANCELLED
        except Exception as error:  # a bug must end only this job, not the mount
            log.exception("bug in load job %s", report.id)
            report.state, report.problem = State.FAILED, f"internal error: {error!r}; see the log"
        finally:
            # A state that is not final means that the mount ends. The next daemon starts the job
            # again.
            if report.state.is_final:
                report.ended_at = time.time()
                log.info("load job %s: %s", report.id, report.state)
            with trio.CancelScope(shield=True):
                await self._save(report)
            del self._running[report.id]
            run.ended.set()

    async def _run_job(self, report: JobReport, run: _Run) -> None:
        report.started_at, report.ended_at, report.problem = time.time(), None, None
        report.progress = Progress()
        await Job(self._context, report, run.note_change).run()

    async def _save_changes(self, report: JobReport, run: _Run) -> None:
        """Save the report now, after each change of its state, and every `_SAVE_INTERVAL_S` if it
        has changed. The job does not wait for it, because a save waits for the disk."""
        saved: JobReport | None = None
        while True:
            run.changed = trio.Event()
            if report != saved:
                saved = await self._save(report)
            with trio.move_on_after(_SAVE_INTERVAL_S):
                await run.changed.wait()

    async def _save(self, report: JobReport) -> JobReport:
        """Return the copy of the report that was saved."""
        async with self._writing:
            snapshot = copy.deepcopy(report)
            with suppress(OSError):  # the job goes on; a restart would find its earlier state
                await trio.to_thread.run_sync(self._files.write, snapshot)
            return snapshot


def _cant_be_kept(error: OSError) -> CachefsError:
    return CachefsError(f"the load job can't be kept in the cache directory: {error.strerror}")
