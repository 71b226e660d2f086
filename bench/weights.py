"""Read a file of weights as loaders do: in order, through mmap, and with several threads.

Cold, the origin is once far away (`far/origin.py`) and once in the same machine. The reference is
the same object in parallel range GETs by obstore, in the same round. Cached, with `--workload
serving`, the reference is the same file on the local disk.
"""

import json
import random
import struct
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from bench import direct, rig
from bench.case import Bench, discard
from bench.far.origin import CONNECTION_MB_S, ROUND_TRIP_MS, far
from bench.report import Row, ratio_row

FAR_BAR = 0.9
LOCAL_BAR = 0.95
WAYS = {
    "read": "read() in order",
    "keys": "mmap, tensors in order",
    "shuffled": "mmap, tensors shuffled",
    "threads": "pread, 4 threads",
}
NAME = "model.safetensors"
WAYS_CACHED = WAYS | {
    "direct": "read() in order, O_DIRECT",
    "pages": "single random pages of a mmap",
}
_IN_FLIGHT = 16
_TENSORS = 96
_READER = Path(__file__).with_name("weights_reader.py")


def weights(bench: Bench) -> list[Row]:
    """Measure all ways to read, with a new mount and an empty cache for each."""
    _make(bench)
    with far(bench.server.endpoint, bench.directory) as endpoint:
        case = f"weights, {ROUND_TRIP_MS} ms away, {CONNECTION_MB_S} MB/s on a connection"
        rows = _measure(bench, case, endpoint, FAR_BAR)
    rows += _measure(bench, "weights, near", bench.server.endpoint)
    return rows + _serving(bench)


def _serving(bench: Bench) -> list[Row]:
    """Measure the cached file beside the same file on the local disk. As another user than root it
    comes through the relay, and nothing is dropped."""
    states = ["page-cached"] + (["page cache dropped"] if rig.can_drop_caches() else [])
    local, rows = bench.local / "weights" / NAME, []
    mount = bench.mount("weights", "--workload", "serving", "--passthrough-from", "16MiB")
    with mount:
        mount.command("load", str(mount.path / NAME))
        for state in states:
            measured = _measure_cached(bench, state, {"local": local, "mount": mount.path / NAME})
            rows += [
                ratio_row(
                    f"weights, serving, {state}", name, "MB/s",
                    measured[way, "mount"], measured[way, "local"], "local", at_least=LOCAL_BAR,
                )
                for way, name in WAYS_CACHED.items()
            ]  # fmt: skip
        said = mount.status()["passthrough"]
        bench.say(f"{said['passed_through']} of {said['opens']} opens were passed through")
    discard(mount)
    return rows


def _measure_cached(
    bench: Bench, state: str, paths: dict[str, Path]
) -> dict[tuple[str, str], list[float]]:
    measured: dict[tuple[str, str], list[float]] = defaultdict(list)
    if rig.can_drop_caches():
        rig.drop_page_cache()  # what was written may lie in smaller pages than what was read
    for path in paths.values():
        _read_once(path, "read", 0)
    for turn in range(bench.scale.rounds):
        bench.say(f"weights, serving, {state}: round {turn + 1} of {bench.scale.rounds}")
        for way in WAYS_CACHED:
            for which in sorted(paths, reverse=turn % 2 == 1):
                if state != "page-cached":
                    rig.drop_page_cache()
                measured[way, which].append(_read_once(paths[which], way, turn))
    return measured


def _measure(bench: Bench, case: str, endpoint: str, bar: float | None = None) -> list[Row]:
    measured: dict[str, list[float]] = defaultdict(list)
    store = bench.server.store(endpoint)
    for turn in range(bench.scale.rounds):
        bench.say(f"{case}: round {turn + 1} of {bench.scale.rounds}")
        reading = direct.get_ranges(store, f"weights/{NAME}", bench.scale.large_bytes, _IN_FLIGHT)
        measured["direct"].append(reading.mb_s)
        for way in WAYS:
            measured[way].append(read(bench, endpoint, way, turn))
    return [
        ratio_row(case, name, "MB/s", measured[way], measured["direct"], "obstore", at_least=bar)
        for way, name in WAYS.items()
    ]


def read(bench: Bench, endpoint: str, way: str, seed: int) -> float:
    """Return MB/s of one cold reading."""
    mount = bench.mount("weights", endpoint=endpoint)
    with mount:
        mb_s = _read_once(mount.path / NAME, way, seed)
    discard(mount)
    return mb_s


def _read_once(path: Path, way: str, seed: int) -> float:
    result = subprocess.run(
        [sys.executable, "-S", "-E", _READER, path, way, str(seed)],
        stdout=subprocess.PIPE, check=True, timeout=300,
    )  # fmt: skip
    size_bytes, seconds = map(float, result.stdout.split())
    return size_bytes / seconds / 1e6


def _make(bench: Bench) -> None:
    """Make and upload a file of `Scale.large_bytes` in the format of safetensors: the length of the
    head in 8 bytes, the head in JSON, then the tensors."""
    directory = bench.local / "weights"
    directory.mkdir(parents=True, exist_ok=True)
    bench.say(f"making and uploading weights of {bench.scale.large_bytes >> 20} MiB")
    path = directory / NAME
    write_safetensors(path, bench.scale.large_bytes)
    rig.upload(bench.store, [(f"weights/{NAME}", path)])


def write_safetensors(path: Path, size_bytes: int) -> None:
    """Write `_TENSORS` tensors. Each layer of eight has two small ones, as norms are, and six
    matrices of different sizes."""
    head_bytes = 32 << 10
    left = size_bytes - head_bytes
    shares = [0.0, 4, 1, 1, 4, 0.0, 6, 6]
    unit = left // (sum(shares) * _TENSORS / len(shares))
    sizes = [int(share * unit) & ~0xFFF or 16 << 10 for share in shares] * (_TENSORS // 8)
    sizes[-1] = left - sum(sizes[:-1])
    head, at = {}, 0
    for number, size in enumerate(sizes):
        head[f"model.layers.{number // 8}.{number % 8}.weight"] = {
            "dtype": "U8", "shape": [size], "data_offsets": [at, at + size],
        }  # fmt: skip
        at += size
    text = json.dumps(head).encode().ljust(head_bytes - 8)
    noise = random.Random("weights").randbytes(16 << 20)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        while (missing := size_bytes - file.tell()) > 0:
            start = file.tell() // 1000 % (8 << 20)
            file.write(noise[start : start + min(missing, 8 << 20)])
