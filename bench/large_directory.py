"""Measure a directory of very many objects: its listing, the memory for it, and one stat in it."""

import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from bench import direct, procfs, rig
from bench.case import Bench
from bench.report import Row, ratio_row

FIRST_BAR = 2.0
SECOND_BAR_S = 1.0
RSS_BAR_BYTES = 200_000_000
STAT_BAR = 0.25
"""The most time that a stat may take, as a share of the listing's time: it must not wait for the
listing."""
_STAT = """
import os, sys, time
began = time.monotonic()
os.stat(sys.argv[1])
print(time.monotonic() - began)
"""


def large_directory(bench: Bench) -> list[Row]:
    """Measure the first and second listing, the memory afterwards, and a stat on a fresh mount."""
    count = bench.scale.names
    bench.say(f"uploading {count:,} objects (some {count // 1500} s)")
    names = [f"object-{number:07}.bin" for number in range(count)]
    rig.upload(bench.store, ((f"flat/{name}", b"0123456789abcdef") for name in names))
    times: dict[str, list[float]] = defaultdict(list)
    memory: dict[str, list[float]] = defaultdict(list)
    for turn in range(bench.scale.rounds):
        bench.say(f"large directory: round {turn + 1} of {bench.scale.rounds}")
        _list_origin(bench, count, times)
        with bench.mount("flat") as mount:
            for figure in ("first", "second"):
                found, seconds = rig.list_directory(mount.path)
                if found != count:
                    raise RuntimeError(f"ls found {found:,} names instead of {count:,}")
                times[figure].append(seconds)
            for part, size_bytes in procfs.memory_bytes(mount.status()["pid"]).items():
                memory[part].append(float(size_bytes))
        mount.remove()
        _stat_rounds(bench, names[-1 - turn], times)
    return _rows(f"{count:,} objects in one directory", times, memory)


def _list_origin(bench: Bench, count: int, times: dict[str, list[float]]) -> None:
    found, seconds = direct.list_pages(bench.server, "flat/")
    times["pages"].append(seconds)
    found_too, seconds = direct.list_with_obstore(bench.store, "flat/")
    times["obstore"].append(seconds)
    if not found == found_too == count:
        raise RuntimeError(f"the origin lists {found:,} and {found_too:,} keys, not {count:,}")


def _stat_rounds(bench: Bench, name: str, times: dict[str, list[float]]) -> None:
    with bench.mount("flat") as mount:
        times["stat"].append(_stat(mount.path / name))
    mount.remove()
    with bench.mount("flat") as mount:
        listing = subprocess.Popen(["ls", "-f", str(mount.path)], stdout=subprocess.DEVNULL)
        try:
            time.sleep(0.1)
            times["stat meanwhile"].append(_stat(mount.path / name))
        finally:
            listing.kill()
            listing.wait()
    mount.remove()


def _stat(path: Path) -> float:
    """Return the seconds of a stat. It runs in a separate process, because a stat that hangs can't
    be interrupted."""
    result = subprocess.run(
        [sys.executable, "-S", "-E", "-c", _STAT, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return float(result.stdout)


def _rows(case: str, times: dict[str, list[float]], memory: dict[str, list[float]]) -> list[Row]:
    second = statistics.median(times["second"])
    rows = [
        ratio_row(
            case,
            "first ls -f / plain LISTs",
            "s",
            times["first"],
            times["pages"],
            "origin",
            at_most=FIRST_BAR,
        ),
        ratio_row(
            case, "first ls -f / obstore.list", "s", times["first"], times["obstore"], "origin"
        ),
        Row(
            case,
            "second ls -f",
            "s",
            second,
            bar=f"<= {SECOND_BAR_S:g} s",
            passed=second <= SECOND_BAR_S,
            rounds={"cachefs": times["second"]},
        ),
    ]
    for figure, title in (("stat", "cold stat"), ("stat meanwhile", "stat during ls")):
        rows.append(
            ratio_row(
                case,
                f"{title} / plain LISTs",
                "s",
                times[figure],
                times["pages"],
                "origin",
                at_most=STAT_BAR,
            )
        )
    return rows + _memory_rows(case, memory)


def _memory_rows(case: str, memory: dict[str, list[float]]) -> list[Row]:
    rss = statistics.median(memory["VmRSS"])
    rows = [
        Row(
            case,
            "RSS after both, in all",
            "MB",
            rss / 1e6,
            bar=f"<= {RSS_BAR_BYTES / 1e6:.0f}",
            passed=rss <= RSS_BAR_BYTES,
            rounds=dict(memory),
        )
    ]
    for part, title in (("RssAnon", "its own"), ("RssFile", "mapped: libraries, index")):
        rows.append(Row(case, f"  {title}", "MB", statistics.median(memory[part]) / 1e6))
    return rows
