"""Measure what the shared tier costs while it is empty, and what its hits bring."""

import statistics
from collections import defaultdict

from bench import procfs, rig
from bench.case import shuffled
from bench.report import Row, ratio_row
from bench.shared.lab import LATENCY_MS, Lab, Read

EMPTY_BAR = 0.9
ADDED_BAR_MS = 0.5
HIT_BAR = 10.0
_HIT_FILES = 150
_FAR_FILES = 300
_NEAR_FILES = 900
_CHUNK_FILES = 25
"""So many files are read through one node, then as many others through the other one: the machine
is as busy for both."""
_READERS = 16
_BOTH = ("with", "without")
_AGAINST = "without it"


def empty(lab: Lab, prefix: str, names: list[str]) -> list[Row]:
    """Read cold files with an empty shared tier, and without one, in turns."""
    near = lab.bench.server.endpoint
    return [
        *_empty(lab, prefix, names, f"{LATENCY_MS} ms away", lab.endpoint, _FAR_FILES, True),
        *_empty(lab, prefix, names, "near", near, _NEAR_FILES, False),
    ]


def _empty(
    lab: Lab, prefix: str, names: list[str], where: str, endpoint: str, count: int, judged: bool
) -> list[Row]:
    case = f"empty shared tier, cold files, origin {where}"
    alone: dict[str, list[list[Read]]] = defaultdict(list)
    many: dict[str, list[float]] = defaultdict(list)
    cpu_us: dict[str, list[float]] = defaultdict(list)
    for turn in range(lab.bench.scale.rounds):
        lab.bench.say(f"shared: empty beside none, origin {where}, round {turn + 1}")
        order = shuffled(names, 300 + turn)
        some = order[: count // lab.bench.scale.rounds]
        for which, reads in _alternate(lab, prefix, some, endpoint).items():
            alone[which].append(reads)
        for which in _BOTH if turn % 2 else _BOTH[::-1]:
            lab.renew()
            options = lab.shared if which == "with" else []
            with lab.node(prefix, shared=options, endpoint=endpoint) as mount:
                pid = mount.status()["pid"]
                before_s = procfs.cpu_s(pid)
                many[which].append(lab.read(mount, order, _READERS).files_s)
                cpu_us[which].append(1e6 * (procfs.cpu_s(pid) - before_s) / len(order))
    speeds = {which: [_files_s(reads) for reads in alone[which]] for which in _BOTH}
    added_ms = [1e3 * (_p50_s(a) - _p50_s(b)) for a, b in zip(*map(alone.get, _BOTH), strict=True)]
    median = statistics.median(added_ms)
    bar = EMPTY_BAR if judged else None
    return [
        ratio_row(case, "1 reader", "files/s", speeds["with"], speeds["without"], _AGAINST,
                  at_least=bar),
        ratio_row(case, f"{_READERS} readers", "files/s", many["with"], many["without"], _AGAINST,
                  at_least=bar),
        ratio_row(case, f"daemon's CPU, {_READERS} readers", "us/file", cpu_us["with"],
                  cpu_us["without"], _AGAINST),
        Row(case, "added to the median read", "ms", median, bar=f"<= {ADDED_BAR_MS:g}",
            passed=median <= ADDED_BAR_MS, rounds={"cachefs": added_ms}),
    ]  # fmt: skip


def _alternate(lab: Lab, prefix: str, names: list[str], endpoint: str) -> dict[str, list[Read]]:
    """Let one reader read all names through both nodes, `_CHUNK_FILES` at a time."""
    lab.renew()
    how = {"endpoint": endpoint}
    with lab.node(prefix, **how) as ours, lab.node(prefix, shared=[], **how) as other:
        sides: dict[str, rig.Mount] = {"with": ours, "without": other}
        plan = [
            (which, name)
            for at in range(0, len(names), _CHUNK_FILES)
            for which in (_BOTH if at // _CHUNK_FILES % 2 else _BOTH[::-1])
            for name in names[at : at + _CHUNK_FILES]
        ]
        (found,) = lab.read_mixed(prefix, [[(sides[which], name) for which, name in plan]])
    if found.bad:
        raise RuntimeError(f"{found.bad} reads failed: {found}")
    reads: dict[str, list[Read]] = defaultdict(list)
    for (which, _), read in zip(plan, found.reads, strict=True):
        reads[which].append(read)
    return reads


def _files_s(reads: list[Read]) -> float:
    return len(reads) / sum(read.took_s for read in reads)


def _p50_s(reads: list[Read] | None) -> float:
    return statistics.median(read.took_s for read in reads or [])


def hits(lab: Lab, prefix: str, names: list[str]) -> list[Row]:
    """Read files that the shared tier has, and the same files from the origin alone, in turns."""
    lab.bench.say("shared: hits beside the origin alone")
    lab.fill(prefix, len(names))
    speeds: dict[str, list[float]] = defaultdict(list)
    many: dict[str, list[float]] = defaultdict(list)
    for turn in range(lab.bench.scale.rounds):
        order = shuffled(names, 400 + turn)
        for which in _BOTH:
            with lab.node(prefix, shared=lab.shared if which == "with" else []) as mount:
                speeds[which].append(lab.read(mount, order[:_HIT_FILES]).files_s)
                many[which].append(lab.read(mount, order[_HIT_FILES:], _READERS).files_s)
    case = f"hits in the shared tier, origin {LATENCY_MS} ms away"
    return [
        ratio_row(case, "1 reader", "files/s", speeds["with"], speeds["without"],
                  "origin alone", at_least=HIT_BAR),
        ratio_row(case, f"{_READERS} readers", "files/s", many["with"], many["without"],
                  "origin alone"),
    ]  # fmt: skip
