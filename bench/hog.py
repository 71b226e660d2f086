"""`python -m bench.hog` measures one user's reads while another user requests far too much.

The hog is limited to 64 KiB/s. Its 8 threads request 2 GiB ahead (posix_fadvise, WILLNEED), either
once, before the other reads begin, or in a loop. Meanwhile root reads files of 200 KB, cached (with
the kernel's pages dropped before each read) and cold. Runs with and without the hog alternate. A
hog in a loop also uses the processor. So does the control: 8 threads that only use the processor
and send nothing to the mount.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import rig, sandbox

HOG_UID = 4242
HOG_BYTES = 2 << 30
THREADS = 8
FILE_BYTES = 200_000
BAR = 2.0
KINDS = ("nobody", "once", "again", "spinning")

_HOG = """
import os, sys, threading
kind, threads = sys.argv[2], int(sys.argv[4])
directory = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
os.setuid(int(sys.argv[3]))
fd = os.open("hog", os.O_RDONLY, dir_fd=directory)
size = os.fstat(fd).st_size
def ask(number):
    while True:
        for start in range(number << 20, size, threads << 20):
            if kind == "spinning":
                sum(range(5_000))
                continue
            os.posix_fadvise(fd, start, 1 << 20, os.POSIX_FADV_WILLNEED)
            if kind == "again":
                os.posix_fadvise(fd, start - (256 << 20), 1 << 20, os.POSIX_FADV_DONTNEED)
        if kind == "once":
            return
asking = [threading.Thread(target=ask, args=[number], daemon=True) for number in range(threads)]
for thread in asking:
    thread.start()
if kind == "once":
    for thread in asking:
        thread.join()
print("asking", flush=True)
sys.stdin.readline()
os._exit(0)
"""

_READER = f"""
import json, os, sys, time
times = []
for path in json.loads(sys.stdin.read()):
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    assert len(os.read(fd, 1 << 20)) == {FILE_BYTES}
    times.append(time.perf_counter() - began)
    os.close(fd)
print(json.dumps(times))
"""


def main() -> None:
    """Parse the arguments and run in the sandbox."""
    parser = argparse.ArgumentParser(prog="python -m bench.hog", description=__doc__)
    parser.add_argument("--files", type=int, default=200, help="of each kind in each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strict", action="store_true", help="exit with 1 if the bar is missed")
    arguments = parser.parse_args()
    sandbox.run("hog", lambda directory: _work(directory, arguments))


def _work(directory: Path, arguments: argparse.Namespace) -> int:
    source = directory / "source"
    source.mkdir()
    with (source / "hog").open("wb") as file:
        file.truncate(HOG_BYTES)
    cached = [_make(source, f"cached{number}") for number in range(arguments.files)]
    colds = {
        (turn, kind): [
            _make(source, f"cold-{turn}-{kind}-{number}") for number in range(arguments.files)
        ]
        for turn in range(arguments.rounds)
        for kind in KINDS
    }
    options = ["--limit-uid", f"{HOG_UID}=64KiB", "--cache-size", "4GiB"]
    options += ["--free-space-ratio", "0.01", "--dir-mode", "755", "--file-mode", "644"]
    found: dict[tuple[str, str], list[float]] = {}
    with rig.Mount(directory / "mount", f"file://{source}", {}, None, options) as mount:
        _read(mount.path, cached)
        for turn in range(arguments.rounds):
            for kind in KINDS:
                cold = colds[turn, kind]
                with _hog(mount.path, kind):
                    for what, names in (("cached", cached), ("cold", cold)):
                        found.setdefault((what, kind), []).append(_p99(_read(mount.path, names)))
    missed = False
    for what in ("cached", "cold"):
        alone = found[what, "nobody"]
        for kind in KINDS:
            times = found[what, kind]
            ratio = statistics.median(n / a for n, a in zip(times, alone, strict=True))
            print(f"{what}, {kind}: p99 {1000 * statistics.median(times):.2f} ms, {ratio:.2f} x")
            missed |= kind == "once" and ratio > BAR
    return int(arguments.strict and missed)


def _make(source: Path, name: str) -> str:
    (source / name).write_bytes(os.urandom(FILE_BYTES))
    return name


def _read(root: Path, names: list[str]) -> list[float]:
    paths = json.dumps([str(root / name) for name in names])
    command = [sys.executable, "-S", "-E", "-c", _READER]
    done = subprocess.run(
        command, input=paths, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    times: list[float] = json.loads(done.stdout)
    return times


def _p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


@contextmanager
def _hog(root: Path, kind: str) -> Iterator[None]:
    if kind == "nobody":
        yield
        return
    command = [sys.executable, "-S", "-E", "-c", _HOG, str(root), kind, str(HOG_UID), str(THREADS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as hog:
        assert hog.stdin is not None
        assert hog.stdout is not None
        hog.stdout.readline()
        try:
            yield
        finally:
            hog.stdin.close()


if __name__ == "__main__":
    main()
