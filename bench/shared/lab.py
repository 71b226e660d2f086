"""The parts of the measurements: members, nodes, and readers of several nodes at the same time."""

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench import rig
from bench.case import Bench, discard
from tests.servers.memcached import Memcached, flags

MEMBERS = 3
NODES = 6
LATENCY_MS = 20
_READER = Path(__file__).with_name("timed_reader.py")
_FILLS = 4
_QUIET_S = 0.7
_HEAD_START_S = 0.05


class Read(NamedTuple):
    """One read: when it began, on the monotonic clock, and how long it took."""

    began_at: float
    took_s: float


@dataclass(slots=True)
class Found:
    """What the readers of one node have seen."""

    reads: list[Read] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    errors: int = 0

    @property
    def bad(self) -> int:
        """Number of reads that failed or had wrong bytes."""
        return len(self.wrong) + self.errors


@dataclass(frozen=True, slots=True)
class Lab:
    """A benchmark with members. `endpoint` is the distant origin."""

    bench: Bench
    members: list[Memcached]
    endpoint: str

    @property
    def shared(self) -> list[str]:
        """The options of a mount that uses the members."""
        return ["--shared", ",".join(member.address for member in self.members)]

    def renew(self) -> None:
        """Start all members anew, so that they are empty."""
        for member in self.members:
            member.stop()
            member.start()

    @contextlib.contextmanager
    def nodes(
        self,
        prefix: str,
        count: int = 1,
        *,
        shared: Sequence[str] | None = None,
        endpoint: str | None = None,
        listed: bool = True,
    ) -> Iterator[list[rig.Mount]]:
        """Mount `prefix` on `count` nodes with empty caches, and discard them at the end. `shared`
        are other options than those of `self.shared`. With `listed` the names are known."""
        options = self.shared if shared is None else shared
        mounts = [
            self.bench.mount(prefix, *options, endpoint=endpoint or self.endpoint)
            for _ in range(count)
        ]
        with ThreadPoolExecutor(count) as pool:
            try:
                list(pool.map(rig.Mount.__enter__, mounts))
                if listed:
                    list(pool.map(rig.list_directory, [mount.path for mount in mounts]))
                yield mounts
            finally:
                list(pool.map(discard, mounts))

    @contextlib.contextmanager
    def node(self, prefix: str, **how: Any) -> Iterator[rig.Mount]:
        """Mount one node; see `nodes`."""
        with self.nodes(prefix, **how) as (mount,):
            yield mount

    def fill(self, prefix: str, count: int, endpoint: str | None = None) -> None:
        """Empty the members, and let nodes load all `count` blocks of a prefix until they have
        them. The endpoint is part of the blocks' keys. Raises `RuntimeError` if the members don't
        get all."""
        self.renew()
        for _ in range(_FILLS):
            with self.node(prefix, endpoint=endpoint) as mount:
                mount.command("load", str(mount.path))
                wait_until_stored([mount])
            if self.held_blocks() >= count:
                return
        raise RuntimeError(f"the members have {self.held_blocks()} of {count} blocks")

    def held_blocks(self) -> int:
        """Return how many values and leases the members have."""
        return sum(int(member.stats()["curr_items"]) for member in self.members)

    def read(self, mount: rig.Mount, names: Sequence[str], readers: int = 1) -> rig.Reading:
        """Read files of one node."""
        return rig.read_files(mount.path, names, readers, list_file=self.bench.list_file)

    def read_all(self, mounts: Sequence[rig.Mount], orders: Sequence[Sequence[str]]) -> rig.Reading:
        """Let one reader on each node read its names, all at the same time."""
        names = [
            f"{mount.path.relative_to(self.bench.directory)}/{name}"
            for some in zip(*orders, strict=True)
            for mount, name in zip(mounts, some, strict=True)
        ]
        return rig.read_files(
            self.bench.directory, names, len(mounts), list_file=self.bench.list_file
        )

    def read_timed(
        self,
        prefix: str,
        mounts: Sequence[rig.Mount],
        orders: Sequence[Sequence[str]],
        **how: Any,
    ) -> list[Found]:
        """Let one reader on each node read its names; see `read_mixed`."""
        tasks = [
            [(mount, name) for name in order] for mount, order in zip(mounts, orders, strict=True)
        ]
        return self.read_mixed(prefix, tasks, **how)

    def read_mixed(
        self,
        prefix: str,
        tasks: Sequence[Sequence[tuple[rig.Mount, str]]],
        *,
        pace_s: float = 0.0,
        offsets_s: Sequence[float] | None = None,
        on_begin: Callable[[float], None] = lambda _: None,
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> list[Found]:
        """Let one reader for each task read its files and compare them with the local ones, all at
        the same time, or `offsets_s` later. The tasks have equally many files. Calls `on_begin`
        with the time (CLOCK_MONOTONIC) of the begin, and `on_progress` with the number of files
        that the first reader has read, in another thread."""
        lines = [
            f"{mount.path.relative_to(self.bench.directory)}/{name} {prefix}/{name}\n"
            for some in zip(*tasks, strict=True)
            for mount, name in some
        ]
        self.bench.list_file.write_text("".join(lines), encoding="utf-8")
        fixed = (_READER, self.bench.directory, self.bench.local, self.bench.list_file)
        readers: list[subprocess.Popen[str]] = []
        try:
            for number in range(len(tasks)):
                arguments = [*fixed, number, len(tasks), pace_s]
                readers.append(
                    subprocess.Popen(
                        [sys.executable, "-S", "-E", *map(str, arguments)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
            begin_at = _begin(readers, offsets_s or [0.0] * len(tasks))
            on_begin(begin_at)
            return _follow(readers, on_progress)
        finally:
            for reader in readers:
                reader.kill()
                reader.communicate()


def _begin(readers: Sequence[subprocess.Popen[str]], offsets_s: Sequence[float]) -> float:
    for reader in readers:
        assert reader.stdout is not None
        if reader.stdout.readline() != "ready\n":
            raise RuntimeError("a reader failed; its error stands above")
    begin_at = time.monotonic() + _HEAD_START_S
    for reader, offset_s in zip(readers, offsets_s, strict=True):
        assert reader.stdin is not None
        reader.stdin.write(f"{begin_at + offset_s}\n")
        reader.stdin.flush()
    return begin_at


def _follow(
    readers: Sequence[subprocess.Popen[str]], on_progress: Callable[[int], None]
) -> list[Found]:
    with ThreadPoolExecutor(len(readers)) as pool:
        nothing: Callable[[int], None] = lambda _: None  # noqa: E731
        calls = [on_progress, *[nothing] * (len(readers) - 1)]
        return list(pool.map(_found, readers, calls))


def _found(reader: subprocess.Popen[str], on_progress: Callable[[int], None]) -> Found:
    assert reader.stdout is not None
    for line in reader.stdout:
        if line.startswith("at "):
            on_progress(int(line.split()[1]))
            continue
        said = json.loads(line)
        reads = [Read(*times) for times in said["times"]]
        return Found(reads, said["wrong"], sum(said["errors"].values()))
    raise RuntimeError("a reader failed; its error stands above")


def wait_until_stored(mounts: Sequence[rig.Mount]) -> None:
    """Wait until the nodes store no more blocks in the members."""
    before = -1
    while before != (now := sum(mount.status()["shared"]["stored_blocks"] for mount in mounts)):
        before = now
        time.sleep(_QUIET_S)


def p99_s(found: Sequence[Found]) -> float:
    """Return the 99th percentile of all reads."""
    return statistics.quantiles([read.took_s for each in found for read in each.reads], n=100)[98]


@contextlib.contextmanager
def members(directory: Path) -> Iterator[list[Memcached]]:
    """Run `MEMBERS` memcached with the flags of docs/SHARED_TIER.md."""
    with contextlib.ExitStack() as stack:
        places = [directory / f"member-{number}" for number in range(MEMBERS)]
        yield [stack.enter_context(Memcached(place, flags(place, "2G", 256))) for place in places]
