"""Another machine makes names that a writable mount has looked up before, and believes absent."""

import errno
import os
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
        with s3_store(tmp_path, server, "others") as found:
            yield found


def exists_already(call: Callable[..., object], *args: object) -> None:
    with pytest.raises(OSError) as raised:
        call(*args)
    assert raised.value.errno == errno.EEXIST


def mount(store: Store) -> Path:
    """Mount the store so that nobody asks again for a name that was found absent."""
    store.write("before", b"")
    store.site.mount("--rw", "--negative-ttl", "1h", "--list-ttl", "1h")
    return store.site.mountpoint


def make_files_directory(store: Store, name: str) -> None:
    """Make a directory with a file, and in an object store without a marker."""
    if store.site.files.is_dir():
        (store.site.files / name).mkdir(exist_ok=True)
    store.write(f"{name}/file", b"theirs")


@pytest.mark.parametrize("kind", ["empty", "with a file", "file"])
def test_a_directory_of_another_machine_is_not_made_again(store: Store, kind: str) -> None:
    path = mount(store) / "lock"
    assert not path.exists()
    match kind:
        case "empty":
            store.make_directory("lock")
        case "with a file":
            make_files_directory(store, "lock")
        case "file":
            store.write("lock", b"theirs")
    exists_already(os.mkdir, path)
    eventually(path.exists)
    assert path.is_dir() == (kind != "file")
    if kind == "with a file":
        assert (path / "file").read_bytes() == b"theirs"
    store.site.umount()


def test_a_directory_is_made_again_after_its_removal(store: Store) -> None:
    path = mount(store) / "lock"
    for _ in range(3):
        path.mkdir()
        exists_already(os.mkdir, path)
        path.rmdir()
    store.site.umount()
