"""The files of load jobs, in a cache directory. Format 1; see docs/formats/jobs.md.

A rename replaces `jobs/ID/job.json` as a whole. `list` and `failures.jsonl` only grow. All methods
block. Call them in worker threads, with one call per job at a time.
"""

import contextlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from cachefs.format.json_sum import decode_json, encode_json
from cachefs.load.spec import JobReport, read_report
from cachefs.load.walk import Failure
from cachefs.trusted_path import read_own_file

log = logging.getLogger(__name__)

JOB_FORMAT = 1
_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"
_ID_LENGTH = 6
_MOST_REPORT_BYTES = 16 << 20
_KEPT_JOBS = 100
"""Finished jobs that `prune` leaves."""


class JobFiles:
    """The files of all jobs of one mount. Methods raise `OSError`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def new_id(self) -> str:
        """Create a directory for a new job and return its id. The id is unique on this mount, and
        very probably on the node."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        while True:
            job_id = "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))
            with contextlib.suppress(FileExistsError):
                (self._directory / job_id).mkdir(mode=0o700)
                return job_id

    def write(self, report: JobReport) -> None:
        """Replace `job.json`. It is synced, so that an accepted job survives a power failure."""
        path = self._directory / report.id / "job.json"
        temporary = path.with_suffix(".tmp")
        fields = {"format": JOB_FORMAT, **report.values()}
        if fields["spec"]["jobs"] is None:  # earlier versions read no null here
            del fields["spec"]["jobs"]
        with temporary.open("wb") as file:
            file.write(encode_json(fields, indent=1))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def read_all(self) -> list[JobReport]:
        """Return the reports of all jobs, oldest first. Delete jobs that were never accepted. Log
        jobs that cannot be read, and leave their files alone."""
        reports = []
        with contextlib.suppress(FileNotFoundError):
            for path in list(self._directory.iterdir()):
                if not (path / "job.json").exists():
                    self.delete(path.name)
                elif (report := _read(path)) is not None:
                    reports.append(report)
        return sorted(reports, key=lambda report: report.created_at)

    def prune(self, reports: list[JobReport]) -> list[JobReport]:
        """Delete the oldest finished jobs beyond `_KEPT_JOBS`, and return them. `reports` are all
        jobs, oldest first."""
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
        """Yield the lines of the list, about `chunk_bytes` at a time."""
        with (self._directory / job_id / "list").open("rb") as file:
            while lines := file.readlines(chunk_bytes):
                yield lines

    def clear_failures(self, job_id: str) -> None:
        (self._directory / job_id / "failures.jsonl").unlink(missing_ok=True)

    def append_failures(self, job_id: str, failures: Iterable[Failure]) -> None:
        """Append failures as JSON objects, one per line. A list of paths may have this format."""
        with (self._directory / job_id / "failures.jsonl").open("ab") as file:
            for failure in failures:
                line = json.dumps({"path": failure.path, "error": failure.error})
                file.write(line.encode() + b"\n")

    def failures(self, job_id: str) -> Iterator[bytes]:
        """Yield the lines of the list of failures."""
        with (
            contextlib.suppress(FileNotFoundError),
            (self._directory / job_id / "failures.jsonl").open("rb") as file,
        ):
            yield from file


def _read(path: Path) -> JobReport | None:
    try:
        fields = decode_json(read_own_file(path / "job.json", _MOST_REPORT_BYTES))
        if fields.pop("format") != JOB_FORMAT:
            raise ValueError("it is of another format")
        return read_report(fields)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        log.warning("%s can't be read as a load job (%s); it is left alone", path, error)
        return None
