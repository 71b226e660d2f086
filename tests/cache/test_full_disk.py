"""Real file systems without space: all reads are right."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachefs.db import Database
from cachefs.errors import CacheDirError
from tests.cache.harness import MIB, assert_right, open_tier, put, serving
from tests.memory_origin import MemoryOrigin

pytestmark = pytest.mark.expect_log("can't (grow|store blocks|write the database)", required=False)


MKFS = {
    "ext4": ("50M", "mkfs.ext4 -q -m 0"),
    "ext4 with blocks of 1 KiB": ("50M", "mkfs.ext4 -q -m 0 -b 1024"),
    "xfs": ("300M", "mkfs.xfs -q"),
    "btrfs": ("110M", "mkfs.btrfs -q"),
}
"""The smallest images that they make, or 50 MB."""


@contextmanager
def mounted(kind: str, tmp_path: Path) -> Iterator[Path]:
    """A small file system."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    place, image = tmp_path / "disk", tmp_path / "image"
    place.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs"]
    else:
        size, mkfs = MKFS[kind]
        subprocess.run(["truncate", "-s", size, image], check=True)
        subprocess.run([*mkfs.split(), image], check=True, capture_output=True)
        options = "loop,compress-force=zstd" if kind == "btrfs" else "loop"
        command = ["mount", "-o", options, str(image)]
    subprocess.run([*command, place], check=True, capture_output=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> None:
    """Take all space, to the last block."""
    fd = os.open(place / "other", os.O_CREAT | os.O_WRONLY)
    piece = os.urandom(MIB)
    while len(piece) >= 512:
        try:
            os.write(fd, piece)
            os.fsync(fd)
        except OSError:
            piece = piece[: len(piece) // 2]
    os.close(fd)


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with mounted(request.param, tmp_path) as place:
        yield place


@pytest.mark.parametrize("taken_bytes", [0, 30 * MIB, 100 * MIB])
@pytest.mark.parametrize("free_space_ratio", [0.0, 0.1])
async def test_all_reads_are_right(
    small_disk: Path, taken_bytes: int, free_space_ratio: float, origin: MemoryOrigin
) -> None:
    refs = [put(origin, f"f{number}", 8 * MIB) for number in range(14)]
    tier = open_tier(small_disk / "cache", 64 * MIB, free_space_ratio=free_space_ratio)
    other = os.open(small_disk / "other", os.O_CREAT | os.O_WRONLY)
    try:
        async with serving(origin, tier) as cache:
            await assert_right(cache, origin, refs[:4])
            try:
                for _ in range(taken_bytes // MIB):
                    os.write(other, b"x" * MIB)
            except OSError:
                pass  # full is what it should be
            await assert_right(cache, origin, refs)
            await assert_right(cache, origin, refs)
            assert cache.status()[0].health == "normal"
    finally:
        os.close(other)


async def test_a_disk_without_room_is_told_once(
    small_disk: Path, caplog: pytest.LogCaptureFixture, origin: MemoryOrigin
) -> None:
    caplog.set_level("INFO")
    refs = [put(origin, f"f{number}", 8 * MIB) for number in range(6)]
    tier = open_tier(small_disk / "cache", 64 * MIB, free_space_ratio=0.5)
    async with serving(origin, tier) as cache:
        await assert_right(cache, origin, refs)
        await assert_right(cache, origin, refs)
    assert sum("the cache stops growing" in text for text in caplog.messages) == 1


@pytest.mark.parametrize("kind", ["tmpfs", *MKFS])
async def test_a_cache_is_used_again_when_its_disk_is_full(
    kind: str, tmp_path: Path, origin: MemoryOrigin
) -> None:
    refs = [put(origin, f"f{number}", 4 * MIB) for number in range(6)]
    with mounted(kind, tmp_path) as disk:
        tier = open_tier(disk / "cache")
        async with serving(origin, tier) as cache:
            await assert_right(cache, origin, refs[:3])
        names = Database.open(str(disk / "names"), ("one",), 1 << 24)
        names.put("one", b"key", b"value")
        names.close()
        fill(disk)
        names = Database.open(str(disk / "names"), ("one",), 1 << 24)
        assert names.get("one", b"key") == b"value"
        gets = origin.counters.gets
        async with serving(origin, open_tier(disk / "cache")) as cache:
            await assert_right(cache, origin, refs[:3])
            assert origin.counters.gets == gets
            await assert_right(cache, origin, refs)
            assert cache.status()[0].health == "normal"
        names.abandon()


@pytest.mark.parametrize("kind", ["tmpfs", *MKFS])
def test_a_full_disk_is_refused_for_a_new_cache(kind: str, tmp_path: Path) -> None:
    with mounted(kind, tmp_path) as disk:
        (disk / "cache").mkdir(mode=0o700)
        (disk / "names").mkdir(mode=0o700)
        fill(disk)
        with pytest.raises(CacheDirError, match=r"No space left|Input/output error"):
            open_tier(disk / "cache")
        with pytest.raises(CacheDirError, match=r"No space left|Input/output error"):
            Database.open(str(disk / "names"), ("one",), 1 << 24)
