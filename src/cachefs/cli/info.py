"""`cachefs info` shows what a path is, and how much of it is cached in which tier."""

import json
import time
from datetime import datetime
from typing import Any

import click

from cachefs.cli.mounts.path_request import PathRequest, counted, path_options
from cachefs.cli.output.text import say
from cachefs.control import api
from cachefs.units import format_bytes, format_duration


@click.command("info")
@path_options
def command(paths: tuple[str, ...], mountpoint: str | None, as_json: bool) -> int:
    """Show source, version, size and age of files, and how much of them is cached in which tier.

    For a directory the command shows the sums over all files below it; the mount lists directories
    that it has never listed. --json prints one object per line.
    """
    request = PathRequest(paths, mountpoint)
    is_first = True
    for path, line in request.ask(api.CACHE_INFO):
        if as_json:
            click.echo(json.dumps({"path": path, **line}))
            continue
        if not is_first:
            say()
        say(path)
        is_first = False
        for name, text in _rows(line):
            say(f"  {name:<9} {text}")
        if "problem" in line:
            request.failed = True
            say(f"cachefs: incomplete: {line['problem']}", err=True)
    return int(request.failed)


def _rows(line: dict[str, Any]) -> list[tuple[str, str]]:
    size_bytes, cached_bytes = line["size_bytes"], line["cached_bytes"]
    rows = [("source", line["source"])]
    if line["kind"] == "file":
        rows.append(("version", line["version"]))
        exact = f" ({size_bytes} bytes)" if size_bytes >= 1024 else ""
        rows.append(("size", format_bytes(size_bytes) + exact))
    else:
        files = counted(line["files"], "file")
        inside = f"{files}, {counted(line['directories'] - 1, 'directory', 'directories')}"
        rows.append(("size", f"{format_bytes(size_bytes)} in {inside}"))
    rows += [
        ("modified", _moment(line["mtime"])),
        ("checked", _age(line["checked_at"])),
        ("inode", str(line["inode"])),
        ("cached", f"{format_bytes(cached_bytes)}{_share(cached_bytes, size_bytes)}"),
    ]
    for place, tier in line["tiers"].items():
        if tier["blocks"]:
            held = f"{format_bytes(tier['size_bytes'])} in {counted(tier['blocks'], 'block')}"
            rows.append(("", f"{tier['medium']} {place}: {held}"))
    if (shared := line.get("shared")) and shared["blocks"] is not None:
        rows.append(("shared", f"{shared['blocks']} of {counted(shared['of'], 'block')}"))
    if unsent := line.get("unsent"):
        why = f": {unsent['reason']}" if unsent["reason"] else ""
        rows.append(("unsent", f"{unsent['state']}{why}"))
    pinned_bytes = line["pinned_bytes"]
    pinned = f"{format_bytes(pinned_bytes)}{_share(pinned_bytes, size_bytes)}"
    rows.append(("pinned", pinned if pinned_bytes else "no"))
    return rows


def _share(part_bytes: int, size_bytes: int) -> str:
    return f", {min(100, 100 * part_bytes // size_bytes)} %" if size_bytes else ""


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    return f"{format_duration(max(0, time.time() - seconds))} ago"
