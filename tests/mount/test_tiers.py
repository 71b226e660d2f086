"""Several tiers behind a real mount: from options, from a file, and changed while it serves."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.mount.harness import MIB, Site


@pytest.fixture
def content(site: Site) -> dict[str, bytes]:
    noise = random.Random(3)
    files = {f"file-{number}": noise.randbytes(MIB + number) for number in range(8)}
    for name, data in files.items():
        (site.files / name).write_bytes(data)
    return files


def read_all(site: Site, content: dict[str, bytes]) -> None:
    for name, data in content.items():
        assert (site.mountpoint / name).read_bytes() == data


def tiers_of(site: Site) -> dict[str, dict[str, Any]]:
    """By the last part of their paths, in the daemon's order."""
    return {Path(tier["path"]).name: tier for tier in site.status()["tiers"]}


def tier(site: Site, verb: str, *args: object, code: int = 0) -> str:
    done = site.cli("tier", verb, site.mountpoint, *args, code=code)
    return done.stderr if code else done.stdout


def test_memory_in_front_of_a_disk(site: Site, content: dict[str, bytes], tmp_path: Path) -> None:
    memory = tmp_path / "mem"
    site.mount("--mem-size", "64MiB", "--mem-dir", memory)
    read_all(site, content)
    tiers = tiers_of(site)
    assert list(tiers) == ["mem", "cache"]
    assert [(t["medium"], t["health"]) for t in tiers.values()] == [
        ("MEM", "normal"),
        ("SSD", "normal"),
    ]
    assert tiers["mem"]["quota_bytes"] == 64 * MIB
    assert (site.cache / "namespace").exists()
    assert not (memory / "namespace").exists()
    assert "mem" in tier(site, "list")
    site.umount()
    site.mount("--mem-size", "64MiB", "--mem-dir", memory)
    read_all(site, content)
    assert site.origin()["gets"] == 0


def test_tiers_from_a_file(site: Site, content: dict[str, bytes], tmp_path: Path) -> None:
    file = tmp_path / "cachefs.toml"
    file.write_text(
        f'free_space_ratio = 0\nlog_file = "{site.log}"\n'
        f'[[tier]]\nmedium = "HDD"\npath = "{tmp_path}/h"\nquota = "128MiB"\n'
        f'[[tier]]\nmedium = "SSD"\npath = "{tmp_path}/s1:{tmp_path}/s2"\nquota = "128MiB"\n'
        "high = 0.5\nlow = 0.25\n"
    )
    site.cli("mount", site.source, site.mountpoint, "-c", file)
    read_all(site, content)
    tiers = tiers_of(site)
    assert list(tiers) == ["s1", "s2", "h"]
    assert [t["quota_bytes"] >> 20 for t in tiers.values()] == [64, 64, 128]
    marks = tiers["s1"]["high_bytes"], tiers["s1"]["low_bytes"]  # of whole slabs
    assert [round(mark / MIB) for mark in marks] == [31, 16]
    assert site.status()["policy"] == "epoch"


def test_tiers_change_while_the_mount_serves(
    site: Site, content: dict[str, bytes], tmp_path: Path
) -> None:
    site.mount()
    read_all(site, content)
    new = tmp_path / "new"
    assert "added as HDD tier" in tier(
        site, "add", new, "--size", "64MiB", "--medium", "HDD", "--free-space-ratio", "0"
    )
    assert "already" in tier(site, "add", new, "--size", "64MiB", code=1)
    assert list(tiers_of(site)) == ["cache", "new"]
    inside = site.files / "tier"
    assert "its own cache" in tier(site, "add", inside, "--size", "64MiB", code=1)
    assert not inside.exists()
    tier(site, "resize", new, "128MiB")
    assert tiers_of(site)["new"]["quota_bytes"] == 128 * MIB
    assert "names and attributes" in tier(site, "remove", site.cache, code=1)
    read_all(site, content)
    tier(site, "remove", new)
    assert list(tiers_of(site)) == ["cache"]
    read_all(site, content)
    assert "added" in tier(site, "add", new, "--size", "64MiB", "--free-space-ratio", "0")
    site.umount()
    site.mount()
    assert list(tiers_of(site)) == ["cache"]
    read_all(site, content)
