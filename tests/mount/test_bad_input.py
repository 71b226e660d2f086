"""Whatever is wrong is told in one line, with the right code, and nothing is touched."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.format.json_sum import decode_json, encode_json
from tests.mount.harness import Site
from tests.servers.ports import free_ports
from tests.servers.seaweedfs import SeaweedFS


@pytest.fixture
def s3_site(tmp_path: Path, seaweedfs: SeaweedFS) -> Iterator[Site]:
    site = Site(tmp_path, "s3://missing-bucket/prefix")
    site.environment = seaweedfs.environment
    yield site
    site.tear_down()


def contents(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


LONGEST_S = 50
"""5 s on a quiet machine."""


def assert_untouched(site: Site) -> None:
    assert not site.is_mounted()
    assert not site.is_running()
    assert not site.cache.exists()


def test_a_missing_bucket(s3_site: Site) -> None:
    said = s3_site.refused()
    assert "missing-bucket" in said
    assert_untouched(s3_site)


def test_wrong_credentials(s3_site: Site, seaweedfs: SeaweedFS) -> None:
    s3_site.source = f"s3://{seaweedfs.make_bucket('wrong-credentials')}"
    s3_site.environment = seaweedfs.environment | {"AWS_SECRET_ACCESS_KEY": "wr0ng-secret"}
    said = s3_site.refused()
    assert "credentials" in said or "denied" in said
    assert "wr0ng-secret" not in said
    assert_untouched(s3_site)


def test_an_endpoint_where_nobody_listens(s3_site: Site) -> None:
    (port,) = free_ports(1)
    began = time.monotonic()
    said = s3_site.refused("--endpoint", f"http://127.0.0.1:{port}")
    assert time.monotonic() - began < LONGEST_S
    assert f"127.0.0.1:{port}" in said
    assert_untouched(s3_site)


def test_an_endpoint_that_never_answers(s3_site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        began = time.monotonic()
        said = s3_site.refused("--endpoint", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert time.monotonic() - began < LONGEST_S
    assert "answer" in said
    assert_untouched(s3_site)


def test_a_missing_source_directory(site: Site) -> None:
    site.source += "-not"
    assert "does not exist" in site.refused()
    assert_untouched(site)


def test_a_missing_mountpoint(site: Site) -> None:
    site.mountpoint.rmdir()
    assert "mkdir -p" in site.refused()
    assert not site.mountpoint.exists()
    assert_untouched(site)


def test_a_mountpoint_that_is_a_file(site: Site) -> None:
    site.mountpoint.rmdir()
    site.mountpoint.write_text("precious")
    assert "not a directory" in site.refused()
    assert site.mountpoint.read_text() == "precious"
    assert_untouched(site)


def test_a_mountpoint_that_is_not_empty(site: Site) -> None:
    (site.mountpoint / "precious").write_text("x")
    assert "not empty" in site.refused()
    assert os.listdir(site.mountpoint) == ["precious"]
    assert_untouched(site)
    (site.files / "file").write_text("y")
    site.mount("--nonempty")
    assert os.listdir(site.mountpoint) == ["file"]
    site.umount()
    assert os.listdir(site.mountpoint) == ["precious"]


def test_links_that_lead_out_are_told_of(site: Site, tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("x")
    (site.files / "link").symlink_to("../blob")
    site.expected_trouble += ("is a symbolic link that leads out of the source",)
    assert f"mount a directory that has both, such as 'file://{tmp_path}'" in site.mount()
    assert os.listdir(site.mountpoint) == []
    assert "NOT SHOWN      1 link out of the source" in site.cli("status", site.mountpoint).stdout


def test_source_mountpoint_and_cache_in_one_another(site: Site, tmp_path: Path) -> None:
    (site.files / "mnt").mkdir()
    (tmp_path / "link").symlink_to(site.files / "mnt")
    before = contents(tmp_path)
    memory = ("--mem-size", "64MiB", "--mem-dir", site.files / "mnt/mem")
    assert "would show its own cache" in site.refused(*memory, code=2)
    mountpoint, site.mountpoint = site.mountpoint, tmp_path / "link"
    assert "would show itself without end" in site.refused(code=2)
    site.mountpoint, site.cache = mountpoint, tmp_path / "link/cache"
    assert "would show its own cache" in site.refused(code=2)
    assert contents(tmp_path) == before


def test_a_mountpoint_that_is_mounted_already(site: Site) -> None:
    (site.files / "file").write_text("y")
    site.mount()
    pid = site.pid()
    assert "already" in site.refused()
    assert site.pid() == pid
    assert (site.mountpoint / "file").read_text() == "y"


def test_a_cache_directory_that_cannot_be_made(site: Site) -> None:
    # Even root can't write there.
    said = site.refused("--cache-dir", "/proc/cachefs-test")
    assert "/proc/cachefs-test" in said
    assert_untouched(site)


def test_a_cache_directory_of_something_else(site: Site) -> None:
    site.cache.mkdir()
    (site.cache / "thesis.tex").write_text("precious")
    before = contents(site.cache)
    assert str(site.cache) in site.refused()
    assert contents(site.cache) == before


def test_a_cache_directory_of_another_source(site: Site) -> None:
    (site.files / "file").write_text("y")
    site.mount()
    (site.mountpoint / "file").read_text()
    site.umount()
    before = contents(site.cache)
    site.source += "-other"
    Path(f"{site.files}-other").mkdir()
    said = site.refused()
    assert str(site.cache) in said
    assert contents(site.cache) == before


def test_a_cache_directory_in_use(site: Site, tmp_path: Path) -> None:
    site.mount()
    other = tmp_path / "other"
    other.mkdir()
    said = site.cli(
        *("mount", site.source, other, "--cache-dir", site.cache, "--cache-size", "256MiB"),
        *("--log-file", tmp_path / "other.log"),
        code=1,
    ).stderr
    assert "in use" in said
    assert said.count("\n") == 1
    assert site.status()["state"] == "serving"


def test_a_cache_directory_of_a_newer_format(site: Site) -> None:
    site.mount()
    site.umount()
    identity = site.cache / "cachefs.json"
    newer = decode_json(identity.read_bytes()) | {"format": 3}
    identity.write_bytes(encode_json(newer, 2))
    before = contents(site.cache)
    assert "format 3" in site.refused()
    assert contents(site.cache) == before


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--cache-size", "lots"), "--cache-size"),
        (("--cache-size", "-1GiB"), "--cache-size"),
        (("--cache-size", "1MiB"), "--cache-size"),
        (("--free-space-ratio", "7"), "--free-space-ratio"),
        (("--entry-ttl", "soon"), "--entry-ttl"),
        (("--file-mode", "999"), "--file-mode"),
        (("--cache-low", "0.9", "--cache-high", "0.5"), "cache_low"),
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_nonsense_options(site: Site, options: tuple[str, ...], named: str) -> None:
    assert named in site.refused(*options, code=2)
    assert_untouched(site)


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ("cache_size = ", "TOML"),
        ('cache_size = "lots"', "cache_size"),
        ('cache_sise = "1GiB"', "cache_size"),
        ('secret_access_key = "x"', "credential"),
        ("file_mode = 644", "file_mode"),
    ],
)
def test_nonsense_in_a_toml_file(site: Site, tmp_path: Path, toml: str, named: str) -> None:
    file = tmp_path / "cachefs.toml"
    file.write_text(toml)
    said = site.cli("mount", site.source, site.mountpoint, "-c", file, code=2).stderr
    assert str(file) in said
    assert named in said
    assert said.count("\n") == 1
    assert_untouched(site)


def test_unmounting_what_is_not_mounted(site: Site) -> None:
    said = site.cli("umount", site.mountpoint, code=1).stderr
    assert "not mounted" in said
    assert said.count("\n") == 1


def test_a_stale_mountpoint_can_be_unmounted(site: Site) -> None:
    site.mount()
    site.crash()
    assert site.is_mounted()
    site.umount()
    assert not site.is_mounted()
    assert subprocess.run(["ls", site.mountpoint], check=False).returncode == 0
