"""What a mount costs the origin, and what it keeps."""

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cachefs.config.workloads import WORKLOADS
from tests.mount.harness import MIB, Site, eventually

SHORT = ("--entry-ttl", "1s", "--attr-ttl", "1s", "--list-ttl", "1s", "--negative-ttl", "1s")


def replace(path: Path, data: bytes) -> None:
    """As stores do it: all at once."""
    new = path.with_name(".new")
    new.write_bytes(data)
    new.rename(path)


def test_64_processes_that_read_one_cold_file_cause_one_get(site: Site) -> None:
    (site.files / "file").write_bytes(os.urandom(100_000))
    site.mount()
    script = 'for i in $(seq 64); do cksum < "$0" & done; wait'
    done = subprocess.run(
        ["sh", "-c", script, site.mountpoint / "file"], capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == 64
    assert len(set(done.stdout.splitlines())) == 1
    assert site.origin()["gets"] == 1


_LOADERS = """
import mmap, os, random, sys

MIB = 1 << 20
name, local = sys.argv[1:]
with open(local, "rb") as file:
    wanted = file.read()
children = []
for number in range(64):
    if not (child := os.fork()):
        with open(name, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            right = mapped[:4096] == wanted[:4096]
            for place in random.Random(number).sample(range(4, 24, 4), 2):
                right &= mapped[place * MIB : (place + 3) * MIB] == wanted[place * MIB :][: 3 * MIB]
        os._exit(not right)
    children.append(child)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def test_weights_that_64_processes_map_come_as_a_whole_and_once(site: Site) -> None:
    size_bytes = 28 * MIB
    head = (2).to_bytes(8, "little") + b"{}"
    (site.files / "w.safetensors").write_bytes(head + os.urandom(size_bytes - len(head)))
    site.mount("--workload", "serving")
    if os.geteuid() == 0:
        device = os.stat(site.mountpoint).st_dev
        setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
        assert int(setting.read_text()) == WORKLOADS["serving"]["kernel_readahead"] >> 10
    command = [sys.executable, "-S", "-c", _LOADERS]
    subprocess.run(
        [*command, site.mountpoint / "w.safetensors", site.files / "w.safetensors"], check=True
    )
    path = site.mountpoint / "w.safetensors"
    eventually(lambda: os.getxattr(path, "user.cachefs.cached") == b"100")
    assert site.origin()["get_bytes"] == size_bytes


def test_a_second_mount_serves_everything_without_a_request(site: Site) -> None:
    for number in range(50):
        path = site.files / f"d{number % 3}" / str(number)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(os.urandom(number * 10_000))
    site.mount()
    wanted = {path: path.read_bytes() for path in site.mountpoint.rglob("*") if path.is_file()}
    inodes = {path: path.stat().st_ino for path in site.mountpoint.rglob("*")}
    assert site.origin()["gets"] > 0
    site.umount()
    assert not site.is_mounted()
    site.mount()
    assert {path: path.stat().st_ino for path in site.mountpoint.rglob("*")} == inodes
    assert {path: path.read_bytes() for path in wanted} == wanted
    counters = site.origin()
    # One listing is the check at mount time, and the owner of the root is asked for then.
    assert (counters["gets"], counters["heads"], counters["lists"]) == (0, 1, 1)
    assert all(os.getxattr(path, "user.cachefs.cached") == b"100" for path in wanted)


def test_a_killed_daemon_is_replaced_and_its_cache_is_whole(site: Site) -> None:
    (site.files / "file").write_bytes(os.urandom(3 * MIB))
    site.mount()
    path = site.mountpoint / "file"
    whole = path.read_bytes()
    eventually(lambda: os.getxattr(path, "user.cachefs.cached") == b"100")
    time.sleep(1.5)  # admissions become durable within a second
    stored = site.status()["cache"]["blocks"]
    site.crash()
    with pytest.raises(OSError, match=r"not connected|connection abort"):
        os.statvfs(site.mountpoint)
    site.expected_trouble = ("which a dead cachefs had left",)
    site.mount()
    # On a busy machine the index did not have all of them; the slabs have.
    eventually(lambda: site.status()["cache"]["blocks"] >= stored)
    assert path.read_bytes() == whole
    assert site.origin()["gets"] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_unmounts_cleanly(site: Site, number: signal.Signals) -> None:
    (site.files / "file").write_bytes(b"x" * 1000)
    site.mount()
    path = site.mountpoint / "file"
    path.read_bytes()
    eventually(lambda: os.getxattr(path, "user.cachefs.cached") == b"100")
    site.signal(number)
    assert not site.is_mounted()
    assert os.listdir(site.mountpoint) == []
    site.mount()
    path.read_bytes()
    assert site.origin()["gets"] == 0


def test_a_signal_stores_what_was_just_fetched(site: Site) -> None:
    (site.files / "file").write_bytes(b"x" * 1000)
    site.mount()
    (site.mountpoint / "file").read_bytes()
    site.signal(signal.SIGTERM)
    site.mount()
    (site.mountpoint / "file").read_bytes()
    assert site.origin()["gets"] == 0


def test_a_signal_while_a_file_is_open_ends_the_daemon_too(site: Site) -> None:
    (site.files / "file").write_bytes(b"x" * 1000)
    site.mount()
    fd = os.open(site.mountpoint / "file", os.O_RDONLY)
    try:
        site.signal(signal.SIGTERM)
        assert not site.is_mounted()
    finally:
        with contextlib.suppress(OSError):  # nobody answers the FLUSH any more
            os.close(fd)


def test_random_reads_fetch_only_the_mebibytes_they_touch(site: Site) -> None:
    content = random.Random(3).randbytes(64 * MIB)
    (site.files / "file").write_bytes(content)
    site.mount()
    blocks = random.Random(4).sample(range(1, 64), 12)
    fd = os.open(site.mountpoint / "file", os.O_RDONLY)
    try:
        for block in blocks:
            offset = block * MIB + 4096 * (block % 200 + 3)
            assert os.pread(fd, 4096, offset) == content[offset : offset + 4096]
    finally:
        os.close(fd)
    assert site.origin()["gets"] == len(blocks)
    assert site.origin()["get_bytes"] == len(blocks) * MIB


def test_random_reads_of_a_large_file_are_right_and_fetch_what_they_touch(site: Site) -> None:
    chance = random.Random(5)
    blocks = chance.sample(range(1, 160), 12)
    pieces = {block * MIB + 4096 * (block % 200 + 3): chance.randbytes(4096) for block in blocks}
    with (site.files / "file").open("wb") as file:
        file.truncate(160 * MIB)
        for offset, piece in pieces.items():
            file.seek(offset)
            file.write(piece)
    site.mount()
    fd = os.open(site.mountpoint / "file", os.O_RDONLY)
    try:
        for _ in range(2):
            for offset, piece in pieces.items():
                assert os.pread(fd, 4096, offset) == piece
    finally:
        os.close(fd)
    assert site.origin()["gets"] <= 2 * len(blocks)
    assert site.origin()["get_bytes"] <= len(blocks) * (MIB + 256 * 1024)


def test_a_sequential_read_takes_few_gets(site: Site) -> None:
    content = os.urandom(64 * MIB)
    (site.files / "file").write_bytes(content)
    site.mount()
    assert (site.mountpoint / "file").read_bytes() == content
    assert site.origin()["get_bytes"] == 64 * MIB
    # 12 to 17 on a quiet machine. READs that come out of order begin more streams, and a stream
    # begins with small GETs. Without read-ahead each of the 64 blocks takes one.
    assert site.origin()["gets"] <= 40


def test_a_second_read_of_a_file_is_the_kernels(site: Site) -> None:
    content = os.urandom(300_000)
    (site.files / "file").write_bytes(content)
    site.mount()
    path = site.mountpoint / "file"
    assert path.read_bytes() == content

    def is_the_kernels() -> bool:
        """Unless somebody else on this machine has the page cache dropped meanwhile."""
        asked = site.read_requests()
        for _ in range(5):
            assert path.read_bytes() == content
        return site.read_requests() == asked

    assert any(is_the_kernels() for _ in range(5))


def test_a_replaced_object_is_seen_when_the_ttl_ends(site: Site) -> None:
    (site.files / "file").write_bytes(b"old" * 1000)
    site.mount(*SHORT)
    path = site.mountpoint / "file"
    assert path.read_bytes() == b"old" * 1000
    before = path.stat()
    replace(site.files / "file", b"newer" * 1000)
    eventually(lambda: path.stat().st_size == 5000)
    assert path.read_bytes() == b"newer" * 1000
    assert path.stat().st_ino != before.st_ino


def test_an_open_file_keeps_its_version_or_is_stale(site: Site) -> None:
    (site.files / "file").write_bytes(b"1" * (16 * MIB))
    site.mount(*SHORT)
    path = site.mountpoint / "file"
    with path.open("rb", buffering=0) as file:
        assert file.read(4096) == b"1" * 4096
        replace(site.files / "file", b"2" * (17 * MIB))
        assert os.pread(file.fileno(), 4096, 0) == b"1" * 4096
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            os.pread(file.fileno(), 4096, 12 * MIB)
        eventually(lambda: path.stat().st_size == 17 * MIB)
        assert path.read_bytes() == b"2" * (17 * MIB)
        assert os.fstat(file.fileno()).st_size == 16 * MIB
        assert os.pread(file.fileno(), 4096, 0) == b"1" * 4096


def test_new_and_deleted_names_are_seen_when_the_ttl_ends(site: Site) -> None:
    (site.files / "old").write_bytes(b"x")
    site.mount(*SHORT)
    assert os.listdir(site.mountpoint) == ["old"]
    assert not (site.mountpoint / "new").exists()
    mtime_ns = site.mountpoint.stat().st_mtime_ns
    (site.files / "new").write_bytes(b"y")
    (site.files / "old").unlink()
    eventually(lambda: os.listdir(site.mountpoint) == ["new"])
    eventually((site.mountpoint / "new").exists)
    eventually(lambda: not (site.mountpoint / "old").exists())
    eventually(lambda: site.mountpoint.stat().st_mtime_ns > mtime_ns)


def test_a_file_that_becomes_a_directory_is_seen_as_one(site: Site) -> None:
    (site.files / "name").write_bytes(b"x")
    site.mount(*SHORT)
    assert (site.mountpoint / "name").read_bytes() == b"x"
    (site.files / "name").unlink()
    (site.files / "name").mkdir()
    (site.files / "name" / "file").write_bytes(b"y")
    eventually((site.mountpoint / "name").is_dir)
    assert (site.mountpoint / "name" / "file").read_bytes() == b"y"


def test_several_cache_directories_share_the_load(site: Site, tmp_path: Path) -> None:
    dirs = f"{tmp_path}/c1:{tmp_path}/c2"
    (site.files / "file").write_bytes(os.urandom(20 * MIB))
    site.mount("--cache-dir", dirs)
    whole = (site.mountpoint / "file").read_bytes()
    site.umount()
    assert all(list((tmp_path / name).rglob("*.slab")) for name in ("c1", "c2"))
    site.mount("--cache-dir", dirs)
    assert (site.mountpoint / "file").read_bytes() == whole
    assert site.origin()["gets"] == 0
