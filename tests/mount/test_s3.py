"""A mount of a real S3 server."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import MIB, PATIENT, Site, eventually
from tests.servers.seaweedfs import SeaweedFS

OBJECTS = {
    "plain": b"content",
    "empty": b"",
    "large": os.urandom(3 * MIB + 5),
    "dir/with space/file name": b"1",
    "dir/ünïcödé/文字 🙂": b"2",
    "dir/100%": b"3",
    "dir/%41": b"4",
    "dir/a+b": b"5",
    "dir/#hash": b"6",
    "dir/~tilde'()*!": b"7",
    "dir/a&b=c?d": b"8",
    **{f"many/{number:05}": b"%d" % number for number in range(1_100)},
}


@pytest.fixture(scope="module")
def bucket(seaweedfs: SeaweedFS) -> str:
    bucket = seaweedfs.make_bucket("mounted")
    seaweedfs.put_many(bucket, {f"pre/fix/{key}": data for key, data in OBJECTS.items()})
    seaweedfs.put(bucket, "pre/fixed", b"not below the prefix")
    return bucket


@pytest.fixture
def s3_site(tmp_path: Path, seaweedfs: SeaweedFS, bucket: str) -> Iterator[Site]:
    site = Site(tmp_path, f"s3://{bucket}/pre/fix")
    site.environment = seaweedfs.environment
    site.options = PATIENT
    yield site
    site.tear_down()


def tree(root: Path) -> dict[str, bytes]:
    files = [path for path in root.rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_the_tree_is_what_was_uploaded_and_a_second_mount_needs_no_get(s3_site: Site) -> None:
    s3_site.mount()
    assert tree(s3_site.mountpoint) == OBJECTS
    assert s3_site.origin()["gets"] <= len(OBJECTS) + 3
    s3_site.umount()
    s3_site.mount()
    assert tree(s3_site.mountpoint) == OBJECTS
    assert s3_site.origin()["gets"] == 0


def test_cold_names_need_no_listing(s3_site: Site) -> None:
    s3_site.mount()
    before = s3_site.origin()
    assert (s3_site.mountpoint / "many/01099").read_bytes() == b"1099"
    after = s3_site.origin()
    assert after["heads"] - before["heads"] <= 2
    assert after["lists"] - before["lists"] <= 1, "to see that `many` is a directory"
    # One that finds no object at `many`, and one for the file.
    assert after["gets"] <= 2
    assert after["get_bytes"] == 4


def test_a_replaced_object_is_never_mixed_with_its_successor(
    s3_site: Site, seaweedfs: SeaweedFS, bucket: str
) -> None:
    key = "pre/fix/replaced"
    seaweedfs.put(bucket, key, b"1" * (16 * MIB))
    try:
        s3_site.mount()
        fd = os.open(s3_site.mountpoint / "replaced", os.O_RDONLY)
        try:
            assert os.pread(fd, 4096, 0) == b"1" * 4096
            seaweedfs.put(bucket, key, b"2" * (17 * MIB))
            assert os.pread(fd, 4096, 0) == b"1" * 4096
            with pytest.raises(OSError, match="Stale"):
                os.pread(fd, 4096, 12 * MIB)
        finally:
            os.close(fd)
        # The read that failed has made the new version known, without waiting for a TTL: the
        # kernel is told at once, if not in the same moment.
        eventually(lambda: (s3_site.mountpoint / "replaced").stat().st_size == 17 * MIB)
        assert (s3_site.mountpoint / "replaced").read_bytes() == b"2" * (17 * MIB)
    finally:
        seaweedfs.delete(bucket, key)


def test_the_version_is_the_etag(s3_site: Site, seaweedfs: SeaweedFS, bucket: str) -> None:
    s3_site.mount()
    etag = seaweedfs.client.head_object(Bucket=bucket, Key="pre/fix/plain")["ETag"]
    version = os.getxattr(s3_site.mountpoint / "plain", "user.cachefs.version").decode()
    assert etag.strip('"') in version
    info = (s3_site.mountpoint / "plain").stat()
    assert info.st_mtime_ns % 1_000_000_000 == 0
