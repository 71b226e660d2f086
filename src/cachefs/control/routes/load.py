"""Routes for load jobs: `cachefs load` and `cachefs jobs`."""

import json
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from cachefs.control import api
from cachefs.control.api import Handler, Lines, Route, UnknownError
from cachefs.errors import NotFoundError, UsageError
from cachefs.load.jobs import Jobs
from cachefs.load.spec import JobReport, load_spec


class LoadRoutes:
    """The handlers for load jobs. Each answers with a `JobReport`, unless its docstring says
    otherwise; the docstrings name the arguments."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def handlers(self) -> dict[Route, Handler]:
        """Return the handlers by route. They raise `CachefsError`s."""
        return {
            api.JOBS: self.all,
            api.JOB: self.show,
            api.JOB_WATCH: self.watch,
            api.JOB_FAILURES: self.failures,
            api.JOB_CREATE: self.create,
            api.JOB_LIST: self.extend,
            api.JOB_START: self.start,
            api.JOB_CANCEL: self.cancel,
            api.JOB_RESUME: self.resume,
        }

    async def all(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Answer with all jobs in `jobs`, the oldest first."""
        return {"jobs": [_shown(report) for report in self._jobs.all()]}

    async def show(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Show the job `id`."""
        return _shown(self._jobs.get(self._id(arguments)))

    async def watch(self, arguments: dict[str, Any]) -> Lines:
        """Stream reports of the job `id` until it has ended."""
        async with aclosing(self._jobs.watch(self._id(arguments))) as reports:
            async for report in reports:
                yield _shown(report)

    async def failures(self, arguments: dict[str, Any]) -> Lines:
        """Stream the failures of the job `id`: each line has a `failure` with `path` and
        `error`."""
        async with aclosing(self._jobs.failures(self._id(arguments))) as lines:
            async for line in lines:
                yield {"failure": json.loads(line)}

    async def create(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Create a job. The arguments are the fields of a `LoadSpec`."""
        return _shown(await self._jobs.create(load_spec(arguments)))

    async def extend(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Append `lines` to the list of paths of the job `id`: complete lines without line ends."""
        lines = arguments.get("lines")
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise UsageError("lines must be a list of texts")
        job_id = self._id(arguments)
        text = "".join(f"{line}\n" for line in lines)
        try:
            data = text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise UsageError("lines must be paths, in valid Unicode") from None
        await self._jobs.extend(job_id, data)
        return _shown(self._jobs.get(job_id))

    async def start(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Start the job `id`, which was created before."""
        return _shown(await self._jobs.start(self._id(arguments)))

    async def cancel(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Cancel the job `id`."""
        return _shown(await self._jobs.cancel(self._id(arguments)))

    async def resume(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Resume the job `id`."""
        return _shown(await self._jobs.resume(self._id(arguments)))

    def _id(self, arguments: dict[str, Any]) -> str:
        job_id = arguments.get("id")
        if not isinstance(job_id, str):
            raise UsageError("id must be a text")
        try:
            self._jobs.get(job_id)
        except NotFoundError as error:
            raise UnknownError(str(error)) from None
        return job_id


def _shown(report: JobReport) -> dict[str, object]:
    return report.values()
