"""Measure loaders on a mount beside the same files on the local disk, in the same rounds.

The loaders are packages that cachefs does not need, some of them large. `LOADERS_PYTHON` names an
interpreter of an environment that has them.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench import rig
from bench.case import Bench, discard
from bench.far.origin import CONNECTION_MB_S, ROUND_TRIP_MS, far
from bench.report import Row, ratio_row
from bench.weights import write_safetensors

PYTHON = "LOADERS_PYTHON"


class MissingError(Exception):
    """The interpreter lacks a package."""


class Case(NamedTuple):
    """One loader: its name for reader.py, the directory that it reads, and the row's title."""

    loader: str
    format: str
    title: str


CASES = (
    Case("safetensors.keys", "safetensors", "safe_open, key order"),
    Case("safetensors.shuffled", "safetensors", "safe_open, shuffled"),
    Case("safetensors.slice", "safetensors", "safe_open, get_slice, half"),
    Case("safetensors.load_file", "safetensors", "safetensors.torch.load_file"),
    Case("safetensors.numpy", "safetensors", "safetensors.numpy.load_file"),
    Case("torch.mmap", "torch", "torch.load(mmap=True)"),
    Case("torch.read", "torch", "torch.load"),
    Case("fastsafetensors", "safetensors", "fastsafetensors"),
    Case("runai", "safetensors", "runai-model-streamer"),
    Case("transformers", "model", "transformers, 4 shards"),
    Case("gguf", "gguf", "GGUFReader"),
    Case("numpy", "numpy", "numpy.load(mmap_mode='r')"),
    Case("parquet", "parquet", "Parquet, 2 of 16 columns"),
    Case("datasets.all", "arrow", "datasets, all rows"),
    Case("datasets.random", "arrow", "datasets, 10 % at random"),
    Case("lmdb.all", "lmdb", "LMDB, cursor"),
    Case("lmdb.random", "lmdb", "LMDB, 5 % at random"),
    Case("webdataset", "webdataset", "webdataset, 4 workers"),
)
COLD = f"loaders, cold, {ROUND_TRIP_MS} ms away, {CONNECTION_MB_S} MB/s on a connection"
DROPPED = "loaders, cached, page cache dropped"
WARM = "loaders, page-cached"
ORIGIN = "loaders, cold, bytes from the origin beside those that were used"
_HERE = Path(__file__).parent
_SHARE = 2
"""The files of each format have this part of `Scale.large_bytes`, so a round takes minutes."""
_LOOK_S = 0.3
_MAKE_TIMEOUT_S = 300


class Read(NamedTuple):
    """What a loader has read: `checksum` is that of names and contents."""

    bytes: int
    checksum: int
    seconds: float

    @property
    def mb_s(self) -> float:
        return self.bytes / self.seconds / 1e6


def loaders(bench: Bench) -> list[Row]:
    """Measure all loaders that the interpreter has, each in each round with a new mount and an
    empty cache."""
    _make(bench)
    missing: dict[str, str] = {}
    measured: dict[tuple[str, Case], list[tuple[float, float]]] = defaultdict(list)
    with far(bench.server.endpoint, bench.directory) as endpoint:
        for turn in bench.rounds("loaders", bench.scale.rounds):
            for case in CASES:
                if case.loader not in missing:
                    try:
                        figures = _measure(bench, case, endpoint, turn)
                    except MissingError as error:
                        missing[case.loader] = str(error)
                        continue
                    for title, pair in figures.items():
                        measured[title, case].append(pair)
    if missing:
        found = "; ".join(f"{name} ({why})" for name, why in missing.items())
        bench.say(f"left out, for want of packages in {_python()}: {found}")
    return [
        _row(title, case.title, measured[title, case])
        for title in (COLD, DROPPED, WARM, ORIGIN)
        for case in CASES
        if (title, case) in measured
    ]


def _row(title: str, figure: str, pairs: list[tuple[float, float]]) -> Row:
    unit, against = ("MB", "used") if title == ORIGIN else ("MB/s", "local")
    return ratio_row(title, figure, unit, *map(list, zip(*pairs, strict=True)), against)


def _measure(bench: Bench, case: Case, endpoint: str, turn: int) -> dict[str, tuple[float, float]]:
    """Return the figures of the mount and of the local disk, by the titles of their tables. Raises
    `MissingError` if the interpreter has no such loader."""
    local = bench.local / "loaders" / case.format
    mount = bench.mount(f"loaders/{case.format}", "--workload", "serving", endpoint=endpoint)
    with mount, _reader(case.loader) as reader:
        expected = reader.read(local, turn)  # the first reading also loads libraries

        def mb_s(directory: Path, dropped: bool = False) -> float:
            if dropped and rig.can_drop_caches():
                rig.drop_page_cache()
            found = reader.read(directory, turn)
            if found[:2] != expected[:2]:
                raise RuntimeError(f"{case.loader} read other bytes from {directory} than before")
            return found.mb_s

        cold = mb_s(mount.path)
        origin_bytes = _when_all_is_stored(mount)
        figures = {ORIGIN: (origin_bytes / 1e6, expected.bytes / 1e6)}
        if rig.can_drop_caches():
            figures[DROPPED] = mb_s(mount.path, dropped=True), mb_s(local, dropped=True)
            figures[COLD] = cold, figures[DROPPED][1]
            reader.read(mount.path, turn)  # into the page cache again
        figures[WARM] = mb_s(mount.path), mb_s(local)
    discard(mount)
    return figures


def _when_all_is_stored(mount: rig.Mount) -> int:
    """Wait until nothing is fetched or stored any more. Return the bytes from the origin."""
    before: object = None
    while True:
        status = mount.status()
        got_bytes: int = status["origin"]["get_bytes"]
        now = (got_bytes, [tier["cached_blocks"] for tier in status["tiers"]])
        if now == before:
            return got_bytes
        before = now
        time.sleep(_LOOK_S)


class _Reader:
    """A process that reads with one loader."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def read(self, directory: Path, seed: int) -> Read:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed} {directory}\n")
        self._process.stdin.flush()
        size_bytes, checksum, seconds = self.line().split()
        return Read(int(size_bytes), int(checksum), float(seconds))

    def line(self) -> str:
        """Return the next line that it prints. Raises `RuntimeError` if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a loader failed; its error stands above")
        return line.rstrip("\n")


@contextlib.contextmanager
def _reader(loader: str) -> Iterator[_Reader]:
    with subprocess.Popen(
        [_python(), "-W", "ignore", _HERE / "reader.py", loader],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            reader = _Reader(process)
            said = reader.line()
            if said != "ready":
                raise MissingError(said)
            yield reader
        finally:
            process.kill()


def _python() -> str:
    return os.environ.get(PYTHON, sys.executable)


def _make(bench: Bench) -> None:
    """Make and upload the files."""
    directory = bench.local / "loaders"
    directory.mkdir(parents=True)
    weights = bench.local / "weights.safetensors"
    size_bytes = bench.scale.large_bytes // _SHARE
    bench.say(f"making and uploading files for loaders, {size_bytes >> 20} MiB of each format")
    write_safetensors(weights, size_bytes)
    formats = dict.fromkeys(case.format for case in CASES)
    subprocess.run(
        [_python(), "-W", "ignore", _HERE / "make_files.py", directory, weights, *formats],
        check=True, timeout=_MAKE_TIMEOUT_S,
    )  # fmt: skip
    weights.unlink()
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    rig.upload(bench.store, [(str(path.relative_to(bench.local)), path) for path in files])
