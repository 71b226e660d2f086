"""A spool and a model of it, to which random operations are done."""

import os
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from cachefs.staging.file_state import FileState
from cachefs.staging.spool import Spool
from cachefs.staging.staged_file import StagedFile
from tests.staging.harness import content_of, meta_of

BASE = bytes(range(1, 101))
SIZES = st.integers(0, 140)
WHICH = st.integers(0, 3)
EXAMPLES = int(os.environ.get("CACHEFS_MODEL_EXAMPLES", "0"))
"""So many examples at random; 0: 60 that are the same in every run, so that CI fails for the change
that broke something."""
SETTINGS = settings(
    max_examples=EXAMPLES or 60,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
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

    def copy(self) -> "Model":
        files = {
            number: replace(file, parts=None if file.parts is None else dict(file.parts))
            for number, file in self.files.items()
        }
        return Model(files)


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
            file = self.spool.begin(1000 + self._next, path, meta)
            self.model.files[file.number] = ModelFile(path, BASE if tracks else b"", tracks)
        elif (chosen := self.chosen(args[0])) is not None:
            await getattr(self, name)(*chosen, *args[1:])

    async def write(self, file: StagedFile, model: ModelFile, offset: int, length: int) -> None:
        data = bytes([self._next % 200 + 50]) * length
        file.write(offset, data)
        begin = min(offset, len(model.content))
        old = model.content.ljust(offset, b"\0")
        self.changed(model, old[:offset] + data + old[offset + length :], begin, offset + length)

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
            file.discard()
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
