"""A process is killed while it writes: every acknowledged write is there."""

import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from cachefs.staging.spool import Spool
from tests.staging.harness import SOURCE, content_of
from tests.staging.killed_writer import BASE, FILES, steps

ROOT = Path(__file__).parents[2]


def write_until_killed(spool: Path, seed: int) -> int:
    """Return how many writes were acknowledged for sure: one more may be, and one begun."""
    command = [sys.executable, "-m", "tests.staging.killed_writer", str(spool), str(seed)]
    wanted = random.Random(seed).randrange(1, 3_000)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        for _ in range(wanted):
            assert process.stdout.readline(), "it ended by itself"
        process.kill()
        rest = process.stdout.read().splitlines()[:-1]  # the last line may be cut
    return (wanted + len(rest)) // 2


@pytest.mark.parametrize("seed", range(4))
async def test_every_acknowledged_write_is_there(tmp_path: Path, seed: int) -> None:
    done = write_until_killed(tmp_path / "spool", seed)
    expected = [bytearray(b"" if which % 2 else BASE) for which in range(FILES)]
    for which, offset, data in islice(steps(seed), done):
        content = expected[which]
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(data)] = data
    spool = await Spool.open(tmp_path / "spool", SOURCE, 1 << 30)
    assert not spool.report.is_damaged
    open_steps = list(islice(steps(seed), done, done + 3))
    for which in range(FILES):
        file = spool.file_of(which + 10)
        assert file is not None
        found = await content_of(file, BASE)
        assert len(found) >= len(expected[which])
        allowed = [(at, at + len(data)) for number, at, data in open_steps if number == which]
        for at, byte in enumerate(expected[which]):
            if found[at] != byte:
                assert any(begin <= at < end for begin, end in allowed), (which, at)
    await spool.close()
