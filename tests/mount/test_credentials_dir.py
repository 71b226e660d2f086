"""Credentials of a Secret are changed while a mount lives."""

import errno
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


def read_problem(file: Path) -> int | None:
    """Return the errno of a read, or None for success."""
    try:
        assert file.read_bytes() == b"content"
    except OSError as error:
        return error.errno
    return None


def test_changed_files_are_used_without_a_restart(
    site: Site, seaweedfs: SeaweedFS, tmp_path: Path
) -> None:
    seaweedfs.make_bucket("rotated")
    objects = {f"dir{number}/file": b"content" for number in range(150)}
    seaweedfs.put_many("rotated", objects)
    secret = tmp_path / "secret"
    secret.mkdir()
    rotate(secret, seaweedfs.access_key, seaweedfs.secret_key)
    site.expected_trouble += ("does not accept the credentials", "answers again")
    site.mount("--debug", "--read-timeout", "5s", "--credentials-dir", secret)
    files = [site.mountpoint / f"dir{number}/file" for number in range(150)]
    assert files[0].read_bytes() == b"content"

    rotate(secret, seaweedfs.access_key, WRONG)
    tries = iter(files)
    while (problem := read_problem(next(tries))) is None:
        time.sleep(0.25)
    assert problem == errno.EIO, "no denial: the store may get to know them yet"
    assert files[0].read_bytes() == b"content", "what is cached stays readable"

    rotate(secret, seaweedfs.access_key, seaweedfs.secret_key)
    while read_problem(next(tries)) is not None:
        time.sleep(0.25)
    text = site.log.read_text() + site.cli("status", site.mountpoint, "--json").stdout
    assert WRONG not in text
    assert seaweedfs.secret_key not in text
