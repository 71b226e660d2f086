"""`python -m bench --only shared`: every bar of the shared tier, with three real memcached."""

import time
from collections.abc import Callable
from functools import partial

from bench.case import Bench, small_sizes
from bench.far.origin import far
from bench.report import Row
from bench.shared import cpu, epochs, faults, lease, moment, speed, wrong
from bench.shared.lab import LATENCY_MS, Lab, members
from tests.servers.memcached import memcached_binary

_FILES = 900
_LARGER_FILES = 48
_LARGER_BYTES = 1 << 20
_CPU_FILES = 900
_FEW_FILES = 150

_Part = tuple[float, Callable[[], list[Row]]]
"""How many seconds it takes on a busy machine, and what measures it."""


def shared_tier(bench: Bench) -> list[Row]:
    """Measure everything for which there is time, the most important parts first."""
    if memcached_binary() is None:
        bench.say("shared: left out, memcached is missing (apt-get install memcached)")
        return []
    rows: list[Row] = []
    with (
        members(bench.directory) as running,
        far(bench.server.endpoint, bench.directory, LATENCY_MS) as endpoint,
    ):
        for seconds, measure in _parts(Lab(bench, running, endpoint)):
            if time.monotonic() + seconds > bench.ends_at:
                bench.say("shared: no time for the rest")
                break
            rows += measure()
    return rows


def _parts(lab: Lab) -> list[_Part]:
    names = lab.bench.files("blocks", small_sizes(_FILES))
    larger = lab.bench.files("larger", [_LARGER_BYTES] * _LARGER_FILES)
    equal = lab.bench.files("equal", [cpu.BLOCK_BYTES] * _CPU_FILES)
    few = lab.bench.files("few", small_sizes(_FEW_FILES))
    return [
        (60, partial(epochs.together, lab, "blocks", names)),
        (60, partial(speed.hits, lab, "blocks", names)),
        (120, partial(speed.empty, lab, "blocks", names)),
        (40, partial(moment.same_moment, lab, "blocks", names, "20-180 KB")),
        (40, partial(moment.same_moment, lab, "larger", larger, "1 MiB")),
        (40, partial(cpu.cpu, lab, "equal", equal)),
        (40, partial(faults.killed, lab, "blocks", names)),
        (20, partial(faults.silent, lab, "few", few)),
        (50, partial(wrong.wrong, lab, "few", few)),
        (40, partial(lease.holder_killed, lab, "few", few)),
        (20, partial(epochs.second_load, lab, "blocks", _FILES)),
    ]
