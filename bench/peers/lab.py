"""One run over all peers: data made on demand, attempts that may fail, figures that add up."""

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
    """How much is measured."""

    cold_files: int
    random_s: float
    """How long one measurement of random reads may take."""
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
    """What a workload gets."""

    bench: Bench
    scale: PeerScale
    peers: Sequence[Peer]
    ends_at: float
    """Of the monotonic clock. Later workloads have fewer rounds rather than end after that; one
    round is made in any case."""
    weights: dict[str, float]
    """What share of the time the workloads to come may take, relative to each other."""
    measures: Measures = field(default_factory=Measures)
    rounds_made: dict[str, int] = field(default_factory=dict)
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    """By workload and peer, what went wrong."""
    _made: set[str] = field(default_factory=set)

    def prepare(self) -> None:
        """Once, before the first workload."""
        for peer in self.peers:
            peer.prepare()
            for beginning, reason in peer.lacks.items():
                for key, figure in FIGURES.items():
                    if beginning == figure.workload or f"{key}.".startswith(f"{beginning}."):
                        self.measures.notes[key, peer.name] = reason

    def data(self, prefix: str) -> None:
        """Make a data set and fill it into the peers that need that, if it isn't there yet."""
        if prefix not in self._made:
            data.make(self.bench, prefix)
            self._made.add(prefix)
            for peer in self.peers:
                with self.attempt(peer, prefix, 300):
                    peer.fill(prefix)

    def able(self, workload: str, turn: int = 0) -> list[Peer]:
        """The peers that can do it and haven't failed, in an order that turns with the rounds;
        the local disk last, because the page cache is dropped for it."""
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
        """What fails in here, or takes longer, is noted, and the peer is out of this workload."""
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
        """The number of each round, with the server's files in memory at its beginning. Fewer
        than planned if they take more than the workload's share of the time that is left."""
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
        """Every peer that is able, with an empty cache; unmounted at the end."""
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
        """Read all that the server has on disk, so that no peer finds it colder than another."""
        buffer = bytearray(1 << 20)
        for path in sorted((self.bench.directory / "server" / "data").rglob("*")):
            if path.is_file():
                with path.open("rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass

    def gets(self, peer: Peer) -> int:
        """GETs of objects that the server has answered in the peer's bucket, so far."""
        return self.bench.server.object_gets(peer.bucket) if peer.bucket else 0

    def read(
        self, peer: Peer, prefix: str, names: Sequence[str], readers: int = 1, **how: Any
    ) -> rig.Reading:
        """`rig.read_files` of a data set through a peer."""
        return rig.read_files(
            peer.path / prefix, names, readers, list_file=self.bench.list_file, **how
        )

    @contextlib.contextmanager
    def cost(self, key: str, peer: Peer) -> Iterator[list[rig.Reading]]:
        """CPU seconds per GB of what is put into the list."""
        readings: list[rig.Reading] = []
        before = peer.usage().cpu_s
        yield readings
        spent_s = peer.usage().cpu_s - before
        if peer.bucket:
            read_bytes = sum(reading.bytes for reading in readings)
            self.measures.add(key, peer.name, spent_s / read_bytes * 1e9)


def run_script(name: str, *arguments: object, site: bool = False) -> list[float]:
    """The numbers that one of the scripts here prints. Raises `RuntimeError` if it fails."""
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
