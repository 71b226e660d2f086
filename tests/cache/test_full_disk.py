"""A real file system without space: 14 of 14 reads are right."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cache.harness import MIB, assert_right, open_tier, put, serving
from tests.memory_origin import MemoryOrigin

pytestmark = pytest.mark.expect_log("can't (grow|store blocks|write the database)", required=False)


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 50 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    place = tmp_path / "disk"
    place.mkdir()
    if request.param == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs", str(place)]
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(50 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
        command = ["mount", "-o", "loop", str(image), str(place)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip(f"can't mount a small {request.param} here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


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
