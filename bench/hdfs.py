"""Read 2,000 files of 100 KB on HDFS cold, without page cache and warm; compare hdfs-native."""

import contextlib
import os
import random
import shutil
from collections import defaultdict
from pathlib import Path

from bench import direct, rig
from bench.case import Bench, shuffled
from bench.report import Row, ratio_row
from bench.rig import Reading
from tests.servers.hdfs import Hdfs, what_is_missing

FILES, FILE_BYTES, READERS = 2_000, 100_000, 16
COLD_BAR, DROPPED_BAR, WARM_BAR = 0.4, 5.0, 8.0
_DIRECTORY = "/bench/small"
_DROPPED = "second epoch, page cache dropped"
_DROPPED_MEM = "the same, blocks in a MEM tier"
_DROPPED_LOCAL = "local ext4, page cache dropped"
"""A reference without cachefs: the speed of the disk."""


def hdfs(bench: Bench) -> list[Row]:
    """Return the figures; none without Java or Maven."""
    missing = what_is_missing()
    if missing:
        bench.say(missing)
        return []
    directory = bench.directory / "hdfs"
    directory.mkdir()
    with Hdfs(directory) as server:
        bench.say(f"writing {FILES:,} files of {FILE_BYTES // 1000} KB to HDFS")
        noise = random.Random(0).randbytes(FILES + FILE_BYTES)
        names = [f"{number:06}.jpg" for number in range(FILES)]
        local = directory / "local"
        local.mkdir()
        bodies = {name: noise[at : at + FILE_BYTES] for at, name in enumerate(names)}
        for name, body in bodies.items():
            (local / name).write_bytes(body)
        server.put_many((f"{_DIRECTORY}/{name}", body) for name, body in bodies.items())
        measured: dict[str, list[float]] = defaultdict(list)
        for turn in range(bench.scale.rounds):
            bench.say(f"HDFS: round {turn + 1} of {bench.scale.rounds}")
            _round(bench, server, local, names, turn, measured)
    case = f"{FILES:,} files of {FILE_BYTES // 1000} KB on HDFS, {READERS} readers"
    bars = {"cold": COLD_BAR, _DROPPED: DROPPED_BAR, _DROPPED_MEM: DROPPED_BAR,
            "third epoch, page cache warm": WARM_BAR}  # fmt: skip
    return [
        ratio_row(
            case, figure, "files/s", figures, measured["direct"], "hdfs-native",
            at_least=bars.get(figure),
        )
        for figure, figures in measured.items()
        if figure != "direct"
    ]  # fmt: skip


def _round(
    bench: Bench,
    server: Hdfs,
    local: Path,
    names: list[str],
    turn: int,
    measured: dict[str, list[float]],
) -> None:
    measured["direct"].append(_direct(server, shuffled(names, turn)).files_s)
    mount = _mount(bench, server, f"hdfs-mount-{turn}")
    with mount:
        measured["cold"].append(_read(bench, mount.path, shuffled(names, turn)))
        if rig.can_drop_caches():
            rig.drop_page_cache()
            measured[_DROPPED_LOCAL].append(_read(bench, local, shuffled(names, turn + 300)))
            rig.drop_page_cache()
            measured[_DROPPED].append(_read(bench, mount.path, shuffled(names, turn + 100)))
        measured["third epoch, page cache warm"].append(
            _read(bench, mount.path, shuffled(names, turn + 200))
        )
    mount.remove()
    if rig.can_drop_caches():
        _dropped_from_memory(bench, server, names, turn, measured[_DROPPED_MEM])


def _dropped_from_memory(
    bench: Bench, server: Hdfs, names: list[str], turn: int, figures: list[float]
) -> None:
    memory = Path(f"/dev/shm/cachefs-bench-{os.getpid()}")
    options = ("--mem-size", "512MiB", "--mem-dir", str(memory))
    mount = _mount(bench, server, f"hdfs-mem-{turn}", *options)
    try:
        with mount:
            _read(bench, mount.path, shuffled(names, turn))
            rig.drop_page_cache()
            figures.append(_read(bench, mount.path, shuffled(names, turn + 100)))
        mount.remove()
    finally:
        shutil.rmtree(memory, ignore_errors=True)


def _mount(bench: Bench, server: Hdfs, name: str, *options: str) -> rig.Mount:
    return rig.Mount(
        bench.directory / name,
        f"{server.url}{_DIRECTORY}",
        server.environment,
        None,
        ["--cache-size", "2GiB", "--free-space-ratio", "0.01", *options],
    )


def _direct(server: Hdfs, names: list[str]) -> Reading:
    """Read with one client of hdfs-native and as many threads as there are readers."""
    from hdfs_native import Client

    client = Client(server.url)

    def read(name: str) -> int:
        with contextlib.closing(client.read(f"{_DIRECTORY}/{name}")) as file:
            return len(file.read(FILE_BYTES))

    read(names[0])
    return direct.timed(read, names, READERS, len(names))


def _read(bench: Bench, root: Path, names: list[str]) -> float:
    return rig.read_files(root, names, READERS, list_file=bench.list_file, timeout_s=120).files_s
