"""A process that writes to a spool until it is killed, and says what it has acknowledged.

`python -m tests.staging.killed_writer ROOT SEED`. Before each operation it prints `begin NUMBER`,
and after it `done NUMBER`. `steps` gives the same operations for the same seed."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import trio

from cachefs.staging import journal as journal_module
from cachefs.staging.spool import Spool
from cachefs.types import ObjectMeta
from tests.staging.harness import SOURCE

BASE = bytes(range(256)) * 400
FILES = 6


def steps(seed: int) -> Iterator[tuple[int, int, bytes]]:
    """File, offset and data, without end. Files with an even number track extents."""
    chance = random.Random(seed)
    while True:
        length = chance.choice((1, 100, 5_000, 70_000))
        yield chance.randrange(FILES), chance.randrange(100_000), chance.randbytes(1) * length


async def main(root: Path, seed: int) -> None:
    journal_module._DEAD_BYTES = 20_000  # it is written anew many times
    spool = await Spool.open(root, SOURCE, 1 << 30)
    files = []
    for number in range(FILES):
        base = None if number % 2 else ObjectMeta(len(BASE), 0, "v")
        files.append(spool.begin(number + 10, f"file {number}", base))
    async with trio.open_nursery() as nursery:
        await nursery.start(spool.run)
        for number, (which, offset, data) in enumerate(steps(seed)):
            print(f"begin {number}", flush=True)
            files[which].write(offset, data)
            print(f"done {number}", flush=True)
            await trio.lowlevel.checkpoint()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), int(sys.argv[2]))
