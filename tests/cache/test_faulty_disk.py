"""The disks of the other tests do what they are told to."""

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.cache_dir.disk import Disk
from tests.cache.faulty_disk import FaultyDisk, UndoDisk, read_undo_file, undo

ROOT = Path(__file__).resolve().parents[2]
KIB = 1 << 10


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = Disk().create(tmp_path / "slab", 64 * KIB)
    yield fd
    os.close(fd)


def test_healthy(disk: FaultyDisk, tmp_path: Path) -> None:
    path = tmp_path / "x"
    fd = disk.create(path, 4 * KIB)
    disk.write(fd, b"abc", 5)
    disk.sync(fd)
    os.close(fd)
    fd = disk.open(path)
    assert disk.read(fd, 3, 5) == b"abc"
    buffer = bytearray(3)
    assert disk.read_nowait(fd, (buffer,), 5, 0) == 3
    assert bytes(buffer) == b"abc"
    os.close(fd)
    disk.unlink(path)
    assert not path.exists()
    assert disk.calls.keys() == {"create", "write", "sync", "open", "read", "read_nowait", "unlink"}
    assert disk.failures.total() == 0


def test_fails_by_kind(disk: FaultyDisk, fd: int, tmp_path: Path) -> None:
    disk.fail(errno.EIO, "read")
    disk.fail(errno.ENOSPC, "create", "write")
    for error, call in [
        (errno.EIO, lambda: disk.read(fd, 1, 0)),
        (errno.ENOSPC, lambda: disk.write(fd, b"x", 0)),
        (errno.ENOSPC, lambda: disk.create(tmp_path / "new", 1)),
    ]:
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == error
    assert not (tmp_path / "new").exists()
    disk.unlink(tmp_path / "slab")
    disk.heal("read")
    assert disk.read(fd, 1, 0) == b"\0"
    with pytest.raises(OSError, match="No space"):
        disk.write(fd, b"x", 0)
    disk.heal()
    disk.write(fd, b"x", 0)
    assert disk.failures == {"read": 1, "write": 2, "create": 1}


def test_fails_now_and_then(fd: int) -> None:
    outcomes = []
    for _ in range(2):
        disk = FaultyDisk(seed=7)
        disk.fail(errno.EIO, probability=0.3)
        for _ in range(200):
            with contextlib.suppress(OSError):
                disk.read(fd, 1, 0)
        outcomes.append(disk.failures["read"])
    assert outcomes[0] == outcomes[1]
    assert 30 < outcomes[0] < 90


def test_a_failed_write_leaves_a_part(disk: FaultyDisk, fd: int) -> None:
    disk.fail(errno.EIO, "write")
    with pytest.raises(OSError, match="Input/output"):
        disk.write(fd, b"x" * 4096, 0)
    written = disk.read(fd, 4096, 0).rstrip(b"\0")
    assert 0 < len(written) < 4096


def test_delay(disk: FaultyDisk, fd: int) -> None:
    disk.delay(0.2, "read")
    begin_s = time.monotonic()
    disk.read(fd, 1, 0)
    assert time.monotonic() - begin_s >= 0.2


def test_hangs_until_healed(disk: FaultyDisk, fd: int) -> None:
    disk.hang("read")
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(disk.read(fd, 1, 0))) for _ in "ab"]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + 60
    while disk.hanging < 2 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    disk.write(fd, b"y", 0)
    assert found == []
    disk.heal()
    for thread in threads:
        thread.join(60)
    assert found == [b"y", b"y"]
    assert disk.hanging == 0


def test_cold_and_full(disk: FaultyDisk, fd: int, tmp_path: Path) -> None:
    disk.cold = True
    disk.free_bytes = 5
    with pytest.raises(BlockingIOError) as caught:
        disk.read_nowait(fd, (bytearray(1),), 0, 0)
    assert caught.value.errno == errno.EAGAIN
    assert disk.free_and_total_bytes(tmp_path)[0] == 5
    disk.heal()
    assert disk.read_nowait(fd, (bytearray(1),), 0, 0) == 1
    assert disk.free_and_total_bytes(tmp_path)[0] > 5


# -- the power cut -----------------------------------------------------------------------------


@pytest.fixture
def undo_file(tmp_path: Path) -> Path:
    return tmp_path / "undo"


@pytest.fixture
def lossy(undo_file: Path) -> Iterator[UndoDisk]:
    disk = UndoDisk(undo_file, piece_bytes=4 * KIB)
    yield disk
    disk.close()


def kept(_: int) -> bool:
    return True


def lost(_: int) -> bool:
    return False


def test_writes_are_lost(lossy: UndoDisk, undo_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"-" * 10_000)
    fd = lossy.open(path)
    lossy.write(fd, b"a" * 5000, 1000)
    lossy.write(fd, b"b" * 5000, 2000)
    lossy.write(fd, b"c" * 8000, 9000)
    os.close(fd)
    assert path.stat().st_size == 17_000
    assert [record.offset for record in read_undo_file(undo_file)] == [
        1000, 4096, 2000, 4096, 9000, 12288, 16384,
    ]  # fmt: skip
    assert undo(undo_file, lost) == 7
    assert path.read_bytes() == b"-" * 10_000
    assert os.listdir(tmp_path) == ["x"]


def test_some_writes_are_lost(lossy: UndoDisk, undo_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(8 * KIB))
    fd = lossy.open(path)
    for value in b"abcd":
        lossy.write(fd, bytes([value]) * 8 * KIB, 0)
    os.close(fd)
    assert undo(undo_file, lambda index: index not in (5, 6, 7)) == 3
    assert path.read_bytes() == b"c" * 4 * KIB + b"b" * 4 * KIB


def test_what_was_synced_is_kept(lossy: UndoDisk, undo_file: Path, tmp_path: Path) -> None:
    fds = {name: lossy.create(tmp_path / name, 10) for name in "xy"}
    for fd in fds.values():
        lossy.write(fd, b"a", 0)
    lossy.sync(fds["x"])
    for fd in fds.values():
        lossy.write(fd, b"bc", 0)
        os.close(fd)
    undo(undo_file, lost)
    assert (tmp_path / "x").read_bytes() == b"a" + bytes(9)
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize("vanish", [True, False])
def test_created_files_are_lost(
    lossy: UndoDisk, undo_file: Path, tmp_path: Path, vanish: bool
) -> None:
    path = tmp_path / "x"
    fd = lossy.create(path, 10)
    lossy.write(fd, b"abc", 0)
    os.close(fd)
    undo(undo_file, lambda index: index != 0, lambda _: vanish)
    assert (path.stat().st_size == 0) if not vanish else not path.exists()


def test_unlinked_files_come_back(lossy: UndoDisk, undo_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    fd = lossy.open(path)
    lossy.write(fd, b"new", 0)
    lossy.unlink(path)
    lossy.write(fd, b"end", 0)  # through a descriptor that outlives the name
    os.close(fd)
    lossy.unlink(path)
    assert [record.kind for record in read_undo_file(undo_file)] == ["write", "unlink"]
    assert undo(undo_file, lost) == 2
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("lost_ones", "expected"),
    [
        ([], b"second"),
        ([0, 1], b"second"),  # of the file that was unlinked
        ([1, 2], b"second"),  # the name is taken
        ([4], bytes(6)),
        ([3], None),
        ([2, 3], b"first\0"),
        ([1, 2, 3], bytes(6)),
        ([0, 2, 3], None),
        ([0, 1, 2, 3, 4], None),
    ],
)
def test_a_name_that_was_used_twice(
    lossy: UndoDisk, undo_file: Path, tmp_path: Path, lost_ones: list[int], expected: bytes | None
) -> None:
    path = tmp_path / "x"
    for content in (b"first", b"second"):
        lossy.unlink(path)
        fd = lossy.create(path, 6)
        lossy.write(fd, content, 0)
        os.close(fd)
    kinds = ["create", "write", "unlink", "create", "write"]
    assert [record.kind for record in read_undo_file(undo_file)] == kinds
    undo(undo_file, lambda index: index not in lost_ones)
    assert (path.read_bytes() if path.exists() else None) == expected


def test_a_torn_record_is_ignored(lossy: UndoDisk, undo_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    fd = lossy.open(path)
    lossy.write(fd, b"one", 0)
    whole = undo_file.stat().st_size
    lossy.write(fd, b"two", 0)
    for size in range(undo_file.stat().st_size - 1, whole - 1, -1):
        os.truncate(undo_file, size)
        assert len(read_undo_file(undo_file)) == 1
    os.truncate(undo_file, whole + 5)
    os.close(fd)

    again = UndoDisk(undo_file)
    fd = again.open(path)
    again.write(fd, b"six", 0)
    os.close(fd)
    again.close()
    assert [record.old for record in read_undo_file(undo_file)] == [b"old", b"two"]
    assert undo(undo_file, lost) == 2
    assert path.read_bytes() == b"old"


_WRITER = """
import random, sys
from pathlib import Path
from tests.cache.faulty_disk import UndoDisk
disk = UndoDisk(Path(sys.argv[1]))
fds = [disk.open(Path(path)) for path in sys.argv[2:]]
print("begun", flush=True)
dice = random.Random(1)
while True:
    disk.write(dice.choice(fds), dice.randbytes(300_000), dice.randrange(700_000))
"""


def test_undone_after_a_kill(undo_file: Path, tmp_path: Path) -> None:
    contents = {tmp_path / name: random.Random(name).randbytes(1 << 20) for name in "xy"}
    for path, content in contents.items():
        path.write_bytes(content)
    for wait_s in (0.01, 0.05):
        command = [sys.executable, "-c", _WRITER, str(undo_file), *map(str, contents)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"begun\n"
            time.sleep(wait_s)
            writer.send_signal(signal.SIGKILL)
    assert any(path.read_bytes() != content for path, content in contents.items())
    assert undo(undo_file, lost) > 0
    assert all(path.read_bytes() == content for path, content in contents.items())


def test_undo_that_keeps_everything(lossy: UndoDisk, undo_file: Path, tmp_path: Path) -> None:
    fd = lossy.create(tmp_path / "x", 3)
    lossy.write(fd, b"abc", 0)
    os.close(fd)
    assert undo(undo_file, kept) == 0
    assert (tmp_path / "x").read_bytes() == b"abc"
