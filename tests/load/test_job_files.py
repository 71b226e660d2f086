"""The files of load jobs: format 1, to the byte; and what is done with those that are none."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cachefs.load.job_files import JobFiles
from cachefs.load.spec import JobReport, LoadSpec, State
from cachefs.load.walk import Failure

GOLDEN = """{
 "format": 1,
 "id": "abcdef",
 "spec": {
  "paths": [
   "train"
  ],
  "has_list": true,
  "include": [
   "*.jpg"
  ],
  "exclude": [],
  "mode": "load",
  "pin": false,
  "jobs": 32
 },
 "state": "queued",
 "created_at": 1750000000.5,
 "started_at": null,
 "ended_at": null,
 "problem": null,
 "progress": {
  "directories": 0,
  "files": 0,
  "bytes": 0,
  "cached_files": 0,
  "cached_bytes": 0,
  "wanted_files": 0,
  "wanted_bytes": 0,
  "fetched_files": 0,
  "fetched_bytes": 0,
  "excess_files": 0,
  "excess_bytes": 0,
  "failed_files": 0,
  "verified_files": 0,
  "verified_bytes": 0,
  "waiting_for": null,
  "tiers": []
 },
 "checksum": "002c3a1682b0c775"
}
"""


def report_of(files: JobFiles, created_at: float = 1750000000.5) -> JobReport:
    spec = LoadSpec({"paths": ("train",), "has_list": True, "include": ("*.jpg",), "jobs": 32})
    return JobReport(id=files.new_id(), spec=spec, state=State.QUEUED, created_at=created_at)


def test_golden_bytes(tmp_path: Path) -> None:
    files = JobFiles(tmp_path / "jobs")
    report = replace(report_of(files), id="abcdef")
    (tmp_path / "jobs" / report.id).mkdir()
    files.write(report)
    assert (tmp_path / "jobs" / report.id / "job.json").read_text() == GOLDEN
    assert (tmp_path / "jobs").stat().st_mode & 0o777 == 0o700
    assert files.read_all() == [report]


def test_a_job_with_other_bytes_is_left_alone(
    tmp_path: Path, expect_log: Callable[[str], None]
) -> None:
    expect_log("its checksum is wrong.*left alone")
    files = JobFiles(tmp_path / "jobs")
    report = report_of(files)
    files.write(report)
    path = tmp_path / "jobs" / report.id / "job.json"
    path.write_bytes(path.read_bytes().replace(b"train", b"traim"))
    assert files.read_all() == []
    assert path.exists()


def test_a_job_without_a_number_of_requests_has_no_field_for_it(tmp_path: Path) -> None:
    """Earlier versions know no null there, and take their default."""
    files = JobFiles(tmp_path / "jobs")
    report = report_of(files)
    report.spec = LoadSpec({"paths": ("train",)})
    files.write(report)
    text = (tmp_path / "jobs" / report.id / "job.json").read_text()
    assert "jobs" not in json.loads(text)["spec"]
    assert files.read_all() == [report]


def test_lists_and_failures(tmp_path: Path) -> None:
    files = JobFiles(tmp_path / "jobs")
    job_id = report_of(files).id
    assert list(files.failures(job_id)) == []
    files.append_to_list(job_id, b"a\nb\n")
    files.append_to_list(job_id, b"c\n")
    assert list(files.list_chunks(job_id, 3)) == [[b"a\n", b"b\n"], [b"c\n"]]
    files.append_failures(job_id, [Failure("odd-\udcff", "no")])
    assert list(files.failures(job_id)) == [b'{"path": "odd-\\udcff", "error": "no"}\n']
    files.clear_failures(job_id)
    assert list(files.failures(job_id)) == []


def test_jobs_that_were_never_accepted_go(tmp_path: Path) -> None:
    files = JobFiles(tmp_path / "jobs")
    report_of(files)
    assert files.read_all() == []
    assert list((tmp_path / "jobs").iterdir()) == []


@pytest.mark.expect_log("can't be read as a load job")
def test_what_is_no_job_is_left_alone(tmp_path: Path) -> None:
    files = JobFiles(tmp_path / "jobs")
    good, bad, newer = (report_of(files) for _ in range(3))
    for report in (good, bad, newer):
        files.write(report)
    (tmp_path / "jobs" / bad.id / "job.json").write_text("{")
    path = tmp_path / "jobs" / newer.id / "job.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    assert files.read_all() == [good]
    assert path.exists()


def test_the_oldest_finished_jobs_go(tmp_path: Path) -> None:
    files = JobFiles(tmp_path / "jobs")
    reports = []
    for number in range(103):
        report = report_of(files, number)
        report.state = State.DONE if number else State.LOADING
        files.write(report)
        reports.append(report)
    gone = files.prune(reports)
    assert [report.created_at for report in gone] == [1, 2]
    assert len(files.read_all()) == 101
