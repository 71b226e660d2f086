"""Measure how long the namespace takes to look up the version of a file that it knows."""

import timeit
from pathlib import Path

import trio

from bench.engine.findings import Findings, Grid
from bench.engine.rig import Options
from cachefs.namespace.clock import Clock
from cachefs.namespace.namespace import ROOT_INO
from cachefs.origin.resilience import Resilience, ResilientOrigin
from tests.namespace.harness import ScriptedOrigin, Tree

_FILES = 500
_ROUNDS = 200


def run(directory: Path, options: Options) -> Findings:
    """Look up all files of a directory again and again, and return the best round's times."""
    grid = Grid(
        f"look-ups of {_FILES} known files in one directory, best of {_ROUNDS} rounds",
        ("", "us"),
        note="version: the inode, its path and the object id, as each first read and each load "
        "need them.",
    )
    options.say("look-ups")
    trio.run(_measure, directory, grid)
    return Findings([grid])


async def _measure(directory: Path, grid: Grid) -> None:
    origin = ScriptedOrigin()
    for number in range(_FILES):
        origin.put(f"directory/{number:04}", b"content")
    async with trio.open_nursery() as nursery:
        resilient = ResilientOrigin(origin, Resilience(hedge=False))
        await nursery.start(resilient.run)
        tree = Tree(directory / "namespace", nursery, resilient, Clock())  # type: ignore[arg-type]
        await tree.start()
        namespace = tree.namespace
        above, _ = await namespace.lookup(ROOT_INO, b"directory")
        files = [await namespace.lookup(above.ino, b"%04d" % n) for n in range(_FILES)]
        inos = [inode.ino for inode, _ in files]
        await tree.db.commit()

        def inodes() -> None:
            for ino in inos:
                namespace.inode(ino)

        def versions() -> None:
            for ino in inos:
                namespace.object_ref(namespace.inode(ino))

        for name, work in (("inode", inodes), ("version", versions)):
            best_s = min(timeit.repeat(work, number=1, repeat=_ROUNDS))
            grid.rows.append([name, best_s / _FILES * 1e6])
        tree.db.abandon()
        nursery.cancel_scope.cancel()
