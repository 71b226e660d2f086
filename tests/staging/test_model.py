"""Random operations, a kill within any write to the disk, and recovery: compared with a model."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st

from cachefs.staging.disk import SpoolDisk
from cachefs.staging.file_state import FileState
from cachefs.staging.spool import Spool
from cachefs.staging.staged_file import StagedFile
from tests.staging.harness import SOURCE, crashed
from tests.staging.model import OPERATIONS, SETTINGS, Machine, Model, ModelFile, content

WRITE_BEHIND_A_SHORT_PART: list[tuple[Any, ...]] = [
    ("conflict", 0),
    ("upload", 0),
    ("part", 0, 1),
    ("write", 0, 40, 1),
]


def fields(file: StagedFile) -> tuple[Any, ...]:
    parts = None if file.upload is None else sorted(file.upload.parts)
    return file.path, file.is_sealed, file.state, parts


def model_fields(file: ModelFile) -> tuple[Any, ...]:
    parts = None if file.parts is None else sorted(file.parts)
    return file.path, file.sealed, file.state, parts


async def check_same(spool: Spool, machine: Machine) -> None:
    """All is as in the model."""
    model = machine.model
    assert set(spool.files) == set(model.files)
    for number, file in spool.files.items():
        expected = model.files[number]
        assert await content(file, machine.bases) == expected.content
        found = fields(file)
        if file.state is FileState.SENDING:
            found = (*found[:2], FileState.OPEN, *found[3:])
        assert found == model_fields(expected)
        assert expected.mtime_ns in (None, file.mtime_ns)


async def check_between(spool: Spool, machine: Machine, before: Model) -> None:
    """All is as before the last operation or as after it; an unanswered write may be there in
    part. What counts as sealed, or as sent, is so in any case."""
    after = machine.model
    assert set(before.files) & set(after.files) <= set(spool.files)
    assert set(spool.files) <= set(before.files) | set(after.files)
    for number, file in spool.files.items():
        models = [each.files[number] for each in (before, after) if number in each.files]
        found = await content(file, machine.bases)
        sizes = [len(model.content) for model in models]
        assert min(sizes) <= len(found) <= max(sizes)
        for at, byte in enumerate(found):
            assert byte in {model.content[at] for model in models if at < len(model.content)}
        assert file.path in {model.path for model in models}
        assert file.state in {model.state for model in models}
        if file.is_sealed:
            assert found in {model.content for model in models if model.sealed}
        for part in () if file.upload is None else file.upload.parts:
            (sent,) = {model.parts[part] for model in models if part in (model.parts or {})}
            assert sent == found[40 * part - 40 : 40 * part], "a stale part"


class KilledDisk(SpoolDisk):
    """Copies the spool as a kill within one change of the disk leaves it."""

    def __init__(self, root: Path, calls: int, cut: float) -> None:
        self._root = root
        self._calls = calls
        """After so many calls comes the kill."""
        self._cut = cut
        """Which share of a write is made."""
        self.is_armed = False

    @property
    def place(self) -> Path:
        return self._root / "killed"

    def _count(self) -> bool:
        """Whether the kill is now. Copies the spool."""
        if not self.is_armed or self.place.exists():
            return False
        self._calls -= 1
        if self._calls >= 0:
            return False
        crashed(self._root, self.place)
        return True

    def create(self, path: Path) -> int:
        self._count()
        return super().create(path)

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._count()
        super().truncate(fd, size_bytes)

    def write(self, fd: int, data: Any, offset: int) -> None:
        if self._count():
            path = Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(self._root)
            copy = os.open(self.place / path, os.O_WRONLY)
            os.pwrite(copy, memoryview(data)[: int(self._cut * len(data))], offset)
            os.close(copy)
        super().write(fd, data, offset)


@contextmanager
def a_directory() -> Iterator[Path]:
    parent = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="cachefs-test-", dir=parent) as name:
        yield Path(name)


async def run_and_kill(root: Path, operations: list[tuple[Any, ...]], disk: KilledDisk) -> None:
    """Run all operations, keep what a kill within the last one leaves, and compare."""
    spool = await Spool.open(root / "spool", SOURCE, 1 << 30, disk)
    machine = Machine(spool)
    for operation in operations[:-1]:
        await machine.run(*operation)
    before = machine.model.copy()
    disk.is_armed = True
    await machine.run(*operations[-1])
    disk.is_armed = False
    await check_same(spool, machine)
    whole = crashed(root, root / "whole")
    await spool.close()
    for _ in range(2):  # the second time it reads the journal that was written anew
        spool = await Spool.open(whole / "spool", SOURCE, 1 << 30)
        await check_same(spool, machine)
        assert not spool.report.ignored_bytes
        await spool.close()
    if disk.place.exists():
        spool = await Spool.open(disk.place / "spool", SOURCE, 1 << 30)
        assert not spool.report.is_damaged
        assert not spool.report.held
        await check_between(spool, machine, before)
        await spool.close()


@pytest.mark.long
@SETTINGS
@given(st.lists(OPERATIONS, max_size=20), OPERATIONS, st.integers(0, 4), st.floats(0, 1))
@example(WRITE_BEHIND_A_SHORT_PART, ("begin", False), 0, 0.0)
def test_a_kill_within_any_write(
    operations: list[tuple[Any, ...]], last: tuple[Any, ...], calls: int, cut: float
) -> None:
    with a_directory() as root:
        disk = KilledDisk(root, calls, cut)
        first = [("begin", True), ("begin", False)]
        trio.run(run_and_kill, root, [*first, *operations, last], disk)
