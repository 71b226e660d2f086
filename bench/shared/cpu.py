"""Measure the CPU time of a hit in the shared tier beside that of a GET from the near S3 server.

There are two ways to count. **The calls alone**: a process reads blocks as the daemon does, without
FUSE and without a local cache, and only what it and the servers use counts. **A node**: all that
daemon and supervisor use while a program reads cold files, which includes the kernel's requests and
the admission to the local cache; both are the same for a hit and a GET.
"""

import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from bench import procfs, rig
from bench.case import shuffled
from bench.report import Row
from bench.shared.lab import Lab

CPU_BAR = 0.25
BLOCK_BYTES = 100_000
_ROUNDS = 3
_CALLS = Path(__file__).with_name("calls.py")

_Sides = dict[str, list[float]]


def cpu(lab: Lab, prefix: str, names: list[str]) -> list[Row]:
    """Measure microseconds, user and system, of one block of `BLOCK_BYTES`. The files of `prefix`
    have this size, and the near server is the origin."""
    lab.bench.say("shared: CPU time of hits and GETs")
    near = lab.bench.server.endpoint
    lab.fill(prefix, len(names), near)
    servers = _servers_us(lab, prefix, names, near)
    nodes: _Sides = defaultdict(list)
    for turn in range(_ROUNDS):
        order = shuffled(names, 600 + turn)
        for kind, shared in (("hit", lab.shared), ("get", [])):
            with lab.node(prefix, shared=shared, endpoint=near) as mount:
                status = mount.status()
                pids = [status["pid"], status["supervisor_pid"]]
                before_s = _cpu_s(pids)
                lab.read(mount, order)
                nodes[kind].append(1e6 * (_cpu_s(pids) - before_s) / len(names))
    calls = _calls_us(lab, prefix, names, near)
    both = {
        kind: [value + statistics.median(servers[kind]) for value in calls[kind]]
        for kind in ("hit", "get")
    }
    case = f"CPU time of a block of {BLOCK_BYTES // 1000} KB, one at a time, near S3 server"
    return [
        _row(case, "the calls alone, reader's side", calls, CPU_BAR),
        _row(case, "memcached, SeaweedFS", servers, None),
        _row(case, "calls and server", both, CPU_BAR),
        _row(case, "daemon and supervisor", nodes, None),
        _took_row(case, calls),
    ]


def _calls_us(lab: Lab, prefix: str, names: list[str], endpoint: str) -> _Sides:
    """Return what calls.py has measured."""
    lab.bench.list_file.write_text("\n".join(names))
    members = lab.shared[1]
    source = f"s3://{rig.BUCKET}/{prefix}"
    result = subprocess.run(
        [sys.executable, str(_CALLS), source, endpoint, members, str(lab.bench.list_file),
         str(_ROUNDS)],
        env={**os.environ, **lab.bench.server.environment},
        stdout=subprocess.PIPE, check=True, timeout=120,
    )  # fmt: skip
    found: _Sides = json.loads(result.stdout)
    return found


def _servers_us(lab: Lab, prefix: str, names: list[str], endpoint: str) -> _Sides:
    """Return what the members, or the S3 server, use while a node reads everything."""
    found: _Sides = defaultdict(list)
    pid = lab.bench.server.pid
    assert pid is not None
    for kind, shared, pids in (
        ("hit", lab.shared, [member.pid for member in lab.members]),
        ("get", [], [pid]),
    ):
        with lab.node(prefix, shared=shared, endpoint=endpoint) as mount:
            before_s = _cpu_s(pids)
            lab.read(mount, shuffled(names, 700))
            found[kind].append(1e6 * (_cpu_s(pids) - before_s) / len(names))
    return found


def _row(case: str, figure: str, sides: _Sides, most: float | None) -> Row:
    hit, get = statistics.median(sides["hit"]), statistics.median(sides["get"])
    ratio = hit / get
    return Row(
        case, figure, "us", hit, get, "S3 GET", ratio,
        "" if most is None else f"<= {most:g}x",
        None if most is None else ratio <= most,
        {"cachefs": sides["hit"], "S3 GET": sides["get"]},
    )  # fmt: skip


def _took_row(case: str, calls: _Sides) -> Row:
    return _row(case, "time of a call", {"hit": calls["hit_took"], "get": calls["get_took"]}, None)


def _cpu_s(pids: list[int]) -> float:
    return sum(procfs.cpu_s(pid) for pid in pids)
