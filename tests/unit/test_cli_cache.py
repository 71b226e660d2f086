"""`cachefs cache` on real cache directories, and what a mount says about its own."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cachefs.cache_dir.directory import CacheDirectory
from cachefs.cli import main
from cachefs.config import MountConfig, load_mount_config
from cachefs.daemon import tiers as daemon_tiers

MIB = 1 << 20


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["cache", *map(str, words)])


def made(place: Path, source: str = "s3://bucket") -> CacheDirectory:
    return CacheDirectory.open(place, quota_bytes=64 * MIB, source_identity=source)


def test_caches_are_listed_and_removed(tmp_path: Path) -> None:
    made(tmp_path / "old", "s3://old/prefix").close()
    (tmp_path / "old/slabs/000001.slab").write_bytes(b"x" * MIB)
    os.utime(tmp_path / "old/lock", (0, 0))
    tier = made(tmp_path / "used")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").write_text("x")
    try:
        rows = {
            Path(row["path"]).name: row for row in json.loads(run("ls", tmp_path, "--json").output)
        }
        assert rows.keys() == {"old", "used"}
        assert rows["old"]["source"] == "s3://old/prefix"
        assert rows["old"]["size_bytes"] >= MIB
        assert (rows["old"]["in_use"], rows["used"]["in_use"]) == (False, True)
        assert rows["used"]["pid"] == os.getpid()
        assert f"process {os.getpid()}" in run("ls", tmp_path).output
        assert run("ls", tmp_path / "old").output.count("s3://") == 1
        done = run("rm", tmp_path / "used", tmp_path / "other", tmp_path / "none", tmp_path / "old")
    finally:
        tier.close()
    assert done.exit_code == 1
    assert f"{tmp_path}/used is in use by a daemon (process {os.getpid()})" in done.output
    for name in ("other", "none"):
        assert f"{tmp_path}/{name} is no cache directory of cachefs" in done.output
    assert "MiB of s3://old/prefix" in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "used"]
    assert (tmp_path / "other/thesis.tex").exists()
    assert run("rm", tmp_path / "used").exit_code == 0


def test_files_of_others_are_left(tmp_path: Path) -> None:
    made(tmp_path / "c").close()
    (tmp_path / "c/lost+found").mkdir()
    (tmp_path / "c/slabs/link").symlink_to(tmp_path / "c/lost+found")
    assert "files of others were left" in run("rm", tmp_path / "c").output
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["lost+found"]


def test_the_default_places_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cachefs.cli import cache

    homes = tmp_path / "disk", tmp_path / "memory"
    monkeypatch.setattr(cache, "user_cache_home", lambda: homes[0])
    monkeypatch.setattr(cache, "user_mem_home", lambda: homes[1])
    assert f"no cache directory in {homes[0]} and {homes[1]}" in run("ls").output
    for home in homes:
        made(home / "a").close()
    assert len(json.loads(run("ls", "--json").output)) == 2


def config(tmp_path: Path, **options: str) -> MountConfig:
    return load_mount_config("s3://b", "/mnt/x", {"cache_dirs": str(tmp_path), **options})


def test_sizes_that_cannot_be_had_are_told(tmp_path: Path, expect_log: object) -> None:
    assert callable(expect_log)
    daemon_tiers.warn_of_sizes(config(tmp_path))
    daemon_tiers.warn_of_sizes(config(tmp_path, cache_size="64MiB", mem_size="64MiB"))
    expect_log("900 TiB are more than the file system there has")
    daemon_tiers.warn_of_sizes(config(tmp_path, cache_size="900TiB"))
    expect_log("900 TiB are more than the machine's memory")
    daemon_tiers.warn_of_sizes(config(tmp_path, mem_size="900TiB"))
