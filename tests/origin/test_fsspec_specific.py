"""What only fsspec has: local oddities, schemes, URLs with passwords."""

import os
import socket
import subprocess
import sys

import fsspec
import pytest

from cachefs.errors import (
    NotADirError,
    NotFoundError,
    ObjectChangedError,
    OriginUnavailableError,
    UsageError,
)
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.types import ObjectMeta, Posix
from tests.origin.listing import list_all


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
async def origin(root):
    opened = open_origin(f"file://{root}")
    yield opened
    await opened.aclose()


async def test_links_are_followed_and_other_things_left_out(root, origin) -> None:
    (root / "f").write_bytes(b"data")
    (root / "d").mkdir()
    (root / "to-f").symlink_to("f")
    (root / "to-d").symlink_to("d")
    (root / "broken").symlink_to("nowhere")
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(root / "sock"))
    listed = await list_all(origin)
    assert sorted(listed) == ["d", "f", "to-d", "to-f"]
    assert origin.counters.unshown_keys == 3
    assert listed["to-d"].is_dir
    for name, entry in listed.items():
        assert await origin.stat(name) == entry.meta
    assert bytes(await origin.read("to-f", listed["to-f"].meta, 1, 2)) == b"at"
    for name in ["fifo", "sock", "broken"]:
        with pytest.raises(NotFoundError):
            await origin.stat(name)


async def test_owners_and_modes_are_those_of_the_directory(root, origin) -> None:
    (root / "d").mkdir(mode=0o711)
    (root / "f").write_bytes(b"data")
    (root / "f").chmod(0o4750)
    (root / "to-f").symlink_to("f")
    listed = await list_all(origin)
    me = (os.getuid(), os.getgid())
    assert listed["d"].meta.posix == Posix(*me, 0o711)
    assert listed["d"].meta.place.startswith(f"{(root / 'd').stat().st_ino}.")
    assert listed["f"].meta.posix == Posix(*me, 0o750), "no setuid"
    assert listed["to-f"].meta.posix == Posix(*me, 0o750)
    assert (await origin.stat("to-f")).posix == Posix(*me, 0o750)


async def test_names_that_are_not_utf8(root, origin) -> None:
    name = os.fsdecode(b"lat\xe9n")
    (root / name).write_bytes(b"data")
    meta = (await list_all(origin))[name].meta
    assert await origin.stat(name) == meta
    assert bytes(await origin.read(name, meta, 0, 4)) == b"data"


async def test_empty_directories(root, origin) -> None:
    (root / "hollow").mkdir()
    await origin.check()
    assert not isinstance(await origin.stat("hollow"), ObjectMeta)
    assert await list_all(origin, "hollow") == {}


async def test_file_truncated_during_the_read(root, origin, monkeypatch) -> None:
    path = root / "f"
    path.write_bytes(b"0123456789")
    meta = await origin.stat("f")
    cat_file = origin._fs.cat_file

    def cut(name, **kwargs):
        path.write_bytes(b"01")
        return cat_file(name, **kwargs)

    monkeypatch.setattr(origin._fs, "cat_file", cut)
    with pytest.raises(ObjectChangedError):
        await origin.read("f", meta, 4, 4)


async def test_errors_of_the_store_are_ours(root, origin, monkeypatch) -> None:
    def broken(*args, **kwargs):
        raise RuntimeError("password=hunter2")

    monkeypatch.setattr(origin._fs, "ls", broken)
    with pytest.raises(OriginUnavailableError) as caught:
        await list_all(origin)
    assert "hunter2" not in str(caught.value)
    assert origin.counters.errors == 1


async def test_missing_directory_and_file_as_source(root) -> None:
    for name, kind in [("missing", NotFoundError), ("file", NotADirError)]:
        (root / "file").write_bytes(b"x")
        origin = open_origin(f"file://{root}/{name}")
        with pytest.raises(kind):
            await origin.check()
        await origin.aclose()


@pytest.mark.parametrize("url", ["nonsense", "/a/path", "://x", "nope://x", "s3://", "s3:///x"])
async def test_bad_urls(url) -> None:
    with pytest.raises(UsageError) as caught:
        open_origin(url)
    assert "\n" not in str(caught.value)


async def test_bad_options() -> None:
    with pytest.raises(UsageError):
        open_origin("memory://x", OriginOptions(max_threads=0))


async def test_a_user_is_not_shown_and_a_password_is_refused() -> None:
    origin = open_origin("memory://user@x/y")
    assert origin.url == origin.identity == "memory://x/y"
    await origin.aclose()
    with pytest.raises(UsageError, match="must not carry") as caught:
        open_origin("memory://user:hunter2@x/y")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "hidden", "listed"),
    [
        ("file:///tmp", (b".snapshot", b".zfs", b".snap", b"~snapshot"), (b"a", b"a.b")),
        ("http://127.0.0.1:1/", (b"README", b"a", b".b"), ()),
        ("memory://", (), (b".snapshot", b"a")),
    ],
)
async def test_names_that_no_listing_may_show(
    url: str, hidden: tuple[bytes, ...], listed: tuple[bytes, ...]
) -> None:
    origin = open_origin(url)
    found = [name for name in (*hidden, *listed) if origin.may_hide and origin.may_hide.match(name)]
    assert found == list(hidden)
    await origin.aclose()


@pytest.mark.parametrize(
    "odd", [{"size": -1}, {"size": 1 << 70}, {"size": "much"}, {"mtime": float("inf")}]
)
async def test_an_entry_that_can_not_be_a_file_is_left_out(root, origin, monkeypatch, odd) -> None:
    """And counted; the directory has its other names."""
    for name in ("a", "b", "c"):
        (root / name).write_bytes(b"data")
    listed = type(origin._fs).ls

    def ls(fs, path, **options):
        infos = listed(fs, path, **options)
        return [info | odd if info["name"].endswith("/b") else info for info in infos]

    monkeypatch.setattr(type(origin._fs), "ls", ls)
    assert sorted(await list_all(origin)) == ["a", "c"]
    assert origin.counters.unshown_keys == 1


async def test_memory_root() -> None:
    fsspec.filesystem("memory").pipe_file("/at-the-root", b"data")
    origin = open_origin("memory://")
    assert "at-the-root" in await list_all(origin)
    assert (
        bytes(await origin.read("at-the-root", await origin.stat("at-the-root"), 0, 4)) == b"data"
    )
    await origin.aclose()


@pytest.mark.parametrize(
    ("opened", "heavy"),
    [
        ("", "obstore botocore fsspec s3fs hdfs_native"),
        ("memory://", "obstore botocore.session s3fs hdfs_native pyarrow aiohttp"),
        ("file:///", "obstore botocore.session s3fs hdfs_native pyarrow aiohttp"),
        ("s3://bucket", "fsspec s3fs hdfs_native pyarrow aiohttp"),
    ],
)
def test_libraries_are_imported_on_use(opened: str, heavy: str) -> None:
    code = (
        "import sys; from cachefs.origin.open_origin import open_origin; "
        f"{opened!r} and open_origin({opened!r}); "
        f"print(*sorted(set({heavy!r}.split()) & set(sys.modules)))"
    )
    environment = os.environ | {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "\n"


def test_a_missing_driver_is_named() -> None:
    for url, package in (("gs://bucket", "gcsfs"), ("abfs://container", "adlfs")):
        with pytest.raises(UsageError, match=f"needs {package}.* -m pip install {package}"):
            open_origin(url)
