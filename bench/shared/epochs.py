"""Measure how often several nodes ask the origin for each block."""

import json
import statistics
import time

from bench.case import shuffled
from bench.report import Row
from bench.shared.lab import NODES, Lab, wait_until_stored

GETS_BAR = 1.05
_ROUNDS = 2


def together(lab: Lab, prefix: str, names: list[str]) -> list[Row]:
    """Let all nodes read all files at the same time, each in its own order, with empty caches."""
    case = f"{NODES} nodes read {len(names)} files of 20-180 KB at once, each in its own order"
    known = [_epoch(lab, prefix, names, turn, listed=True) for turn in range(_ROUNDS)]
    unknown = [_epoch(lab, prefix, names, _ROUNDS, listed=False)]
    return [
        _gets_row(case, "names known", [gets for gets, _ in known], GETS_BAR),
        _speed_row(case, "names known, all nodes together", [files_s for _, files_s in known]),
        _gets_row(case, "names unknown", [gets for gets, _ in unknown], None),
        _speed_row(case, "names unknown, all nodes together", [files_s for _, files_s in unknown]),
    ]


def _epoch(lab: Lab, prefix: str, names: list[str], turn: int, listed: bool) -> tuple[float, float]:
    """Return origin GETs per block, and files per second of all nodes together."""
    lab.bench.say(f"shared: {NODES} nodes, names {'known' if listed else 'unknown'}")
    lab.renew()
    with lab.nodes(prefix, NODES, listed=listed) as mounts:
        before = lab.bench.server.object_gets()
        orders = [shuffled(names, 100 * turn + number) for number in range(NODES)]
        reading = lab.read_all(mounts, orders)
        gets = lab.bench.server.object_gets() - before
    return gets / len(names), reading.files_s


def second_load(lab: Lab, prefix: str, count: int) -> list[Row]:
    """Load all files on one node, and then on another one. The origin sees nothing of the second
    load but listings."""
    case = f"`cachefs load` of {count} files on one node, then on another"
    lab.renew()
    gets, speeds = [], []
    for which in ("first", "second"):
        lab.bench.say(f"shared: the load of the {which} node")
        with lab.node(prefix, listed=False) as mount:
            before = lab.bench.server.object_gets()
            began = time.monotonic()
            job = json.loads(mount.command("load", str(mount.path), "--json"))
            speeds.append(count / (time.monotonic() - began))
            if job["state"] != "done":
                raise RuntimeError(f"the load ended as {job['state']}: {job}")
            gets.append(lab.bench.server.object_gets() - before)
            if which == "first":
                wait_until_stored([mount])
    return [
        Row(case, "GETs of the second", "", gets[1], bar="= 0", passed=gets[1] == 0),
        Row(case, "GETs of the first", "", gets[0]),
        _speed_row(case, "first", speeds[:1]),
        _speed_row(case, "second", speeds[1:]),
    ]


def _gets_row(case: str, names: str, figures: list[float], most: float | None) -> Row:
    median = statistics.median(figures)
    return Row(
        case, f"GETs per block, {names}", "", median,
        bar="" if most is None else f"<= {most:g}",
        passed=None if most is None else median <= most,
        rounds={"cachefs": figures},
    )  # fmt: skip


def _speed_row(case: str, figure: str, figures: list[float]) -> Row:
    return Row(case, figure, "files/s", statistics.median(figures), rounds={"cachefs": figures})
