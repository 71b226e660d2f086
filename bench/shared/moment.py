"""Measure what happens when several nodes read one cold block at the same moment."""

import statistics
from collections.abc import Sequence

from bench import rig
from bench.case import shuffled
from bench.report import Row
from bench.shared.lab import LATENCY_MS, NODES, Found, Lab

SLOWEST_BAR = 1.3
_PACE_S = 0.25
_WARM_UP = 8
"""The nodes don't know yet how long the origin takes, so these blocks don't count."""
_BLOCKS = 16


def same_moment(lab: Lab, prefix: str, names: list[str], what: str) -> list[Row]:
    """Let all nodes read one block at the same moment, and a node without a shared tier another
    one between two of them. Then let all nodes do it without a shared tier."""
    lab.bench.say(f"shared: {NODES} nodes read one cold block, {what}")
    lab.renew()
    order = shuffled(names, 500)  # in name order they would be prefetched
    ours, others = order[: _WARM_UP + _BLOCKS], order[_WARM_UP + _BLOCKS :]
    with lab.nodes(prefix, NODES) as mounts, lab.node(prefix, shared=[]) as alone:
        all_mounts = [*mounts, alone]
        _read(lab, prefix, all_mounts, ours[:_WARM_UP], others[:_WARM_UP])
        before = _gets(mounts)
        rest = slice(_WARM_UP, _WARM_UP + _BLOCKS)
        found = _read(lab, prefix, all_mounts, ours[rest], others[rest])
        gets_per_block = (_gets(mounts) - before) / _BLOCKS
    with lab.nodes(prefix, NODES, shared=[]) as mounts:
        without = _read(lab, prefix, mounts, ours[rest], [])
    slowest_ms, without_ms = _slowest_ms(found[:NODES]), _slowest_ms(without)
    alone_ms = [1e3 * read.took_s for read in found[NODES].reads]
    ratio = statistics.median(slowest_ms) / statistics.median(alone_ms)
    bad = sum(each.bad for each in found)
    case = f"{NODES} nodes read one cold block at once, {what}, origin {LATENCY_MS} ms away"
    against = "one node without it"
    return [
        Row(case, "the slowest node", "ms", statistics.median(slowest_ms),
            statistics.median(alone_ms), against, ratio, f"<= {SLOWEST_BAR:g}x",
            ratio <= SLOWEST_BAR, {"cachefs": slowest_ms, against: alone_ms}),
        Row(case, "the slowest without it", "ms", statistics.median(without_ms),
            statistics.median(alone_ms), against,
            statistics.median(without_ms) / statistics.median(alone_ms),
            rounds={"cachefs": without_ms}),
        Row(case, "GETs per block", "", gets_per_block, bar="= 1", passed=gets_per_block == 1),
        Row(case, "failed or wrong reads", "", bad, bar="= 0", passed=not bad),
    ]  # fmt: skip


def _read(
    lab: Lab, prefix: str, mounts: Sequence[rig.Mount], ours: list[str], others: list[str]
) -> list[Found]:
    """Let `NODES` mounts read `ours`, and another one, if there is one, `others`."""
    orders = [ours] * NODES + [others] * (len(mounts) - NODES)
    offsets_s = [0.0] * NODES + [_PACE_S / 2] * (len(mounts) - NODES)
    return lab.read_timed(prefix, mounts, orders, pace_s=_PACE_S, offsets_s=offsets_s)


def _slowest_ms(found: Sequence[Found]) -> list[float]:
    """Return for each block how long the slowest node took."""
    reads = zip(*(each.reads for each in found), strict=True)
    return [1e3 * max(read.took_s for read in each) for each in reads]


def _gets(mounts: Sequence[rig.Mount]) -> int:
    return sum(mount.status()["origin"]["gets"] for mount in mounts)
