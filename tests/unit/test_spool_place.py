"""In which cache directory the spool lies."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachefs.cache_dir.probe import is_in_memory
from cachefs.daemon import spool_place
from cachefs.daemon.spool_place import choose_spool
from cachefs.errors import SpoolError
from cachefs.format.paths import TierPaths
from cachefs.staging.spool import Spool

SOURCE = "s3://bucket/prefix"


@pytest.fixture
def in_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def choose(*roots: Path, source: str = SOURCE, noted: Path | None = None) -> Path:
    tiers = [SimpleNamespace(paths=TierPaths(root)) for root in roots]
    spool = None if noted is None else noted / "spool"
    return choose_spool(TierPaths(roots[0]), tiers, source, spool).parent  # type: ignore[arg-type]


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three cache directories on a disk, whatever /tmp is."""
    monkeypatch.setattr(spool_place, "is_in_memory", lambda root: root.is_relative_to("/dev/shm"))
    found = [tmp_path / name for name in ("a", "b", "c")]
    for root in found:
        root.mkdir()
    return found


async def leave_file(root: Path, source: str) -> None:
    spool = await Spool.open(root / "spool", source, 1 << 20)
    spool.begin(7, "file", None).write(0, b"1")
    await spool.close()


def test_what_is_in_memory(in_memory: Path) -> None:
    assert is_in_memory(in_memory)
    assert not is_in_memory(Path("/proc"))
    with pytest.raises(FileNotFoundError):
        is_in_memory(in_memory / "absent")


def test_the_first_directory_on_a_disk(in_memory: Path, disks: list[Path], expect_log) -> None:
    assert choose(*disks) == disks[0]
    assert choose(in_memory, *disks) == disks[0]
    expect_log("is in memory: a reboot loses it")
    assert choose(in_memory) == in_memory


async def test_a_spool_in_another_directory_is_found(
    in_memory: Path, disks: list[Path], expect_log
) -> None:
    await leave_file(disks[0], "s3://another")
    await leave_file(disks[1], SOURCE)
    assert choose(*disks) == disks[1]
    assert choose(in_memory, disks[2], disks[1]) == disks[1]
    await leave_file(disks[2], SOURCE)
    expect_log("c/spool has unsent files, too")
    assert choose(*disks) == disks[1]


async def test_a_spool_that_cannot_be_read_now_is_not_passed_over(disks: list[Path]) -> None:
    spool = await Spool.open(disks[1] / "spool", SOURCE, 1 << 20)
    try:
        assert choose(*disks) == disks[1], "it is in use"
    finally:
        await spool.close()
    assert choose(*disks) == disks[0], "it is empty"


async def test_the_next_daemon_has_the_same_spool(disks: list[Path]) -> None:
    """Also if it has become empty since, or another one has files now."""
    await leave_file(disks[2], SOURCE)
    assert choose(*disks, noted=disks[1]) == disks[1]
    with pytest.raises(SpoolError, match="is gone"):
        choose(disks[0], disks[2], noted=disks[1])
