"""Large files of a writable mount of S3: their parts are sent while they are written, and no daemon
that is killed leaves a mix or an open upload."""

import contextlib
import errno
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.mount.harness import MIB, PATIENT, Site, drop_pages, eventually
from tests.servers.fault_proxy import Fault, FaultProxy
from tests.servers.seaweedfs import SeaweedFS

pytestmark = pytest.mark.server

_buckets = count(1)
SMALL = ("--spool-size", "64MiB")
CONTENT = os.urandom(8 * MIB) * 3 + b"the rest"


class Bucket:
    """A bucket of its own, as the server itself shows it."""

    def __init__(self, server: SeaweedFS) -> None:
        self.client: Any = server.client
        self.name = server.make_bucket(f"write-parts-{next(_buckets)}")

    def content(self, key: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return data

    def uploads(self) -> list[str]:
        found = self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])
        return [upload["UploadId"] for upload in found]

    def parts(self, key: str) -> int:
        """How many parts the open upload of the object has."""
        with contextlib.suppress(self.client.exceptions.ClientError):
            for upload_id in self.uploads():
                listed = self.client.list_parts(Bucket=self.name, Key=key, UploadId=upload_id)
                return len(listed.get("Parts", []))
        return 0


@pytest.fixture
def bucket(seaweedfs: SeaweedFS) -> Bucket:
    return Bucket(seaweedfs)


@pytest.fixture
def proxy(seaweedfs: SeaweedFS) -> Iterator[FaultProxy]:
    with FaultProxy(seaweedfs.endpoint) as running:
        yield running


@pytest.fixture
def rw(tmp_path: Path, seaweedfs: SeaweedFS, bucket: Bucket, proxy: FaultProxy) -> Iterator[Site]:
    site = Site(tmp_path, f"s3://{bucket.name}")
    site.environment = seaweedfs.environment
    site.expected_trouble = ("an empty directory is shown until there is", " cachefs.supervisor.")
    site.mount("--rw", "--data-path", "relay", "--endpoint", proxy.endpoint, *SMALL, *PATIENT)
    yield site
    proxy.clear()
    for name in os.listdir("/proc/self/fd"):  # of a test that has failed
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(str(site.mountpoint)):
                os.close(int(name))
    if site.is_mounted():
        site.umount()
    site.tear_down()


def write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def begun(rw: Site, bucket: Bucket) -> int:
    """A new file with `CONTENT`, not closed, whose full parts are at the store."""
    fd = os.open(rw.mountpoint / "large", os.O_CREAT | os.O_RDWR)
    write_all(fd, CONTENT)
    eventually(lambda: bucket.parts("large") == 3, 180)
    return fd


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def closed_meanwhile(fd: int, proxy: FaultProxy) -> Iterator[None]:
    """What is done here is done while a close waits for the origin."""
    closing = in_thread(lambda: os.close(os.dup(fd)))
    eventually(lambda: proxy.counts().faults > 0)
    yield
    assert closing.is_alive(), "it was too late"
    proxy.clear()
    closing.join(60)
    assert not closing.is_alive()


def test_full_parts_are_sent_while_the_file_is_written(
    rw: Site, bucket: Bucket, proxy: FaultProxy
) -> None:
    fd = begun(rw, bucket)
    proxy.fault(Fault.ERROR, method="PUT", text="partNumber=1&")  # it is not sent again
    os.close(fd)
    assert bucket.content("large") == CONTENT
    assert bucket.uploads() == []
    gets = rw.origin()["gets"]
    drop_pages(rw.mountpoint / "large")
    assert (rw.mountpoint / "large").read_bytes() == CONTENT
    assert rw.origin()["gets"] == gets


def test_a_part_that_changes_later_is_sent_again(rw: Site, bucket: Bucket) -> None:
    fd = begun(rw, bucket)
    (upload,) = bucket.uploads()
    os.pwrite(fd, b"changed", 9 * MIB)
    os.close(fd)
    expected = CONTENT[: 9 * MIB] + b"changed" + CONTENT[9 * MIB + 7 :]
    assert bucket.content("large") == expected
    assert upload not in bucket.uploads()


def test_the_next_daemon_continues_an_upload(rw: Site, bucket: Bucket, proxy: FaultProxy) -> None:
    fd = begun(rw, bucket)
    (upload,) = bucket.uploads()
    os.kill(rw.daemon_pid(), signal.SIGKILL)
    os.write(fd, b" and more")
    assert bucket.uploads() == [upload]
    proxy.fault(Fault.ERROR, method="PUT", text="partNumber=1&")  # it is not sent again
    os.close(fd)
    assert bucket.content("large") == CONTENT + b" and more"
    assert bucket.uploads() == []


@pytest.mark.parametrize("is_done", [False, True], ids=["asked", "done"])
def test_a_daemon_that_is_killed_while_an_upload_is_completed(
    rw: Site, bucket: Bucket, proxy: FaultProxy, is_done: bool
) -> None:
    fd = begun(rw, bucket)
    if is_done:
        # The first request for it succeeds, and its answer is lost; no later one gets through.
        proxy.fault(Fault.LOSE, times=1, method="POST", text="uploadId=")
        closing = in_thread(lambda: os.close(fd))
        eventually(lambda: proxy.counts().faults > 0)
        proxy.fault(Fault.ERROR)
    else:
        proxy.fault(Fault.SILENCE, method="POST", text="uploadId=")
        closing = in_thread(lambda: os.close(fd))
        eventually(lambda: proxy.counts().faults > 0)
    os.kill(rw.daemon_pid(), signal.SIGKILL)
    proxy.clear()
    closing.join(60)
    assert not closing.is_alive()
    assert bucket.content("large") == CONTENT
    assert bucket.uploads() == []
    assert (rw.mountpoint / "large").read_bytes() == CONTENT


def test_a_writer_does_not_wait_for_a_sending(rw: Site, bucket: Bucket, proxy: FaultProxy) -> None:
    fd = begun(rw, bucket)
    proxy.fault(Fault.ERROR, method="POST", text="uploadId=")
    with closed_meanwhile(fd, proxy):
        os.pwrite(fd, b"newer", 0)
    assert bucket.content("large") == CONTENT
    os.close(fd)
    assert bucket.content("large") == b"newer" + CONTENT[5:]
    assert bucket.uploads() == []


def test_small_files_change_while_they_are_sent(
    rw: Site, bucket: Bucket, proxy: FaultProxy
) -> None:
    fd = os.open(rw.mountpoint / "small", os.O_CREAT | os.O_RDWR)
    os.write(fd, b"first")
    proxy.fault(Fault.ERROR, method="PUT")
    with closed_meanwhile(fd, proxy):
        os.pwrite(fd, b"2", 0)
    assert bucket.content("small") == b"first"
    os.close(fd)
    assert bucket.content("small") == b"2irst"


@pytest.mark.parametrize("how", ["unlink", "truncate", "forget"])
def test_no_upload_stays_open(rw: Site, bucket: Bucket, how: str) -> None:
    fd = begun(rw, bucket)
    if how == "truncate":
        os.ftruncate(fd, 0)
    else:
        (rw.mountpoint / "large").unlink()
    if how == "forget":
        os.close(fd)
    eventually(lambda: bucket.uploads() == [])
    if how != "forget":
        os.pwrite(fd, b"still here", 0)
        assert os.pread(fd, 10, 0) == b"still here"
        os.close(fd)
    assert (rw.mountpoint / "large").exists() == (how == "truncate")


def test_a_checkpoint_is_sent_once(rw: Site, bucket: Bucket, proxy: FaultProxy) -> None:
    fd = begun(rw, bucket)
    os.fsync(fd)
    proxy.fault(Fault.ERROR, text="partNumber=")
    os.rename(rw.mountpoint / "large", rw.mountpoint / "final")
    os.close(fd)
    assert bucket.content("final") == CONTENT
    assert not (rw.mountpoint / "large").exists()
    assert bucket.uploads() == []


def test_a_part_of_a_large_object_changes(rw: Site, bucket: Bucket) -> None:
    bucket.client.put_object(Bucket=bucket.name, Key="large", Body=CONTENT)
    with open(rw.mountpoint / "large", "r+b") as stream:
        stream.seek(12 * MIB)
        stream.write(b"changed")
    assert bucket.content("large") == CONTENT[: 12 * MIB] + b"changed" + CONTENT[12 * MIB + 7 :]
    assert bucket.uploads() == []


def test_an_exclusive_file_replaces_nothing_after_a_kill(rw: Site, bucket: Bucket) -> None:
    rw.expected_trouble += ("was not stored, and its bytes stay in the spool",)
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    ours, moved = (os.open(rw.mountpoint / name, flags) for name in ("ours", "moved"))
    os.write(ours, b"ours")
    os.write(moved, b"moved")
    os.kill(rw.daemon_pid(), signal.SIGKILL)
    for name in ("ours", "target"):
        bucket.client.put_object(Bucket=bucket.name, Key=name, Body=b"theirs")
    with pytest.raises(OSError) as raised:
        os.close(ours)
    assert raised.value.errno == errno.ESTALE
    os.rename(rw.mountpoint / "moved", rw.mountpoint / "target")
    os.close(moved)
    assert bucket.content("ours") == b"theirs"
    assert bucket.content("target") == b"moved", "a rename replaces"


def test_a_file_that_is_removed_right_after_it_was_sent(rw: Site) -> None:
    fd = os.open(rw.mountpoint / "large", os.O_CREAT | os.O_RDWR)
    write_all(fd, CONTENT)
    os.fsync(fd)
    (rw.mountpoint / "large").unlink()
    drop_pages(f"/proc/self/fd/{fd}")
    found = b"".join(os.pread(fd, MIB, offset) for offset in range(0, len(CONTENT), MIB))
    assert found == CONTENT
    os.close(fd)


def larger_than_the_spool(rw: Site, name: str) -> tuple[int, bytes]:
    """A new file that is not closed, and its content."""
    content = os.urandom(MIB) * 100 + b"the rest"
    fd = os.open(rw.mountpoint / name, os.O_CREAT | os.O_RDWR)
    write_all(fd, content)
    return fd, content


def test_a_file_larger_than_the_spool(rw: Site, bucket: Bucket) -> None:
    """What was sent is not in the spool any more. The next daemon completes the upload."""
    rw.expected_trouble += ("had no room in the spool", "can't be changed before it is closed")
    fd, content = larger_than_the_spool(rw, "large")
    past_the_pages = os.open(rw.mountpoint / "large", os.O_RDONLY | os.O_DIRECT)
    with pytest.raises(OSError) as raised:
        os.preadv(past_the_pages, [mmap.mmap(-1, 4096)], 0)
    assert raised.value.errno == errno.EIO
    with pytest.raises(OSError) as raised:
        os.rename(rw.mountpoint / "large", rw.mountpoint / "other")
    assert raised.value.errno == errno.ENOSPC
    os.kill(rw.daemon_pid(), signal.SIGKILL)
    write_all(fd, b" and more")
    os.close(fd)
    assert bucket.content("large") == content + b" and more"
    os.close(past_the_pages)
    assert (rw.mountpoint / "large").read_bytes() == content + b" and more"
    assert bucket.uploads() == []


def test_a_lost_upload_of_a_file_larger_than_the_spool(rw: Site, bucket: Bucket) -> None:
    """The file can't be stored any more, and nothing of it is."""
    rw.expected_trouble += ("was not stored, and its bytes stay in the spool", "had no room in")
    fd, _ = larger_than_the_spool(rw, "large")
    (upload,) = bucket.uploads()
    bucket.client.abort_multipart_upload(Bucket=bucket.name, Key="large", UploadId=upload)
    with pytest.raises(OSError) as raised:
        os.close(fd)
    assert raised.value.errno == errno.EIO
    assert not (rw.mountpoint / "large").exists()
    listed = bucket.client.list_objects_v2(Bucket=bucket.name).get("Contents", [])
    assert listed == []
    assert bucket.uploads() == []


def test_a_conflict_of_a_file_larger_than_the_spool(rw: Site, bucket: Bucket) -> None:
    """Its upload stays until a user decides."""
    rw.expected_trouble += ("was not stored, and its bytes stay in the spool",)
    fd, content = larger_than_the_spool(rw, "large")
    bucket.client.put_object(Bucket=bucket.name, Key="large", Body=b"theirs")
    with pytest.raises(OSError) as raised:
        os.close(fd)
    assert raised.value.errno == errno.ESTALE
    rw.cli("writes", "send", "--overwrite", rw.mountpoint / "large")
    assert bucket.content("large") == content
    assert bucket.uploads() == []
