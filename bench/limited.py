"""`python -m bench.limited` measures readers of small files with a download limit, beside a load.

6 processes read 1,000 cold files of 4 to 34 KB with `--download-limit 2MiB/s`: alone, beside
`cachefs load` of one file of 64 MiB, and beside one process that reads this file in order. Each run
has a mount and a cache of its own, and the kinds alternate.
"""

import argparse
import random
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import rig, sandbox

READERS = 6
LEAST_BYTES, MOST_BYTES = 4_000, 34_000
LARGE, LARGE_BYTES = "large/file", 64 << 20
BAR = 1.5
KINDS = ("alone", "beside a load", "beside cat")
_READ_S = 600
_HEAD_START_S = 0.5


@dataclass(frozen=True, slots=True)
class _Round:
    """One pass over all small files, and what the mount fetched of the large file meanwhile."""

    seconds: float
    files: int
    small_bytes: int
    other_bytes: int


def main() -> None:
    """Parse the arguments and run in the sandbox."""
    parser = argparse.ArgumentParser(prog="python -m bench.limited", description=__doc__)
    parser.add_argument("--files", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", default="2MiB/s")
    parser.add_argument("--origin", choices=("s3", "file"), default="s3")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if the bar is missed")
    arguments = parser.parse_args()
    sandbox.run("limited", lambda directory: _work(directory, arguments))


def _work(directory: Path, arguments: argparse.Namespace) -> int:
    source = directory / "source"
    chance = random.Random(4_034)
    sizes = [chance.randrange(LEAST_BYTES, MOST_BYTES + 1) for _ in range(arguments.files)]
    names = [f"small/{number:04}" for number in range(len(sizes))]
    for name, size_bytes in [*zip(names, sizes, strict=True), (LARGE, LARGE_BYTES)]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(chance.randbytes(size_bytes))
    options = ["--download-limit", arguments.limit, "--free-space-ratio", "0.01"]
    print(f"{len(names):,} files, {sum(sizes) / (1 << 20):.1f} MiB, {READERS} readers")
    measured: dict[str, list[_Round]] = {kind: [] for kind in KINDS}
    with _origin(source, [*names, LARGE], directory, arguments.origin) as origin:
        for turn in range(arguments.rounds):
            for kind in KINDS:
                base = directory / f"{turn}-{kind.replace(' ', '-')}"
                mount = rig.Mount(base, *origin, options)
                found = _round(mount, base, names, kind)
                mount.remove()
                measured[kind].append(found)
                print(
                    f"{kind:14}  {found.seconds:5.1f} s  {found.files / found.seconds:5.0f} files/s"
                    f"  {found.small_bytes / found.seconds / (1 << 20):.2f} MiB/s for the readers,"
                    f" {found.other_bytes / found.seconds / (1 << 20):.2f} for the other",
                    flush=True,
                )
    ratios = {
        kind: statistics.median(
            other.seconds / alone.seconds
            for other, alone in zip(measured[kind], measured["alone"], strict=True)
        )
        for kind in KINDS[1:]
    }
    for kind, ratio in ratios.items():
        bar = f" (bar {BAR})" if kind == "beside a load" else ""
        print(f"{kind} / alone: {ratio:.2f} x{bar}")
    return int(arguments.strict and ratios["beside a load"] > BAR)


@contextmanager
def _origin(
    source: Path, names: list[str], directory: Path, kind: str
) -> Iterator[tuple[str, dict[str, str], str | None]]:
    """Yield the URL of an origin with these files, its environment and its endpoint."""
    if kind == "file":
        yield f"file://{source}", {}, None
        return
    with rig.server(directory / "server") as server:
        rig.upload(server.store(), ((name, source / name) for name in names))
        yield f"s3://{rig.BUCKET}", dict(server.environment), server.endpoint


def _round(mount: rig.Mount, base: Path, names: list[str], kind: str) -> _Round:
    with mount:
        rig.list_directory(mount.path / "small")
        command = {
            "alone": None,
            "beside a load": [*rig.cachefs_command(), "load", str(mount.path / "large")],
            "beside cat": ["cat", str(mount.path / LARGE)],
        }[kind]
        with _other(command):
            before = mount.status()["origin"]["get_bytes"]
            reading = rig.read_files(
                mount.path, names, READERS, list_file=base / "read.list", timeout_s=_READ_S
            )
            after = mount.status()["origin"]["get_bytes"]
    return _Round(reading.seconds, reading.files, reading.bytes, after - before - reading.bytes)


@contextmanager
def _other(command: list[str] | None) -> Iterator[None]:
    """Run another process meanwhile, which begins a little earlier."""
    if command is None:
        yield
        return
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as other:
        time.sleep(_HEAD_START_S)
        try:
            yield
        finally:
            other.kill()


if __name__ == "__main__":
    main()
