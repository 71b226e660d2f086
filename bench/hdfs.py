"""2,000 files of 100 KB on HDFS: cold, page cache dropped, warm; beside hdfs-native itself."""

import contextlib
import random
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


def hdfs(bench: Bench) -> list[Row]:
    """Nothing where there is no Java or Maven."""
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
        server.put_many(
            (f"{_DIRECTORY}/{name}", noise[number : number + FILE_BYTES])
            for number, name in enumerate(names)
        )
        measured: dict[str, list[float]] = defaultdict(list)
        for turn in range(bench.scale.rounds):
            bench.say(f"HDFS: round {turn + 1} of {bench.scale.rounds}")
            _round(bench, server, names, turn, measured)
    case = f"{FILES:,} files of {FILE_BYTES // 1000} KB on HDFS, {READERS} readers"
    bars = {"cold": COLD_BAR, "second epoch, page cache dropped": DROPPED_BAR,
            "third epoch, page cache warm": WARM_BAR}  # fmt: skip
    return [
        ratio_row(
            case, figure, "files/s", figures, measured["direct"], "hdfs-native",
            at_least=bars[figure],
        )
        for figure, figures in measured.items()
        if figure != "direct"
    ]  # fmt: skip


def _round(
    bench: Bench, server: Hdfs, names: list[str], turn: int, measured: dict[str, list[float]]
) -> None:
    measured["direct"].append(_direct(server, shuffled(names, turn)).files_s)
    mount = rig.Mount(
        bench.directory / f"hdfs-mount-{turn}",
        f"{server.url}{_DIRECTORY}",
        server.environment,
        None,
        ["--cache-size", "2GiB", "--free-space-ratio", "0.01"],
    )
    with mount:
        measured["cold"].append(_read(bench, mount.path, shuffled(names, turn)))
        if rig.can_drop_caches():
            rig.drop_page_cache()
            measured["second epoch, page cache dropped"].append(
                _read(bench, mount.path, shuffled(names, turn + 100))
            )
        measured["third epoch, page cache warm"].append(
            _read(bench, mount.path, shuffled(names, turn + 200))
        )
    mount.remove()


def _direct(server: Hdfs, names: list[str]) -> Reading:
    """One client, as many threads as there are readers."""
    from hdfs_native import Client

    client = Client(server.url)

    def read(name: str) -> int:
        with contextlib.closing(client.read(f"{_DIRECTORY}/{name}")) as file:
            return len(file.read(FILE_BYTES))

    read(names[0])
    return direct.timed(read, names, READERS, len(names))


def _read(bench: Bench, root: Path, names: list[str]) -> float:
    return rig.read_files(root, names, READERS, list_file=bench.list_file, timeout_s=120).files_s
