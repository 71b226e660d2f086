"""Compute what a shared tier does with 24 to 500 nodes, from figures that were measured.

Nothing runs here. Each node reads all of the data in each epoch, in its own order, and has a
member of the shared tier. Its own cache has some of the blocks. The rest come from the members,
each from the one that the ring names, and the ring is the real one.

**GETs.** A block has one GET for the first node that asks. There is one more for each question that
a member does not answer in time, and one for each node that asks so early that the bytes come later
than it waits for the node with the lease.
"""

import math
from collections import Counter
from pathlib import Path

from bench.engine.findings import Findings, Grid
from bench.engine.rig import Options
from cachefs.shared.ring import Ring

NODES = (24, 50, 100, 200, 500)
DATA_BYTES = 780e9
BLOCK_BYTES = 100_000
LOCAL_HITS = 0.385
READS_PER_S = 2_000
"""What the job on each node reads: 200 MB/s."""
ORIGIN_S = (0.025, 0.2, 0.5)
WAIT_S = 0.3
"""How long a node waits at most for the node with the lease (`shared.tier`)."""
LATE = (0.0, 0.0001, 0.001)
"""The share of the questions that a member does not answer in time. Six nodes and everything else
on two cores had 0.1 to 1 %."""

HIT_S = 0.0003
"""`python -m bench --only shared`: how long a hit takes."""
DAEMON_CPU_S = 0.0007
"""The same: daemon and supervisor for a file of 100 KB from the shared tier, with the kernel's
requests and the admission to the local cache. One thread does nearly all of it."""
MEMBER_CPU_S = 0.00011
"""The same: memcached for such a block."""
DISK_FACTOR = 1.1
CONNECTIONS = 8
"""At most, from one node to one member (`shared.member`)."""
_BURST = 0.999
_SLOTS = 1 << 16
"""More slots than these the ring does not have."""
_LIMITS = {
    "10 Gbit/s, one direction": 1.25e9,
    "25 Gbit/s, one direction": 3.125e9,
    "SATA SSD, 0.5 GB/s": 0.5e9,
    "NVMe SSD, 2 GB/s": 2e9,
}


def run(directory: Path, options: Options) -> Findings:
    return Findings([*_gets(), _slow_origin(), _load(), _limits()])


def _gets() -> list[Grid]:
    """Return a table for the first epoch, with empty caches, and one for each later one."""
    note = (
        f"data: {DATA_BYTES / 1e9:.0f} GB in blocks of {BLOCK_BYTES // 1000} KB. late: the share "
        "of the questions that a member does not answer in time."
    )
    columns = ("nodes", "no tier", *(f"{late:.2%} late" for late in LATE))
    first = Grid("origin GETs per block, first epoch", columns, note=note)
    later = Grid(
        f"origin GETs per block, each later epoch, {LOCAL_HITS:.1%} in the nodes' own caches",
        columns,
    )
    for nodes in NODES:
        asked = nodes * (1 - LOCAL_HITS)
        first.rows.append([str(nodes), nodes, *(1 + (nodes - 1) * late for late in LATE)])
        later.rows.append([str(nodes), asked, *(asked * late for late in LATE)])
    return [first, later]


def _slow_origin() -> Grid:
    """How many nodes ask the origin, too, because the node with the lease takes too long."""
    epoch_s = DATA_BYTES / BLOCK_BYTES / READS_PER_S
    grid = Grid(
        "further GETs per block in the first epoch, as an origin is slower than a node waits",
        ("nodes", *(f"{1e3 * origin:.0f} ms" for origin in ORIGIN_S)),
        note=f"each node reads {READS_PER_S:,} files/s, so an epoch takes {epoch_s / 60:.0f} min. "
        f"A node waits for at most {1e3 * WAIT_S:.0f} ms.",
    )
    for nodes in NODES:
        row: list[str | float | None] = [str(nodes)]
        for origin_s in ORIGIN_S:
            too_early_s = max(0.0, origin_s - min(2 * origin_s, WAIT_S))
            row.append((nodes - 1) * too_early_s / epoch_s)
        grid.rows.append(row)
    return grid


def _load() -> Grid:
    grid = Grid(
        f"load of a member, each node reads {READS_PER_S:,} files/s",
        ("nodes", "GB held", "gets/s", "MB/s", "busiest", "cores", "connections", "at most"),
        note="busiest: MB/s of the member with the largest share of the ring. connections: those "
        f"in use at the same time in all but {1 - _BURST:.1%} of the moments, from all nodes.",
    )  # fmt: skip
    gets_per_s = READS_PER_S * (1 - LOCAL_HITS)
    for nodes in NODES:
        ring = Ring([f"10.0.{n // 250}.{n % 250}:11211" for n in range(nodes)])
        shares = Counter(ring.owner(slot) for slot in range(_SLOTS))
        busiest = max(shares.values()) * nodes / _SLOTS
        mb_s = gets_per_s * BLOCK_BYTES / 1e6
        held_gb = DATA_BYTES * DISK_FACTOR / nodes / 1e9
        grid.rows.append(
            [str(nodes), held_gb, gets_per_s, mb_s, mb_s * busiest, gets_per_s * MEMBER_CPU_S,
             nodes * _usual_connections(gets_per_s / nodes * HIT_S), nodes * CONNECTIONS]
        )  # fmt: skip
    return grid


def _usual_connections(mean: float) -> int:
    """Return a number that a Poisson variable with this mean exceeds with a probability of at most
    `1 - _BURST`; at least one."""
    number, term = 0, math.exp(-mean)
    total = term
    while total < _BURST:
        number += 1
        term *= mean / number
        total += term
    return max(1, number)


def _limits() -> Grid:
    """What the job of each node can read at most, by what limits it. Because each node has a
    member, none of it depends on the number of nodes."""
    grid = Grid(
        "what limits a node next",
        ("", "files/s of a node", "MB/s of a node"),
        note=f"{1 - LOCAL_HITS:.1%} of the reads go to the members. The network carries as much in "
        "the other direction. SSD: as if memcached had no block in memory.",
    )
    asked = 1 - LOCAL_HITS
    found = {"daemon, its one thread": 1 / (asked * DAEMON_CPU_S)}
    found |= {"memcached, one core": 1 / (asked * MEMBER_CPU_S)}
    found |= {name: limit / (asked * BLOCK_BYTES) for name, limit in _LIMITS.items()}
    for name, reads_per_s in sorted(found.items(), key=lambda item: item[1]):
        grid.rows.append([name, reads_per_s, reads_per_s * BLOCK_BYTES / 1e6])
    return grid
