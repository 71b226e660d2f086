"""Measure the way of bytes from the store to a reader, and what it costs the daemon.

With `--base DIR` the cachefs of another work tree, whose compiled parts are built, takes turns with
this one. CPU is that of the daemon, user and system, until it rests after the reads: of its main
thread, on which all Python runs, and of all its threads.
"""

import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench import direct, procfs, rig, writes
from bench.case import Bench, Scale, shuffled, small_sizes
from bench.far import case as far_case
from bench.far.origin import CONNECTION_MB_S, ROUND_TRIP_MS, far
from bench.large_file import direct_mb_s
from bench.load import load_small
from bench.peers.contestants import Cachefs
from bench.peers.peer import Peer
from bench.report import Row, ratio_row, show
from bench.small_files import COLD_READERS, DIRECT_IN_FLIGHT

ROUNDS = 5
MAIN_MS_BAR, ALL_MS_BAR = 0.12, 0.8
"""Per cold small file."""
MAIN_S_GB_BAR, ALL_S_GB_BAR = 0.07, 1.1
SMALL_BAR, LARGE_BAR, TLS_BAR = 0.9, 0.8, 0.8
FAR_LARGE_BAR_MB_S = 300.0
LOAD_BAR, FAR_LOAD_BAR = 1.0, 0.95
WRITTEN_BAR = 1.2
_MOST_WRITTEN = 1_000
_REST_S, _REST_SHARE = 0.3, 0.03
"""A daemon rests when it used less than this share of a core for so long."""
_MOST_UNREST_S = 10.0
_OURS, _BASE = "cachefs", "base"

Figures = dict[str, dict[str, list[float]]]
"""The values of all rounds, by figure and side: cachefs, base, and what they are compared with."""


@dataclass(slots=True)
class _Cost:
    """CPU seconds of a daemon."""

    main_s: float = 0.0
    all_s: float = 0.0


def wire(bench: Bench, base: Path | None = None) -> list[Row]:
    """Measure, with a new mount and an empty cache for each figure and side of a round."""
    sides = {_OURS: bench}
    if base is not None:
        sides[_BASE] = bench.of_tree(base)
        _check(sides[_BASE], base)
    names, large = bench.small_files(), bench.large_file()
    direct.get_all(bench.store, [f"small/{name}" for name in names], DIRECT_IN_FLIGHT)
    direct.get_ranges(bench.store, f"large/{large}", bench.scale.large_bytes, 4)
    peers = writes.others(bench)
    for peer in peers:
        peer.prepare()
    figures: Figures = defaultdict(lambda: defaultdict(list))
    with far(bench.server.endpoint, bench.directory) as endpoint:
        for turn in bench.rounds("wire", ROUNDS):
            one_round = _Round(bench, figures, turn)
            one_round.obstore(endpoint)
            for side in sorted(sides, reverse=not turn % 2):
                one_round.reads(side, sides[side], endpoint)
            one_round.written(sides, peers)
            one_round.tell(list(sides))
    return rows(bench.scale, figures, "" if base is None else _commit(base))


def _check(bench: Bench, base: Path) -> None:
    """Raise `RuntimeError` if the cachefs of `base` isn't the one that a mount of `bench` runs."""
    done = subprocess.run(
        [sys.executable, "-c", "import cachefs; print(cachefs.__file__)"],
        env=bench.environment, stdout=subprocess.PIPE, text=True, check=True, timeout=60,
    )  # fmt: skip
    if not Path(done.stdout.strip()).is_relative_to(base):
        raise RuntimeError(f"{base} is no work tree of cachefs: {done.stdout.strip()} was imported")


def _commit(base: Path) -> str:
    git = ["git", "-c", f"safe.directory={base}", "-C", str(base)]
    done = subprocess.run(
        [*git, "describe", "--always", "--dirty", "--abbrev=12"],
        stdout=subprocess.PIPE, text=True, check=False, timeout=20,
    )  # fmt: skip
    return done.stdout.strip() or str(base)


class _Round:
    """One round: each method adds to the figures."""

    def __init__(self, bench: Bench, figures: Figures, turn: int) -> None:
        self._bench = bench
        self._figures = figures
        self._turn = turn
        self._order = shuffled(bench.small_files(), 4000 + turn)

    def obstore(self, far_endpoint: str) -> None:
        """Send the GETs that the reads need, without a mount."""
        bench = self._bench
        keys = [f"small/{name}" for name in self._order]
        before_s = time.process_time()
        self._add("small", "obstore", direct.get_all(bench.store, keys, DIRECT_IN_FLIGHT).files_s)
        self._add("small.all", "obstore", (time.process_time() - before_s) / len(keys) * 1e3)
        self._add("large", "obstore", direct_mb_s(bench))
        store = bench.server.store(far_endpoint)
        self._add("far.load", "obstore", direct.get_all(store, keys, far_case.IN_FLIGHT).files_s)

    def reads(self, side: str, bench: Bench, far_endpoint: str) -> None:
        """Read everything with one side."""
        reading, cost = self._read(bench, "small", self._order, COLD_READERS)
        self._add("small", side, reading.files_s)
        self._add("small.main", side, cost.main_s / reading.files * 1e3)
        self._add("small.all", side, cost.all_s / reading.files * 1e3)
        server = bench.server
        options = server.tls_options
        reading, _ = self._read(
            bench, "small", self._order, COLD_READERS, server.tls_endpoint, options
        )
        self._add("tls", side, reading.files_s)
        reading, cost = self._read(bench, "large", [bench.large_file()])
        self._add("large", side, reading.mb_s)
        self._add("large.main", side, cost.main_s / reading.bytes * 1e9)
        self._add("large.all", side, cost.all_s / reading.bytes * 1e9)
        self._add("far.large", side, far_case.read_large(bench, far_endpoint))
        self._add("load", side, load_small(bench))
        self._add("far.load", side, load_small(bench, endpoint=far_endpoint))

    def written(self, sides: dict[str, Bench], peers: list[Peer]) -> None:
        """Write small files with each side and each peer."""
        bench = self._bench
        sizes = small_sizes(min(bench.scale.small_files, _MOST_WRITTEN))
        files = [(f"{number:06}.bin", size_bytes) for number, size_bytes in enumerate(sizes)]
        best = 0.0
        ours = [Cachefs(of_side, ["--rw"], name) for name, of_side in sides.items()]
        turns = [*peers, *ours]
        turn = self._turn % len(turns)
        for peer in turns[turn:] + turns[:turn]:
            if peer in ours:
                peer.prepare()
            try:
                with peer.fresh() as root:
                    directory = root / f"wire-{peer.name}-{self._turn}"
                    directory.mkdir()
                    written = writes.write(bench, peer, directory, files, writes.WRITERS)
            except writes.FAILURES as error:
                peer.abandon()
                if peer in ours:
                    raise
                bench.say(f"wire: {peer.name} failed: {error}")
                continue
            if peer in ours:
                self._add("written", peer.name, written.files_s)
            else:
                bench.say(f"wire: {peer.name}, small files written: {show(written.files_s)}/s")
                best = max(best, written.files_s)
        if not best:
            raise RuntimeError("no peer could write, so there is nothing to compare with")
        self._add("written", "best peer", best)

    def tell(self, sides: list[str]) -> None:
        """Print the figures of this round."""
        for side in sides:
            found = {key: values[side][-1] for key, values in self._figures.items()
                     if values.get(side)}  # fmt: skip
            self._bench.say(f"wire: {side}: " + ", ".join(f"{key} {show(value)}"
                            for key, value in found.items()))  # fmt: skip

    def _read(
        self,
        bench: Bench,
        prefix: str,
        names: list[str],
        readers: int = 1,
        endpoint: str | None = None,
        options: list[str] | None = None,
    ) -> tuple[rig.Reading, _Cost]:
        mount = bench.mount(prefix, *(options or []), endpoint=endpoint)
        with mount, _cost(mount) as cost:
            reading = rig.read_files(
                mount.path, names, readers, chunks=prefix == "large", list_file=bench.list_file,
                timeout_s=120,
            )  # fmt: skip
        mount.remove()
        return reading, cost

    def _add(self, figure: str, side: str, value: float) -> None:
        self._figures[figure][side].append(value)


@contextmanager
def _cost(mount: rig.Mount) -> Iterator[_Cost]:
    """Fill in the CPU time that the daemon uses during the `with` block and until it rests."""
    pid = mount.status()["pid"]
    cost = _Cost()
    before_s, main_before_s = procfs.cpu_s(pid), procfs.cpu_s_of_threads(pid)[pid]
    yield cost
    _wait_for_rest(lambda: sum(procfs.cpu_s_of_threads(pid).values()))
    cost.main_s = procfs.cpu_s_of_threads(pid)[pid] - main_before_s
    cost.all_s = procfs.cpu_s(pid) - before_s


def _wait_for_rest(used_s: Callable[[], float]) -> None:
    deadline = time.monotonic() + _MOST_UNREST_S
    before_s = used_s()
    while time.monotonic() < deadline:
        time.sleep(_REST_S)
        now_s = used_s()
        if now_s - before_s < _REST_SHARE * _REST_S:
            return
        before_s = now_s


# -- rows --------------------------------------------------------------------------------------


def rows(scale: Scale, figures: Figures, base: str) -> list[Row]:
    """Return the rows of all figures, with bars; `base` describes the other work tree, if any."""
    found = [*_cost_rows(figures), *_speed_rows(scale, figures)]
    if base:
        titles = {
            "small": ("cold, 16 readers", "files/s"),
            "tls": ("the same over TLS", "files/s"),
            "large": ("large file in order, cold", "MB/s"),
            "far.large": ("the same, far", "MB/s"),
            "load": ("load", "files/s"),
            "far.load": ("load, far", "files/s"),
            "written": (f"written, {writes.WRITERS} writers", "files/s"),
        }
        for key, (title, unit) in titles.items():
            ours, theirs = figures[key][_OURS], figures[key][_BASE]
            found.append(ratio_row(f"beside {base}", title, unit, ours, theirs, _BASE))
    return found


def _cost_rows(figures: Figures) -> list[Row]:
    case = "CPU of the daemon"
    return [
        _most(case, f"small, {COLD_READERS} readers: main thread", "ms/file",
              figures["small.main"], MAIN_MS_BAR),
        _most(case, f"small, {COLD_READERS} readers: all", "ms/file",
              figures["small.all"], ALL_MS_BAR),
        _most(case, "large, in order: main thread", "s/GB", figures["large.main"], MAIN_S_GB_BAR),
        _most(case, "large, in order: all", "s/GB", figures["large.all"], ALL_S_GB_BAR),
    ]  # fmt: skip


def _speed_rows(scale: Scale, figures: Figures) -> list[Row]:
    case = (
        f"{scale.small_files:,} files of 20-180 KB, one of {scale.large_bytes >> 20} MiB; "
        f"far: {ROUND_TRIP_MS} ms, {CONNECTION_MB_S} MB/s on a connection; "
        f"{len(figures['small'][_OURS])} rounds"
    )

    def beside(key: str, title: str, unit: str, other: str, bar: float, their: str = "") -> Row:
        theirs = figures[their or key][other]
        ours = figures[key][_OURS]
        return ratio_row(case, f"{title} / {'plain' if other == _OURS else other}", unit,
                         ours, theirs, other, at_least=bar)  # fmt: skip

    speeds = figures["far.large"][_OURS]
    median = statistics.median(speeds)
    far_large = Row(
        case, "large file in order, far", "MB/s", median, bar=f">= {FAR_LARGE_BAR_MB_S:g}",
        passed=median >= FAR_LARGE_BAR_MB_S, rounds={_OURS: speeds},
    )  # fmt: skip
    cost = figures["small.all"]
    return [
        beside("small", f"cold, {COLD_READERS} readers", "files/s", "obstore", SMALL_BAR),
        beside("large", "large file in order, cold", "MB/s", "obstore", LARGE_BAR),
        far_large,
        beside("load", "load", "files/s", "obstore", LOAD_BAR, "small"),
        beside("far.load", "load, far", "files/s", "obstore", FAR_LOAD_BAR),
        beside("tls", f"TLS, {COLD_READERS} readers", "files/s", _OURS, TLS_BAR, "small"),
        beside(
            "written", f"written, {writes.WRITERS} writers", "files/s", "best peer", WRITTEN_BAR
        ),
        ratio_row(
            case, "CPU per small file / obstore", "ms", cost[_OURS], cost["obstore"], "obstore"
        ),
    ]


def _most(case: str, figure: str, unit: str, sides: dict[str, list[float]], most: float) -> Row:
    """Return a row with an upper bar for cachefs, beside the base if that was measured."""
    ours = sides[_OURS]
    median = statistics.median(ours)
    row = Row(case, figure, unit, median, rounds={_OURS: ours})
    if sides.get(_BASE):
        row = ratio_row(case, figure, unit, ours, sides[_BASE], _BASE)
    return replace(row, bar=f"<= {most:g}", passed=median <= most)
