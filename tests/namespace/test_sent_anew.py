"""Uploads in parts that can't be continued: the spool has all bytes, so another one begins."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.errors import (
    AccessDeniedError,
    NotFoundError,
    NotOfferedError,
    OriginError,
    OriginUnavailableError,
    RefusedError,
)
from cachefs.namespace.namespace import ROOT_INO
from cachefs.origin.writable import (
    MOST_PARTS,
    NO_ATTRIBUTES,
    Attributes,
    Condition,
    Content,
    PartTag,
    Upload,
    content_of,
)
from cachefs.staging.spool import Spool
from cachefs.types import ObjectMeta
from cachefs.writes.sending import sender
from tests.namespace.harness import Reading, ScriptedOrigin
from tests.namespace.test_written_names import Mount, ObjectStore

PIECE = b"12345678" * (1 << 17)
SIZE_MIB = 20


class PartStore(ObjectStore):
    """An `ObjectStore` with uploads in parts. `gone` are uploads that it has dropped by itself."""

    def __init__(self, origin: ScriptedOrigin) -> None:
        super().__init__(origin, can_rename=False)
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.gone: set[str] = set()
        self.failures: list[OriginError] = []
        """What the next lists of parts raise."""
        self.refusal: OriginError = NotOfferedError("no UploadPartCopy")
        self._ids = count(1)

    async def start_upload(
        self, path: str, attributes: Attributes = NO_ATTRIBUTES, write_id: str | None = None
    ) -> Upload:
        async with self._request("start", path):
            upload_id = f"upload {next(self._ids)}"
            self.uploads[upload_id] = {}
        return Upload(path, upload_id, write_id or "")

    def _parts(self, upload: Upload) -> dict[int, bytes]:
        if upload.upload_id in self.gone or upload.upload_id not in self.uploads:
            raise NotFoundError("no such upload")
        return self.uploads[upload.upload_id]

    async def put_part(
        self, upload: Upload, number: int, offset: int, body: bytes | Content
    ) -> PartTag:
        async with self._request("part", upload.path):
            content = content_of(body)
            data = await trio.to_thread.run_sync(content.read, 0, content.size_bytes)
            self._parts(upload)[number] = bytes(data)
        return PartTag(number, content.size_bytes, f"{number}")

    async def copy_part(
        self, upload: Upload, number: int, offset: int, path: str, meta: ObjectMeta, length: int
    ) -> PartTag:
        async with self._request("copy part", upload.path):
            raise self.refusal

    async def parts(self, upload: Upload) -> list[PartTag]:
        async with self._request("list", upload.path):
            if self.failures:
                raise self.failures.pop(0)
            found = self._parts(upload)
        return [PartTag(number, len(data), f"{number}") for number, data in found.items()]

    async def complete(
        self,
        upload: Upload,
        parts: Sequence[PartTag],
        condition: Condition | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> ObjectMeta:
        async with self._request("complete", upload.path):
            found = self._parts(upload)
            self._check(upload.path, condition)
            meta = self._origin.put(upload.path, b"".join(found[part.number] for part in parts))
            del self.uploads[upload.upload_id]
        return meta

    async def abort(self, upload: Upload) -> None:
        async with self._request("abort", upload.path):
            self.uploads.pop(upload.upload_id, None)


@pytest.fixture
async def mount(reading: Reading, tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[Mount]:
    spool = await Spool.open(tmp_path / "spool", reading.origin.identity, 1 << 30)
    await nursery.start(spool.run)
    yield Mount(reading, spool, PartStore(reading.origin))
    await spool.close()


def store_of(mount: Mount) -> Any:
    return mount.store


async def begun(mount: Mount) -> int:
    """A file of which the store has all parts, whose daemon has been replaced since."""
    ino = await mount.create(ROOT_INO, b"large")
    for position in range(SIZE_MIB):
        await mount.files.write(ino, position << 20, PIECE, 1)

    async def away(kind: str, path: str) -> None:
        if kind == "complete":
            raise OriginUnavailableError("away")

    mount.store.before = away
    with pytest.raises(OriginUnavailableError):
        await mount.files.close(ino, 1)
    mount.store.before = None
    mount.store.requests.clear()
    file = mount.files.entry(ino)
    assert file is not None
    file.knows_parts = False
    file.note_writer(1)
    return ino


@pytest.mark.parametrize(
    "failure",
    [
        AccessDeniedError("no s3:ListMultipartUploadParts"),
        OriginError("NotImplemented"),
        NotFoundError("it has expired"),
    ],
)
async def test_parts_that_can_not_be_listed_are_sent_again(mount: Mount, failure) -> None:
    ino = await begun(mount)
    if isinstance(failure, NotFoundError):
        store_of(mount).gone.update(store_of(mount).uploads)
    else:
        store_of(mount).failures.append(failure)
    await mount.files.close(ino, 1)
    assert mount.objects()["large"] == PIECE * SIZE_MIB
    assert store_of(mount).uploads == {}


async def test_a_store_that_is_away_is_asked_once_more_for_its_parts(mount: Mount) -> None:
    ino = await begun(mount)
    store_of(mount).failures += [OriginUnavailableError("HTTP 500")] * 5
    with pytest.raises(OriginUnavailableError):
        await mount.files.close(ino, 1)
    await mount.files.send_changed(ino)
    assert mount.objects()["large"] == PIECE * SIZE_MIB
    assert len(store_of(mount).failures) == 3


async def test_an_upload_that_the_store_has_dropped_is_replaced(mount: Mount) -> None:
    ino = await begun(mount)
    file = mount.files.entry(ino)
    assert file is not None
    file.knows_parts = True
    store_of(mount).gone.update(store_of(mount).uploads)
    await mount.files.close(ino, 1)
    assert mount.objects()["large"] == PIECE * SIZE_MIB


@pytest.mark.parametrize(
    "refusal",
    [NotOfferedError("501"), RefusedError("400"), AccessDeniedError("403"), NotFoundError("404")],
)
async def test_parts_that_the_store_does_not_copy_are_sent(
    mount: Mount, refusal: OriginError
) -> None:
    store_of(mount).refusal = refusal
    before = PIECE * SIZE_MIB
    mount.origin.put("base", before)
    inode = await mount.tree.find("base")
    await mount.files.write(inode.ino, len(before), b"and more", 1)
    await mount.files.close(inode.ino, 1)
    assert mount.objects()["base"] == before + b"and more"
    assert ("copy part", "base") in mount.store.requests
    await mount.files.write(inode.ino, 0, b"changed", 1)
    mount.store.requests.clear()
    await mount.files.close(inode.ino, 1)
    assert mount.objects()["base"] == b"changed" + before[7:] + b"and more"
    is_asked_again = ("copy part", "base") in mount.store.requests
    assert is_asked_again is not isinstance(refusal, NotOfferedError)


async def test_a_file_that_outgrows_its_parts_gets_larger_ones(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts of an object are equal, but the last one."""

    def small_steps(size_bytes: int, most_parts: int = MOST_PARTS) -> int:
        return (4 if size_bytes <= SIZE_MIB << 20 else 7) << 20

    monkeypatch.setattr(sender, "part_bytes", small_steps)
    ino = await begun(mount)
    assert {len(data) for data in store_of(mount).uploads["upload 1"].values()} == {4 << 20}
    await mount.files.write(ino, SIZE_MIB << 20, PIECE, 1)
    joined: list[list[int]] = []
    complete = store_of(mount).complete

    async def note_parts(upload: Upload, parts: Sequence[PartTag], *more: Any) -> ObjectMeta:
        joined.append([part.size_bytes >> 20 for part in sorted(parts)])
        meta: ObjectMeta = await complete(upload, parts, *more)
        return meta

    store_of(mount).complete = note_parts
    await mount.files.close(ino, 1)
    assert joined == [[7, 7, 7]]
    assert mount.objects()["large"] == PIECE * (SIZE_MIB + 1)
    assert store_of(mount).uploads == {}


async def test_a_lone_file_is_sent_with_more_requests_than_each_of_several(
    mount: Mount, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "part_bytes", lambda *sizes: 1 << 20)
    under_way: Counter[str] = Counter()
    wanted = {"lone": 8, "second": 4}
    are_under_way = {path: trio.Event() for path in wanted}
    go_on = trio.Event()

    async def before(kind: str, path: str) -> None:
        if kind == "part":
            under_way[path] += 1
            if under_way[path] == wanted[path]:
                are_under_way[path].set()
            await go_on.wait()

    mount.store.before = before
    inos = []
    for name in (b"lone", b"second"):
        ino = await mount.create(ROOT_INO, name)
        for position in range(SIZE_MIB):
            await mount.files.write(ino, position << 20, PIECE, 1)
        inos.append(ino)
    for ino, path in zip(inos, wanted, strict=True):
        nursery.start_soon(mount.files.close, ino, 1)
        await are_under_way[path].wait()
        await trio.testing.wait_all_tasks_blocked()
    assert under_way == wanted
    go_on.set()
    for ino in inos:
        await mount.files.close(ino, 1)
    assert under_way == {"lone": SIZE_MIB, "second": SIZE_MIB}
    assert mount.objects()["lone"] == mount.objects()["second"] == PIECE * SIZE_MIB
