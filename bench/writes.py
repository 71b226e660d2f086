"""Write to mounts: one large file, many small files, a checkpoint; and read beside it.

The contestants are cachefs, JuiceFS and rclone, s3fs if it is installed, and geesefs and
mountpoint-s3 if `GEESEFS` and `MOUNTPOINT_S3` name their binaries, each so that the store has a
file when its writer goes on. obstore, without any
file system, is the floor. They take turns in each round, and each row shows the median of the
ratios of the rounds.
"""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench import rig
from bench.case import Bench, shuffled, small_sizes
from bench.peers.contestants import Cachefs, Geesefs, JuiceFS, Mountpoint, Rclone, S3fs
from bench.peers.peer import Cache, Peer
from bench.report import Row, ratio_row

MIB = 1 << 20
WRITERS = 16
CHECKPOINT_SHARE = 4
"""The checkpoint has this part of the bytes of the large file."""
ROUNDS = 5
_PIECE_BYTES = 8 * MIB
_FLOOR = "obstore"
_CLOSES_BEFORE = {"geesefs"}
"""Peers whose close waits for no upload. Their writers sync each file, because their option
--fsync-on-close waits in RELEASE, and no close waits for that (core/goofys_fuse.go)."""
FAILURES = (RuntimeError, OSError, TimeoutError)


class WritableRclone(Rclone):
    """rclone without a cache for writes, so that close waits for the upload."""

    def words(self, cache: Cache) -> list[str]:
        """Return the options of its mount."""
        return [
            "--vfs-cache-mode", "off", "--dir-cache-time", "1h", "--attr-timeout", "1h",
            "--use-server-modtime", "--cache-dir", str(self.cache_dir(cache.in_memory)),
            *self.options,
        ]  # fmt: skip


class WritableGeesefs(Geesefs):
    """geesefs without a cache on disk."""

    def words(self, cache: Cache) -> list[str]:
        """Return the options of its mount."""
        return self.options


class WritableMountpoint(Mountpoint):
    """mountpoint-s3 without a cache: a file can be read only after it was closed."""

    def words(self, cache: Cache) -> list[str]:
        """Return the options of its mount."""
        return self.options


@dataclass(slots=True)
class Figures:
    """The values of all rounds, by figure and contestant. A failed measurement is None."""

    values: dict[str, dict[str, list[float | None]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def add(self, figure: str, contestant: str, value: float | None) -> None:
        self.values[figure][contestant].append(value)

    def pairs(self, figure: str, other: str) -> tuple[list[float], list[float]]:
        """Return the values of cachefs and of another contestant in the rounds that have both."""
        of = self.values[figure]
        both = [
            (ours, theirs)
            for ours, theirs in zip(of["cachefs"], of[other], strict=False)
            if ours is not None and theirs is not None
        ]
        return [ours for ours, _ in both], [theirs for _, theirs in both]


def writes(bench: Bench) -> list[Row]:
    """Return the figures of as many rounds as there is time for, at least one."""
    peers = [Cachefs(bench, ["--rw"]), *others(bench)]
    for peer in peers:
        peer.prepare()
    figures = Figures()
    for turn in bench.rounds("writes", ROUNDS):
        _floor(bench, figures, turn)
        for peer in peers[turn % len(peers) :] + peers[: turn % len(peers)]:
            try:
                with peer.fresh() as root:
                    _Round(bench, figures, peer, turn).run(root / f"{peer.name}-{turn}")
            except FAILURES as error:
                bench.say(f"writes: {peer.name} failed: {error}")
                peer.abandon()
    return _rows(bench, figures, [peer.name for peer in peers])


def others(bench: Bench) -> list[Peer]:
    """Return the contestants beside cachefs that this machine has."""
    peers = [
        JuiceFS(bench), WritableRclone(bench), S3fs(bench, ["rw"]), WritableGeesefs(bench),
        WritableMountpoint(bench),
    ]  # fmt: skip
    return [peer for peer in peers if peer.missing() is None]


def write(
    bench: Bench,
    peer: Peer,
    root: Path,
    files: Sequence[tuple[str, int]],
    writers: int = 1,
    how: str | None = None,
) -> rig.Reading:
    """Let writers write files, of which each has a name below `root` and a size in bytes, so that
    the store has a file when its writer goes on (see writer.py for `how`)."""
    how = how or ("SYNC" if peer.kind in _CLOSES_BEFORE else "CLOSE")
    return rig.write_files(root, files, writers, how=how, list_file=bench.list_file)


def _small(bench: Bench) -> list[tuple[str, int]]:
    sizes = small_sizes(bench.scale.small_files)
    return [(f"{number:06}.bin", size_bytes) for number, size_bytes in enumerate(sizes)]


def _large_bytes(bench: Bench) -> int:
    return 2 * bench.scale.large_bytes


def _checkpoint_bytes(bench: Bench) -> int:
    return _large_bytes(bench) // CHECKPOINT_SHARE


class _Round:
    """What one contestant does in one round, in a new mount with an empty cache."""

    def __init__(self, bench: Bench, figures: Figures, peer: Peer, turn: int) -> None:
        self._bench = bench
        self._figures = figures
        self._peer = peer
        self._turn = turn

    def run(self, root: Path) -> None:
        root.mkdir()
        for figure, measure in (
            ("large", self._large),
            ("small", self._small),
            ("checkpoint", self._checkpoint),
        ):
            self._note(figure, measure, root)
        for readers in (1, 4):
            self._note(f"read {readers}", partial(self._read, readers), root)

    def _note(self, figure: str, measure: Callable[[Path], float], root: Path) -> None:
        try:
            value: float | None = measure(root)
        except FAILURES as error:
            self._bench.say(f"writes: {self._peer.name}, {figure}: {error}")
            value = None
        self._figures.add(figure, self._peer.name, value)
        if value is not None:
            self._bench.say(f"writes: {self._peer.name}, {figure}: {value:,.0f}")

    def _large(self, root: Path) -> float:
        return self._write(root, [("large", _large_bytes(self._bench))]).mb_s

    def _small(self, root: Path) -> float:
        return self._write(root, _small(self._bench), WRITERS).files_s

    def _checkpoint(self, root: Path) -> float:
        bucket = self._peer.bucket or rig.BUCKET
        size_bytes = _checkpoint_bytes(self._bench)
        before = self._bench.server.received_bytes(bucket)
        written = self._write(root, [("checkpoint", size_bytes)], how="RENAME")
        received = self._bench.server.received_bytes(bucket) - before
        self._figures.add("received", self._peer.name, received / size_bytes)
        return written.mb_s

    def _write(
        self,
        root: Path,
        files: Sequence[tuple[str, int]],
        writers: int = 1,
        how: str | None = None,
    ) -> rig.Reading:
        return write(self._bench, self._peer, root, files, writers, how)

    def _read(self, readers: int, root: Path) -> float:
        bench = self._bench
        names = shuffled([name for name, _ in _small(bench)], self._turn)
        rig.read_files(root, names, 4, list_file=bench.list_file)
        passes = bench.scale.warm_passes
        return rig.read_files(
            root, names, readers, passes=passes, list_file=bench.list_file
        ).files_s


# -- the floor ---------------------------------------------------------------------------------


def _floor(bench: Bench, figures: Figures, turn: int) -> None:
    """Put the same objects with obstore."""
    noise = memoryview(os.urandom(_PIECE_BYTES + MIB))
    for figure, size_bytes in (
        ("large", _large_bytes(bench)),
        ("checkpoint", _checkpoint_bytes(bench)),
    ):
        began = time.monotonic()
        _put_in_parts(bench, f"floor-{turn}/{figure}", size_bytes, noise)
        figures.add(figure, _FLOOR, size_bytes / (time.monotonic() - began) / 1e6)
    files = _small(bench)
    objects = [
        (f"floor-{turn}/{name}", bytes(noise[number % MIB : number % MIB + size_bytes]))
        for number, (name, size_bytes) in enumerate(files)
    ]
    began = time.monotonic()
    rig.upload(bench.store, objects, WRITERS)
    figures.add("small", _FLOOR, len(files) / (time.monotonic() - began))


def _put_in_parts(bench: Bench, key: str, size_bytes: int, noise: memoryview) -> None:
    import obstore

    def pieces() -> Iterator[bytes]:
        for offset in range(0, size_bytes, _PIECE_BYTES):
            start = offset // _PIECE_BYTES % MIB
            yield bytes(noise[start : start + min(_PIECE_BYTES, size_bytes - offset)])

    obstore.put(bench.store, key, pieces(), chunk_size=_PIECE_BYTES, max_concurrency=8)


# -- rows --------------------------------------------------------------------------------------


def _rows(bench: Bench, figures: Figures, names: list[str]) -> list[Row]:
    count = bench.scale.small_files
    titles = {
        "large": (f"write {_large_bytes(bench) >> 20} MiB in order, and close", "MB/s"),
        "small": (
            f"write {count:,} files of 20-180 KB with {WRITERS} processes, close each",
            "files/s",
        ),
        "checkpoint": (
            f"write {_checkpoint_bytes(bench) >> 20} MiB, fsync, close and rename",
            "MB/s",
        ),
        "read 1": (f"read {count:,} files that were written, warm, 1 reader", "files/s"),
        "read 4": (f"read {count:,} files that were written, warm, 4 readers", "files/s"),
    }
    rows = []
    for figure, (title, unit) in titles.items():
        for other in (_FLOOR, *names[1:]):
            ours, theirs = figures.pairs(figure, other)
            if ours:
                rows.append(ratio_row(title, f"beside {other}", unit, ours, theirs, other))
    for name in names:
        received = [value for value in figures.values["received"][name] if value is not None]
        if received:
            title, _ = titles["checkpoint"]
            median = statistics.median(received)
            rows.append(
                Row(title, f"{name}: bytes received / written", "", median, rounds={name: received})
            )
    return rows
