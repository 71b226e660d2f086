"""What every origin promises, held against every origin (see `cachefs.origin.base`)."""

import importlib
import random
import warnings
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import trio

from cachefs.errors import NotADirError, NotFoundError, ObjectChangedError
from cachefs.origin.base import Origin
from cachefs.origin.fsspec import client as fsspec_origin
from cachefs.origin.hdfs import client as hdfs_origin
from cachefs.origin.s3 import client as s3_origin
from cachefs.types import NO_POSIX, Directory, Entry, ObjectMeta
from tests.origin import backends
from tests.origin.backends import BUCKET, Backend
from tests.origin.listing import list_all, list_pages
from tests.servers.oss import SeaweedOss
from tests.servers.store import Store
from tests.servers.store_dials import OSS

FIRST_START = pytest.mark.timeout(600)  # Hadoop is downloaded the first time ever
BACKENDS = [
    "memory",
    "file",
    "fsspec-memory",
    *(pytest.param(name, marks=pytest.mark.server) for name in ("s3", "s3fs", "oss")),
    "ossfs",
    *(pytest.param(name, marks=(pytest.mark.server, FIRST_START)) for name in ("hdfs", "webhdfs")),
    *backends.STORES,
]

ODD_NAMES = [
    "plain",
    "sp ace",
    " lead",
    "trail ",
    "uni-é-漢字-🎈",
    "per%41cent%",
    "plus+plus",
    "hash#tag",
    "question?a=b&c",
    "quote'\"<>",
    "star*[x]{y}",
    "back\\slash",
    "colon:semi;",
    "~tilde",
    "...",
    "-dash",
    "n" * 255,
    "é" * 127,
]


def odd_names(backend: Backend) -> list[str]:
    return [name for name in ODD_NAMES if not set(name) & set(backend.impossible)]


@pytest.fixture(scope="session")
def contract_bucket(seaweedfs, tmp_path_factory):  # seaweedfs: for its skip
    with SeaweedOss(tmp_path_factory.mktemp("contract")) as server:
        server.make_bucket(BUCKET)
        backends.S3(server, "many").put_many({f"dir/f{i:05}": b"" for i in range(backends.MANY)})
        yield server


@pytest.fixture(scope="session")
def contract_hdfs(hdfs):
    hdfs.make_empty_files(f"/many/dir/f{i:05}" for i in range(backends.MANY))
    return hdfs


@pytest.fixture(params=BACKENDS)
def backend(request, tmp_path, monkeypatch) -> Iterator[Backend]:
    if request.param in backends.STORES:
        with backends.dialled(request.param, monkeypatch) as found:
            yield found
    elif request.param == "ossfs":
        with (
            warnings.catch_warnings()
        ):  # Python warns of escapes in oss2, whenever it compiles that
            warnings.simplefilter("ignore")
            importlib.import_module("ossfs")
        with Store(replace(OSS, path_style=True)) as store:
            monkeypatch.setenv("OSS_ACCESS_KEY_ID", store.access_key)
            monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", store.secret_key)
            yield backends.Ossfs(store)
    else:
        yield _backend(request, tmp_path, monkeypatch)


def _backend(request, tmp_path, monkeypatch) -> Backend:
    if request.param == "memory":
        return backends.Memory()
    if request.param == "file":
        root = tmp_path / "root"
        root.mkdir()
        return backends.File(root)
    if request.param == "fsspec-memory":
        return backends.FsspecMemory()
    kind, server_name = {
        "s3": (backends.S3, "contract_bucket"),
        "s3fs": (backends.S3fs, "contract_bucket"),
        "oss": (backends.Oss, "contract_bucket"),
        "hdfs": (backends.Hdfs, "contract_hdfs"),
        "webhdfs": (backends.WebHdfs, "contract_hdfs"),
    }[request.param]
    server = request.getfixturevalue(server_name)
    settings = server.oss_environment if kind is backends.Oss else server.environment
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return kind(server)


@pytest.fixture
async def origin(backend) -> AsyncIterator[Origin]:
    opened = backend.open()
    yield opened
    await opened.aclose()


async def read(origin: Origin, path: str, offset: int = 0, length: int | None = None) -> bytes:
    meta = await origin.stat(path)
    assert isinstance(meta, ObjectMeta)
    length = meta.size_bytes - offset if length is None else length
    return bytes(await origin.read(path, meta, offset, length))


async def test_check_accepts_a_source_with_data(backend, origin, monkeypatch) -> None:
    for module in (fsspec_origin, hdfs_origin, s3_origin):
        # The first call of s3fs reads descriptions of S3, which takes a busy machine seconds.
        monkeypatch.setattr(module, "CHECK_DEADLINE_S", 100.0)
    backend.put("a", b"1")
    await origin.check()
    assert origin.counters.errors == 0


async def test_names_survive_listing_stat_and_read(backend, origin) -> None:
    names = odd_names(backend)
    for name in names:
        backend.put(f"dir/{name}", name.encode())
    listed = await list_all(origin, "dir")
    assert sorted(listed) == sorted(names)
    for name in names:
        assert await origin.stat(f"dir/{name}") == listed[name].meta
        assert await read(origin, f"dir/{name}") == name.encode()
    assert origin.counters.unshown_keys == 0


async def test_many_read_together_are_right_or_left_to_read(backend, origin) -> None:
    objects = {f"dir/{name}": name.encode() * 3 for name in odd_names(backend)}
    for path, data in objects.items():
        backend.put(path, data)
    wanted = [(path, await origin.stat(path)) for path in objects]
    at_once = origin.reads_many
    found = await origin.read_many(wanted, 2, lambda: False)
    assert len(found) == len(wanted)
    assert at_once == backend.reads_many
    assert None not in found or not at_once
    for data, expected in zip(found, objects.values(), strict=True):
        assert data is None or bytes(data) == expected


async def test_odd_names_as_directories(backend, origin) -> None:
    names = [name for name in odd_names(backend) if len(name) < 100]
    for name in names:
        backend.put(f"{name}/below", b"data")
    listed = await list_all(origin)
    assert sorted(listed) == sorted(names)
    for name in names:
        assert listed[name].is_dir
        assert await origin.stat(name) == listed[name].meta
        assert list(await list_all(origin, name)) == ["below"]


async def test_root_is_a_directory(origin) -> None:
    found = await origin.stat("")
    assert isinstance(found, Directory) if origin.tells_owners else found is None
    assert origin.counters.heads == origin.tells_owners, "no owner, no request"


async def test_listing_and_stat_agree(backend, origin) -> None:
    backend.put("a", b"one")
    backend.put("b", b"")
    backend.put("sub/c", b"three")
    listed = await list_all(origin)
    assert sorted(listed) == ["a", "b", "sub"]
    for name, entry in listed.items():
        found = await origin.stat(name)
        assert found == entry.meta
        if isinstance(found, ObjectMeta):
            assert found.posix == entry.meta.posix
            assert (found.posix != NO_POSIX) == origin.tells_owners
    assert (await origin.stat("a")).mtime_ns > 0


async def test_a_look_up_with_bytes_agrees_with_stat(backend, origin) -> None:
    contents = {"a": b"one", "empty": b"", "sub/c": b"three", "large": bytes(300 << 10)}
    for name, content in contents.items():
        backend.put(name, content)
    for name in (*contents, "sub"):
        found, data = await origin.stat_and_read(name)
        assert found == await origin.stat(name)
        assert data is None or bytes(data) == contents[name]
    assert await origin.stat_and_read("") == (await origin.stat(""), None)
    with pytest.raises(NotFoundError):
        await origin.stat_and_read("no/such/thing")


async def test_empty_file(backend, origin) -> None:
    backend.put("dir/empty", b"")
    meta = await origin.stat("dir/empty")
    assert meta is not None
    assert meta.size_bytes == 0
    with pytest.raises(NotADirError):
        await list_all(origin, "dir/empty")


async def test_ranges(backend, origin) -> None:
    data = bytes(range(256)) * 5
    backend.put("f", data)
    meta = await origin.stat("f")
    size = len(data)
    marks = [0, 1, 2, size // 2, size - 2, size - 1, size]
    for start in marks:
        for end in marks:
            if start < end:
                got = await origin.read("f", meta, start, end - start)
                assert bytes(got) == data[start:end], (start, end)


async def test_ranges_around_what_stores_cut_at(backend, origin) -> None:
    """Checksum chunks of 512 bytes, packets of 64 KiB, blocks of 1 MiB."""
    data = random.Random(1).randbytes((2 << 20) + 5)
    backend.put("f", data)
    meta = await origin.stat("f")
    for cut in (512, 64 << 10, 1 << 20, 2 << 20):
        for start, length in [(cut - 1, 1), (cut - 1, 2), (cut, 1), (cut, 5), (0, cut), (1, cut)]:
            got = await origin.read("f", meta, start, length)
            assert bytes(got) == data[start : start + length], (start, length)
    assert await read(origin, "f") == data


async def test_result_is_a_buffer(backend, origin) -> None:
    backend.put("f", b"hello")
    meta = await origin.stat("f")
    view = memoryview(await origin.read("f", meta, 0, 5))
    assert view.contiguous
    assert view.nbytes == 5


@pytest.mark.parametrize("after", [b"other", b"a longer one", b"s"])
async def test_replaced_object(backend, origin, after) -> None:
    backend.put("f", b"first")
    old = await origin.stat("f")
    await trio.sleep(0.01)
    backend.put("f", after)
    for offset, length in [(0, 5), (2, 3), (4, 1)]:
        with pytest.raises(ObjectChangedError):
            await origin.read("f", old, offset, length)
    new = await origin.stat("f")
    assert new.version != old.version
    assert await read(origin, "f") == after


async def test_missing(backend, origin) -> None:
    backend.put("f", b"data")
    meta = await origin.stat("f")
    backend.put("other", b"data")
    backend.delete("f")
    with pytest.raises(NotFoundError):
        await origin.read("f", meta, 0, 4)
    with pytest.raises(NotFoundError):
        await origin.stat("f")
    with pytest.raises(NotFoundError):
        await origin.stat("no/such/thing")
    with pytest.raises(NotFoundError):
        await list_all(origin, "no/such/dir")


async def test_no_name_costs_no_request(backend, origin) -> None:
    backend.put("f", b"data")
    for path in ["a//b", ".", "a/../f", "nul\0", "n" * 256, "é" * 128]:
        with pytest.raises(NotFoundError):
            await origin.stat(path)
    assert origin.counters.heads == origin.counters.lists == 0


async def test_file_is_no_directory(backend, origin) -> None:
    backend.put("f", b"data")
    with pytest.raises(NotADirError):
        await list_all(origin, "f")


async def test_a_name_that_begins_like_another(backend, origin) -> None:
    for path in ["ab", "a-1", "a.b/x", "abc/x", "a0"]:
        backend.put(path, b"data")
    assert sorted(await list_all(origin)) == ["a-1", "a.b", "a0", "ab", "abc"]
    with pytest.raises(NotFoundError):
        await origin.stat("a")
    with pytest.raises(NotFoundError):
        await list_all(origin, "a")


async def test_file_becomes_directory(backend, origin) -> None:
    backend.put("x", b"file")
    assert await origin.stat("x") is not None
    backend.delete("x")
    backend.put("x/y", b"below")
    assert not isinstance(await origin.stat("x"), ObjectMeta)
    assert list(await list_all(origin, "x")) == ["y"]


async def test_many_pages(backend) -> None:
    many = backend.fill_dir()
    origin = backend.open()
    pages = await list_pages(origin, "dir")
    assert len(pages) >= many // 1000
    assert max(len(page) for page in pages) <= 1001  # the last key of a page may wait for the next
    names = [entry.name for page in pages for entry in page]
    assert sorted(names) == [f"f{i:05}" for i in range(many)]
    if backend.sees_below:
        assert origin.counters.lists == many // 1000
    await origin.aclose()


async def test_what_a_listing_shows_below_is_what_is_there(backend) -> None:
    for name in ["a/x", "a/y/z", "a/y-/z", "a-/x", *(f"b/{name}/f" for name in odd_names(backend))]:
        backend.put(name, b"data")
    sees_below = backend.sees_below
    for number in range(1020 if sees_below else 20):
        backend.put(f"c/d{number % 20}/f{number}", b"")
    origin = backend.open()
    shown = 0
    for path in ("", "a", "b", "c", *(f"c/d{number}" for number in range(20))):
        below: dict[str, list[Entry]] = {}
        here = [entry async for page in origin.list_dir(path, below) for entry in page]
        assert {entry.name: entry for entry in here} == await list_all(origin, path)
        for inner, entries in below.items():
            assert {entry.name: entry for entry in entries} == await list_all(origin, inner)
        shown += len(below)
    assert shown > 50 or not sees_below
    await origin.aclose()


async def test_a_listing_may_be_dropped_half_way(backend) -> None:
    backend.fill_dir()
    origin = backend.open()
    async for page in origin.list_dir("dir"):
        assert page
        break
    await origin.aclose()


async def test_counters(backend, origin) -> None:
    backend.put("f", b"0123456789")
    meta = await origin.stat("f")
    counters = origin.counters
    assert (counters.heads, counters.gets, counters.lists) == (1, 0, 0)
    await origin.read("f", meta, 0, 10)
    await origin.read("f", meta, 3, 4)
    assert (counters.gets, counters.get_bytes) == (2, 14)
    assert counters.heads == (1 if backend.conditional_reads else 3)
    await list_all(origin)
    assert counters.lists == 1
    assert counters.errors == 0


async def test_reads_run_in_parallel_and_can_be_cancelled(backend, origin) -> None:
    backend.put("f", bytes(100_000))
    meta = await origin.stat("f")
    async with trio.open_nursery() as nursery:
        for i in range(20):
            nursery.start_soon(origin.read, "f", meta, i, 1000)
    with trio.move_on_after(0):
        await origin.read("f", meta, 0, 1)
    assert bytes(await origin.read("f", meta, 0, 1)) == b"\0"


async def test_identity_is_stable_and_names_no_key(backend, origin) -> None:
    again = backend.open()
    assert again.identity == origin.identity
    assert "AKID" not in origin.identity + origin.url
    if again is not origin:
        await again.aclose()
