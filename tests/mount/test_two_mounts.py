"""Two mounts on one host."""

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import MIB, Site, eventually


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[list[Site]]:
    """Two of them, whose daemons live at the same time."""
    roots = [tmp_path / name for name in ("one", "two")]
    for root in roots:
        root.mkdir()
    sites = [Site(root) for root in roots]
    yield sites
    for site in sites:
        site.tear_down()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system to be filled")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_each_has_its_own_cache(sites: list[Site]) -> None:
    for number, site in enumerate(sites):
        (site.files / "same name").write_text(f"content {number}")
        site.mount()
    for number, site in enumerate(sites):
        assert (site.mountpoint / "same name").read_text() == f"content {number}"
        eventually(lambda site=site: site.status()["cache"]["used_bytes"] == 9)  # type: ignore[misc]
    sites[0].umount()
    assert (sites[1].mountpoint / "same name").read_text() == "content 1"


def test_one_directory_serves_one_mount(sites: list[Site]) -> None:
    one, two = sites
    one.mount()
    assert "directory of its own" in two.refused("--cache-dir", one.cache)
    two.source = one.source
    said = two.refused("--cache-dir", one.cache)
    assert f"mounted on {one.mountpoint}" in said
    assert "directory of its own with --cache-dir" in said


def test_both_leave_the_same_share_of_their_file_system_free(
    small_disk: Path, sites: list[Site]
) -> None:
    """Neither knows of the other; both look at what is free. (The disk comes first, so that it is
    there until both daemons have ended.)"""
    noise = random.Random(1)
    for site in sites:
        for number in range(30):
            (site.files / str(number)).write_bytes(noise.randbytes(5 * MIB))
        directory = small_disk / site.files.parent.name
        site.mount("--cache-dir", directory, "--free-space-ratio", "0.5", "--cache-eviction", "lru")
    for number in range(30):
        for site in sites:
            assert len((site.mountpoint / str(number)).read_bytes()) == 5 * MIB
    for site in sites:
        assert site.status()["cache"]["used_bytes"] > 10 * MIB
    eventually(lambda: _free_share(small_disk) >= 0.45)


def _free_share(place: Path) -> float:
    info = os.statvfs(place)
    return info.f_bavail / info.f_blocks
