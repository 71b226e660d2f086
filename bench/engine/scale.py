"""Measure a cache of 4 million blocks: the time of its start, its memory, and its look-ups.

The cache directory is synthetic: sparse slab files full of zeros, with matching headers, slot
tables and index. New processes (`scale_probe.py`) then open it:

clean      closed properly; the kernel has the index in its page cache
cold       after a process that did not close it, with the index dropped from the page cache
crashed    the same with the index in the page cache; at the end it evicts a tenth of everything
"""

import json
import math
import os
import random
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import trio

from bench.engine.findings import Bar, Cell, Findings, Grid
from bench.engine.rig import IDENTITY, MIB, Options, make_ref
from bench.rig import ROOT
from cachefs.cache.tier.index import Index
from cachefs.format.index_record import SlabRow, pack_bitmap
from cachefs.format.paths import TierPaths
from cachefs.format.slab import (
    HEADER_BYTES,
    MAX_SLAB_BYTES,
    SlabHeader,
    SlotEntry,
    checksum_of,
    class_of,
    encode_entry,
    encode_header,
    slab_layout,
)
from cachefs.format.tier_identity import TierIdentity, encode_identity
from cachefs.types import BlockKey, BlockLocation

_BLOCKS = 4_000_000
_BLOCK_BYTES = 16_000
_FULL = 0.969
"""The filled share of the quota, just below the high mark."""
_COMMIT_BLOCKS = 500_000
_PROBE_LIMIT_S = 300
_FIRST_READ_S, _MEMORY_MIB, _LOOK_UP_US = 1.0, 400, 50


@dataclass(frozen=True, slots=True)
class _Plan:
    """The layout of the synthetic directory."""

    slabs: int
    slots: int

    @property
    def blocks(self) -> int:
        return self.slabs * self.slots

    @property
    def quota_bytes(self) -> int:
        return math.ceil(self.slabs / _FULL) * MAX_SLAB_BYTES


def run(directory: Path, options: Options) -> Findings:
    slots = slab_layout(class_of(_BLOCK_BYTES), MAX_SLAB_BYTES).slot_count
    plan = _Plan(-(-(_BLOCKS // (10 if options.quick else 1)) // slots), slots)
    cache = directory / "cache"
    options.say(f"making up {plan.blocks:,} blocks in {plan.slabs:,} slabs")
    trio.run(_make, TierPaths(cache), plan)
    index_bytes = os.stat(cache / "index" / "data.mdb").st_blocks * 512
    found = {}
    for name in ("clean", "cold", "crashed"):
        options.say(f"a fresh process: {name}")
        if name == "cold":
            _forget(cache / "index" / "data.mdb")
        found[name] = _probe(cache, plan, evict=name == "crashed")
    return _report(plan, index_bytes, found)


# -- a cache directory -------------------------------------------------------------------------


async def _make(paths: TierPaths, plan: _Plan) -> None:
    identity = TierIdentity(uuid.uuid4().bytes, MAX_SLAB_BYTES, IDENTITY)
    paths.slabs.mkdir(parents=True)
    paths.identity.write_bytes(encode_identity(identity))
    index = Index.open(str(paths.index), plan.quota_bytes, identity.uuid)
    class_index = class_of(_BLOCK_BYTES)
    checksum = checksum_of(bytes(_BLOCK_BYTES))
    numbers = list(range(plan.blocks))
    random.Random(0).shuffle(numbers)  # so that no slab has neighbouring files
    bitmap = pack_bitmap(bytes([1]) * plan.slots)
    uncommitted = 0
    for slab_id in range(plan.slabs):
        entries = []
        for slot in range(plan.slots):
            ref = make_ref(numbers[slab_id * plan.slots + slot], _BLOCK_BYTES)
            key = BlockKey(ref.object_id, 0)
            index.put(key, BlockLocation(slab_id, slot, _BLOCK_BYTES, checksum))
            entries.append(encode_entry(SlotEntry(key, _BLOCK_BYTES, checksum)))
        used_bytes = plan.slots * _BLOCK_BYTES
        row = SlabRow(class_index, plan.slots, plan.slots, 1 + slab_id, used_bytes, bitmap)
        index.put_slab(slab_id, row)
        header = SlabHeader(slab_id, class_index, MAX_SLAB_BYTES, identity.uuid)
        _write_slab(paths.slab(slab_id), header, b"".join(entries))
        uncommitted += plan.slots
        if uncommitted >= _COMMIT_BLOCKS:
            await index.commit()
            uncommitted = 0
    index.put_clean_mark()
    index.close()


def _write_slab(path: Path, header: SlabHeader, table: bytes) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(fd, header.slab_bytes)
        os.pwrite(fd, encode_header(header), 0)
        os.pwrite(fd, table, HEADER_BYTES)
    finally:
        os.close(fd)


def _forget(path: Path) -> None:
    """Ask the kernel to drop the file from its page cache."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


# -- fresh processes ---------------------------------------------------------------------------


def _probe(cache: Path, plan: _Plan, evict: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.engine.scale_probe"]
    arguments = {
        "directory": str(cache),
        "quota_bytes": plan.quota_bytes,
        "blocks": plan.blocks,
        "block_bytes": _BLOCK_BYTES,
        "evict": evict,
    }
    done = subprocess.run(
        [*command, json.dumps(arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_PROBE_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the probe failed:\n{done.stderr[-4000:]}")
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _report(plan: _Plan, index_bytes: int, found: dict[str, dict[str, float]]) -> Findings:
    names = list(dict.fromkeys(name for figures in found.values() for name in figures))
    grid = Grid(
        f"{plan.blocks:,} blocks of {_BLOCK_BYTES:,} bytes in {plan.slabs:,} slabs; "
        f"index of {index_bytes // MIB:,} MiB",
        ("", *found, "bar"),
        note="memory: anonymous and shared pages, so without mapped files such as the index. The "
        "slabs have no blocks on disk: reads of them cost no disk, but all else.",
    )
    findings = Findings([grid])
    for name in names:
        at_most = _limit(name)
        values: list[Cell] = [figures.get(name) for figures in found.values()]
        grid.rows.append([name, *values, at_most])
        if at_most is not None:
            findings.bars += [
                Bar(f"{name}: {case}", figures[name], at_most=at_most)
                for case, figures in found.items()
                if name in figures
            ]
    return findings


def _limit(name: str) -> float | None:
    if name.startswith("open to first read"):
        return _FIRST_READ_S
    if name.startswith("memory"):
        return _MEMORY_MIB
    return _LOOK_UP_US if name.startswith("look-up") and "p99," in name else None
