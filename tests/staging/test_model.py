"""Random operations, a kill within any write to the disk, and recovery: compared with a model."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachefs.staging.answers import RESENT
from cachefs.staging.disk import SpoolDisk
from cachefs.staging.file_state import FileState
from cachefs.staging.spool import Spool
from cachefs.staging.staged_file import StagedFile
from tests.staging.harness import CONNECTION, SOURCE, content_of, crashed, meta_of

BASE = bytes(range(1, 101))
SIZES = st.integers(0, 140)
WHICH = st.integers(0, 3)
MOST = int(os.environ.get("MODEL_EXAMPLES", "60"))
OPERATIONS = st.one_of(
    st.tuples(st.just("begin"), st.booleans()),
    st.tuples(st.just("write"), WHICH, SIZES, st.integers(1, 40)),
    st.tuples(st.just("write"), WHICH, SIZES, st.integers(1, 40)),
    st.tuples(st.just("truncate"), WHICH, SIZES),
    st.tuples(st.just("seal"), WHICH),
    st.tuples(st.just("sync"), WHICH),
    st.tuples(st.just("attributes"), WHICH, st.integers(-5, 5)),
    st.tuples(st.just("rename"), WHICH, st.text(max_size=5)),
    st.tuples(st.just("upload"), WHICH),
    st.tuples(st.just("part"), WHICH, st.integers(1, 3)),
    st.tuples(st.just("send"), WHICH),
    st.tuples(st.just("finish"), WHICH),
    st.tuples(st.just("conflict"), WHICH),
    st.tuples(st.just("drop"), WHICH),
    st.tuples(st.just("answer"), st.integers(0, 9)),
)


@dataclass
class ModelFile:
    """What a file must be."""

    path: str
    content: bytes
    tracks: bool
    sealed: bool = False
    state: FileState = FileState.OPEN
    mtime_ns: int | None = None
    parts: dict[int, bytes] | None = None
    """The parts that the origin has, with their content."""
    sending: bytes | None = None
    """What is being sent."""
    is_current: bool = False
    """Whether that is all there is to send."""


@dataclass
class Model:
    files: dict[int, ModelFile] = field(default_factory=dict)
    answers: dict[int, int] = field(default_factory=dict)

    def copy(self) -> "Model":
        files = {
            number: replace(file, parts=None if file.parts is None else dict(file.parts))
            for number, file in self.files.items()
        }
        return Model(files, dict(self.answers))


class Machine:
    """Runs operations on a spool and the model."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self.model = Model()
        self._next = 0
        self.bases = {"base": BASE}
        """The content of each version at the origin."""

    def chosen(self, which: int) -> tuple[StagedFile, ModelFile] | None:
        numbers = [n for n, file in self.spool.files.items() if file.is_attached]
        if not numbers:
            return None
        number = sorted(numbers)[which % len(numbers)]
        return self.spool.files[number], self.model.files[number]

    async def run(self, name: str, *args: Any) -> None:
        self._next += 1
        if name == "begin":
            tracks, path = args[0], f"file {self._next}"
            meta = meta_of(BASE, "base") if tracks else None
            file = self.spool.begin(1000 + self._next, path, meta, answering=self._next)
            self.model.files[file.number] = ModelFile(path, BASE if tracks else b"", tracks)
            self.model.answers[self._next] = 0
        elif name == "answer":
            self.spool.note_answer(self._next, args[0])
            self.model.answers[self._next] = args[0]
        elif (chosen := self.chosen(args[0])) is not None:
            await getattr(self, name)(*chosen, *args[1:])

    async def write(self, file: StagedFile, model: ModelFile, offset: int, length: int) -> None:
        data = bytes([self._next % 200 + 50]) * length
        file.write(offset, data)
        old = model.content.ljust(offset, b"\0")
        self.changed(model, old[:offset] + data + old[offset + length :], offset, offset + length)

    async def truncate(self, file: StagedFile, model: ModelFile, size: int) -> None:
        await file.truncate(size)
        begin = min(size, len(model.content))
        self.changed(model, model.content[:size].ljust(size, b"\0"), begin, 1 << 62)

    def changed(self, model: ModelFile, content: bytes, begin: int, end: int) -> None:
        model.content, model.sealed, model.mtime_ns, model.is_current = content, False, None, False
        if model.parts is not None:
            for number in list(model.parts):
                if number * 40 - 40 < end and begin < number * 40:
                    del model.parts[number]

    async def seal(self, file: StagedFile, model: ModelFile) -> None:
        file.seal()
        model.sealed = True

    async def sync(self, file: StagedFile, _: ModelFile) -> None:
        await file.sync()

    async def attributes(self, file: StagedFile, model: ModelFile, mtime_ns: int) -> None:
        file.set_attributes(mtime_ns=mtime_ns)
        model.mtime_ns, model.is_current = mtime_ns, False

    async def rename(self, file: StagedFile, model: ModelFile, path: str) -> None:
        file.rename(path)
        model.path, model.is_current = path, False

    async def upload(self, file: StagedFile, model: ModelFile) -> None:
        file.start_upload("id", "write", file.path)
        model.parts = {}

    async def part(self, file: StagedFile, model: ModelFile, number: int) -> None:
        if model.parts is not None:
            part = file.begin_part(number, 40 * number - 40, 40)
            assert file.finish_part(part, "tag")
            model.parts[number] = model.content[40 * number - 40 : 40 * number]

    async def send(self, file: StagedFile, model: ModelFile) -> None:
        file.begin_sending()
        model.sending, model.is_current = model.content, True

    async def finish(self, file: StagedFile, model: ModelFile) -> None:
        if model.sending is None:
            return
        version = f"version {self._next}"
        self.bases[version] = model.sending
        assert file.finish(meta_of(model.sending, version)) is model.is_current
        if model.is_current:
            del self.model.files[file.number]
        else:
            model.parts = model.sending = None

    async def conflict(self, file: StagedFile, model: ModelFile) -> None:
        file.conflict("why")
        model.state = FileState.CONFLICT

    async def drop(self, file: StagedFile, _: ModelFile) -> None:
        file.drop()
        del self.model.files[file.number]


async def content(file: StagedFile, bases: dict[str, bytes]) -> bytes:
    return await content_of(file, b"" if file.base is None else bases[file.base.version])


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
    for unique, errno in model.answers.items():
        assert spool.answer_to(unique | RESENT) == errno
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
    for unique, errno in before.answers.items():
        assert spool.answer_to(unique | RESENT) == errno
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
    spool = await Spool.open(root / "spool", SOURCE, 1 << 30, CONNECTION, disk)
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
        spool = await Spool.open(whole / "spool", SOURCE, 1 << 30, CONNECTION)
        await check_same(spool, machine)
        assert not spool.report.ignored_bytes
        await spool.close()
    if disk.place.exists():
        spool = await Spool.open(disk.place / "spool", SOURCE, 1 << 30, CONNECTION)
        assert not spool.report.is_damaged
        assert not spool.report.held
        await check_between(spool, machine, before)
        await spool.close()


@settings(max_examples=MOST, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(OPERATIONS, max_size=20), OPERATIONS, st.integers(0, 4), st.floats(0, 1))
def test_a_kill_within_any_write(
    operations: list[tuple[Any, ...]], last: tuple[Any, ...], calls: int, cut: float
) -> None:
    with a_directory() as root:
        disk = KilledDisk(root, calls, cut)
        first = [("begin", True), ("begin", False)]
        trio.run(run_and_kill, root, [*first, *operations, last], disk)
