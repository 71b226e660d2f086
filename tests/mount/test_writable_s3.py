"""A writable mount of a bucket: directories, renames, attributes."""

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.mount.harness import MIB, PATIENT, Site, drop_pages, eventually
from tests.servers.seaweedfs import SeaweedFS

_buckets = count(1)


class Bucket:
    """What the server itself has below the mounted prefix."""

    def __init__(self, server: SeaweedFS) -> None:
        self.name = server.make_bucket(f"writable-s3-{next(_buckets)}")
        self.client = server.client

    def keys(self, directory: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=f"prefix/{directory}"
        )
        found = [one["Key"] for page in pages for one in page.get("Contents", ())]
        return [key.removeprefix("prefix/") for key in found]

    def files(self, directory: str = "") -> list[str]:
        return [key for key in self.keys(directory) if not key.endswith("/")]

    def put(self, path: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=f"prefix/{path}", Body=data)


@pytest.fixture
def bucket(seaweedfs: SeaweedFS) -> Bucket:
    return Bucket(seaweedfs)


@pytest.fixture
def rw(tmp_path: Path, seaweedfs: SeaweedFS, bucket: Bucket) -> Iterator[Site]:
    site = Site(tmp_path, f"s3://{bucket.name}/prefix")
    site.environment = seaweedfs.environment
    site.options = PATIENT
    site.expected_trouble = ("an empty directory is shown until there is", ".resilience.prober: ")
    yield site
    if site.is_mounted():
        site.umount()
    site.tear_down()


def test_a_directory_is_renamed_while_its_daemon_is_killed(rw: Site, bucket: Bucket) -> None:
    rw.mount("--rw", "--data-path", "relay")
    rw.expected_trouble += (" cachefs.supervisor.",)
    old, new = rw.mountpoint / "old", rw.mountpoint / "new"
    for phase in ("copies", "deletions"):
        wanted = {}
        (old / "deep").mkdir(parents=True)
        for number in range(150):
            name = f"deep/file-{number}" if number % 2 else f"file-{number}"
            bucket.put(f"old/{name}", f"{phase} {number}".encode())
            wanted[name] = f"{phase} {number}"
        rw.cli("refresh", old)
        thread = threading.Thread(target=old.rename, args=(new,))
        thread.start()
        if phase == "copies":
            eventually(lambda: bool(bucket.files("new/")))
        else:
            eventually(lambda: len(bucket.files("old/")) < 150)
        os.kill(rw.daemon_pid(), signal.SIGKILL)
        thread.join(300)
        assert not thread.is_alive()
        found = {name: (new / name).read_text() for name in wanted}
        assert found == wanted
        assert not old.exists()
        assert sorted(bucket.files("new/")) == sorted(f"new/{name}" for name in wanted)
        assert bucket.keys("old/") == []
        assert len(os.listdir(new / "deep")) == 75
        for name in wanted:
            (new / name).unlink()
        (new / "deep").rmdir()
        new.rmdir()


def test_files_are_renamed_while_daemons_are_killed(rw: Site, bucket: Bucket) -> None:
    rw.mount("--rw", "--data-path", "relay")
    rw.expected_trouble += (" cachefs.supervisor.",)
    names = [rw.mountpoint / name for name in ("one", "two")]
    names[0].write_bytes(b"content")
    os.listdir(rw.mountpoint)  # a complete listing answers for absent names
    done, ended = 0, threading.Event()
    failures: list[object] = []

    def rename() -> None:
        nonlocal done
        while not ended.is_set() and not failures:
            old, new = names[done % 2], names[1 - done % 2]
            try:
                old.rename(new)
                found = (new.read_bytes(), old.exists(), os.listdir(rw.mountpoint))
            except OSError as error:
                found = error
            if found != (b"content", False, [new.name]):
                failures.append(found)
            done += 1

    thread = threading.Thread(target=rename)
    thread.start()
    for _ in range(4):
        before = done
        eventually(lambda before=before: done >= before + 2 or bool(failures))  # type: ignore[misc]
        os.kill(rw.daemon_pid(), signal.SIGKILL)
    ended.set()
    thread.join(120)
    assert failures == []
    assert len(bucket.files()) == 1


def test_a_directory_with_too_many_files_is_not_renamed(rw: Site, bucket: Bucket) -> None:
    rw.mount("--rw", "--rename-limit", "3")
    for number in range(4):
        bucket.put(f"many/{number}", b"x")
    with pytest.raises(OSError) as raised:
        (rw.mountpoint / "many").rename(rw.mountpoint / "other")
    assert raised.value.errno == errno.EOPNOTSUPP
    assert len(bucket.files("many/")) == 4
    assert bucket.keys("other") == []
    (rw.mountpoint / "many/0").unlink()
    (rw.mountpoint / "many").rename(rw.mountpoint / "other")
    assert bucket.files() == ["other/1", "other/2", "other/3"]


def test_directories_stay_without_files_and_foreign_objects_keep_them(
    rw: Site, bucket: Bucket
) -> None:
    bucket.put("implied/file", b"x")
    bucket.put("moved from/file", b"x")
    rw.mount("--rw")
    made, implied = rw.mountpoint / "made", rw.mountpoint / "implied"
    made.mkdir()
    assert bucket.keys("made") == ["made/"]
    (implied / "file").unlink()
    (rw.mountpoint / "moved from/file").rename(made / "file")
    assert bucket.keys("moved from") == ["moved from/"]
    (rw.mountpoint / "moved from").rmdir()
    (made / "file").write_bytes(b"1")
    (made / "file").unlink()
    rw.umount()
    rw.cache = rw.cache.with_name("empty cache")
    rw.mount("--rw")
    assert sorted(os.listdir(rw.mountpoint)) == ["implied", "made"]
    assert os.listdir(made) == os.listdir(implied) == []
    bucket.put("made/foreign", b"of somebody else")
    with pytest.raises(OSError) as raised:
        made.rmdir()
    assert raised.value.errno == errno.ENOTEMPTY
    assert bucket.files() == ["made/foreign"]
    assert (made / "foreign").read_bytes() == b"of somebody else"
    (made / "foreign").unlink()
    made.rmdir()
    implied.rmdir()
    assert bucket.keys() in ([], [""])


def test_a_renamed_file_keeps_its_cached_blocks(rw: Site, bucket: Bucket) -> None:
    rw.mount("--rw")
    old, new = rw.mountpoint / "old", rw.mountpoint / "new"
    content = os.urandom(9 * MIB + 5)
    old.write_bytes(content)
    rw.wait_until_stored(10)
    old.rename(new)
    rw.wait_until_stored(20)
    gets = rw.origin()["gets"]
    drop_pages(new)
    assert new.read_bytes() == content
    assert rw.origin()["gets"] == gets


def test_attributes_survive_a_remount_and_listings(rw: Site, bucket: Bucket) -> None:
    rw.mount("--rw", "--list-ttl", "0", "--attr-ttl", "0", "--entry-ttl", "0")
    source, file = rw.files / "source", rw.mountpoint / "file"
    source.write_bytes(b"1")
    source.chmod(0o640)
    os.utime(source, ns=(10**18, 10**18))
    subprocess.run(["cp", "-p", source, file], check=True)
    subprocess.run(["cp", "-p", source, rw.mountpoint / "touched"], check=True)
    subprocess.run(["touch", "-d", "@1234567890.5", rw.mountpoint / "touched"], check=True)

    temporary = rw.mountpoint / ".synced.AbCd"  # as rsync does it
    temporary.write_bytes(b"1")
    os.utime(temporary, ns=(10**18, 10**18))
    temporary.chmod(0o640)
    temporary.rename(rw.mountpoint / "synced")

    def check() -> None:
        assert sorted(os.listdir(rw.mountpoint)) == ["file", "synced", "touched"]
        synced = (rw.mountpoint / "synced").stat()
        assert (synced.st_mtime_ns, synced.st_mode & 0o777) == (10**18, 0o640)
        assert (file.stat().st_mtime_ns, file.stat().st_mode & 0o777) == (10**18, 0o640)
        assert (rw.mountpoint / "touched").stat().st_mtime_ns == 1_234_567_890_500_000_000

    check()
    metadata = bucket.client.head_object(Bucket=bucket.name, Key="prefix/file")["Metadata"]
    assert float(metadata["mtime"]) == 1e9
    assert int(metadata["mode"]) & 0o777 == 0o640
    rw.umount()
    rw.mount("--rw", "--list-ttl", "0", "--attr-ttl", "0", "--entry-ttl", "0")
    check()
    rw.cli("refresh", rw.mountpoint)
    check()
    with file.open("ab") as stream:
        stream.write(b"2")
    file.chmod(0o600)
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("then", ["unlink", "rename"])
def test_an_object_that_a_new_file_has_replaced_does_not_return(
    rw: Site, bucket: Bucket, then: str
) -> None:
    """The new file is renamed over it before the first close, so the store still has the object."""
    bucket.put("file", b"old")
    rw.let_only_closes_send()
    rw.mount("--rw")
    new, file, other = (rw.mountpoint / name for name in ("new", "file", "other"))
    descriptor = os.open(new, os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, b"new")
    new.rename(file)
    assert bucket.files() == ["file"]
    if then == "unlink":
        file.unlink()
        assert bucket.files() == []
        os.close(descriptor)
    else:
        file.rename(other)
        assert bucket.files() == []
        os.close(descriptor)
        assert other.read_bytes() == b"new"
    rw.cli("refresh", rw.mountpoint)
    left = ["other"] if then == "rename" else []
    assert os.listdir(rw.mountpoint) == bucket.files() == left


def test_a_name_with_a_control_character_is_refused(rw: Site) -> None:
    rw.mount("--rw")
    for name in ("new\nline", "tab\t", "\x01"):
        with pytest.raises(OSError) as raised:
            (rw.mountpoint / name).write_bytes(b"x")
        assert raised.value.errno == errno.EINVAL
    assert os.listdir(rw.mountpoint) == []
