"""Credentials of a Secret are changed while a mount lives."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import PATIENT, Site
from tests.servers.seaweedfs import SeaweedFS

WRONG = "hunter2Wrong"


@pytest.fixture
def site(tmp_path: Path, seaweedfs: SeaweedFS) -> Iterator[Site]:
    site = Site(tmp_path, "s3://rotated")
    site.options = PATIENT
    site.environment = {
        "AWS_ENDPOINT_URL": seaweedfs.endpoint,
        "AWS_ACCESS_KEY_ID": "UNUSED",
        "AWS_SECRET_ACCESS_KEY": "unused",
    }
    yield site
    site.tear_down()


def rotate(path: Path, access_key: str, secret_key: str) -> None:
    """As the kubelet does it."""
    fresh = path / f"..{time.monotonic_ns()}"
    fresh.mkdir()
    (fresh / "access-key-id").write_text(access_key)
    (fresh / "secret-access-key").write_text(secret_key)
    (path / "..tmp").symlink_to(fresh.name)
    os.replace(path / "..tmp", path / "..data")


def read_until(files: Iterator[Path], deadline: float) -> None:
    while time.monotonic() < deadline:
        next(files).read_bytes()
        time.sleep(0.25)


def test_changed_files_are_used_without_a_restart(
    site: Site, seaweedfs: SeaweedFS, tmp_path: Path
) -> None:
    seaweedfs.make_bucket("rotated")
    objects = {f"dir{number}/file": b"content" for number in range(150)}
    seaweedfs.put_many("rotated", objects)
    secret = tmp_path / "secret"
    secret.mkdir()
    rotate(secret, seaweedfs.access_key, seaweedfs.secret_key)
    site.expected_trouble += ("access denied",)
    site.mount("--debug", "--credentials-dir", secret)
    files = (site.mountpoint / f"dir{number}/file" for number in range(150))
    assert next(files).read_bytes() == b"content"

    rotate(secret, seaweedfs.access_key, WRONG)
    deadline = time.monotonic() + 30
    with pytest.raises(PermissionError):
        read_until(files, deadline)

    rotate(secret, seaweedfs.access_key, seaweedfs.secret_key)
    for path in files:
        try:
            assert path.read_bytes() == b"content"
            break
        except PermissionError:
            assert time.monotonic() < deadline + 30
            time.sleep(0.25)
    text = site.log.read_text() + site.cli("status", site.mountpoint, "--json").stdout
    assert WRONG not in text
    assert seaweedfs.secret_key not in text
