"""Power cuts at random moments: what was synced is there, and nothing else is published."""

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from cachefs.staging import recovery as recovery_module
from cachefs.staging.file_state import FileState
from cachefs.staging.spool import Spool
from tests.staging.harness import SOURCE
from tests.staging.model import OPERATIONS, SETTINGS, WHICH, Machine, content
from tests.staging.power_cut import PowerCutDisk


async def run_and_cut(root: Path, operations: list[tuple[Any, ...]], seed: int) -> None:
    disk = PowerCutDisk(root)
    spool = await Spool.open(root / "spool", SOURCE, 1 << 30, disk)
    machine = Machine(spool)
    synced: dict[int, set[bytes]] = {}
    """The contents with which each file was synced."""
    for operation in [("begin", True), ("begin", False), *operations]:
        await machine.run(*operation)
        for number, file in spool.files.items():
            if file.is_synced:
                synced.setdefault(number, set()).add(machine.model.files[number].content)
    safe = {
        number: model.content
        for number, model in machine.model.files.items()
        if model.sealed and spool.files[number].is_synced and model.state is FileState.OPEN
    }
    disk.cut(root / "after", random.Random(seed))
    await spool.close()
    with pytest.MonkeyPatch.context() as reboot:
        reboot.setattr(recovery_module, "boot_id", lambda: b"the next system.")
        spool = await Spool.open(root / "after/spool", SOURCE, 1 << 30)
    for number, expected in safe.items():
        assert number in spool.files, "what was synced is there"
        assert await content(spool.files[number], machine.bases) == expected
    for number, file in spool.files.items():
        if file.is_attached:
            assert file.is_sealed
            assert await content(file, machine.bases) in synced[number]
    await spool.close()


@pytest.mark.long
@SETTINGS
@given(
    st.lists(OPERATIONS, max_size=15),
    WHICH,
    st.lists(OPERATIONS, max_size=4),
    st.integers(0, 1 << 30),
)
@pytest.mark.expect_log("spool .*: (its journal|.* files)", required=False)
def test_a_power_cut(
    before: list[tuple[Any, ...]], which: int, after: list[tuple[Any, ...]], seed: int
) -> None:
    """One file is closed and synced; it may be changed afterwards."""
    closed = [("write", which, 0, 30), ("seal", which), ("sync", which)]
    root = Path(tempfile.mkdtemp(prefix="cachefs-test-"))
    try:
        trio.run(run_and_cut, root, [*before, *closed, *after], seed)
    finally:
        shutil.rmtree(root)
