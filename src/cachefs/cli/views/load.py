"""Follow load jobs. Print their progress and result on a terminal or in the output of a service."""

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from cachefs.cli.output.text import say, shown
from cachefs.control import api
from cachefs.control.client import ask, stream
from cachefs.errors import CachefsError
from cachefs.mounts import socket_path
from cachefs.units import format_bytes, format_duration

JOB_TIMEOUT_S = 30.0
"""The limit for the answer to a request about a job."""

_SHOWN_FAILURES = 10
_RATE_OF_S = 5.0

Report = dict[str, Any]


def follow(mountpoint: Path, job_id: str, as_json: bool, *, cancel: bool = True) -> int:
    """Show the job's progress until the job has ended, and return the exit code.

    Ctrl-C cancels the job if `cancel`; otherwise it only ends the display. Raises `CachefsError`.
    """
    socket = socket_path(mountpoint)
    try:
        report = _show_progress(socket, job_id)
    except KeyboardInterrupt:
        if not cancel:
            say(f"load job {job_id} goes on; see cachefs jobs", err=True)
            return 130
        with contextlib.suppress(CachefsError):
            ask(socket, api.JOB_CANCEL, {"id": job_id}, JOB_TIMEOUT_S)
        say(
            f"load job {job_id} is cancelled; what it loaded stays, and cachefs jobs resume "
            f"{job_id} goes on from there",
            err=True,
        )
        return 130
    except CachefsError as error:
        raise CachefsError(
            f"{error}; load job {job_id} goes on when {mountpoint} is mounted again"
        ) from error
    if as_json:
        click.echo(json.dumps(report))
    else:
        _print_summary(socket, report, mountpoint)
    return 0 if report["state"] == "done" else 1


def _show_progress(socket: Path, job_id: str) -> Report:
    """Follow the job to its end, with a bar on a terminal. Return its last report."""
    report: Report = {}
    reports = stream(socket, api.JOB_WATCH, {"id": job_id})
    with contextlib.closing(reports), _bar() as show:
        for report in reports:
            show(report)
    return report


@contextlib.contextmanager
def _bar() -> "Iterator[Any]":
    if not sys.stderr.isatty():
        yield lambda report: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(compact=True),
    )
    console = Console(stderr=True, markup=False, highlight=False)
    with Progress(
        *columns, console=console, transient=True, expand=True, speed_estimate_period=_RATE_OF_S
    ) as bar:
        task = bar.add_task("starting", total=None, counts="")

        def show(report: Report) -> None:
            progress = report["progress"]
            loading = report["state"] == "loading"
            wanted = progress["wanted_bytes"] - progress["excess_bytes"]
            bar.update(
                task,
                description=_description(report),
                total=wanted if loading else None,
                completed=progress["fetched_bytes"],
                counts=_counts(report, bar.tasks[0].speed),
            )

        yield show


def _description(report: Report) -> str:
    failed = report["progress"]["failed_files"]
    return str(report["state"]) + (f", {failed:,} failed" if failed else "")


def _counts(report: Report, speed: float | None) -> str:
    """Return the counts beside the bar, in at most 45 characters."""
    progress = report["progress"]
    if progress["waiting_for"]:
        return f"waiting: {shown(progress['waiting_for'])[:36]}"
    if report["state"] != "loading":
        return f"{progress['files']:,} files, {format_bytes(progress['bytes'])}"
    wanted = progress["wanted_files"] - progress["excess_files"]
    rate = f", {format_bytes(int(speed))}/s" if speed else ""
    return f"{progress['fetched_files']:,} of {wanted:,} files{rate}"


def _print_summary(socket: Path, report: Report, mountpoint: Path) -> None:
    """Print the summary of a finished job to stdout, and its failures to stderr."""
    for line in summary(report):
        say(line)
    for line in _failures(socket, report, mountpoint):
        say(line, err=True)


def summary(report: Report) -> list[str]:
    """Return lines about which files were found, fetched and cached."""
    progress, mode = report["progress"], report["spec"]["mode"]
    found = _files(progress["files"], progress["bytes"])
    lines = []
    if mode == "metadata":
        lines.append(f"{progress['directories']:,} directories listed: {found}")
    elif mode == "dry-run":
        lines.append(f"{found}; {_files(progress['cached_files'], progress['cached_bytes'])} of it "
                     "cached already")  # fmt: skip
        wanted = _files(
            progress["wanted_files"] - progress["excess_files"],
            progress["wanted_bytes"] - progress["excess_bytes"],
        )
        lines.append(f"would fetch {wanted}")
    elif report["state"] in ("done", "incomplete"):
        verified = _files(progress["verified_files"], progress["verified_bytes"])
        lines.append(f"{verified} of {found} are cached (verified)")
        if mode == "load":
            fetched = _files(progress["fetched_files"], progress["fetched_bytes"])
            lines.append(f"fetched {fetched}{_took(report, progress['fetched_bytes'])}")
    if progress["excess_files"]:
        excess = _files(progress["excess_files"], progress["excess_bytes"])
        lines.append(f"no room for {excess}{_by_tier(progress['tiers'])}")
    if report["state"] not in ("done", "incomplete"):
        lines.append(f"load job {report['id']}: {report['state']}")
    if report["problem"]:
        lines.append(report["problem"])
    return lines


def _by_tier(tiers: list[dict[str, Any]]) -> str:
    shares = [
        f"{tier['medium']} {tier['path']} takes {format_bytes(tier['wanted_bytes'])}"
        for tier in tiers
    ]
    return f" ({', '.join(shares)} of it)" if shares else ""


def _took(report: Report, fetched_bytes: int) -> str:
    if not (report["started_at"] and report["ended_at"]):
        return ""
    seconds = report["ended_at"] - report["started_at"]
    rate = format_bytes(int(fetched_bytes / seconds)) if seconds > 0.05 else None
    return f" in {format_duration(round(seconds, 1))}" + (f" ({rate}/s)" if rate else "")


def _files(count: int, size_bytes: int) -> str:
    return f"{count:,} file{'' if count == 1 else 's'} ({format_bytes(size_bytes)})"


def _failures(socket: Path, report: Report, mountpoint: Path) -> Iterator[str]:
    """Yield the first failures, and the commands that list all and try them again."""
    if report["state"] == "done":
        return
    shown = 0
    failures = stream(socket, api.JOB_FAILURES, {"id": report["id"]})
    for line in failures:
        if shown == _SHOWN_FAILURES:
            yield f"  and more: cachefs jobs failures {report['id']}"
            break
        failure = line["failure"]
        yield f"  {failure['path']}: {failure['error']}"
        shown += 1
    if shown:
        yield (
            f"to try these again: cachefs jobs failures {report['id']} | cachefs load "
            f"-f - --mount {shlex.quote(str(mountpoint))}"
        )
