"""What only HDFS has: NameNodes in pairs, users, blocks, servers that say nothing."""

import contextlib
import grp
import pwd
import signal
import socket
import time

import pytest
import trio

from cachefs.errors import (
    AccessDeniedError,
    NotADirError,
    NotFoundError,
    ObjectChangedError,
    OriginUnavailableError,
    UsageError,
)
from cachefs.origin.base import OriginCounters
from cachefs.origin.hdfs import client as hdfs_origin
from cachefs.origin.hdfs.config import resolve_target
from cachefs.origin.open_origin import OriginOptions, open_origin
from cachefs.types import UNKNOWN_ID, Entry, ObjectMeta, Posix
from tests.origin.listing import list_all
from tests.servers.ports import free_ports, wait_until
from tests.servers.suspend import suspend

pytestmark = pytest.mark.timeout(600)  # Hadoop is downloaded the first time ever

IMPATIENT = OriginOptions(connect_timeout_s=0.4, total_timeout_s=1.0)
PATIENT = OriginOptions()
SITE = """<configuration>
{}
</configuration>
"""


def write_site(directory, properties):
    """`core-site.xml` with everything in it."""
    lines = [
        f"<property><name>{name}</name><value>{value}</value></property>"
        for name, value in properties.items()
    ]
    directory.mkdir(exist_ok=True)
    (directory / "core-site.xml").write_text(SITE.format("\n".join(lines)))
    return directory


def write_pair(directory, first, second):
    """A nameservice `ns` of two NameNodes."""
    return write_site(
        directory,
        {
            "dfs.ha.namenodes.ns": "one,two",
            "dfs.namenode.rpc-address.ns.one": first,
            "dfs.namenode.rpc-address.ns.two": second,
        },
    )


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A configuration directory of this test's own."""
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "site"))
    return tmp_path / "site"


@pytest.fixture
def root(hdfs, monkeypatch, tmp_path):
    """A directory of this test's own, and its path."""
    monkeypatch.setenv("HADOOP_USER_NAME", hdfs.user)
    path = f"/{tmp_path.name}"
    hdfs.make_dir(path)
    yield path
    hdfs.delete(path)


@pytest.fixture
async def opened():
    """`opened(url, options)`: an origin that is closed after the test."""
    origins = []

    def open_it(url, options=PATIENT):
        origins.append(open_origin(url, options))
        return origins[-1]

    yield open_it
    for origin in origins:
        await origin.aclose()


@pytest.fixture
def silent_port():
    """Of something that accepts connections and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(100)
        yield listener.getsockname()[1]


async def read_at_last(origin, path, meta):
    """Read a file, although a busy server may take longer than the origin waits."""
    with trio.fail_after(300):
        while True:
            with contextlib.suppress(OriginUnavailableError):
                return bytes(await origin.read(path, meta, 0, meta.size_bytes))


async def read_all(origin, path):
    meta = await origin.stat(path)
    return bytes(await origin.read(path, meta, 0, meta.size_bytes))


async def test_sources_that_are_no_directory(hdfs, root, opened) -> None:
    hdfs.put(f"{root}/file", b"x")
    for name, kind in [("missing", NotFoundError), ("file", NotADirError)]:
        with pytest.raises(kind) as caught:
            await opened(f"{hdfs.url}{root}/{name}").check()
        assert "\n" not in str(caught.value)


async def test_the_root_can_be_mounted(hdfs, root, opened) -> None:
    origin = opened(hdfs.url)
    await origin.check()
    assert root[1:] in await list_all(origin)
    assert (await origin.stat(root[1:])).posix.mode == 0o755
    assert origin.identity == opened(f"{hdfs.url}///").identity == f"{hdfs.url}/"


async def test_a_file_of_many_blocks(hdfs, root, opened) -> None:
    data = bytes(range(251)) * 50
    hdfs.put(f"{root}/f", data, block_bytes=1024)
    origin = opened(f"{hdfs.url}{root}")
    meta = await origin.stat("f")
    for offset, length in [(0, len(data)), (1023, 2), (1024, 1024), (500, 9000), (12_000, 550)]:
        assert bytes(await origin.read("f", meta, offset, length)) == data[offset:][:length]


async def test_a_version_is_mtime_and_length(hdfs, root, opened) -> None:
    hdfs.put(f"{root}/f", b"data")
    hdfs.set_mtime(f"{root}/f", 1_700_000_000_123)
    origin = opened(f"{hdfs.url}{root}")
    meta = await origin.stat("f")
    assert meta.mtime_ns == 1_700_000_000_123_000_000
    hdfs.set_mtime(f"{root}/f", 1_700_000_000_124)
    with pytest.raises(ObjectChangedError):
        await origin.read("f", meta, 0, 4)


async def test_a_file_that_is_being_written(hdfs, root, opened) -> None:
    import hdfs_native

    writer = hdfs_native.Client(hdfs.url).create(f"{root}/f")
    origin = opened(f"{hdfs.url}{root}")
    before = await origin.stat("f")
    assert before.size_bytes == 0
    writer.write(b"data")
    writer.close()
    assert await read_all(origin, "f") == b"data"
    assert (await origin.stat("f")).version != before.version


async def test_a_file_becomes_a_directory(hdfs, root, opened) -> None:
    hdfs.put(f"{root}/f", b"data")
    origin = opened(f"{hdfs.url}{root}")
    meta = await origin.stat("f")
    hdfs.delete(f"{root}/f")
    hdfs.make_dir(f"{root}/f")
    with pytest.raises(ObjectChangedError):
        await origin.read("f", meta, 0, 4)


async def test_paths_that_lead_through_a_file(hdfs, root, opened) -> None:
    hdfs.put(f"{root}/f", b"data")
    origin = opened(f"{hdfs.url}{root}")
    meta = await origin.stat("f")
    for attempt in [
        lambda: origin.stat("f/x"),
        lambda: origin.read("f/x", meta, 0, 4),
        lambda: list_all(origin, "f/x"),
    ]:
        with pytest.raises(NotFoundError):
            await attempt()


async def test_names_that_hdfs_can_not_have(hdfs, root, opened) -> None:
    origin = opened(f"{hdfs.url}{root}")
    for name in ["a:b", "lat\udce9n"]:
        with pytest.raises(NotFoundError):
            await origin.stat(name)


async def test_owners_groups_and_modes(hdfs, root, opened) -> None:
    user, group = pwd.getpwuid(1), grp.getgrgid(2)
    hdfs.put(f"{root}/known", b"data")
    hdfs.set_owner(f"{root}/known", user.pw_name, group.gr_name)
    hdfs.set_mode(f"{root}/known", "640")
    hdfs.make_dir(f"{root}/unknown", "1733")
    hdfs.set_owner(f"{root}/unknown", "nobody-of-this-name", "4711")
    for url in (hdfs.url, hdfs.webhdfs_url):
        origin = opened(f"{url}{root}")
        listed = await list_all(origin)
        assert listed["known"].meta.posix == Posix(1, 2, 0o640)
        assert listed["unknown"].meta.posix == Posix(UNKNOWN_ID, 4711, 0o1733)
        for name, entry in listed.items():
            found = await origin.stat(name)
            assert found == entry.meta
            assert getattr(found, "posix", None) == getattr(entry.meta, "posix", None)
        assert (await origin.stat("")).posix.mode == 0o755


async def test_another_mode_is_no_other_version(hdfs, root, opened) -> None:
    hdfs.put(f"{root}/f", b"data")
    origin = opened(f"{hdfs.url}{root}")
    before = await origin.stat("f")
    hdfs.set_mode(f"{root}/f", "600")
    after = await origin.stat("f")
    assert before == after
    assert before.posix != after.posix
    assert bytes(await origin.read("f", before, 0, 4)) == b"data"


async def test_permission_denied(hdfs, root, opened, monkeypatch) -> None:
    hdfs.make_dir(f"{root}/closed", "700")
    hdfs.put(f"{root}/closed/f", b"data")
    hdfs.put(f"{root}/secret", b"data")
    hdfs.set_mode(f"{root}/secret", "600")
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody-else")
    for url in (hdfs.url, hdfs.webhdfs_url):
        origin = opened(f"{url}{root}")
        meta = await origin.stat("secret")
        for attempt in [
            lambda o=origin: o.stat("closed/f"),
            lambda o=origin: list_all(o, "closed"),
            lambda o=origin, m=meta: o.read("secret", m, 0, 4),
        ]:
            with pytest.raises(AccessDeniedError) as caught:
                await attempt()
            assert "\n" not in str(caught.value)
            assert "org.apache" not in str(caught.value)


async def test_nobody_listens(opened) -> None:
    (port,) = free_ports(1)
    origin = opened(f"hdfs://127.0.0.1:{port}/x")
    with pytest.raises(OriginUnavailableError, match="refused"):
        await origin.check()
    assert origin.counters.errors == 1


@pytest.mark.long
async def test_a_namenode_that_says_nothing(silent_port, opened) -> None:
    origin = opened(f"hdfs://127.0.0.1:{silent_port}/x", IMPATIENT)
    for attempt in [origin.check, lambda: origin.stat("f"), lambda: list_all(origin)]:
        with pytest.raises(OriginUnavailableError, match=f"no answer from 127.0.0.1:{silent_port}"):
            await attempt()


async def test_the_other_namenode_is_asked(
    hdfs, root, site, silent_port, opened, monkeypatch
) -> None:
    monkeypatch.setattr(hdfs_origin, "CHECK_DEADLINE_S", 60.0)
    hdfs.put(f"{root}/f", b"data")
    (closed_port,) = free_ports(1)
    for port in (closed_port, silent_port):
        write_pair(site, f"127.0.0.1:{port}", hdfs.address)
        origin = opened(f"hdfs://ns{root}", OriginOptions(connect_timeout_s=4.0))
        await origin.check()
        assert await read_all(origin, "f") == b"data"
        assert list(await list_all(origin)) == ["f"]
        assert origin.identity == f"hdfs://ns{root}"
        assert origin._active == 1  # and it is asked first from now on
        assert origin.counters.errors == 0


async def test_a_pair_of_which_none_answers(site, silent_port, opened) -> None:
    (closed_port,) = free_ports(1)
    write_pair(site, f"127.0.0.1:{silent_port}", f"127.0.0.1:{closed_port}")
    with pytest.raises(OriginUnavailableError):
        await opened("hdfs://ns/x", IMPATIENT).check()


async def test_the_default_file_system(hdfs, root, site, opened) -> None:
    write_site(site, {"fs.defaultFS": hdfs.url})
    origin = opened(f"hdfs://{root}")
    await origin.check()
    assert origin.url == f"hdfs://{hdfs.address}{root}"


def test_a_host_without_a_port_has_the_usual_one(site) -> None:
    assert resolve_target("namenode/x", PATIENT).url == "hdfs://namenode:8020/x"


@pytest.mark.parametrize(
    "url", ["hdfs://", "hdfs:///x", "hdfs://a b/x", "hdfs://user@host:1/x", "hdfs://h:port/x"]
)
def test_bad_urls(url, site) -> None:
    with pytest.raises(UsageError) as caught:
        open_origin(url)
    assert "\n" not in str(caught.value)


def test_a_site_file_that_is_broken(site) -> None:
    site.mkdir()
    (site / "hdfs-site.xml").write_text("<configuration>")
    with pytest.raises(UsageError, match=r"hdfs-site.xml is no valid XML"):
        open_origin("hdfs://ns/x")


@pytest.mark.parametrize("which", ["namenode", "datanode"])
async def test_a_paused_server_is_given_up_and_read_from_again(hdfs, root, opened, which) -> None:
    hdfs.put(f"{root}/f", b"data")
    origin, patient = opened(f"{hdfs.url}{root}", IMPATIENT), opened(f"{hdfs.url}{root}")
    meta = await patient.stat("f")
    assert await read_at_last(origin, "f", meta) == b"data"
    process = getattr(hdfs, which)
    await trio.to_thread.run_sync(suspend, process.pid)
    try:
        started = time.monotonic()
        with pytest.raises(OriginUnavailableError):
            await origin.read("f", meta, 0, 4)
        assert time.monotonic() - started < 40
        if which == "namenode":
            with pytest.raises(OriginUnavailableError):
                await list_all(origin)
        else:
            assert list(await list_all(patient)) == ["f"]
    finally:
        process.send_signal(signal.SIGCONT)
    assert bytes(await patient.read("f", meta, 0, 4)) == b"data"
    assert await read_at_last(origin, "f", meta) == b"data"


async def test_a_listing_that_hangs_is_left_behind(hdfs, root, opened, monkeypatch) -> None:
    """Not for ever many of them, though."""
    monkeypatch.setattr(hdfs_origin, "_LISTERS_MAX", 2)
    origin = opened(f"{hdfs.url}{root}", IMPATIENT)
    hung = 0
    release = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def hang(_):
        nonlocal hung
        hung += 1
        trio.from_thread.run(release.wait, trio_token=token)
        return []

    monkeypatch.setattr(hdfs_origin, "_entries", hang)
    with trio.fail_after(300):
        while hung < 2:  # a busy server may not even begin to answer in time
            with pytest.raises(OriginUnavailableError):
                await list_all(origin)
    with pytest.raises(OriginUnavailableError):
        await list_all(origin)
    assert hung == 2
    release.set()
    monkeypatch.undo()
    await trio.to_thread.run_sync(wait_until, lambda: origin._listers._value == 2, 60, "threads")
    assert await list_all(opened(f"{hdfs.url}{root}")) == {}


@pytest.mark.parametrize("scheme", ["hdfs", "webhdfs"])
async def test_snapshots_are_entered_and_not_listed(hdfs, root, opened, scheme) -> None:
    hdfs.put(f"{root}/d/f", b"old")
    hdfs.make_snapshot(f"{root}/d", "s1")
    hdfs.put(f"{root}/d/f", b"new")
    origin = opened(f"{hdfs.url if scheme == 'hdfs' else hdfs.webhdfs_url}{root}")
    assert not isinstance(await origin.stat("d/.snapshot"), ObjectMeta)
    assert list(await list_all(origin, "d/.snapshot")) == ["s1"]
    assert await read_all(origin, "d/.snapshot/s1/f") == b"old"
    assert list(await list_all(origin, "d")) == ["f"]
    assert origin.may_hide.fullmatch(b".snapshot")
    assert not origin.may_hide.fullmatch(b".hidden"), "HDFS lists it"
    hdfs.delete_snapshot(f"{root}/d", "s1")


async def test_webhdfs_knows_the_file_id(hdfs, root, opened) -> None:
    origin = opened(f"{hdfs.webhdfs_url}{root}")
    hdfs.put(f"{root}/f", b"first")
    hdfs.set_mtime(f"{root}/f", 1_700_000_000_000)
    meta = await origin.stat("f")
    assert meta.mtime_ns == 1_700_000_000_000_000_000
    hdfs.put(f"{root}/f", b"other")
    hdfs.set_mtime(f"{root}/f", 1_700_000_000_000)
    with pytest.raises(ObjectChangedError):
        await origin.read("f", meta, 0, 5)


@pytest.mark.long
async def test_a_webhdfs_server_that_says_nothing(silent_port, opened) -> None:
    with pytest.raises(OriginUnavailableError):
        await opened(f"webhdfs://127.0.0.1:{silent_port}/x", IMPATIENT).check()


def test_pyarrow_without_libhdfs(monkeypatch, tmp_path) -> None:
    for name in ("HADOOP_HOME", "LD_LIBRARY_PATH", "CLASSPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ARROW_LIBHDFS_DIR", str(tmp_path))
    with pytest.raises(UsageError, match=r"--hdfs-driver pyarrow finds no libhdfs"):
        open_origin("hdfs://127.0.0.1:1/x", OriginOptions(hdfs_driver="pyarrow"))


async def test_an_entry_of_an_impossible_size_is_left_out() -> None:
    class Origin:
        counters = OriginCounters()

        async def start_listing(self, path):
            return iter(())

        def start_page(self, path, statuses):
            return [
                Entry(name, ObjectMeta(size, 0, "v")) for name, size in (("a", 1), ("b", 1 << 63))
            ]

        async def finish_page(self, path, started):
            return started

    listing = hdfs_origin._Listing(Origin(), "")
    assert [entry.name for entry in await listing.next_page()] == ["a"]
    assert Origin.counters.unshown_keys == 1
