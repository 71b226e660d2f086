"""A run over all peers: make data on demand, allow failed attempts, collect figures."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import rig
from bench.case import Bench, Scale
from bench.peers import data
from bench.peers.figures import FIGURES, Measures
from bench.peers.peer import Cache, Peer

FAILURES = (RuntimeError, OSError, subprocess.SubprocessError)


@dataclass(frozen=True, slots=True)
class PeerScale(Scale):
    """The amount of work of a run."""

    cold_files: int
    random_s: float
    """The most seconds of one measurement of random reads."""
    epochs: int


FULL = PeerScale(
    rounds=3, small_files=5_000, large_bytes=512 << 20, names=100_000, warm_passes=8,
    cold_files=1_500, random_s=1.5, epochs=4,
)  # fmt: skip
QUICK = PeerScale(
    rounds=1, small_files=2_000, large_bytes=256 << 20, names=20_000, warm_passes=4,
    cold_files=500, random_s=1.0, epochs=4,
)  # fmt: skip
TINY = PeerScale(
    rounds=1, small_files=20, large_bytes=4 << 20, names=200, warm_passes=1,
    cold_files=10, random_s=0.2, epochs=2,
)  # fmt: skip


@dataclass(slots=True)
class Lab:
    """The context of a workload."""

    bench: Bench
    scale: PeerScale
    peers: Sequence[Peer]
    ends_at: float
    """The time limit on the monotonic clock. Later workloads make fewer rounds to keep it, but at
    least one round."""
    weights: dict[str, float]
    """The time that the remaining workloads may take, relative to each other."""
    measures: Measures = field(default_factory=Measures)
    rounds_made: dict[str, int] = field(default_factory=dict)
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    """The reasons of failures, by workload and peer."""
    _made: set[str] = field(default_factory=set)

    def prepare(self) -> None:
        """Prepare the peers. Call this once, before the first workload."""
        for peer in self.peers:
            peer.prepare()
            for beginning, note in {**peer.lacks, **peer.remarks}.items():
                for key, figure in FIGURES.items():
                    if beginning == figure.workload or f"{key}.".startswith(f"{beginning}."):
                        self.measures.notes[key, peer.name] = note

    def data(self, prefix: str) -> None:
        """Make a data set and copy it into the peers that need a copy, if not done yet."""
        if prefix not in self._made:
            data.make(self.bench, prefix)
            self._made.add(prefix)
            for peer in self.peers:
                with self.attempt(peer, prefix, 300):
                    peer.fill(prefix)

    def able(self, workload: str, turn: int = 0) -> list[Peer]:
        """Return the peers that support the workload and haven't failed in it. Their order rotates
        with the rounds; the local disk is last, because it drops the page cache."""
        able = [
            peer
            for peer in self.peers
            if (workload, peer.name) not in self.failures and workload not in peer.lacks
        ]
        mounts = [peer for peer in able if peer.bucket]
        turn %= max(len(mounts), 1)
        return mounts[turn:] + mounts[:turn] + [peer for peer in able if not peer.bucket]

    @contextlib.contextmanager
    def attempt(self, peer: Peer, workload: str, limit_s: float) -> Iterator[None]:
        """Run an attempt. If it fails or takes longer than `limit_s`, record this and exclude the
        peer from the workload."""
        late = threading.Event()

        def end() -> None:
            late.set()
            peer.abandon()

        watchdog = threading.Timer(limit_s, end)
        watchdog.start()
        try:
            yield
        except FAILURES as error:
            text = _one_line(str(error).replace(f"{self.bench.directory}/", ""))
            said = f"not within {limit_s:.0f} s" if late.is_set() else text or repr(error)
            self.bench.say(f"{workload}: {peer.name} failed: {said}")
            self.measures.notes[workload, peer.name] = said
            self.failures[workload, peer.name] = said
            peer.abandon()
        finally:
            watchdog.cancel()

    def rounds(self, workload: str) -> Iterator[int]:
        """Yield the number of each round, with the server's files in memory at its begin. Yields
        fewer than planned if they exceed the workload's share of the remaining time."""
        began = time.monotonic()
        left = sum(self.weights.values())
        share_s = (self.ends_at - began) * self.weights.pop(workload) / left
        for turn in range(self.scale.rounds):
            taken_s = time.monotonic() - began
            if turn and taken_s * (turn + 1) / turn > share_s:
                self.bench.say(f"{workload}: no time for round {turn + 1}")
                return
            self.bench.say(f"{workload}: round {turn + 1} of {self.scale.rounds}")
            self.warm_server()
            self.rounds_made[workload] = turn + 1
            yield turn

    @contextlib.contextmanager
    def all_mounted(self, workload: str, cache: Cache | None = None) -> Iterator[None]:
        """Mount every peer that supports the workload, with an empty cache; unmount at the end."""
        for peer in self.able(workload):
            with self.attempt(peer, workload, 60):
                peer.wipe()
                peer.mount(cache)
        yield
        self.unmount_all(workload)

    def unmount_all(self, workload: str) -> None:
        for peer in self.able(workload):
            with self.attempt(peer, workload, 60):
                peer.unmount()
                peer.wipe()

    def warm_server(self) -> None:
        """Read all of the server's files, so that every peer finds them in the page cache."""
        buffer = bytearray(1 << 20)
        for path in sorted((self.bench.directory / "server" / "data").rglob("*")):
            if path.is_file():
                with path.open("rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass

    def gets(self, peer: Peer) -> int:
        """Return how many GETs of objects in the peer's bucket the server has answered so far."""
        return self.bench.server.object_gets(peer.bucket) if peer.bucket else 0

    def read(
        self, peer: Peer, prefix: str, names: Sequence[str], readers: int = 1, **how: Any
    ) -> rig.Reading:
        """Read files of a data set through a peer with `rig.read_files`."""
        return rig.read_files(
            peer.path / prefix, names, readers, list_file=self.bench.list_file, **how
        )

    @contextlib.contextmanager
    def cost(self, key: str, peer: Peer) -> Iterator[list[rig.Reading]]:
        """Record as `cpu.KEY` the CPU seconds per GB of the readings that the caller adds to the
        yielded list. If there are such figures, also record the share of the busiest thread as
        `busiest.KEY`, and what follows from it as `most.KEY`."""
        readings: list[rig.Reading] = []
        before = peer.usage()
        yield readings
        after = peer.usage()
        if not peer.bucket:
            return
        read_gb = sum(reading.bytes for reading in readings) / 1e9
        self.measures.add(f"cpu.{key}", peer.name, (after.cpu_s - before.cpu_s) / read_gb)
        if busiest := FIGURES.get(f"busiest.{key}"):
            spent_s = after.busiest_since(before)
            if busiest.unit == "s/GB":
                self.measures.add(busiest.key, peer.name, spent_s / read_gb)
                self.measures.add(f"most.{key}", peer.name, read_gb * 1e3 / spent_s)
            else:
                files = sum(reading.files for reading in readings)
                self.measures.add(busiest.key, peer.name, spent_s / files * 1e3)
                self.measures.add(f"most.{key}", peer.name, files / spent_s)


def run_script(name: str, *arguments: object, site: bool = False) -> list[float]:
    """Run a script of this directory and return the numbers that it prints. Raises `RuntimeError`
    if it fails."""
    how = [] if site else ["-I", "-S", "-B"]
    done = subprocess.run(
        [sys.executable, *how, str(Path(__file__).with_name(name)), *map(str, arguments)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(_one_line(done.stderr) or f"{name} failed")
    return [float(word) for word in done.stdout.split()]


def _one_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else ""
