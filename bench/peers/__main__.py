"""`python -m bench.peers` compares cachefs, JuiceFS, rclone, s3fs-fuse and the local disk.

If the environment variables GEESEFS and MOUNTPOINT_S3 name their binaries, geesefs and
mountpoint-s3 take part, too.

It starts an S3 server on loopback, mounts each peer as its manual advises, and runs each workload
on the peers in turn, on the same data. A whole run writes bench/RESULTS.md and bench/peers.svg; a
part of it (--quick, --only, --peers) writes both to bench/out. All values are in peers.json in
bench/out. A footnote names each workload that a peer can't do or fails. As root it also drops the
kernel's page cache (of the whole machine); otherwise it omits the figures that need this.
"""

import argparse
import datetime
import json
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before the sandbox starts, nothing needs cleanup

from bench import sandbox

if TYPE_CHECKING:
    from bench.peers.lab import Lab

WORKLOADS = {
    "cold": 3, "cached": 4, "memory": 2, "large": 3, "lmdb": 2, "import": 3, "names": 5,
    "warmup": 1, "epochs": 3,
}  # fmt: skip
"""The workloads, with the time that they may take relative to each other."""
PEER_NAMES = ("cachefs", "JuiceFS", "rclone", "s3fs", "geesefs", "mountpoint", "local")
_BENCH = Path(__file__).resolve().parent.parent
_FULL_S, _QUICK_S = 35 * 60, 5 * 60
"""The time limits. The run makes fewer rounds to keep them, but at least one round per workload. A
signal ends the run after twice the limit and 5 minutes."""
_LAST_START = 1.5
"""No workload starts after more than this share of the time limit."""


def main() -> None:
    """Parse the arguments and run in the sandbox."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    scales = parser.add_mutually_exclusive_group()
    scales.add_argument("--quick", action="store_true", help="one round of less, about 5 minutes")
    scales.add_argument("--tiny", action="store_true", help="just see whether it works")
    parser.add_argument(
        "--only", action="append", choices=WORKLOADS, help="this workload; several are possible"
    )
    parser.add_argument(
        "--peers", type=_peers, default=list(PEER_NAMES), metavar="A,B",
        help=f"these peers only, of {','.join(PEER_NAMES)}",
    )  # fmt: skip
    for name in ("cachefs", "juicefs", "rclone", "geesefs", "mountpoint"):
        parser.add_argument(
            f"--{name}-option", action="append", default=[], metavar="WORD",
            help=f"a word more on the command line of {name} mount, as --{name}-option=--verify"
            if name == "cachefs" else f"the same for {name}",
        )  # fmt: skip
    parser.add_argument(
        "--beside", metavar="WORDS",
        help="mount cachefs a second time, with these words more on its command line, as cachefs-2",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, help="how many rounds, instead of 3")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--out", type=Path, help="write RESULTS.md and the plot there")
    arguments = parser.parse_args()
    sandbox.run("peers", lambda directory: _work(directory, arguments))


def _peers(text: str) -> list[str]:
    by_lower = {name.lower(): name for name in PEER_NAMES}
    names = text.lower().split(",")
    if unknown := [name for name in names if name not in by_lower]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
    return [name for name in PEER_NAMES if name.lower() in names]


def _work(directory: Path, arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from bench import machine, rig
    from bench.case import Bench
    from bench.peers.bars import judge
    from bench.peers.lab import FULL, QUICK, TINY, Lab

    limit_s = _QUICK_S if arguments.quick or arguments.tiny else _FULL_S
    signal.alarm(2 * limit_s + 300)
    began = time.monotonic()
    console = Console(highlight=False)

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began:4.0f} s  {text}", soft_wrap=True, markup=False)

    description = machine.describe(directory)
    scale = QUICK if arguments.quick else TINY if arguments.tiny else FULL
    if arguments.rounds:
        import dataclasses

        scale = dataclasses.replace(scale, rounds=arguments.rounds)
    with rig.server(directory / "server") as server:
        bench = Bench(directory, server, scale, say, server.store())
        workloads = _workloads(arguments.only)
        peers = _make_peers(bench, arguments, say)
        weights = {name: float(WORKLOADS[name]) for name, _ in workloads}
        lab = Lab(bench, scale, peers, began + limit_s, weights)
        lab.prepare()
        versions = {peer.name: peer.version() for peer in lab.peers if peer.name != "local"}
        for name, workload in workloads:
            started = time.monotonic()
            if started - began > limit_s * _LAST_START:
                say(f"{name}: skipped, the time is over")
                continue
            workload(lab)
            say(f"{name}: took {time.monotonic() - started:.0f} s")
        if "local" in arguments.peers:
            versions["local: Linux"] = description["kernel"]
    seconds = time.monotonic() - began
    console.print()
    _print(console, lab)
    for path in _write(arguments, lab, description, versions, seconds):
        console.print(f"wrote {path}", soft_wrap=True)
    if not rig.can_drop_caches():
        console.print("the figures with the page cache dropped need root; they are left out")
    return int(arguments.strict and any(verdict.met is False for verdict in judge(lab.measures)))


def _make_peers(bench: Any, arguments: argparse.Namespace, say: Callable[[str], None]) -> list[Any]:
    from bench.peers.contestants import PEERS

    peers = []
    for peer in PEERS:
        if peer.kind not in arguments.peers:
            continue
        if reason := peer.missing():
            say(f"without {peer.kind}: {reason}")
            continue
        options = getattr(arguments, f"{peer.kind.lower()}_option", [])
        words = [word for option in options for word in shlex.split(option)]
        peers.append(peer(bench, words))
        if peer.kind == "cachefs" and arguments.beside is not None:
            peers.append(peer(bench, words + shlex.split(arguments.beside), "cachefs-2"))
    return peers


def _workloads(only: list[str] | None) -> "list[tuple[str, Callable[[Lab], None]]]":
    from bench.peers import epochs, large_file, lmdb_gets, names, packages, small_files, warm_up

    workloads = {
        "cold": small_files.cold,
        "cached": small_files.cached,
        "memory": small_files.memory,
        "large": large_file.large_file,
        "lmdb": lmdb_gets.lmdb_gets,
        "import": packages.packages,
        "names": names.names,
        "warmup": warm_up.warm_up,
        "epochs": epochs.epochs,
    }
    return [(name, workloads[name]) for name in WORKLOADS if not only or name in only]


def _print(console: Any, lab: "Lab") -> None:
    from rich.table import Table

    from bench.peers.bars import judge
    from bench.peers.figures import FIGURES
    from bench.peers.markdown import title_of
    from bench.report import show

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1))
    table.add_column("")
    table.add_column("unit")
    for peer in lab.peers:
        table.add_column(peer.name, justify="right")
    for figure in FIGURES.values():
        medians = [lab.measures.median(figure.key, peer.name) for peer in lab.peers]
        if any(median is not None for median in medians):
            cells = ["-" if median is None else show(median) for median in medians]
            table.add_row(title_of(figure), figure.unit, *cells)
    console.print(table)
    for failed, text in lab.failures.items():
        console.print(f"{': '.join(failed)}: {text}", markup=False, soft_wrap=True)
    for verdict in judge(lab.measures):
        if verdict.met is not None:
            word = "met" if verdict.met else "MISSED"
            title = title_of(FIGURES[verdict.bar.key])
            against = f"{verdict.ratio:.2f}x {verdict.bar.against}"
            console.print(
                f"{word:6} {title}: {against}, target {verdict.bar.target}",
                markup=False, soft_wrap=True,
            )  # fmt: skip


def _write(
    arguments: argparse.Namespace,
    lab: "Lab",
    description: dict[str, Any],
    versions: dict[str, str],
    seconds: float,
) -> list[Path]:
    """Write RESULTS.md, the plot, and everything as JSON. Return the paths."""
    from bench.peers import markdown, plot

    whole = not (arguments.quick or arguments.tiny or arguments.only)
    whole = whole and arguments.peers == list(PEER_NAMES) and arguments.beside is None
    directory = arguments.out or (_BENCH if whole else _BENCH / "out")
    beside = arguments.out or _BENCH / "out"
    for path in (directory, beside):
        path.mkdir(parents=True, exist_ok=True)
    today = datetime.datetime.now(datetime.UTC).date()
    facts = [
        f"{today}, cachefs {description['commit']}; the whole run took {seconds / 60:.0f} minutes",
        *markdown.describe(description),
        _describe(lab),
    ]
    names = [peer.name for peer in lab.peers]
    command_lines = {
        peer.name: peer.first_command_line.replace(f"{peer.bench.directory}/", "DIR/")
        for peer in lab.peers
    }
    results, picture = directory / "RESULTS.md", directory / "peers.svg"
    values = beside / "peers.json"
    results.write_text(
        markdown.render(lab.measures, names, facts, versions, command_lines, picture.name, whole)
    )
    picture.write_text(plot.draw(lab.measures, names))
    values.write_text(
        json.dumps(
            {
                "machine": description,
                "versions": versions,
                "command_lines": command_lines,
                "seconds": round(seconds, 1),
                "values": _nested(lab.measures.values),
                "notes": _nested(lab.measures.notes),
            },
            indent=2,
        )
        + "\n"
    )
    return [results, picture, values]


def _describe(lab: "Lab") -> str:
    scale = lab.scale
    rounds = ", ".join(f"{name} {count}" for name, count in lab.rounds_made.items())
    return (
        f"rounds: {rounds}; {scale.small_files:,} small files ({scale.cold_files:,} for the "
        f"cold figures), one file of {scale.large_bytes >> 20} MiB, {scale.names:,} names"
    )


def _nested(flat: dict[tuple[str, str], Any]) -> dict[str, dict[str, Any]]:
    nested: dict[str, dict[str, Any]] = {}
    for (key, peer), value in flat.items():
        nested.setdefault(key, {})[peer] = value
    return nested


if __name__ == "__main__":
    main()
