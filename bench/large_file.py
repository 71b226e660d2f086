"""Read one large file in order, in 1 MiB pieces: cold, and from the cache."""

import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from bench import direct, rig
from bench.case import Bench
from bench.report import Row, ratio_row, show

COLD_BAR = 0.6
CACHED_BAR_MB_S = 800.0
CACHED_BAR_RATIO = 0.4
IN_FLIGHT = (1, 4, 8)


def large_file(bench: Bench) -> list[Row]:
    """Measure both, with a new mount and an empty cache in each round."""
    name = bench.large_file()
    size_bytes = bench.scale.large_bytes
    direct.get_ranges(bench.store, f"large/{name}", size_bytes, 4)
    measured: dict[str, list[float]] = defaultdict(list)
    for turn in range(bench.scale.rounds):
        bench.say(f"large file: round {turn + 1} of {bench.scale.rounds}")
        measured["direct"].append(direct_mb_s(bench))
        with bench.mount("large") as mount:
            measured["cold"].append(_read(bench, mount.path, name).mb_s)
            measured["warm"].append(_read(bench, mount.path, name).mb_s)
            _read(bench, bench.local / "large", name)
            measured["local warm"].append(_read(bench, bench.local / "large", name).mb_s)
            if rig.can_drop_caches():
                rig.drop_page_cache()
                measured["local dropped"].append(_read(bench, bench.local / "large", name).mb_s)
                rig.drop_page_cache()
                measured["dropped"].append(_read(bench, mount.path, name).mb_s)
        mount.remove()
    return _rows(f"one file of {size_bytes >> 20} MiB, in order", measured)


def direct_mb_s(bench: Bench) -> float:
    """GET the large file in ranges with obstore, and return the best speed of `IN_FLIGHT`."""
    key, size_bytes = f"large/{bench.large_file()}", bench.scale.large_bytes
    return max(direct.get_ranges(bench.store, key, size_bytes, count).mb_s for count in IN_FLIGHT)


def _rows(case: str, measured: dict[str, list[float]]) -> list[Row]:
    rows = [
        ratio_row(
            case,
            "cold / obstore, 8 MiB ranges",
            "MB/s",
            measured["cold"],
            measured["direct"],
            "obstore",
            at_least=COLD_BAR,
        ),
        ratio_row(case, "warm / local", "MB/s", measured["warm"], measured["local warm"], "local"),
    ]
    if measured["dropped"]:
        local = statistics.median(measured["local dropped"])
        wanted = min(CACHED_BAR_MB_S, CACHED_BAR_RATIO * local)
        ours = statistics.median(measured["dropped"])
        row = ratio_row(
            case,
            "page cache dropped / local",
            "MB/s",
            measured["dropped"],
            measured["local dropped"],
            "local",
        )
        rows.append(replace(row, bar=f">= {show(wanted)}", passed=ours >= wanted))
    return rows


def _read(bench: Bench, root: Path, name: str) -> rig.Reading:
    return rig.read_files(root, [name], chunks=True, list_file=bench.list_file, timeout_s=120)
