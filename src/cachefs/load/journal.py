"""The files of load jobs, in a cache directory. Format 1; see docs/formats/jobs.md.

`jobs/ID/job.json` is replaced as a whole by a rename; `list` and `failures.jsonl` only grow.
Everything here blocks, and is called in worker threads, one call of a job at a time.
"""

import contextlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from cachefs.load.spec import JobReport
from cachefs.load.walk import Failure

log = logging.getLogger(__name__)

JOB_FORMAT = 1
_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"
_ID_LENGTH = 6
_KEPT_JOBS = 100
"""Finished ones that `prune` leaves."""


class Journal:
    """All jobs of one mount. Raises `OSError`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def new_id(self) -> str:
        """An id that no job has, on this node and most likely on no other mount of it; its
        directory is made."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        while True:
            job_id = "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))
            with contextlib.suppress(FileExistsError):
                (self._directory / job_id).mkdir(mode=0o700)
                return job_id

    def write(self, report: JobReport) -> None:
        """Replace `job.json`. Durable, so that a job that was accepted outlives a power cut."""
        path = self._directory / report.id / "job.json"
        temporary = path.with_suffix(".tmp")
        text = json.dumps({"format": JOB_FORMAT, **report.model_dump(mode="json")}, indent=1)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def read_all(self) -> list[JobReport]:
        """Oldest first. What can't be understood is left alone, and said; jobs that were never
        accepted are deleted."""
        reports = []
        with contextlib.suppress(FileNotFoundError):
            for path in list(self._directory.iterdir()):
                if not (path / "job.json").exists():
                    self.delete(path.name)
                elif (report := _read(path)) is not None:
                    reports.append(report)
        return sorted(reports, key=lambda report: report.created_at)

    def prune(self, reports: list[JobReport]) -> list[JobReport]:
        """Delete the oldest finished jobs if there are too many; those that went."""
        finished = [report for report in reports if report.state.is_final]
        gone = finished[: max(0, len(finished) - _KEPT_JOBS)]
        for report in gone:
            self.delete(report.id)
        return gone

    def delete(self, job_id: str) -> None:
        shutil.rmtree(self._directory / job_id, ignore_errors=True)

    def append_to_list(self, job_id: str, data: bytes) -> None:
        with (self._directory / job_id / "list").open("ab") as file:
            file.write(data)

    def list_chunks(self, job_id: str, chunk_bytes: int = 1 << 20) -> Iterator[list[bytes]]:
        """The lines of the list, many at a time."""
        with (self._directory / job_id / "list").open("rb") as file:
            while lines := file.readlines(chunk_bytes):
                yield lines

    def clear_failures(self, job_id: str) -> None:
        (self._directory / job_id / "failures.jsonl").unlink(missing_ok=True)

    def append_failures(self, job_id: str, failures: Iterable[Failure]) -> None:
        """JSON objects, one a line, which a list of paths may consist of too."""
        with (self._directory / job_id / "failures.jsonl").open("ab") as file:
            for failure in failures:
                line = json.dumps({"path": failure.path, "error": failure.error})
                file.write(line.encode() + b"\n")

    def failures(self, job_id: str) -> Iterator[bytes]:
        """The lines of the list of failures."""
        with (
            contextlib.suppress(FileNotFoundError),
            (self._directory / job_id / "failures.jsonl").open("rb") as file,
        ):
            yield from file


def _read(path: Path) -> JobReport | None:
    try:
        fields = json.loads((path / "job.json").read_text(encoding="utf-8"))
        if fields.pop("format") != JOB_FORMAT:
            raise ValueError("it is of another format")
        return JobReport.model_validate(fields)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        log.warning("%s can't be read as a load job (%s); it is left alone", path, error)
        return None
