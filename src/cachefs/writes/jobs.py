"""Work for single files that no process waits for."""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import trio

from cachefs.errors import CachefsError
from cachefs.writes.written_file import WrittenFile

log = logging.getLogger(__name__)

FileJob: TypeAlias = Callable[[WrittenFile], Awaitable[None]]


class FileJobs:
    """Jobs for files, each in its own task. `run` runs for as long as the mount."""

    def __init__(self) -> None:
        self._waiting: list[tuple[FileJob, WrittenFile]] = []
        self._work = trio.lowlevel.ParkingLot()

    def start(self, job: FileJob, file: WrittenFile) -> None:
        """Do the job soon. Its failure is logged."""
        self._waiting.append((job, file))
        self._work.unpark_all()

    async def run(self) -> None:
        """Do the jobs. Never returns."""
        async with trio.open_nursery() as nursery:
            while True:
                while self._waiting:
                    nursery.start_soon(self._do, *self._waiting.pop())
                await self._work.park()

    async def finish(self, optional: FileJob) -> None:
        """Do at the end of the mount the jobs that have not begun, except the optional ones."""
        waiting, self._waiting = self._waiting, []
        for job, file in waiting:
            if job != optional:
                await self._do(job, file)

    async def _do(self, job: FileJob, file: WrittenFile) -> None:
        try:
            await job(file)
        except CachefsError as error:
            log.warning("%s: %s", file.staged.path, error)
        except Exception:
            log.exception("bug in background work for %s", file.staged.path)
