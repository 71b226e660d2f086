"""A writable mount of a local directory, through the real kernel."""

import contextlib
import ctypes
import errno
import mmap
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import (
    MIB,
    PATIENT,
    Site,
    children_of,
    drop_pages,
    eventually,
    unchangeable,
)
from tests.servers.seaweedfs import SeaweedFS

CREATE = os.O_CREAT | os.O_WRONLY | os.O_TRUNC


@pytest.fixture
def rw(site: Site) -> Iterator[Site]:
    site.mount("--rw")
    yield site
    if site.is_mounted():
        site.umount()


def same(site: Site, name: str, content: bytes) -> None:
    """The mount and the origin have this content."""
    assert (site.mountpoint / name).read_bytes() == content
    assert (site.files / name).read_bytes() == content
    assert (site.mountpoint / name).stat().st_size == len(content)


def test_written_files_are_at_the_origin_after_close(rw: Site) -> None:
    content = os.urandom(300_000)
    (rw.mountpoint / "new").write_bytes(content)
    same(rw, "new", content)
    (rw.mountpoint / "empty").write_bytes(b"")
    same(rw, "empty", b"")


def test_nothing_is_at_the_origin_before_the_first_close(rw: Site) -> None:
    with open(rw.mountpoint / "new", "wb") as file:
        file.write(b"first")
        file.flush()
        assert (rw.mountpoint / "new").read_bytes() == b"first"
        assert "new" in os.listdir(rw.mountpoint)
    same(rw, "new", b"first")


def test_only_the_close_of_a_process_that_wrote_sends_a_file(site: Site) -> None:
    site.let_only_closes_send()
    site.mount("--rw")
    rw = site
    name = rw.mountpoint / "log"
    origin = rw.files / "log"
    with open(name, "wb", buffering=0) as log:
        log.write(b"first ")
        with open(name, "rb") as reader:  # the same process: this close sends the file
            assert reader.read() == b"first "
        assert origin.read_bytes() == b"first "
        log.write(b"second ")
        subprocess.run(["cat", name], check=True, capture_output=True)
        subprocess.run(["true"], check=True, stdout=log)  # a child closes what it has inherited
        assert origin.read_bytes() == b"first "
        subprocess.run(["echo", "-n", "by a child "], check=True, stdout=log)
        assert origin.read_bytes() == b"first second by a child "
        thread = threading.Thread(target=log.write, args=(b"by a thread",))
        thread.start()
        thread.join()
        subprocess.run(["true"], check=True, stdout=log)
        assert origin.read_bytes() == b"first second by a child "
    same(rw, "log", b"first second by a child by a thread")


def test_a_reader_does_not_get_the_error_of_a_writer(site: Site) -> None:
    site.expected_trouble = ("it stays in the spool",)
    site.mount("--rw")
    writer = os.open(site.mountpoint / "file", os.O_CREAT | os.O_WRONLY)
    os.write(writer, b"kept")
    with unchangeable(site.files):
        read = subprocess.run(["cat", site.mountpoint / "file"], check=True, capture_output=True)
        assert read.stdout == b"kept"
        with pytest.raises(OSError):
            os.close(writer)
        copy = os.open(site.mountpoint / "file", os.O_RDONLY)
        os.close(copy)  # the process knows already
    site.umount()
    assert (site.files / "file").read_bytes() == b"kept"


def test_files_are_replaced_appended_to_and_changed(rw: Site) -> None:
    file = rw.mountpoint / "file"
    file.write_bytes(b"x" * 5000)
    ino = file.stat().st_ino
    file.write_bytes(b"replaced")
    same(rw, "file", b"replaced")
    with file.open("ab") as stream:
        stream.write(b" and more")
    same(rw, "file", b"replaced and more")
    with file.open("r+b") as stream:
        stream.seek(3)
        stream.write(b"LAC")
        stream.truncate(10)
    same(rw, "file", b"repLACed a")
    os.truncate(file, 12)
    os.sync()
    with file.open("r+b") as stream:
        os.fsync(stream.fileno())
    same(rw, "file", b"repLACed a\0\0")
    assert file.stat().st_ino == ino


def test_parts_of_a_file_of_the_origin_change(rw: Site) -> None:
    content = bytearray(os.urandom(3 * MIB + 17))
    (rw.files / "large").write_bytes(content)
    with open(rw.mountpoint / "large", "r+b") as stream:
        stream.seek(MIB - 10)
        stream.write(b"#" * 20)
        content[MIB - 10 : MIB + 10] = b"#" * 20
        stream.flush()
        drop_pages(rw.mountpoint / "large")
        assert (rw.mountpoint / "large").read_bytes() == content
    drop_pages(rw.mountpoint / "large")
    same(rw, "large", bytes(content))


def test_a_mapped_file_is_written(rw: Site) -> None:
    file = rw.mountpoint / "mapped"
    file.write_bytes(bytes(8192))
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 8192) as view:
        view[100:105] = b"hello"
        view.flush()
        os.fsync(stream.fileno())
    same(rw, "mapped", bytes(100) + b"hello" + bytes(8192 - 105))


def test_what_was_written_is_read_back_without_the_origin(rw: Site) -> None:
    content = os.urandom(2 * MIB + 5)
    (rw.mountpoint / "large").write_bytes(content)
    (rw.mountpoint / "small").write_bytes(b"small")
    gets = rw.origin()["gets"]
    for name, expected in (("large", content), ("small", b"small")):
        drop_pages(rw.mountpoint / name)
        assert (rw.mountpoint / name).read_bytes() == expected
    assert rw.origin()["gets"] == gets


@pytest.mark.parametrize("way", ["before the close", "after the close", "before a rename"])
def test_contents_of_one_size_and_one_set_time_are_told_apart(rw: Site, way: str) -> None:
    """Every second one may get the inode number, and so the version, of the one before the last."""
    times = (1_000_000_000, 1_000_000_000)
    written = rw.mountpoint / ("file" if way != "before a rename" else "new")
    path = rw.mountpoint / "file"
    for number in range(6):
        content = f"content {number}".encode() * 10_000
        descriptor = os.open(written, CREATE)
        os.write(descriptor, content)
        if way == "before the close":
            os.utime(descriptor, times)
        os.close(descriptor)
        os.utime(written, times)
        written.rename(path)
        eventually(lambda: rw.status()["writes"]["spool_bytes"] == 0)
        drop_pages(path)
        same(rw, "file", content)


def test_directories_are_made_renamed_and_removed(rw: Site) -> None:
    top = rw.mountpoint / "a"
    top.mkdir()
    assert (rw.files / "a").is_dir()
    (top / "b").mkdir()
    (top / "b/file").write_bytes(b"deep")
    with pytest.raises(OSError, match="not empty"):
        top.rmdir()
    top.rename(rw.mountpoint / "c")
    same(rw, "c/b/file", b"deep")
    assert not top.exists()
    assert os.listdir(rw.files) == ["c"]
    (rw.mountpoint / "c/b/file").unlink()
    (rw.mountpoint / "c/b").rmdir()
    (rw.mountpoint / "c").rmdir()
    assert os.listdir(rw.files) == os.listdir(rw.mountpoint) == []


def test_files_are_renamed(rw: Site) -> None:
    one, two = rw.mountpoint / "one", rw.mountpoint / "two"
    one.write_bytes(b"one")
    two.write_bytes(b"two")
    with two.open("rb") as stream:
        one.rename(two)
        assert stream.read() == b"two"
    same(rw, "two", b"one")
    assert not one.exists()
    assert not (rw.files / "one").exists()
    with pytest.raises(FileNotFoundError):
        one.rename(two)
    with open(rw.mountpoint / "open", "wb") as stream:
        stream.write(b"before ")
        stream.flush()
        os.rename(rw.mountpoint / "open", rw.mountpoint / "moved")
        stream.write(b"after")
    same(rw, "moved", b"before after")
    assert not (rw.files / "open").exists()


def test_files_are_removed(rw: Site) -> None:
    file = rw.mountpoint / "file"
    file.write_bytes(b"1")
    file.unlink()
    assert not file.exists()
    assert os.listdir(rw.files) == os.listdir(rw.mountpoint) == []
    with pytest.raises(FileNotFoundError):
        file.unlink()


def test_a_removed_file_stays_for_those_who_have_it_open(rw: Site) -> None:
    file = rw.mountpoint / "file"
    with file.open("w+b") as stream:
        stream.write(b"gone")
        stream.flush()
        file.unlink()
        stream.write(b" and here")
        stream.seek(0)
        assert stream.read() == b"gone and here"
        assert os.fstat(stream.fileno()).st_size == 13
    assert os.listdir(rw.files) == []


def test_only_one_creates_a_name(rw: Site) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    made: list[int] = []

    def create() -> None:
        try:
            made.append(os.open(rw.mountpoint / "lock", flags))
        except FileExistsError:
            made.append(-1)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made)[:7] == [-1] * 7
    os.close(max(made))


def test_owner_mode_and_time_are_kept(rw: Site) -> None:
    file = rw.mountpoint / "file"
    file.write_bytes(b"1")
    file.chmod(0o640)
    os.utime(file, ns=(10**18, 10**18))
    assert file.stat().st_mode & 0o777 == 0o640
    assert file.stat().st_mtime_ns == 10**18
    assert (rw.files / "file").stat().st_mtime_ns == 10**18
    assert (rw.files / "file").stat().st_mode & 0o777 == 0o640
    same(rw, "file", b"1")


def test_another_writer_is_seen_and_is_not_overwritten_by_a_partial_change(site: Site) -> None:
    site.expected_trouble = ("cachefs.writes.sending.file_sends: ",)
    site.mount("--rw", "--attr-ttl", "0", "--entry-ttl", "0", "--list-ttl", "0")
    file = site.mountpoint / "shared"
    file.write_bytes(b"ours......")
    (site.files / "shared").write_bytes(b"theirs, longer")
    eventually(lambda: file.read_bytes() == b"theirs, longer")
    stream = os.open(file, os.O_WRONLY)
    os.pwrite(stream, b"OURS", 2)
    (site.files / "shared").write_bytes(b"theirs again")
    with pytest.raises(OSError) as raised:
        os.close(stream)
    assert raised.value.errno == errno.ESTALE
    eventually(lambda: file.read_bytes() == b"theirs again")
    assert (site.files / "shared").read_bytes() == b"theirs again"


def test_a_new_file_replaces_that_of_another_client_only_if_it_truncates(site: Site) -> None:
    site.expected_trouble = ("cachefs.writes.sending.file_sends: ",)
    site.mount("--rw")
    assert os.listdir(site.mountpoint) == []  # the names count as absent from now on
    log, whole = site.mountpoint / "log", site.mountpoint / "whole"
    for file in (log, whole):
        with pytest.raises(FileNotFoundError):
            file.stat()
    ours = [os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), os.open(whole, CREATE)]
    (site.files / "log").write_bytes(b"theirs")
    (site.files / "whole").write_bytes(b"theirs")
    for descriptor in ours:
        os.write(descriptor, b"ours")
    with pytest.raises(OSError) as raised:
        os.close(ours[0])
    assert raised.value.errno == errno.ESTALE
    os.close(ours[1])
    assert (site.files / "log").read_bytes() == b"theirs"
    assert (site.files / "whole").read_bytes() == b"ours"


def test_a_file_whose_name_another_client_took_takes_no_changes(site: Site) -> None:
    site.mount("--rw", "--attr-ttl", "0", "--entry-ttl", "0", "--list-ttl", "0")
    file = site.mountpoint / "file"
    file.write_bytes(b"ours")
    stream = os.open(file, os.O_WRONLY)
    (site.files / "new").write_bytes(b"theirs, longer")
    (site.files / "new").rename(site.files / "file")
    eventually(lambda: file.stat().st_size == 14)
    with pytest.raises(OSError) as raised:
        os.pwrite(stream, b"lost?", 0)
    assert raised.value.errno == errno.ESTALE
    os.close(stream)
    assert file.read_bytes() == (site.files / "file").read_bytes() == b"theirs, longer"


def test_names_that_cannot_be(rw: Site) -> None:
    with pytest.raises(OSError) as raised:
        (rw.mountpoint / ("x" * 256)).write_bytes(b"")
    assert raised.value.errno == errno.ENAMETOOLONG
    (rw.mountpoint / ("x" * 255)).write_bytes(b"long")
    same(rw, "x" * 255, b"long")
    with pytest.raises(PermissionError):
        os.mkfifo(rw.mountpoint / "fifo")


def test_a_daemon_that_is_killed_while_files_are_open(site: Site) -> None:
    site.mount("--rw", "--data-path", "relay")  # otherwise the mount ends with its daemon
    site.expected_trouble = (" cachefs.supervisor.",)
    rw = site
    written = bytearray()
    with open(rw.mountpoint / "open", "wb", buffering=0) as stream:
        for turn in range(3):
            for _ in range(20):
                piece = os.urandom(5000)
                stream.write(piece)
                written += piece
            (daemon,) = children_of(rw.pid())  # it may not have a control socket yet
            os.kill(daemon, signal.SIGKILL)
            assert (rw.mountpoint / "open").stat().st_size == len(written), turn
            with open(rw.mountpoint / f"closed{turn}", "wb") as other:
                other.write(written)
    same(rw, "open", bytes(written))
    for turn in range(3):
        size = 100_000 * (turn + 1)
        same(rw, f"closed{turn}", bytes(written[:size]))
    rw.umount()


@pytest.fixture
def s3_site(tmp_path: Path, seaweedfs: SeaweedFS) -> Iterator[Site]:
    site = Site(tmp_path, f"s3://{seaweedfs.make_bucket('writable-mount')}/prefix")
    site.environment = seaweedfs.environment
    site.options = PATIENT
    site.expected_trouble = ("an empty directory is shown until there is",)
    yield site
    site.tear_down()


def test_objects_of_s3_are_written(s3_site: Site) -> None:
    s3_site.mount("--rw")
    large = os.urandom(20 * MIB + 3)
    (s3_site.mountpoint / "dir").mkdir()
    (s3_site.mountpoint / "dir/small").write_bytes(b"small")
    (s3_site.mountpoint / "dir/large").write_bytes(large)
    gets = s3_site.origin()["gets"]
    drop_pages(s3_site.mountpoint / "dir/large")
    assert (s3_site.mountpoint / "dir/large").read_bytes() == large
    assert s3_site.origin()["gets"] == gets
    (s3_site.mountpoint / "dir/small").rename(s3_site.mountpoint / "moved")
    (s3_site.mountpoint / "dir").rename(s3_site.mountpoint / "other")
    s3_site.umount()
    s3_site.cache = s3_site.cache.with_name("empty cache")
    s3_site.mount()
    assert sorted(os.listdir(s3_site.mountpoint)) == ["moved", "other"]
    assert (s3_site.mountpoint / "moved").read_bytes() == b"small"
    assert (s3_site.mountpoint / "other/large").read_bytes() == large
    s3_site.umount()


def test_without_rw_nothing_can_be_written(site: Site, tmp_path: Path) -> None:
    site.mount()
    with pytest.raises(OSError) as raised:
        (site.mountpoint / "file").write_bytes(b"")
    assert raised.value.errno == errno.EROFS


def test_a_source_that_cannot_be_written(site: Site) -> None:
    subprocess.run(["mount", "--bind", site.files, site.files], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", site.files], check=True)
    try:
        assert "can't be written" in site.refused("--rw")
    finally:
        subprocess.run(["umount", site.files], check=True)


def test_a_manifest_cannot_be_written(site: Site) -> None:
    said = site.refused("--rw", "--manifest", "m.parquet", code=2)
    assert "leave out --rw or --manifest" in said


def test_what_could_not_be_sent_is_sent_later(site: Site) -> None:
    site.expected_trouble = ("it stays in the spool",)
    site.mount("--rw")
    (site.mountpoint / "dir").mkdir()
    stream = os.open(site.mountpoint / "dir/file", os.O_CREAT | os.O_WRONLY)
    os.write(stream, b"kept")
    with unchangeable(site.files / "dir"):
        with pytest.raises(OSError) as raised:
            os.close(stream)
        assert raised.value.errno == errno.EACCES
        stream = os.open(site.mountpoint / "dir/file", os.O_RDONLY)
        assert os.pread(stream, 10, 0) == b"kept"
        with contextlib.suppress(OSError):  # each close tries to send the file
            os.close(stream)
        site.umount()
    site.mount("--rw")
    eventually((site.files / "dir/file").exists)
    same(site, "dir/file", b"kept")
    site.umount()


def test_files_that_stay_open_are_published(site: Site) -> None:
    site.mount("--rw", "--publish-interval", "1s")
    log, old, part = (site.mountpoint / name for name in ("log", "old", "part"))
    old.write_bytes(b"old content")
    part.write_bytes(b"part")
    ended = threading.Event()

    def write_log() -> None:
        with log.open("ab", buffering=0) as stream:
            while not ended.wait(0.1):
                stream.write(b"a line\n")

    writer = threading.Thread(target=write_log)
    writer.start()
    try:
        eventually((site.files / "log").exists)
        size = (site.files / "log").stat().st_size
        eventually(lambda: (site.files / "log").stat().st_size > size)
        with old.open("wb") as anew, part.open("r+b") as changed:
            anew.write(b"half of the new con")
            anew.flush()
            changed.write(b"PART")
            changed.flush()
            eventually(lambda: (site.files / "part").read_bytes() == b"PART")
            assert (site.files / "old").read_bytes() == b"old content"
            assert old.read_bytes() == b"half of the new con"
            anew.write(b"tent")
    finally:
        ended.set()
        writer.join()
    assert (site.files / "old").read_bytes() == b"half of the new content"
    assert (site.files / "log").read_bytes() == log.read_bytes()
    with old.open("wb"):
        pass
    os.truncate(part, 0)
    eventually(lambda: (site.files / "part").read_bytes() == b"")
    site.umount()


def test_what_no_file_can_have_is_refused_at_once(rw: Site) -> None:
    """A size behind the largest object. Times before 1678 or after 2262 become the nearest."""
    path = rw.mountpoint / "far"
    with path.open("w+b", buffering=0) as file:
        for offset in (5 << 40, 6 << 40, 1 << 47, 1 << 62):
            with pytest.raises(OSError) as raised:
                os.pwrite(file.fileno(), b"a", offset)
            assert raised.value.errno == errno.EFBIG
        assert os.fstat(file.fileno()).st_size == 0
    for seconds in (1 << 36, -(1 << 36)):
        os.utime(path, (seconds, seconds))
        found = path.stat()
        assert found.st_atime_ns == found.st_mtime_ns
        assert abs(found.st_mtime_ns) > 1 << 62
    path.unlink()


def test_what_a_writable_mount_does_not_have(rw: Site) -> None:
    path, other = rw.mountpoint / "file", rw.mountpoint / "other"
    path.write_bytes(b"content")
    other.write_bytes(b"other")
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file:
        assert libc.fallocate(file.fileno(), 0, ctypes.c_long(0), ctypes.c_long(1 << 20)) == -1
        assert ctypes.get_errno() == errno.EOPNOTSUPP
    names = os.fsencode(path), os.fsencode(other)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    assert libc.renameat2(here, names[0], here, names[1], exchange) == -1
    assert ctypes.get_errno() == errno.EINVAL
    with pytest.raises(OSError) as raised:
        os.setxattr(path, "user.name", b"value")
    assert raised.value.errno == errno.EOPNOTSUPP
    for link in (os.symlink, os.link):
        with pytest.raises(PermissionError):
            link(path, rw.mountpoint / "link")
    same(rw, "file", b"content")
    same(rw, "other", b"other")


class _Handle(ctypes.Structure):
    """See open_by_handle_at(2)."""

    _fields_ = (("size", ctypes.c_uint), ("kind", ctypes.c_int), ("data", ctypes.c_ubyte * 128))


def _opened(libc: ctypes.CDLL, site: Site, handle: _Handle) -> int:
    """Open a file by its handle and close it. Return 0, or the errno."""
    top = os.open(site.mountpoint, os.O_RDONLY)
    opened = libc.open_by_handle_at(top, ctypes.byref(handle), os.O_RDONLY)
    error = 0 if opened >= 0 else ctypes.get_errno()
    os.close(top)
    if opened >= 0:
        os.close(opened)
    return error


def test_a_file_handle_is_valid_only_while_the_kernel_knows_the_file(rw: Site) -> None:
    path = rw.mountpoint / "file"
    path.write_bytes(b"content")
    libc = ctypes.CDLL(None, use_errno=True)
    handle, mount_id = _Handle(size=128), ctypes.c_int()
    found = ctypes.byref(handle), ctypes.byref(mount_id)
    assert libc.name_to_handle_at(-100, os.fsencode(path), *found, 0) == 0
    assert _opened(libc, rw, handle) == 0
    rw.umount()
    rw.mount("--rw")
    assert _opened(libc, rw, handle) == errno.ESTALE
    assert path.read_bytes() == b"content"
