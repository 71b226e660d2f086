"""Names and attributes of a writable mount, through the real kernel: what POSIX demands of them."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.mount.harness import Site, eventually


@pytest.fixture
def rw(site: Site) -> Iterator[Site]:
    site.mount("--rw")
    yield site
    if site.is_mounted():
        site.umount()


def errno_of(call: Callable[[], object]) -> int | None:
    with pytest.raises(OSError) as raised:
        call()
    return raised.value.errno


def wait_for_clock(since_ns: int) -> None:
    """The kernel's times of files have a resolution of up to 10 ms."""
    eventually(lambda: time.time_ns() > since_ns + 50_000_000)


CHANGES: dict[str, Callable[[Path], object]] = {
    "chmod": lambda path: path.chmod(0o600),
    "the same mode": lambda path: path.chmod(path.stat().st_mode & 0o777),
    "utime": lambda path: os.utime(path, ns=(1, 10**18)),
    "rename": lambda path: path.rename(path.with_name("other")).rename(path),
}


@pytest.fixture
def local_rw(site: Site, tmp_path: Path) -> Site:
    source = tmp_path / "local"
    source.mkdir()
    site.source = f"file://{source}"
    site.mount("--rw")
    return site


def test_the_ctime_changes_with_attributes_and_name(rw: Site) -> None:
    file, directory = rw.mountpoint / "file", rw.mountpoint / "dir"
    file.write_bytes(b"1")
    directory.mkdir()
    for path in (file, directory):
        for name, change in CHANGES.items():
            before = path.stat()
            wait_for_clock(before.st_ctime_ns)
            change(path)
            assert path.stat().st_ctime_ns > before.st_ctime_ns, (path, name)
        with os.scandir(rw.mountpoint) as entries:
            listed = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
        assert listed[path.name].st_ctime_ns == path.stat().st_ctime_ns


def test_the_ctime_changes_with_the_content(rw: Site) -> None:
    path = rw.mountpoint / "it"
    path.write_bytes(b"1")
    os.utime(path, ns=(10**18, 2 * 10**18))
    before = path.stat()
    wait_for_clock(before.st_ctime_ns)
    with path.open("ab") as stream:
        stream.write(b"2")
        stream.flush()
        assert path.stat().st_ctime_ns > before.st_ctime_ns
        assert path.stat().st_mtime_ns > before.st_ctime_ns


def test_times_are_kept_over_a_remount(rw: Site) -> None:
    path = rw.mountpoint / "it"
    path.write_bytes(b"1")
    os.utime(path, ns=(10**18 + 1, 2 * 10**18 + 2))
    before = path.stat()
    assert (before.st_atime_ns, before.st_mtime_ns) == (10**18 + 1, 2 * 10**18 + 2)
    rw.umount()
    rw.mount("--rw")
    after = path.stat()
    assert (after.st_atime_ns, after.st_mtime_ns) == (10**18 + 1, 2 * 10**18 + 2)
    assert after.st_ctime_ns == before.st_ctime_ns


def test_the_atime_alone_is_set(rw: Site) -> None:
    path = rw.mountpoint / "it"
    path.write_bytes(b"1")
    before = path.stat()
    os.utime(path, ns=(5 * 10**17, before.st_mtime_ns))
    assert path.stat().st_atime_ns == 5 * 10**17
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_a_removed_file_and_a_removed_directory_have_no_links(rw: Site) -> None:
    path, directory = rw.mountpoint / "file", rw.mountpoint / "dir"
    directory.mkdir()
    fd = os.open(directory, os.O_RDONLY)
    with path.open("wb") as stream:
        assert os.fstat(stream.fileno()).st_nlink == 1
        path.unlink()
        directory.rmdir()
        assert os.fstat(stream.fileno()).st_nlink == 0
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)


def test_a_long_name_is_refused_by_every_call(rw: Site) -> None:
    file = rw.mountpoint / "file"
    file.write_bytes(b"")
    for length in (256, 600, 1000):
        long = rw.mountpoint / ("x" * length)
        calls: list[Callable[[], object]] = [long.stat, long.unlink, long.rmdir, long.mkdir]
        calls += [long.touch, partial(long.rename, file), partial(file.rename, long)]
        for call in (*calls, partial(os.truncate, long, 0)):
            assert errno_of(call) == errno.ENAMETOOLONG, (length, call)


def test_a_path_that_is_too_long_for_the_spool(local_rw: Site) -> None:
    here = os.getcwd()
    try:
        os.chdir(local_rw.mountpoint)
        for _ in range(264):
            os.mkdir("d" * 250)
            os.chdir("d" * 250)
        with pytest.raises(OSError) as caught:
            Path("f").write_text("x")
        assert caught.value.errno == errno.ENAMETOOLONG
        assert os.listdir() == []
    finally:
        os.chdir(here)


def test_bytes_behind_the_largest_size(local_rw: Site) -> None:
    file = local_rw.mountpoint / "f"
    with file.open("wb") as opened:
        for offset in (1 << 62, (1 << 63) - 2):
            with pytest.raises(OSError) as caught:
                os.pwrite(opened.fileno(), b"x", offset)
            assert caught.value.errno == errno.EFBIG
    assert file.read_bytes() == b""


def test_what_objects_can_not_be(rw: Site) -> None:
    file = rw.mountpoint / "file"
    file.write_bytes(b"")
    other = rw.mountpoint / "other"
    assert errno_of(lambda: other.hardlink_to(file)) == errno.EPERM
    assert errno_of(lambda: other.symlink_to(file)) == errno.EPERM
    assert errno_of(lambda: os.mkfifo(other)) == errno.EPERM
    assert errno_of(lambda: os.setxattr(file, "user.x", b"1")) == errno.EOPNOTSUPP
    assert errno_of(lambda: os.removexattr(file, "user.x")) == errno.EOPNOTSUPP
    assert errno_of(lambda: os.truncate(file, 10**15)) == errno.EFBIG
    assert file.stat().st_size == 0


def test_attributes_of_a_file_with_unsent_changes_travel_with_them(rw: Site) -> None:
    path, there = rw.mountpoint / "file", rw.files / "file"
    path.write_bytes(b"old")
    there_before = there.stat()
    with path.open("r+b") as stream:
        stream.write(b"newer")
        stream.flush()
        os.utime(stream.fileno(), ns=(10**18, 10**18))
        os.fchmod(stream.fileno(), 0o600)
        assert there.read_bytes() == b"old"
        assert there.stat().st_mtime_ns == there_before.st_mtime_ns
        assert os.fstat(stream.fileno()).st_size == 5
    assert there.read_bytes() == path.read_bytes() == b"newer"
    assert there.stat().st_mtime_ns == path.stat().st_mtime_ns == 10**18
    assert there.stat().st_mode & 0o777 == path.stat().st_mode & 0o777 == 0o600


@pytest.mark.root
def test_an_attribute_that_the_source_refuses_does_not_change(rw: Site) -> None:
    path = rw.mountpoint / "file"
    path.write_bytes(b"1")
    path.chmod(0o640)
    (rw.files / "file").unlink()
    assert errno_of(lambda: path.chmod(0o600)) == errno.ENOENT
    assert os.stat(path).st_mode & 0o777 == 0o640
