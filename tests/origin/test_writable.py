"""What every origin that can be written to promises, held against each of them."""

import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest
import trio

from cachefs.errors import (
    ConflictError,
    NotADirError,
    NotEmptyError,
    NotFoundError,
    NotOfferedError,
    ObjectChangedError,
)
from cachefs.origin.base import Origin
from cachefs.origin.fsspec.local_files import LocalFiles
from cachefs.origin.open_origin import open_origin
from cachefs.origin.writable import (
    ABSENT,
    LEAST_PART_BYTES,
    MOST_PARTS,
    UNCHECKED,
    Attributes,
    Condition,
    Content,
    FileContent,
    Guarantees,
    Upload,
    WritableOrigin,
    new_write_id,
    part_bytes,
)
from cachefs.types import ObjectMeta
from tests.origin import backends
from tests.origin.backends import Backend
from tests.origin.listing import list_all
from tests.servers.s3_server import S3Server

MIB = 1 << 20
BACKENDS = [
    "file",
    *(pytest.param(name, marks=pytest.mark.server) for name in ("s3", "s3-proxy", "s3-careless")),
    *backends.STORES,
]
_buckets = count(1)


class S3Bucket(backends.S3):
    """A bucket of the test's own."""

    def __init__(self, server: S3Server) -> None:
        super().__init__(server)
        self.bucket = server.make_bucket(f"writable-{next(_buckets)}")

    def open(self) -> Origin:
        return open_origin(f"s3://{self.bucket}/{self.prefix}")


@pytest.fixture(params=BACKENDS)
def backend(request, tmp_path, monkeypatch) -> Iterator[Backend]:
    if request.param in backends.STORES:
        with backends.dialled(request.param, monkeypatch) as found:
            yield found
    else:
        yield _backend(request, tmp_path, monkeypatch)


def _backend(request, tmp_path, monkeypatch) -> Backend:
    if request.param == "file":
        root = tmp_path / "root"
        root.mkdir()
        return backends.File(root)
    server = request.getfixturevalue("seaweedfs")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    if request.param == "s3-proxy":  # the server is a proxy for itself, too
        monkeypatch.setenv("http_proxy", server.endpoint)
        monkeypatch.setenv("no_proxy", "")
    return S3Bucket(server)


@pytest.fixture
async def origin(backend) -> AsyncIterator[Origin]:
    opened = backend.open()
    yield opened
    await opened.aclose()


@pytest.fixture
async def writer(backend, origin, request) -> WritableOrigin:
    assert origin.writer is not None
    name = request.node.callspec.params["backend"]
    if name in backends.STORES:
        origin.writer.guarantees = await origin.writer.check_writable()
    elif name != "file":
        origin.writer.guarantees = UNCHECKED if name == "s3-careless" else Guarantees()
    return origin.writer


async def stat(origin: Origin, path: str) -> ObjectMeta:
    found = await origin.stat(path)
    assert isinstance(found, ObjectMeta)
    return found


async def content(origin: Origin, path: str) -> bytes:
    meta = await stat(origin, path)
    return bytes(await origin.read(path, meta, 0, meta.size_bytes)) if meta.size_bytes else b""


async def test_the_probe_leaves_nothing_behind(writer, origin, backend) -> None:
    guarantees = await writer.check_writable()
    assert guarantees == writer.guarantees
    assert guarantees.put_absent == backend.checks_absent
    assert guarantees.keeps_write_id
    assert await list_all(origin) == {}


@pytest.mark.parametrize("name", ["a", "sp ace", "uni-é-漢字-🎈", "plus+plus", "per%41cent%"])
@pytest.mark.parametrize("size", [0, 1, 100_000])
async def test_what_is_put_is_read(writer, origin, name, size) -> None:
    data = os.urandom(size)
    written = await writer.put(name, data)
    found = await stat(origin, name)
    assert (written.size_bytes, written.version) == (size, found.version)
    assert list(await list_all(origin)) == [name]
    assert await content(origin, name) == data


async def test_a_file_is_put_from_its_descriptor(writer, origin, tmp_path) -> None:
    (tmp_path / "spool").write_bytes(b"0123456789" * 1000)
    with (tmp_path / "spool").open("rb") as spool:
        body = FileContent(spool.fileno(), 5, 9000)
    await writer.put("a", body)
    assert await content(origin, "a") == (b"0123456789" * 1000)[5:9005]


async def test_absent_means_absent(writer, origin) -> None:
    await writer.put("a", b"one", ABSENT)
    with pytest.raises(ConflictError):
        await writer.put("a", b"two", ABSENT)
    with pytest.raises(ConflictError):
        await writer.put("a", b"one", ABSENT)
    assert await content(origin, "a") == b"one"


async def test_a_version_is_replaced_only_if_it_is_the_expected_one(writer, origin) -> None:
    first = await writer.put("a", b"one")
    await writer.put("a", b"two!", Condition(first.version))
    with pytest.raises(ConflictError):
        await writer.put("a", b"three", Condition(first.version))
    with pytest.raises(ConflictError):
        await writer.put("b", b"three", Condition(first.version))
    assert await content(origin, "a") == b"two!"
    assert list(await list_all(origin)) == ["a"]


async def test_a_repeated_write_is_the_same_write(writer, origin) -> None:
    write_id = new_write_id()
    first = await writer.put("a", b"one", ABSENT, write_id=write_id)
    assert await writer.written_by("a", write_id) == await writer.written_by("a", write_id)
    assert await writer.written_by("a", new_write_id()) is None
    assert await writer.written_by("b", write_id) is None
    again = await writer.put("a", b"one", ABSENT, write_id=write_id)
    assert again.version == first.version == (await stat(origin, "a")).version


async def test_parts_become_one_object(writer, origin) -> None:
    pieces = [os.urandom(size) for size in (6 * MIB, 6 * MIB, 1000)]
    upload = await writer.start_upload("a")
    assert await list_all(origin) == {}
    tags = []
    offset = 0
    for number, piece in enumerate(pieces, 1):
        tags.append(await writer.put_part(upload, number, offset, piece))
        offset += len(piece)
    upload = Upload(*upload)  # as from a journal
    assert await writer.parts(upload) == tags
    assert await list_all(origin) == {}
    written = await writer.complete(upload, tags)
    assert written.version == (await stat(origin, "a")).version
    assert written.size_bytes == offset
    assert await content(origin, "a") == b"".join(pieces)
    assert list(await list_all(origin)) == ["a"]


async def test_parts_may_come_in_any_order_and_twice(writer, origin) -> None:
    data = os.urandom(11 * MIB)
    upload = await writer.start_upload("a")
    tags = [await writer.put_part(upload, 2, 6 * MIB, data[6 * MIB :])]
    await writer.put_part(upload, 1, 0, bytes(6 * MIB))
    tags.append(await writer.put_part(upload, 1, 0, data[: 6 * MIB]))
    assert set(await writer.parts(upload)) <= set(tags)
    await writer.complete(upload, tags)
    assert await content(origin, "a") == data


async def test_an_upload_is_completed_once(writer, origin, backend) -> None:
    upload = await writer.start_upload("a")
    tags = [await writer.put_part(upload, 1, 0, b"one")]
    first = await writer.complete(upload, tags, ABSENT)
    again = await writer.complete(upload, tags, ABSENT)
    assert again.version == first.version
    await writer.put("a", b"from elsewhere")
    if backend.completes_again:
        assert (await writer.complete(upload, tags)).version == first.version
    else:
        with pytest.raises(NotFoundError):
            await writer.complete(upload, tags)
    assert await content(origin, "a") == b"from elsewhere"


async def test_a_refused_completion_leaves_the_upload(writer, origin) -> None:
    before = await writer.put("a", b"before")
    upload = await writer.start_upload("a")
    tags = [await writer.put_part(upload, 1, 0, b"after")]
    with pytest.raises(ConflictError):
        await writer.complete(upload, tags, ABSENT)
    with pytest.raises(ConflictError):
        await writer.complete(upload, tags, Condition('"another"'))
    assert await content(origin, "a") == b"before"
    await writer.complete(upload, tags, Condition(before.version))
    assert await content(origin, "a") == b"after"


@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)
async def test_an_upload_whose_answer_was_lost_is_dropped(writer, origin) -> None:
    lost = await writer.start_upload("dir/a")
    other = await writer.start_upload("dir/ab")
    await writer.abort_started(lost._replace(upload_id=""), 3600, 1800)  # it began later
    assert await writer.parts(lost) == []
    await writer.abort_started(lost._replace(upload_id=""), 5, 0)
    with pytest.raises(NotFoundError):
        await writer.parts(lost)
    assert await writer.parts(other) == []


@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)
async def test_uploads_that_may_be_of_others_are_not_dropped(writer, origin) -> None:
    with_a_part = await writer.start_upload("dir/a")
    await writer.put_part(with_a_part, 1, 0, b"bytes")
    await writer.abort_started(with_a_part._replace(upload_id=""), 5, 0)
    first, second = [await writer.start_upload("dir/b") for _ in range(2)]
    await writer.abort_started(first._replace(upload_id=""), 5, 0)
    assert [len(await writer.parts(each)) for each in (with_a_part, first, second)] == [1, 0, 0]


async def test_an_aborted_upload_is_gone(writer, origin) -> None:
    upload = await writer.start_upload("a")
    tag = await writer.put_part(upload, 1, 0, b"one")
    await writer.abort(upload)
    await writer.abort(upload)
    with pytest.raises(NotFoundError):
        await writer.parts(upload)
    with pytest.raises(NotFoundError):
        await writer.complete(upload, [tag])
    assert await list_all(origin) == {}


async def test_a_part_may_be_copied(writer, origin, backend) -> None:
    data = os.urandom(11 * MIB)
    old = await writer.put("old", data)
    upload = await writer.start_upload("new")
    if not backend.copies_parts:
        with pytest.raises(NotOfferedError):
            await writer.copy_part(upload, 1, 0, "old", old, 6 * MIB)
        return
    tags = [
        await writer.copy_part(upload, 1, 0, "old", old, 6 * MIB),
        await writer.put_part(upload, 2, 6 * MIB, b"the end"),
    ]
    await writer.put("old", b"changed")
    with pytest.raises(ObjectChangedError):
        await writer.copy_part(upload, 3, 6 * MIB, "old", old, MIB)
    await writer.complete(upload, tags)
    assert await content(origin, "new") == data[: 6 * MIB] + b"the end"


async def test_a_copy_is_of_one_version(writer, origin) -> None:
    old = await writer.put("old name", b"bytes")
    copied = await writer.copy("old name", old, "new+name", ABSENT)
    assert copied.version == (await stat(origin, "new+name")).version
    assert await content(origin, "new+name") == b"bytes"
    with pytest.raises(ConflictError):
        await writer.copy("old name", old, "new+name", ABSENT)
    await writer.put("old name", b"changed")
    with pytest.raises(ObjectChangedError):
        await writer.copy("old name", old, "third")
    with pytest.raises(NotFoundError):
        await writer.copy("never", old, "third")


async def test_delete(writer, origin) -> None:
    meta = await writer.put("a", b"one")
    await writer.put("a", b"two!")
    with pytest.raises(ConflictError):
        await writer.delete("a", Condition(meta.version))
    assert await content(origin, "a") == b"two!"
    await writer.delete("a", Condition((await stat(origin, "a")).version))
    await writer.delete("a")
    assert await list_all(origin) == {}


async def test_many_are_deleted(writer, origin) -> None:
    names = ["a", "sp ace", "<&>", "é", *(f"f{n}" for n in range(20))]
    for name in names:
        await writer.put(name, b"")
    assert await writer.delete_many([*names, "never"]) == {}
    assert await list_all(origin) == {}


async def test_directories(writer, origin) -> None:
    await writer.make_directory("dir")
    await writer.make_directory("dir")
    assert (await list_all(origin))["dir"].is_dir
    await writer.put("dir/a", b"one")
    with pytest.raises(NotEmptyError):
        await writer.remove_directory("dir")
    await writer.delete("dir/a")
    await writer.remove_directory("dir")
    await writer.remove_directory("dir")
    assert await list_all(origin) == {}
    await writer.put("file", b"x")
    with pytest.raises(NotADirError):
        await writer.make_directory("file")


async def test_a_new_directory_is_made_once(writer, origin) -> None:
    await writer.make_directory("dir", is_new=True)
    with pytest.raises(ConflictError):
        await writer.make_directory("dir", is_new=True)
    await writer.put("dir/a", b"one")
    with pytest.raises(ConflictError):
        await writer.make_directory("dir", is_new=True)
    with pytest.raises(ConflictError):
        await writer.make_directory("dir/a", is_new=True)
    await writer.make_directory("dir/b", is_new=True)
    assert sorted(await list_all(origin, "dir")) == ["a", "b"]


async def test_readers_see_the_old_or_the_new_bytes(writer, origin) -> None:
    old, new = b"old" * 100_000, b"new" * 100_000
    await writer.put("a", old)

    async def write() -> None:
        for data in (new, old) * 5:
            await writer.put("a", data)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        while True:
            try:
                assert await content(origin, "a") in (old, new)
            except (ObjectChangedError, NotFoundError):
                continue


async def test_a_cancelled_write_changes_nothing_later(writer, origin) -> None:
    """The thread still runs; it must not publish what nobody waits for."""
    begun = trio.Event()
    token = trio.lowlevel.current_trio_token()
    go_on = threading.Event()

    class Slow(Content):
        size_bytes = 3

        def read(self, offset: int, length: int) -> bytes:
            token.run_sync_soon(begun.set)
            go_on.wait(60)
            return b"old"[offset : offset + length]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.put, "a", Slow())
        await begun.wait()
        nursery.cancel_scope.cancel()
    go_on.set()
    await writer.put("a", b"new")
    await writer.put("b", b"new")
    assert await content(origin, "a") == b"new"


async def test_attributes_travel(writer, backend) -> None:
    mtime_ns = 1_700_000_000_123_456_000
    await writer.put("a", b"one", attributes=Attributes(mode=0o640, mtime_ns=mtime_ns))
    if backend.name == "file":
        found = (backend.root / "a").stat()
        assert (found.st_mode & 0o7777, found.st_mtime_ns) == (0o640, mtime_ns)


@pytest.mark.parametrize("most_parts", [1000, MOST_PARTS])
@pytest.mark.parametrize("size_bytes", [1, 8 << 33, (8 << 33) + 1, 80_000 * MIB, 5 << 40])
def test_parts_are_equal_and_reach_the_largest_object(size_bytes: int, most_parts: int) -> None:
    part = part_bytes(size_bytes, most_parts)
    assert part >= LEAST_PART_BYTES
    assert part * MOST_PARTS >= size_bytes
    assert part == 640 * MIB or part * most_parts >= size_bytes
    assert part_bytes(size_bytes // 2, most_parts) <= part


async def test_renames_of_local_files(tmp_path) -> None:
    origin = open_origin(f"file://{tmp_path}")
    writer = origin.writer
    assert writer is not None
    assert writer.can_rename
    first = await writer.put("a", b"one")
    await writer.put("b", b"two!")
    with pytest.raises(ConflictError):
        await writer.rename("a", "b", ABSENT)
    await writer.rename("a", "b", Condition((await stat(origin, "b")).version))
    assert await content(origin, "b") == b"one"
    assert (await stat(origin, "b")).version == first.version
    await writer.make_directory("dir")
    await writer.rename("b", "dir/b")
    await writer.rename("dir", "other")
    assert list(await list_all(origin)) == ["other"]
    with pytest.raises(NotFoundError):
        await writer.rename("dir", "third")
    await origin.aclose()


async def test_of_several_writers_one_makes_a_local_directory(tmp_path) -> None:
    origin = open_origin(f"file://{tmp_path}")
    assert origin.writer is not None
    made = []

    async def make(number: int) -> None:
        with contextlib.suppress(ConflictError):
            await origin.writer.make_directory("dir", is_new=True)
            made.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(make, number)
    assert len(made) == 1
    await origin.aclose()


async def test_a_rename_to_an_absent_name_compares_in_the_same_step(tmp_path, monkeypatch) -> None:
    """Another program makes the name after the comparison."""
    origin = open_origin(f"file://{tmp_path}")
    assert origin.writer is not None
    await origin.writer.put("a", b"one")
    compare = LocalFiles._compare

    def make_after(files: LocalFiles, place: int, name: str, condition: Condition | None) -> None:
        compare(files, place, name, condition)
        (tmp_path / "b").write_bytes(b"theirs")

    monkeypatch.setattr(LocalFiles, "_compare", make_after)
    with pytest.raises(ConflictError):
        await origin.writer.rename("a", "b", ABSENT)
    assert (tmp_path / "a").read_bytes() == b"one"
    assert (tmp_path / "b").read_bytes() == b"theirs"
    await origin.aclose()


async def test_a_repeated_mkdir_of_a_local_directory_is_the_same_write(tmp_path) -> None:
    origin = open_origin(f"file://{tmp_path}")
    assert origin.writer is not None
    write_id = new_write_id()
    await origin.writer.make_directory("dir", is_new=True, write_id=write_id)
    await origin.writer.make_directory("dir", is_new=True, write_id=write_id)
    with pytest.raises(ConflictError):
        await origin.writer.make_directory("dir", is_new=True, write_id=new_write_id())
    await origin.aclose()


@pytest.mark.server
async def test_the_probe_finds_out_what_a_store_does_not_check(moto_s3, monkeypatch) -> None:
    for name, value in moto_s3.environment.items():
        monkeypatch.setenv(name, value)
    origin = S3Bucket(moto_s3).open()
    assert origin.writer is not None
    found = await origin.writer.check_writable()
    assert found.put_absent
    assert not found.copy_absent, "it copies onto an object whatever the request says"
    assert found.keeps_write_id
    old = await origin.writer.put("old", b"one")
    await origin.writer.put("new", b"two")
    with pytest.raises(ConflictError):
        await origin.writer.copy("old", old, "new", ABSENT)
    await origin.aclose()
