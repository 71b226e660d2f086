"""Measure load jobs: against plain GETs and JuiceFS, repeated, after a change, with a reader."""

import json
import os
import statistics
import time
from collections import defaultdict
from typing import Any

from bench import direct, rig
from bench.case import Bench, discard, shuffled
from bench.juicefs import JuiceFS
from bench.report import Row, ratio_row

DIRECT_BAR, JUICEFS_BAR = 0.75, 2.0
AGAIN_BAR_S = 1.5
CHANGED = 50
READER_BAR = 3.0
_REQUESTS = 32
_PROBE_FILES = 600


def load(bench: Bench) -> list[Row]:
    """Measure load jobs over the small files. Seconds are those of the whole command."""
    names = bench.small_files()
    case = f"{len(names):,} files of 20-180 KB, loaded"
    measured: dict[str, list[float]] = defaultdict(list)
    juicefs = JuiceFS(bench)
    with juicefs:
        juicefs.fill("small", names)
        for turn in range(bench.scale.rounds):
            bench.say(f"load: round {turn + 1} of {bench.scale.rounds}")
            keys = [f"small/{name}" for name in shuffled(names, turn)]
            measured["obstore"].append(direct.get_all(bench.store, keys, _REQUESTS).files_s)
            mount = bench.mount("small")
            with mount:
                measured["load"].append(len(names) / _load(mount))
                _again(bench, mount, names, measured)
            discard(mount)
            measured["unverified"].append(load_small(bench, "--verify-origin", "off"))
            measured["juicefs"].append(len(names) / juicefs.warm_up("small"))
    rows = [
        ratio_row(case, "first", "files/s", measured["load"], measured["obstore"],
                  f"obstore, {_REQUESTS} in flight", at_least=DIRECT_BAR),
        ratio_row(case, "first", "files/s", measured["load"], measured["juicefs"],
                  f"juicefs warmup -p {_REQUESTS}", at_least=JUICEFS_BAR),
        ratio_row(case, "first, --verify-origin off", "files/s", measured["unverified"],
                  measured["obstore"], f"obstore, {_REQUESTS} in flight"),
        ratio_row(case, "first, --verify-origin off", "files/s", measured["unverified"],
                  measured["juicefs"], f"juicefs warmup -p {_REQUESTS}"),
        _bar(case, "again", "s", measured["again_s"], AGAIN_BAR_S),
        _bar(case, "GETs sent again", "", measured["again_gets"], 0),
        _exactly(case, f"GETs after {CHANGED} files changed", measured["changed_gets"], CHANGED),
    ]  # fmt: skip
    return [*rows, *_beside_a_reader(bench, names)]


def load_small(bench: Bench, *options: str, endpoint: str | None = None) -> float:
    """Load the small files into a new mount, which gets `options`. Return files per second."""
    names = bench.small_files()
    mount = bench.mount("small", *options, endpoint=endpoint)
    with mount:
        seconds = _load(mount)
    discard(mount)
    return len(names) / seconds


def _load(mount: rig.Mount) -> float:
    """Run `cachefs load` for the whole mount and return its seconds."""
    began = time.monotonic()
    report = mount.command("load", str(mount.path), "--json")
    seconds = time.monotonic() - began
    job: dict[str, Any] = json.loads(report)
    if job["state"] != "done":
        raise RuntimeError(f"the load ended as {job['state']}: {job}")
    return seconds


def _again(
    bench: Bench, mount: rig.Mount, names: list[str], measured: dict[str, list[float]]
) -> None:
    before = bench.server.object_gets()
    measured["again_s"].append(_load(mount))
    measured["again_gets"].append(bench.server.object_gets() - before)
    rig.upload(bench.store, ((f"small/{name}", os.urandom(50_000)) for name in names[:CHANGED]))
    before = bench.server.object_gets()
    _load(mount)
    measured["changed_gets"].append(bench.server.object_gets() - before)
    rig.upload(
        bench.store,
        ((f"small/{name}", bench.local / "small" / name) for name in names[:CHANGED]),
    )


# -- a reader meanwhile --------------------------------------------------------------------------


def _beside_a_reader(bench: Bench, names: list[str]) -> list[Row]:
    """Let one process read cold files one by one: alone, and while a job loads all others."""
    alone: list[float] = []
    beside: list[float] = []
    for turn in range(bench.scale.rounds):
        bench.say(f"load beside a reader: round {turn + 1} of {bench.scale.rounds}")
        order = shuffled(names, 1000 + turn)
        for figures, loading in ((alone, False), (beside, True)):
            mount = bench.mount("small")
            with mount:
                _list(mount)
                figures.append(_reader_p99_s(mount, order[:_PROBE_FILES], order, loading))
            discard(mount)
    case = "a reader of cold files while others are loaded"
    return [
        ratio_row(case, "p99 of a read", "ms", [s * 1e3 for s in beside], [s * 1e3 for s in alone],
                  "without the load", at_most=READER_BAR)
    ]  # fmt: skip


def _list(mount: rig.Mount) -> None:
    rig.list_directory(mount.path)


def _reader_p99_s(mount: rig.Mount, probes: list[str], names: list[str], loading: bool) -> float:
    job: str | None = None
    if loading:
        wanted = set(probes)
        listed = mount.path.parent / "load.list"
        listed.write_text("".join(f"{name}\n" for name in names if name not in wanted))
        job = mount.command("load", "-f", str(listed), "-m", str(mount.path), "--detach").strip()
    durations = []
    for name in probes:
        began = time.perf_counter()
        (mount.path / name).read_bytes()
        durations.append(time.perf_counter() - began)
        if job is not None and len(durations) % 50 == 0 and _has_ended(mount, job):
            break  # without the job, further reads would be reads of a reader alone
    if job is not None:
        mount.command("jobs", "attach", job)
    return statistics.quantiles(durations, n=100)[98]


def _has_ended(mount: rig.Mount, job: str) -> bool:
    state = json.loads(mount.command("jobs", "show", job, "--json"))["state"]
    return state in ("done", "incomplete", "failed", "cancelled")


def _bar(case: str, figure: str, unit: str, figures: list[float], most: float) -> Row:
    median = statistics.median(figures)
    bar = f"<= {most:g} {unit}".strip() if most else "= 0"
    return Row(case, figure, unit, median, bar=bar, passed=max(figures) <= most
               if not most else median <= most, rounds={"cachefs": figures})  # fmt: skip


def _exactly(case: str, figure: str, figures: list[float], wanted: float) -> Row:
    return Row(
        case, figure, "", statistics.median(figures), bar=f"= {wanted:g}",
        passed=all(value == wanted for value in figures), rounds={"cachefs": figures},
    )  # fmt: skip
