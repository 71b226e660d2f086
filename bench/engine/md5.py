"""Measure how fast the MD5s of fetched files are computed, one after the other and together."""

import hashlib
import random
import time
from collections.abc import Callable
from pathlib import Path

from bench.engine.findings import Findings, Grid
from bench.engine.rig import Options
from cachefs.origin.s3 import digest

_ROUNDS = 30
_CALLS = ((32, 20_000, 180_000), (8, 20_000, 180_000), (3, 100_000, 100_000), (32, 1000, 4000))
"""Files per call, and their least and greatest size in bytes."""


def run(directory: Path, options: Options) -> Findings:
    """Hash the same files in both ways, in turn, and return the best round of each."""
    grid = Grid(
        f"MD5 of files, best of {_ROUNDS} rounds",
        ("files", "hashlib MB/s", "together MB/s", "ratio"),
        note="together: as `cachefs load` compares files with their ETags.",
    )
    options.say("md5")
    chance = random.Random(1)
    for count, least, most in _CALLS:
        datas = [chance.randbytes(chance.randint(least, most)) for _ in range(count)]
        size_mb = sum(map(len, datas)) / 1e6
        singly_s: list[float] = []
        together_s: list[float] = []
        for _ in range(_ROUNDS):
            singly_s.append(_seconds(_singly, datas))
            together_s.append(_seconds(digest.md5_of_each, datas))
        best_singly, best_together = size_mb / min(singly_s), size_mb / min(together_s)
        sizes = f"{count} of {least // 1000}-{most // 1000} KB"
        grid.rows.append([sizes, best_singly, best_together, best_together / best_singly])
    return Findings([grid])


def _singly(datas: list[bytes]) -> list[bytes]:
    return [hashlib.md5(data, usedforsecurity=False).digest() for data in datas]


def _seconds(work: Callable[[list[bytes]], object], datas: list[bytes]) -> float:
    began = time.perf_counter()
    work(datas)
    return time.perf_counter() - began
