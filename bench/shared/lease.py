"""Measure how long other nodes wait for a block whose node is killed while it fetches the block."""

import contextlib
import os
import signal
import statistics
import threading
import time

from bench import rig
from bench.case import shuffled
from bench.far.origin import far
from bench.report import Row
from bench.shared.lab import Lab

DELAY_BAR_MS = 300.0
_LATENCY_MS = 400
_BLOCKS = 5
_PACE_S = 4.0
_KILL_AFTER_S = 0.15
_ASK_AFTER_S = 0.2
_RESTART_S = 1.5


def holder_killed(lab: Lab, prefix: str, names: list[str]) -> list[Row]:
    """Kill the daemon of the node that fetches a block, while two others wait for the block. A
    node without a shared tier reads another block at the same time."""
    lab.bench.say("shared: the node that has the lease is killed")
    lab.renew()
    order = shuffled(names, 1000)
    ours, others, warm_up = order[:_BLOCKS], order[_BLOCKS : 2 * _BLOCKS], order[2 * _BLOCKS :]
    with contextlib.ExitStack() as stack:
        server, directory = lab.bench.server.endpoint, lab.bench.directory
        endpoint = stack.enter_context(far(server, directory, _LATENCY_MS))
        mounts = stack.enter_context(lab.nodes(prefix, 3, endpoint=endpoint))
        alone = stack.enter_context(lab.node(prefix, shared=[], endpoint=endpoint))
        everybody = [*mounts, alone]
        for number, mount in enumerate(everybody):
            lab.read(mount, [warm_up[number]])  # so that all know how long the origin takes
        killer = _Killer(mounts[0])
        found = lab.read_timed(
            prefix, everybody, [ours, ours, ours, others], pace_s=_PACE_S,
            offsets_s=[0.0, _ASK_AFTER_S, _ASK_AFTER_S, _ASK_AFTER_S], on_begin=killer.begin,
        )  # fmt: skip
        killer.join()
    alone_s = statistics.median(read.took_s for read in found[3].reads)
    delays_ms = [
        1e3 * (max(a.took_s, b.took_s) - alone_s)
        for a, b in zip(found[1].reads, found[2].reads, strict=True)
    ]
    delay_ms = statistics.median(delays_ms)
    bad = sum(each.bad for each in found)
    case = f"SIGKILL of the daemon that has the lease, origin {_LATENCY_MS} ms away"
    return [
        Row(case, "delay of the others", "ms", delay_ms, bar=f"<= {DELAY_BAR_MS:g}",
            passed=delay_ms <= DELAY_BAR_MS, rounds={"cachefs": delays_ms}),
        Row(case, "a read without the tier", "ms", 1e3 * alone_s),
        Row(case, "failed or wrong reads", "", bad, bar="= 0", passed=not bad),
    ]  # fmt: skip


class _Killer(threading.Thread):
    """Kills the daemon of a mount `_KILL_AFTER_S` after the begin of each block. Its supervisor
    then starts another one."""

    def __init__(self, mount: rig.Mount) -> None:
        super().__init__(daemon=True)
        self._mount = mount
        self._pid: int = mount.status()["pid"]
        self._begin_at = 0.0

    def begin(self, begin_at: float) -> None:
        """Start; the first read begins at `begin_at`."""
        self._begin_at = begin_at
        self.start()

    def run(self) -> None:
        for number in range(_BLOCKS):
            kill_at = self._begin_at + number * _PACE_S + _KILL_AFTER_S
            time.sleep(max(0.0, kill_at - time.monotonic()))
            os.kill(self._pid, signal.SIGKILL)
            time.sleep(_RESTART_S)
            self._pid = self._mount.status()["pid"]
