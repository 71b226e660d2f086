"""Measure the first epoch over a distant origin, where a reader may wait for each round trip."""

import random
import time
from collections import defaultdict
from pathlib import Path

from bench import direct, rig
from bench.case import Bench, discard, shuffled
from bench.far import siblings
from bench.far.origin import CONNECTION_MB_S, ROUND_TRIP_MS, far
from bench.load import load_small
from bench.report import Row

RANDOM_ORDER_BAR = 27
NAME_ORDER_BAR = 400
LARGE_BAR = 300
PIECES_BAR = 30
LOAD_BAR = 0.85
_RANDOM_FILES = 200
_PIECES = 100
_PIECE_BYTES = 4096
IN_FLIGHT = 64


def far_origin(bench: Bench) -> list[Row]:
    """Measure files or bytes per second of one reader, with a new mount and an empty cache in each
    round."""
    names, large = bench.small_files(), bench.large_file()
    measured: dict[str, list[float]] = defaultdict(list)
    with far(bench.server.endpoint, bench.directory) as endpoint:
        store = bench.server.store(endpoint)
        for turn in range(bench.scale.rounds):
            bench.say(f"far origin: round {turn + 1} of {bench.scale.rounds}")
            order = shuffled(names, 2000 + turn)
            measured["random order"].append(_read(bench, endpoint, order[:_RANDOM_FILES]))
            measured["name order"].append(_read(bench, endpoint, sorted(names), listed=True))
            measured["large"].append(read_large(bench, endpoint))
            measured["pieces"].append(_read_pieces(bench, endpoint, large, turn))
            keys = [f"small/{name}" for name in order]
            measured["obstore"].append(direct.get_all(store, keys, IN_FLIGHT).files_s)
            measured["load"].append(load_small(bench, endpoint=endpoint))
        shuffled_rows = siblings.measure(bench, endpoint)
    case = f"an origin {ROUND_TRIP_MS} ms away, {CONNECTION_MB_S} MB/s on a connection"
    return [
        _row(case, "1 reader, random order", "files/s", measured["random order"], RANDOM_ORDER_BAR),
        _row(case, "1 reader, name order", "files/s", measured["name order"], NAME_ORDER_BAR),
        _row(case, "large file in order", "MB/s", measured["large"], LARGE_BAR),
        _row(case, "random 4 KiB, first 100", "reads/s", measured["pieces"], PIECES_BAR),
        _row(case, f"obstore, {IN_FLIGHT} in flight", "files/s", measured["obstore"], None),
        _row(case, "load", "files/s", measured["load"], LOAD_BAR * min(measured["obstore"])),
        *shuffled_rows,
    ]  # fmt: skip


def _read(bench: Bench, endpoint: str, names: list[str], listed: bool = False) -> float:
    mount = bench.mount("small", endpoint=endpoint)
    with mount:
        if listed:
            rig.list_directory(mount.path)
        files_s = rig.read_files(mount.path, names, list_file=bench.list_file).files_s
    discard(mount)
    return files_s


def read_large(bench: Bench, endpoint: str) -> float:
    """Read the large file in order, with a new mount and an empty cache. Return MB/s."""
    name = bench.large_file()
    mount = bench.mount("large", endpoint=endpoint)
    with mount:
        mb_s = rig.read_files(mount.path, [name], chunks=True, list_file=bench.list_file).mb_s
    discard(mount)
    return mb_s


def _read_pieces(bench: Bench, endpoint: str, name: str, turn: int) -> float:
    chance = random.Random(turn)
    mount = bench.mount("large", endpoint=endpoint)
    with mount, Path(mount.path / name).open("rb", buffering=0) as file:
        began = time.monotonic()
        for _ in range(_PIECES):
            file.seek(chance.randrange(bench.scale.large_bytes // _PIECE_BYTES) * _PIECE_BYTES)
            file.read(_PIECE_BYTES)
        seconds = time.monotonic() - began
    discard(mount)
    return _PIECES / seconds


def _row(case: str, figure: str, unit: str, figures: list[float], least: float | None) -> Row:
    median = sorted(figures)[len(figures) // 2]
    bar = "" if least is None else f">= {least:.0f}"
    passed = None if least is None else median >= least
    return Row(case, figure, unit, median, bar=bar, passed=passed, rounds={"cachefs": figures})
