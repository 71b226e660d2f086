"""Measure reads while a member is killed, stands still, or is slow."""

import statistics
from collections.abc import Callable

from bench import rig
from bench.case import shuffled
from bench.far.origin import far
from bench.report import Row
from bench.shared.lab import LATENCY_MS, Found, Lab, p99_s

ADDED_BAR_MS = 50.0
REQUESTS_BAR = 3
WAIT_BAR_MS = 25.0
"""20 ms, 2 ms for the bytes of the largest blocks, and what a busy machine adds."""
_READING_NODES = 3
_FEW_FILES = 60
_SLOW_MS = 200


def killed(lab: Lab, prefix: str, names: list[str]) -> list[Row]:
    """Kill a member in the middle of an epoch of some nodes, which find all blocks in the members,
    and compare with an epoch in which nothing happens."""
    lab.bench.say("shared: a member is killed")
    lab.fill(prefix, len(names))
    victim = lab.members[0]
    share = int(victim.stats()["curr_items"]) / lab.held_blocks()
    quiet, quiet_gets = _epoch(lab, prefix, names, lambda: None)
    found, gets = _epoch(lab, prefix, names, victim.kill)
    victim.start()
    extra = (gets - quiet_gets) / (len(names) * _READING_NODES)
    added_ms = 1e3 * (p99_s(found) - p99_s(quiet))
    bad = sum(each.bad for each in [*quiet, *found])
    case = f"SIGKILL of a member in the middle of an epoch, {_READING_NODES} nodes"
    return [
        Row(case, "failed or wrong reads", "", bad, bar="= 0", passed=not bad),
        Row(case, "extra GETs per block", "", extra, share, "share of the member",
            bar=f"<= {share:.2f}", passed=extra <= share),
        Row(case, "added to the p99 of reads", "ms", added_ms, bar=f"<= {ADDED_BAR_MS:g}",
            passed=added_ms <= ADDED_BAR_MS),
        Row(case, "GETs per block, nothing happens", "",
            quiet_gets / (len(names) * _READING_NODES)),
        Row(case, "p99 of reads", "ms", 1e3 * p99_s(found), 1e3 * p99_s(quiet), "nothing happens"),
    ]  # fmt: skip


def _epoch(
    lab: Lab, prefix: str, names: list[str], at_half: Callable[[], None]
) -> tuple[list[Found], int]:
    with lab.nodes(prefix, _READING_NODES) as mounts:
        before = lab.bench.server.object_gets()
        orders = [shuffled(names, 800 + number) for number in range(_READING_NODES)]
        half = _once(len(names) // 2, at_half)
        found = lab.read_timed(prefix, mounts, orders, on_progress=half)
        return found, lab.bench.server.object_gets() - before


def _once(count: int, call: Callable[[], None]) -> Callable[[int], None]:
    """Return what calls `call` when `count` files have been read."""

    def on_progress(at: int) -> None:
        if at == count:
            call()

    return on_progress


def silent(lab: Lab, prefix: str, names: list[str]) -> list[Row]:
    """Stop a member (SIGSTOP) while a node reads; and let a node use a member that answers after
    `_SLOW_MS`."""
    lab.bench.say("shared: a member stands still, a member is slow")
    lab.fill(prefix, len(names))
    some = shuffled(names, 900)[: 2 * _FEW_FILES]
    victim = lab.members[0]
    try:
        with lab.node(prefix) as mount:
            pause = _once(_FEW_FILES, victim.pause)
            (found,) = lab.read_timed(prefix, [mount], [some], on_progress=pause)
            stopped = _silent_rows("SIGSTOP of a member", mount, victim.address, found, _FEW_FILES)
    finally:
        victim.go_on()
    slow_address = f"http://{victim.address}"
    with far(slow_address, lab.bench.directory, _SLOW_MS) as relayed:
        address = relayed.removeprefix("http://")
        others = [member.address for member in lab.members[1:]]
        options = ["--shared", ",".join([address, *others])]
        with lab.node(prefix, shared=options) as mount:
            (found,) = lab.read_timed(prefix, [mount], [some[:_FEW_FILES]])
            case = f"a member with {_SLOW_MS} ms of latency"
            return [*stopped, *_silent_rows(case, mount, address, found, 0)]


def _silent_rows(case: str, mount: rig.Mount, address: str, found: Found, since: int) -> list[Row]:
    """Return what the reads from number `since` on have waited for a member. It must be within a
    second, before the member gets a probe."""
    report = mount.status()["shared"]
    (member,) = [each for each in report["members"] if each["address"] == address]
    took_ms = sorted(1e3 * read.took_s for read in found.reads[since:])
    from_origin_ms = [took for took in took_ms if took >= LATENCY_MS]
    wait_ms = statistics.median(took_ms[-REQUESTS_BAR:]) - statistics.median(from_origin_ms)
    requests = member["failures"]
    return [
        Row(case, "requests that waited for it", "", requests, bar=f"<= {REQUESTS_BAR}",
            passed=requests <= REQUESTS_BAR and member["state"] == "out"),
        Row(case, "wait for it, median of three", "ms", wait_ms, bar=f"<= {WAIT_BAR_MS:g}",
            passed=wait_ms <= WAIT_BAR_MS),
        Row(case, "the slowest read", "ms", took_ms[-1]),
        Row(case, "failed or wrong reads", "", found.bad, bar="= 0", passed=not found.bad),
    ]  # fmt: skip
