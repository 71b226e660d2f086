"""Compare two checkouts: `python -m bench.two_trees OLD NEW` (directories with a .venv each).

It mounts the same files with both and reads them in turn, round after round, so that other load on
the machine affects both. It prints the best time of each row and ratios. It must run as root.
"""

import argparse
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
SMALL, LARGE_BYTES = 400, 96 * MIB
READS = 600


def main() -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.two_trees", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="on the disk to be measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        sides = {"old": arguments.old.resolve(), "new": arguments.new.resolve()}
        _measure(Path(directory), sides, arguments.rounds)


def _measure(root: Path, trees: dict[str, Path], rounds: int) -> None:
    source = root / "source"
    source.mkdir()
    for number in range(SMALL):
        (source / f"s{number}").write_bytes(os.urandom(20_000 + number * 400))
    with (source / "large").open("wb") as file:
        for _ in range(LARGE_BYTES // MIB):
            file.write(os.urandom(MIB))
    measured: dict[tuple[str, str], list[float]] = defaultdict(list)
    mounted = []
    try:
        for side, tree in trees.items():
            point = root / side
            point.mkdir()
            _cachefs(tree, "mount", f"file://{source}", point, "--cache-dir", root / f"c-{side}")
            mounted.append((tree, point))
            for _ in range(3):  # until the files are stored and published to the relay
                _small(point), _in_order(point)
                time.sleep(1)
                _forget(point)
        for turn in range(rounds):
            for row, (read, prepare) in ROWS.items():
                order = list(trees) if turn % 2 else list(trees)[::-1]
                for side in order:
                    prepare(root / side, root / f"c-{side}")
                    measured[row, side].append(read(root / side))
    finally:
        for tree, point in mounted:
            _cachefs(tree, "umount", point)
    for row in ROWS:
        old, new = (measured[row, side] for side in trees)
        ratio = statistics.median(after / before for before, after in zip(old, new, strict=True))
        best = min(new) / min(old)
        print(f"{row:32}{min(old) * 1e3:9.1f} ms{min(new) * 1e3:9.1f} ms", end="")
        print(f"  time x {best:.3f} (best of each), x {ratio:.3f} (median of the rounds' ratios)")


def _cachefs(tree: Path, *args: object) -> None:
    subprocess.run([tree / ".venv/bin/cachefs", *map(str, args)], check=True)


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _small(point: Path) -> float:
    names = [f"s{number}" for number in range(SMALL)]
    random.shuffle(names)

    def work() -> None:
        for name in names:
            (point / name).read_bytes()

    return _timed(work)


def _in_order(point: Path) -> float:
    def work() -> None:
        with (point / "large").open("rb", buffering=0) as file:
            while file.read(MIB):
                pass

    return _timed(work)


def _at_random(length: int) -> Callable[[Path], float]:
    def read(point: Path) -> float:
        places = [random.randrange(LARGE_BYTES // length) * length for _ in range(READS)]

        def work() -> None:
            with (point / "large").open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                for place in places:
                    os.pread(file.fileno(), length, place)

        return _timed(work)

    return read


def _forget(directory: Path) -> None:
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _drop(point: Path, cache: Path) -> None:
    _forget(point)
    _forget(cache / "slabs")


def _drop_files(point: Path, cache: Path) -> None:
    _forget(point)


def _keep(point: Path, cache: Path) -> None:
    pass


ROWS: dict[str, tuple[Callable[[Path], float], Callable[[Path, Path], None]]] = {
    "small files, dropped": (_small, _drop),
    "small files, slabs in memory": (_small, _drop_files),
    "small files, warm": (_small, _keep),
    "in order, dropped": (_in_order, _drop),
    "in order, slabs in memory": (_in_order, _drop_files),
    "in order, warm": (_in_order, _keep),
    "random 4 KiB, dropped": (_at_random(4096), _drop),
    "random 4 KiB, slabs in memory": (_at_random(4096), _drop_files),
    "random 128 KiB, dropped": (_at_random(128 << 10), _drop),
}


if __name__ == "__main__":
    main()
