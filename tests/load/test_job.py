"""One run of a job: what it fetches, and when."""

import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
import trio.testing

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import BadDataError
from cachefs.load import job as load_job
from cachefs.load.job import Job, JobContext
from cachefs.load.job_files import JobFiles
from cachefs.load.jobs import Jobs
from cachefs.load.paths import PathReader
from cachefs.load.spec import JobReport, LoadSpec, State
from cachefs.namespace.clock import Clock
from cachefs.origin.resilience import Resilience, ResilientOrigin
from tests.cache.harness import MIB, open_tier, until
from tests.namespace.harness import ScriptedOrigin, Tree

SETTINGS = Resilience(read_timeout_s=120.0, request_timeout_s=60.0, hedge=False)
FILES = 30
PAGE = 10


class Rig:
    """Jobs over an origin with one directory of three pages."""

    def __init__(self, context: JobContext, origin: ScriptedOrigin) -> None:
        self.context = context
        self.origin = origin

    def job(self, **fields: object) -> Job:
        def changed() -> None: ...

        spec = LoadSpec({"paths": ("",), **fields})
        report = JobReport(id=self.context.files.new_id(), spec=spec, created_at=0.0)
        self.context.files.write(report)
        return Job(self.context, report, changed)

    def hold_page(self, held: int) -> trio.Event:
        """The origin answers this page only when the event is set."""
        gate = trio.Event()

        async def wait(path: str, number: int) -> None:
            if number == held:
                await gate.wait()

        self.origin.before_page = wait
        return gate


@pytest.fixture
def tier_bytes() -> int:
    return 128 * MIB


@pytest.fixture
async def rig(tmp_path: Path, nursery: trio.Nursery, tier_bytes: int) -> AsyncIterator[Rig]:
    origin = ScriptedOrigin(page_size=PAGE)
    for number in range(FILES):
        origin.put(f"dir/{number:02}", bytes([number]) * 500_000)
    resilient = ResilientOrigin(origin, SETTINGS)
    await nursery.start(resilient.run)
    tree = Tree(tmp_path / "namespace", nursery, resilient, Clock())  # type: ignore[arg-type]
    await tree.start()
    cache = BlockCache(resilient, [open_tier(tmp_path / "cache", tier_bytes)])
    await nursery.start(cache.run)
    files = JobFiles(tmp_path / "jobs")
    reader = PathReader("/mnt", "fake://test")
    yield Rig(JobContext(tree.namespace, cache, resilient, files, reader, 64 * MIB), origin)
    await cache.aclose()
    tree.db.abandon()


async def test_the_first_files_are_fetched_before_all_are_known(rig: Rig) -> None:
    gate = rig.hold_page(2)
    job = rig.job()
    progress = job.report.progress
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(job.run)
            await until(lambda: progress.fetched_files == 2 * PAGE)
            assert job.report.state == State.EXPANDING
            assert progress.files == 0
            gate.set()
    assert job.report.state == State.DONE
    assert (progress.files, progress.fetched_files, progress.verified_files) == (FILES,) * 3
    assert (progress.wanted_files, progress.cached_files) == (FILES, 0)
    assert rig.origin.counters.gets == FILES
    again = rig.job()
    await again.run()
    assert (again.report.progress.wanted_files, again.report.progress.cached_files) == (0, FILES)
    assert rig.origin.counters.gets == FILES


async def test_a_listing_that_fails_once_counts_once(rig: Rig) -> None:
    tries = 0

    async def fail_once(path: str, number: int) -> None:
        nonlocal tries
        tries += number == 2
        if number == 2 and tries == 1:
            raise BadDataError("the page is wrong")

    rig.origin.before_page = fail_once
    job = rig.job()
    with trio.fail_after(300):
        await job.run()
    assert tries == 2
    assert job.report.state == State.DONE
    assert job.report.progress.files == FILES
    assert rig.origin.counters.gets == FILES


@pytest.mark.parametrize("mode", ["dry-run", "check", "metadata"])
async def test_other_modes_fetch_nothing(rig: Rig, mode: str) -> None:
    job = rig.job(mode=mode)
    await job.run()
    assert job.report.progress.files == FILES
    assert rig.origin.counters.gets == 0


async def test_no_more_than_the_most_is_fetched_early(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_job, "_MOST_EARLY", 5)
    gate = rig.hold_page(2)
    job = rig.job()
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(job.run)
            await until(lambda: job.report.progress.fetched_files == 5)
            await trio.testing.wait_all_tasks_blocked()
            assert rig.origin.counters.gets == 5
            gate.set()
    assert job.report.state == State.DONE
    assert rig.origin.counters.gets == FILES


async def test_cached_files_are_not_looked_up_early_without_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_job, "_MOST_EARLY", 5)
    await rig.job(paths=[f"dir/{number:02}" for number in range(5)]).run()
    assert rig.origin.counters.gets == 5
    gate = rig.hold_page(2)
    job = rig.job()
    pages = rig.origin.counters.lists
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(job.run)
            await until(lambda: rig.origin.counters.lists > pages)
            await trio.testing.wait_all_tasks_blocked()
            assert rig.origin.counters.gets == 5
            gate.set()
    assert job.report.state == State.DONE
    assert rig.origin.counters.gets == FILES


@pytest.mark.parametrize("tier_bytes", [8 * MIB])
async def test_only_what_fits_is_fetched_early(rig: Rig) -> None:
    """And what was fetched early stays."""
    gate = rig.hold_page(2)
    (status,) = rig.context.cache.status()
    fitting = status.high_bytes // load_job.charge_bytes(500_000)
    assert 0 < fitting < 2 * PAGE
    job = rig.job()
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(job.run)
            await until(lambda: job.report.progress.fetched_files == fitting)
            await trio.testing.wait_all_tasks_blocked()
            gate.set()
    progress = job.report.progress
    assert job.report.state == State.INCOMPLETE
    assert rig.origin.counters.gets == fitting == progress.verified_files
    assert progress.excess_files == FILES - fitting
    assert not progress.failed_files


async def test_a_job_does_not_wait_until_its_state_is_saved(
    rig: Rig, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, saved, disk_is_back = rig.context.files, list[State](), threading.Event()
    write = files.write

    def wait_and_write(report: JobReport) -> None:
        if saved:  # the first says that the job is accepted
            disk_is_back.wait(300)
        write(report)
        saved.append(report.state)

    monkeypatch.setattr(files, "write", wait_and_write)
    jobs = Jobs(rig.context)
    with trio.fail_after(300):
        await nursery.start(jobs.run)
        report = await jobs.create(LoadSpec({"paths": ("dir",)}))
        try:
            await jobs.start(report.id)
            await until(lambda: report.state is State.DONE)
            assert saved == [State.QUEUED]
        finally:
            disk_is_back.set()
        await until(lambda: jobs.running_count == 0)
    assert saved[-1] is State.DONE
