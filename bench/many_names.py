"""`python -m bench.many_names` measures a mount with millions of names: memory, find and unmount.

It loads the names with `cachefs load --metadata`, runs `find` with a stat of each file twice, and
unmounts while the kernel holds what it wants of the names. The objects are computed and never
stored. A thread samples the memory of the daemon ten times a second.
"""

import argparse
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import procfs, rig, sandbox
from bench.generated_s3 import BUCKET, GeneratedS3

NAMES = 4_000_000
MEMORY_BAR_BYTES = 250_000_000
UNMOUNT_BAR_S = 3.0
_TIMEOUT_S = 1_800


def main() -> None:
    """Parse the arguments and run in the sandbox."""
    parser = argparse.ArgumentParser(prog="python -m bench.many_names", description=__doc__)
    parser.add_argument("--names", type=int, default=NAMES)
    parser.add_argument("--prefix", choices=("tree", "flat"), default="tree")
    arguments = parser.parse_args()
    sandbox.run("many_names", lambda directory: _work(directory, arguments))


def _work(directory: Path, arguments: argparse.Namespace) -> int:
    count: int = arguments.names
    with GeneratedS3(count) as server:
        mount = rig.Mount(
            directory / f"names-{random.getrandbits(32):08x}",
            f"s3://{BUCKET}/{arguments.prefix}",
            server.environment,
            server.endpoint,
            ["--cache-size", "256MiB", "--free-space-ratio", "0.01"]
            + [f"--{name}-ttl=1d" for name in ("list", "entry", "attr")],
        )
        with mount, _memory_peak(mount.status()["pid"]) as peak:
            _timed(count, "load", [*rig.cachefs_command(), "load", str(mount.path), "--metadata"])
            for _ in range(2):
                command = ["find", str(mount.path), "-type", "f", "-size", "+1", "-printf", "x"]
                found = _timed(count, "find", command)
                if len(found) != count:
                    raise RuntimeError(f"find found {len(found):,} files instead of {count:,}")
            began = time.monotonic()
            subprocess.run([*rig.cachefs_command(), "umount", str(mount.path)], check=True)
            unmount_s = time.monotonic() - began
    largest, own = max(peak), max(own for _, own in peak)
    print(f"unmount: {unmount_s:.2f} s (bar {UNMOUNT_BAR_S} s)")
    print(f"most memory of the daemon: {largest[0] / 1e6:.0f} MB, of its own {own / 1e6:.0f} MB")
    print(f"(bar {MEMORY_BAR_BYTES / 1e6:.0f} MB)")
    return int(unmount_s > UNMOUNT_BAR_S or largest[0] > MEMORY_BAR_BYTES)


def _timed(count: int, what: str, command: list[str]) -> bytes:
    began = time.monotonic()
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=_TIMEOUT_S).stdout
    seconds = time.monotonic() - began
    print(f"{what}: {seconds:.1f} s, {count / seconds:,.0f} names/s", flush=True)
    return said


@contextmanager
def _memory_peak(pid: int) -> Iterator[list[tuple[int, int]]]:
    """Collect `VmRSS` and `RssAnon` of a process, in bytes, until the block ends."""
    samples: list[tuple[int, int]] = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(0.1):
            try:
                memory = procfs.memory_bytes(pid)
                samples.append((memory["VmRSS"], memory["RssAnon"]))
            except (OSError, KeyError):
                return

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    main()
