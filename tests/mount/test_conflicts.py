"""Another client changes what a writable mount changes, too: nobody's bytes are lost silently."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.harness import eventually
from tests.mount.stores import Store, local_store, s3_store
from tests.servers.seaweedfs import SeaweedFS


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "file":
        with local_store(tmp_path) as found:
            yield found
    else:
        server: SeaweedFS = request.getfixturevalue("seaweedfs")
        with s3_store(tmp_path, server, "conflicts") as found:
            yield found


def is_stale(call: Callable[..., object], *args: object) -> None:
    with pytest.raises(OSError) as raised:
        call(*args)
    assert raised.value.errno == errno.ESTALE


def until_known(path: Path, content: bytes) -> None:
    """Until the kernel has been told that the name is another file by now."""

    def is_known() -> bool:
        try:
            return path.read_bytes() == content
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return False

    eventually(is_known)


def test_after_a_conflict_the_name_is_looked_up_again(store: Store) -> None:
    """Also with a fresh listing, in which the name was: a process that opens the file to append to
    it must not begin a new one."""
    site = store.site
    site.expected_trouble += ("its bytes stay in the spool",)
    store.write("file", b"first")
    site.mount("--rw")
    assert os.listdir(site.mountpoint) == ["file"]
    descriptor = os.open(site.mountpoint / "file", os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, b" and ours")
    store.write("file", b"theirs")
    is_stale(os.close, descriptor)
    until_known(site.mountpoint / "file", b"theirs")
    with open(site.mountpoint / "file", "ab") as stream:
        stream.write(b" and ours")
    assert store.read("file") == (site.mountpoint / "file").read_bytes() == b"theirs and ours"
    site.umount()


def test_a_partial_change_of_a_version_that_is_gone(store: Store) -> None:
    """The rest of the content can't be read any more: this is a conflict, too, and the name does
    not stay as it is for ever."""
    site = store.site
    site.expected_trouble += ("its bytes stay in the spool",)
    store.write("file", bytes(3_000_000))
    site.mount("--rw")
    descriptor = os.open(site.mountpoint / "file", os.O_WRONLY)
    os.pwrite(descriptor, b"ours", 2_000_000)
    store.write("file", b"theirs")
    is_stale(os.fsync, descriptor)
    is_stale(os.pwrite, descriptor, b"ours", 0)  # or a later close would say that it was stored
    os.close(descriptor)
    until_known(site.mountpoint / "file", b"theirs")
    (site.mountpoint / "file").write_bytes(b"ours again")
    assert store.read("file") == b"ours again"
    site.umount()


@pytest.mark.parametrize("call", [os.close, os.fsync])
def test_a_conflict_that_no_close_waited_for_is_told_to_the_next_one(
    store: Store, call: Callable[[int], None]
) -> None:
    site = store.site
    site.expected_trouble += ("its bytes stay in the spool",)
    store.write("file", b"first")
    site.let_only_closes_send()
    site.mount("--rw")
    path = site.mountpoint / "file"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, b" and ours")
    store.write("file", b"theirs")
    site.cli("flush", site.mountpoint, code=1)
    subprocess.run(["true"], check=True, stdout=descriptor)  # this close is not told
    is_stale(call, descriptor)
    if call is os.fsync:
        os.close(descriptor)  # it has been told
    until_known(path, b"theirs")
    assert path.read_bytes() == b"theirs"
    site.umount()


def test_an_append_to_an_empty_file(store: Store) -> None:
    """Two machines append to a file that `touch` has made: none replaces the other's bytes."""
    site = store.site
    site.expected_trouble += ("its bytes stay in the spool",)
    for name in ("file", "free", "replaced"):
        store.write(name, b"")
    site.mount("--rw")
    for name in ("file", "free", "replaced"):
        descriptor = os.open(site.mountpoint / name, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, b"ours")
        if name == "replaced":  # a shell's ">", while another process appends
            os.truncate(site.mountpoint / name, 0)
            os.write(descriptor, b"whole")
        if name != "free":
            store.write(name, b"theirs")
        if name == "file":
            is_stale(os.close, descriptor)
        else:
            os.close(descriptor)
    until_known(site.mountpoint / "file", b"theirs")
    assert store.read("file") == b"theirs"
    assert store.read("free") == b"ours"
    assert store.read("replaced") == b"whole"
    with open(site.mountpoint / "free", "ab") as stream:
        stream.write(b" and more")
    assert store.read("free") == b"ours and more"
    site.umount()
