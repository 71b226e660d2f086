"""`cachefs jobs` shows and controls the load jobs of all mounts."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cachefs.cli import debug_option, json_option
from cachefs.cli.mounts.one_mount import live_mounts, the_mount
from cachefs.cli.output.text import say
from cachefs.cli.views.load import JOB_TIMEOUT_S, follow, summary
from cachefs.control import api
from cachefs.control.client import ask, stream
from cachefs.errors import CachefsError, UsageError
from cachefs.mounts import socket_path
from cachefs.units import format_bytes, format_duration


@click.group("jobs", invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Show, follow, cancel or resume load jobs; without a command, list them.

    The cache directory stores the jobs. If a daemon ends during a job, the next daemon continues
    it automatically.
    """
    if context.invoked_subcommand is None:
        _print_list(None, as_json=False)


@command.command("ls", short_help="List the jobs.")
@click.argument("mountpoint", required=False)
@json_option
@debug_option
def list_jobs(mountpoint: str | None, as_json: bool) -> None:
    """List the jobs of MOUNTPOINT, or of all mounts, oldest first."""
    _print_list(mountpoint, as_json)


def _job_command(name: str, help_text: str) -> Callable[..., Any]:
    def decorate(function: Callable[..., int | None]) -> Any:
        return command.command(name, help=help_text)(click.argument("job_id", metavar="ID")(
            json_option(debug_option(function))
        ))  # fmt: skip

    return decorate


@_job_command("show", "Show what a job was asked for, and how far it is.")
def show(job_id: str, as_json: bool) -> None:
    """Run the command; `_job_command` above has its help text."""
    place, report = _find(job_id)
    if as_json:
        click.echo(json.dumps(report))
        return
    say(f"load job {report['id']} on {place}: {report['state']}{_age(report)}")
    spec = report["spec"]
    paths = [path or "/" for path in spec["paths"]] + ["a list"] * spec["has_list"]
    say(f"  of {', '.join(paths)} ({spec['mode']}{', pinned' if spec['pin'] else ''})")
    for line in summary(report):
        say(f"  {line}")


@_job_command("attach", "Follow a job to its end; Ctrl-C leaves it to the daemon.")
def attach(job_id: str, as_json: bool) -> int:
    """Run the command; `_job_command` above has its help text."""
    place, _ = _find(job_id)
    return follow(place, job_id, as_json, cancel=False)


@_job_command("cancel", "Stop a job; what it has loaded stays.")
def cancel(job_id: str, as_json: bool) -> None:
    """Run the command; `_job_command` above has its help text."""
    place, _ = _find(job_id)
    report = ask(socket_path(place), api.JOB_CANCEL, {"id": job_id}, JOB_TIMEOUT_S)
    click.echo(json.dumps(report) if as_json else f"load job {job_id}: {report['state']}")


@_job_command("resume", "Carry a job on that has ended, and follow it to its end.")
def resume(job_id: str, as_json: bool) -> int:
    """Run the command; `_job_command` above has its help text."""
    place, _ = _find(job_id)
    ask(socket_path(place), api.JOB_RESUME, {"id": job_id}, JOB_TIMEOUT_S)
    return follow(place, job_id, as_json, cancel=False)


@_job_command("failures", "Print what a job could not load, as a list for load -f.")
def failures(job_id: str, as_json: bool) -> None:
    """Run the command; `_job_command` above has its help text."""
    place, _ = _find(job_id)
    for line in stream(socket_path(place), api.JOB_FAILURES, {"id": job_id}):
        click.echo(json.dumps(line["failure"]))


def _find(job_id: str) -> tuple[Path, dict[str, Any]]:
    """Return the mount that has the job, and the job's report. Raises `UsageError`."""
    for place in live_mounts():
        for report in _reports(place):
            if report["id"] == job_id:
                return place, report
    raise UsageError(f"there is no load job {job_id}; cachefs jobs shows what there is")


def _reports(place: Path) -> list[dict[str, Any]]:
    """Return the reports of all jobs. For a mount that doesn't answer, print why and return an
    empty list."""
    try:
        reports: list[dict[str, Any]] = ask(socket_path(place), api.JOBS, {}, JOB_TIMEOUT_S)["jobs"]
    except CachefsError as error:
        say(f"cachefs: {place}: {error}", err=True)
        return []
    return reports


def _print_list(mountpoint: str | None, as_json: bool) -> None:
    places = live_mounts() if mountpoint is None else [the_mount(mountpoint)]
    found = [(place, report) for place in places for report in _reports(place)]
    if as_json:
        click.echo(json.dumps([{"mountpoint": str(place), **report} for place, report in found]))
        return
    if not found:
        say("no load jobs")
        return
    from cachefs.cli.views.tables import plain_table, stdout_console

    table = plain_table()
    for title in ("JOB", "MOUNT", "STATE", "AGE", "FILES", "CACHED", "FAILED"):
        table.add_column(title)
    for place, report in found:
        progress = report["progress"]
        cached = progress["verified_bytes"] or progress["cached_bytes"] + progress["fetched_bytes"]
        table.add_row(
            report["id"],
            str(place),
            report["state"],
            format_duration(round(time.time() - report["created_at"])),
            f"{progress['files']:,}",
            f"{format_bytes(cached)} of {format_bytes(progress['bytes'])}",
            f"{progress['failed_files']:,}",
        )
    stdout_console().print(table)


def _age(report: dict[str, Any]) -> str:
    if report["started_at"] is None:
        return ""
    until = report["ended_at"] or time.time()
    return f", {format_duration(round(until - report['started_at'], 1))} at work"
