"""Power cuts at random moments. (A file of its own: files are what test processes share out.)"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachefs.cache.tier import index as index_module
from tests.cache.faulty_disk import undo
from tests.crash.rounds import EXPECTED, Rounds, Server
from tests.sizes import size


@contextmanager
def memory_directory() -> Iterator[Path]:
    """On tmpfs where there is one: undo files are written as fast as slabs."""
    parent = "/dev/shm" if os.path.isdir("/dev/shm") else None
    path = Path(tempfile.mkdtemp(prefix="cachefs-test-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.mark.timeout(3600)
@pytest.mark.expect_log(EXPECTED, required=False)
@pytest.mark.parametrize("seed", [2])
def test_power_cuts(
    server: Server, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is ever synced but the index, so that any of the writes to slabs may be lost."""
    rounds = Rounds(server, tmp_path, seed)
    with memory_directory() as memory:
        undo_file = memory / "undo"
        while rounds.go_on(size(15, 40)):
            order = rounds.order(undo_file)
            if rounds.chance(0.2):
                rounds.close(order)
            else:
                for _ in range(rounds.choose((1, 1, 2))):
                    rounds.crash(order)
            kept = rounds.choose((0.0, 0.1, 0.5, 0.9, 0.99))
            rounds.total["reverted"] += undo(
                undo_file,
                keep=lambda _, kept=kept: rounds.chance(kept),
                vanish=lambda _: rounds.chance(0.5),
            )
            with monkeypatch.context() as boot:
                boot.setattr(index_module, "boot_id", lambda: b"the next")
                rounds.verify(order)
    assert rounds.total["reverted"] > 0
    rounds.end()
