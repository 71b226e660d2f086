"""Measure the hit ratio of each eviction policy, and compare it with the optimum.

One reader reads one file after another through the real engine. Admissions run in the background;
between two reads there is only a pause of one turn of the loop. A hit is a read that needed no GET.
A read of a block that is fetched but not yet stored is also a hit, so the memory for such blocks is
small.
"""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import trio

from bench.engine.findings import Bar, Cell, Findings, Grid
from bench.engine.rig import NumberedOrigin, Options, make_ref, open_tier, read_numbered, running
from bench.engine.workloads import FILE_BYTES, FILES, Workload, all_workloads, optimum
from cachefs.format.slab import class_of, slab_layout
from cachefs.types import ObjectRef

POLICIES = ("epoch", "lru", "2-random", "sieve", "none")
_SLAB_BYTES = 4 << 20
_BUFFER_BYTES = 100 * FILE_BYTES


def run(directory: Path, options: Options) -> Findings:
    policies = options.policies or POLICIES
    columns = ("workload", "f", *policies, "optimum", "bar")
    grid = Grid(
        f"hit ratios; data sets of {FILES:,} files of {FILE_BYTES:,} bytes",
        columns,
        note="f: quota / data set. optimum: knows the future, and uses the whole quota (for mixed "
        "sizes: as if all files were of mean size).",
    )
    findings = Findings([grid])
    for workload in all_workloads(options.quick):
        if options.workloads and not any(name in workload.name for name in options.workloads):
            continue
        quota_bytes = _quota(workload)
        chosen = [name for name in policies if not _is_spared(workload, name, options)]
        hits = {}
        for policy in chosen:
            began = time.monotonic()
            hits[policy] = trio.run(_replay, directory / "cache", workload, quota_bytes, policy)
            options.say(
                f"{workload.name}, f = {workload.f}, {policy}: {time.monotonic() - began:.1f} s"
            )
        hits["optimum"] = optimum(workload.phases, _capacity(workload, quota_bytes))
        _report(workload, quota_bytes / workload.data_bytes, hits, findings)
    return findings


def _is_spared(workload: Workload, policy: str, options: Options) -> bool:
    """Return whether to skip this run. To save time, policies without a bar run only on the
    workloads in which they differ."""
    if options.policies or policy in ("epoch", "lru"):
        return False
    return options.quick or not workload.for_all_policies


def _quota(workload: Workload) -> int:
    """Return the quota in bytes: whole slabs, nearest to f."""
    return round(workload.f * workload.data_bytes / _SLAB_BYTES) * _SLAB_BYTES


def _capacity(workload: Workload, quota_bytes: int) -> int:
    if workload.sizes is not None:
        return int(quota_bytes / workload.data_bytes * FILES)
    layout = slab_layout(class_of(FILE_BYTES), _SLAB_BYTES)
    return quota_bytes // _SLAB_BYTES * layout.slot_count


async def _replay(
    directory: Path, workload: Workload, quota_bytes: int, policy_name: str
) -> list[int]:
    """Run the workload and return the hits in each phase."""
    tier = open_tier(directory, quota_bytes, slab_bytes=_SLAB_BYTES)
    assert tier.identity.slab_bytes == _SLAB_BYTES
    refs: dict[int, ObjectRef] = {}
    hits = [0] * len(workload.phases)
    try:
        async with running(
            NumberedOrigin(), tier, policy_name=policy_name, buffer_bytes=_BUFFER_BYTES
        ) as cache:
            for phase, numbers in enumerate(workload.phases):
                for number in numbers:
                    ref = refs.get(number)
                    if ref is None:
                        ref = refs[number] = make_ref(number, workload.size_of(number))
                    hits[phase] += await read_numbered(cache, ref)
                    await trio.lowlevel.checkpoint()
    finally:
        shutil.rmtree(directory)
    return hits


def _report(workload: Workload, f: float, hits: dict[str, list[int]], findings: Findings) -> None:
    grid = findings.grids[0]
    policies = grid.columns[2:-1]
    for figure in workload.figures:
        requests = sum(len(workload.phases[phase]) for phase in figure.phases)
        ratios = {policy: _ratio(found, figure.phases, requests) for policy, found in hits.items()}
        name = f"{workload.name}, {figure.name}" if figure.name else workload.name
        row: list[Cell] = [name, f, *(ratios.get(policy) for policy in policies)]
        if figure.bar is not None and "epoch" in ratios and "lru" in ratios:
            at_least = figure.bar(f, ratios["lru"])
            bar = Bar(f"epoch: {name}, f = {f:.3f}", ratios["epoch"], at_least=at_least)
            findings.bars.append(bar)
            row.append(at_least)
        else:
            row.append(None)
        grid.rows.append(row)


def _ratio(hits: Sequence[int], phases: Sequence[int], requests: int) -> float:
    return sum(hits[phase] for phase in phases) / requests
