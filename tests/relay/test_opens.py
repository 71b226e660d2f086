"""OPEN behind the relay: which files the kernel reads directly, with the real kernel."""

import contextlib
import errno
import mmap
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from cachefs.fuse import relay

if relay.why_not() is not None:
    pytest.skip(str(relay.why_not()), allow_module_level=True)
if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
    pytest.skip("needs root and /dev/fuse", allow_module_level=True)
if tuple(map(int, platform.release().split(".")[:2])) < (6, 9):
    pytest.skip("needs Linux 6.9", allow_module_level=True)

from tests.relay.raw_mount import File, RawMount

MIB = 1 << 20
CONTENT = random.Random(1).randbytes(3 * MIB + 4321)
UNDECIDED, ON, OFF = range(3)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[RawMount]:
    with RawMount(tmp_path / "mount") as made:
        made.table.pass_through(True)
        yield made


@pytest.fixture
def large(mount: RawMount, tmp_path: Path) -> File:
    """A file of several blocks, that isn't published yet."""
    (tmp_path / "large").write_bytes(CONTENT)
    return mount.add(tmp_path / "large")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that nobody else uses."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@contextlib.contextmanager
def opened(mount: RawMount, flags: int = 0, name: str = "large") -> Iterator[int]:
    fd = os.open(mount.mountpoint / name, os.O_RDONLY | flags)
    try:
        yield fd
    finally:
        os.close(fd)


def read_all(fd: int) -> bytes:
    return os.pread(fd, len(CONTENT) + 1, 0)


def is_through(mount: RawMount, name: str = "large") -> bool:
    """Whether the next open of the file is passed through."""
    before = mount.counted("opens_through"), mount.counted("opens")
    with opened(mount, name=name):
        through, opens = mount.counted("opens_through"), mount.counted("opens")
    assert opens == before[1] + 1
    return bool(through > before[0])


def eventually(is_so: Callable[[], bool]) -> None:
    """The kernel sends RELEASE after close(2) has returned."""
    until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


# -- which opens are passed through ----------------------------------------------------------------


def test_the_kernel_reads_a_whole_file_directly(mount: RawMount, large: File) -> None:
    mount.publish(large, whole=True)
    with opened(mount) as fd:
        assert read_all(fd) == CONTENT
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as view:
            assert view[:] == CONTENT
        assert os.fstat(fd).st_size == len(CONTENT)
    assert (mount.counted("opens"), mount.counted("opens_through")) == (1, 1)
    assert (mount.counted("hits"), mount.reads) == (0, 0)
    assert mount.table.drain(10) == [(large.ino, 0, 0, 0)]  # the daemon sees that it is used
    assert mount.table.take_file_hits(0) == (1, 0)


def test_direct_reads_are_passed_through(mount: RawMount, large: File) -> None:
    mount.publish(large, whole=True)
    page = mmap.mmap(-1, MIB)
    with opened(mount), opened(mount, os.O_DIRECT) as fd:
        assert os.preadv(fd, [page], MIB) == MIB
    assert page[:] == CONTENT[MIB : 2 * MIB]
    assert mount.counted("opens_through") == 2


def test_reads_change_no_attribute(mount: RawMount, large: File) -> None:
    mount.publish(large, whole=True)
    path = mount.mountpoint / "large"
    before = path.stat()
    with opened(mount) as fd:
        assert read_all(fd) == CONTENT
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as view:
            assert view[:] == CONTENT
        assert os.fstat(fd) == path.stat() == before
    assert mount.counted("opens_through") == 1


def test_bytes_that_the_disk_has_changed_are_not_noticed(
    mount: RawMount, large: File, tmp_path: Path
) -> None:
    slab = tmp_path / "slab"
    slab.write_bytes(CONTENT)
    mount.publish(large, whole=True, content=slab)
    with slab.open("rb+") as file:
        file.write(b"wrong")
    with opened(mount) as fd:
        assert read_all(fd) == b"wrong" + CONTENT[5:]


def _incomplete(mount: RawMount, file: File) -> None:
    mount.publish(file, whole=False)


def _withdrawn(mount: RawMount, file: File) -> None:
    mount.table.withdraw_file(mount.publish(file, whole=True))


def _revived(mount: RawMount, file: File) -> None:
    number = mount.publish(file, whole=True)
    mount.table.withdraw_file(number)
    mount.table.revive(number)  # a file that was withdrawn is not whole any more


def _not_lent(mount: RawMount, file: File) -> None:
    mount.relay.close_file(mount.publish(file, whole=True))


def _not_at_its_start(mount: RawMount, file: File) -> None:
    number = mount.publish(file, whole=True)
    mount.table.publish(file.ino, 0, number, 4096, MIB, False, 0)
    mount.table.publish(file.ino, 0, number, 4096, 1, False, 0)


def _forbidden(mount: RawMount, file: File) -> None:
    mount.publish(file, whole=True)
    mount.table.pass_through(False)


def _paused(mount: RawMount, file: File) -> None:
    mount.publish(file, whole=True)
    mount.table.pause(True)


@pytest.mark.parametrize(
    "prepare",
    [_incomplete, _withdrawn, _revived, _not_lent, _not_at_its_start, _forbidden, _paused],
)
def test_every_other_file_is_read_through_the_relay(
    mount: RawMount, large: File, prepare: Callable[[RawMount, File], None]
) -> None:
    prepare(mount, large)
    with opened(mount) as fd:
        assert read_all(fd) == CONTENT
    assert (mount.counted("opens"), mount.counted("opens_through")) == (1, 0)
    assert mount.counted("through_error") == 0


def test_numbers_of_files_are_checked(mount: RawMount) -> None:
    with pytest.raises(ValueError, match="no such place"):
        mount.table.mark_whole(1 << 20, True)


def test_cached_pages_stay_across_opens(mount: RawMount, large: File) -> None:
    mount.publish(large, whole=False)
    reads = []
    for _ in range(3):
        with opened(mount) as fd:
            assert read_all(fd) == CONTENT
        reads.append(mount.counted("hits") + mount.reads)
    assert reads[1] == reads[2]


def test_a_file_on_overlayfs_is_read_through_the_relay(
    mount: RawMount, large: File, tmp_path: Path
) -> None:
    layers = [tmp_path / name for name in ("lower", "upper", "work", "merged")]
    for layer in layers:
        layer.mkdir()
    lower, upper, work, merged = layers
    (lower / "slab").write_bytes(CONTENT)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    command = ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no overlayfs here")
    try:
        number = mount.publish(large, whole=True, content=merged / "slab")
        with opened(mount) as fd:
            assert read_all(fd) == CONTENT
        assert mount.counted("through_error") == errno.ELOOP
        assert mount.counted("opens_through") == 0
        mount.relay.close_file(number)
    finally:
        subprocess.run(["umount", "-l", str(merged)], check=True)
    mount.publish(large, whole=True)  # elsewhere
    eventually(lambda: is_through(mount))
    assert mount.counted("through_error") == 0


# -- whether OPEN is answered ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        pytest.param({"passthrough": False}, 0, id="not wanted"),
        pytest.param({"writable": True}, 0, id="writable"),
        pytest.param({"negotiates": False}, errno.EPERM, id="refused by the kernel"),
    ],
)
def test_without_passthrough_the_kernel_sends_no_open(
    tmp_path: Path, options: dict[str, bool], error: int
) -> None:
    (tmp_path / "large").write_bytes(CONTENT)
    with RawMount(tmp_path / "mount", **options) as mount:
        mount.table.pass_through(True)
        mount.publish(mount.add(tmp_path / "large"), whole=True)
        for _ in range(3):
            with opened(mount) as fd:
                assert read_all(fd) == CONTENT
        assert mount.counted("opens_state") == OFF
        assert mount.counted("through_error") == error
        assert (mount.counted("opens"), mount.counted("opens_through")) == (0, 0)


def test_the_first_open_decides(mount: RawMount, large: File) -> None:
    mount.publish(large, whole=False)
    assert mount.counted("opens_state") == UNDECIDED
    assert not is_through(mount)
    assert mount.counted("opens_state") == ON


def test_no_file_is_opened_for_writing_after_a_remount(mount: RawMount, large: File) -> None:
    """The kernel would write to the cache."""
    mount.publish(large, whole=True)
    subprocess.run(["mount", "-i", "-o", "remount,rw", str(mount.mountpoint)], check=True)
    for flags in (os.O_RDWR, os.O_WRONLY):
        with pytest.raises(OSError, match=os.strerror(errno.EROFS)), opened(mount, flags):
            pass
    with opened(mount) as fd:
        assert read_all(fd) == CONTENT
    assert large.path.read_bytes() == CONTENT


# -- files that are open ---------------------------------------------------------------------------


def test_opens_that_overlap_get_the_same_answer(mount: RawMount, large: File) -> None:
    number = mount.publish(large, whole=True)
    with opened(mount) as first:
        mount.table.mark_whole(number, False)
        mount.table.pass_through(False)
        with opened(mount) as second:
            assert read_all(first) == read_all(second) == CONTENT
    assert mount.counted("opens_through") == 2
    eventually(lambda: not is_through(mount))
    with opened(mount):
        mount.table.mark_whole(number, True)
        mount.table.pass_through(True)
        assert not is_through(mount)
    eventually(lambda: is_through(mount))


def test_a_file_that_is_evicted_while_it_is_open(mount: RawMount, large: File, disk: Path) -> None:
    slab, free = disk / "slab", os.statvfs(disk).f_bfree
    slab.write_bytes(CONTENT)
    number = mount.publish(large, whole=True, content=slab)
    with opened(mount) as first, mmap.mmap(first, 0, prot=mmap.PROT_READ) as view:
        mount.table.withdraw_file(number)
        mount.relay.close_file(number)
        slab.unlink()
        assert is_through(mount)
        with opened(mount) as second:
            assert read_all(first) == read_all(second) == view[:] == CONTENT
        assert os.statvfs(disk).f_bfree < free
    assert mount.reads == 0
    eventually(lambda: os.statvfs(disk).f_bfree == free)
    eventually(lambda: not is_through(mount))
    with opened(mount) as fd:
        assert read_all(fd) == CONTENT
    assert mount.reads > 0


def test_open_files_outlive_the_daemon(mount: RawMount, large: File, tmp_path: Path) -> None:
    (tmp_path / "cached").write_bytes(CONTENT)
    mount.publish(mount.add(tmp_path / "cached"), whole=False)
    mount.publish(large, whole=True)
    cached = os.open(mount.mountpoint / "cached", os.O_RDONLY)
    with opened(mount) as first:
        mount.replace_daemon()
        assert is_through(mount)
        with opened(mount) as second:
            assert read_all(first) == read_all(second) == CONTENT
        mount.publish(mount.files["cached"], whole=True)
        mount.table.pass_through(True)
        os.close(os.open(mount.mountpoint / "cached", os.O_RDONLY))  # cached, as the open one
        assert read_all(cached) == CONTENT
        os.close(cached)
    eventually(lambda: not is_through(mount))
    mount.publish(large, whole=True)
    eventually(lambda: is_through(mount))


_READER = """
import os, random, sys
path, content = sys.argv[1], open(sys.argv[2], "rb").read()
print("began", flush=True)
while True:
    fd = os.open(path, os.O_RDONLY)
    at = random.randrange(len(content))
    assert os.pread(fd, 5000, at) == content[at : at + 5000]
    os.close(fd)
"""


def test_killed_readers_leave_nothing_open(mount: RawMount, large: File) -> None:
    number = mount.publish(large, whole=True)
    path = mount.mountpoint / "large"
    for turn in range(8):
        command = [sys.executable, "-S", "-E", "-c", _READER, str(path), str(large.path)]
        with ExitStack() as stack:
            readers = [
                stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
                for _ in range(2)
            ]
            for reader in readers:
                assert reader.stdout is not None
                assert reader.stdout.readline() == b"began\n"
            time.sleep(random.Random(turn).random() * 0.02)
            for reader in readers:
                assert reader.poll() is None
                reader.send_signal(signal.SIGKILL)
    mount.table.mark_whole(number, False)
    eventually(lambda: not is_through(mount))
    mount.table.mark_whole(number, True)
    eventually(lambda: is_through(mount))


@pytest.mark.parametrize("resends", [False, True], ids=["steady", "resent"])
def test_no_reader_sees_that_the_answer_changes(
    mount: RawMount, tmp_path: Path, resends: bool
) -> None:
    """100 threads, while files become whole and are not any more."""
    pages, over, failures = 16, threading.Event(), list[BaseException]()
    paths = [tmp_path / f"file{number}" for number in range(30)]
    for path in paths:
        path.write_bytes(CONTENT[: pages * 4096])
    numbers = [mount.publish(mount.add(path), whole=True) for path in paths]

    def read(seed: int) -> None:
        chance = random.Random(seed)
        while not over.is_set():
            flags = os.O_RDONLY | chance.choice([0, 0, 0, os.O_DIRECT])
            fd = os.open(mount.mountpoint / chance.choice(paths).name, flags)
            try:
                at = chance.randrange(pages) * 4096
                if chance.random() < 0.3:
                    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as view:
                        assert view[at : at + 4096] == CONTENT[at : at + 4096]
                page = mmap.mmap(-1, 4096)
                assert os.preadv(fd, [page], at) == 4096
                assert page[:] == CONTENT[at : at + 4096]
                if chance.random() < 0.2:
                    time.sleep(0.002)
            finally:
                os.close(fd)
            time.sleep(0.01)

    def read_or_note(seed: int) -> None:
        try:
            read(seed)
        except BaseException as error:
            failures.append(error)
            over.set()

    readers = [threading.Thread(target=read_or_note, args=(seed,)) for seed in range(100)]
    for reader in readers:
        reader.start()
    until, chance = time.monotonic() + 2, random.Random(5)
    while time.monotonic() < until and not over.is_set():
        for _ in range(10):
            mount.table.mark_whole(chance.choice(numbers), chance.random() < 0.5)
        mount.table.pass_through(chance.random() < 0.8)
        if resends:
            mount.relay.resend()
        time.sleep(0.001)
    over.set()
    for reader in readers:
        reader.join()
    assert failures == []
    assert 0 < mount.counted("opens_through") < mount.counted("opens")
    mount.table.pass_through(True)
    for whole in (False, True, False):  # nothing is counted as open
        for number, path in zip(numbers, paths, strict=True):
            mount.table.mark_whole(number, whole)
            eventually(partial(_is_through_now, mount, path.name, whole))


def _is_through_now(mount: RawMount, name: str, whole: bool) -> bool:
    return is_through(mount, name) == whole
