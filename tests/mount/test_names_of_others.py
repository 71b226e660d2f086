"""Another machine makes names that a writable mount has looked up before, and believes absent."""

import ctypes
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


def move_to_absent(old: Path, new: Path) -> None:
    """Rename with RENAME_NOREPLACE, as `mv -n` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(-100, os.fsencode(old), -100, os.fsencode(new), 1):
        raise OSError(ctypes.get_errno(), "renameat2")


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


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_rename_that_must_replace_nothing_asks_the_source(store: Store, kind: str) -> None:
    root = mount(store)
    for number, theirs in enumerate(("file", "empty directory", "directory")):
        old, new = root / f"ours-{number}", root / f"new-{number}"
        if kind == "file":
            old.write_bytes(b"ours")
        else:
            old.mkdir()
            (old / "file").write_bytes(b"ours")
        assert not new.exists()
        match theirs:
            case "file":
                store.write(new.name, b"theirs")
            case "empty directory":
                store.make_directory(new.name)
            case "directory":
                make_files_directory(store, new.name)
        exists_already(move_to_absent, old, new)
        eventually(new.exists)
        assert new.is_dir() == (theirs != "file")
        if theirs != "empty directory":
            content = store.read(new.name if theirs == "file" else f"{new.name}/file")
            assert content == b"theirs"
        assert (old if kind == "file" else old / "file").read_bytes() == b"ours"
        move_to_absent(old, root / f"free-{number}")
        assert not old.exists()
    left = "free-0" if kind == "file" else "free-0/file"
    assert store.read(left) == (root / left).read_bytes() == b"ours"
    store.site.umount()


def test_an_unsent_file_that_must_replace_nothing(store: Store) -> None:
    """The source is asked at the rename, and again when the close sends the file."""
    root = mount(store)
    store.site.expected_trouble += ("its bytes stay in the spool",)
    new, early, late = (root / name for name in ("new", "early", "late"))
    descriptor = os.open(new, os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, b"ours")
    assert not early.exists()
    store.write("early", b"theirs")
    exists_already(move_to_absent, new, early)
    move_to_absent(new, late)
    store.write("late", b"theirs")
    with pytest.raises(OSError) as raised:
        os.close(descriptor)
    assert raised.value.errno == errno.ESTALE
    assert store.read("early") == store.read("late") == b"theirs"
    store.site.umount()


def test_a_directory_is_not_moved_into_one_that_another_machine_has_just_made(store: Store) -> None:
    root = mount(store)
    (root / "ours").mkdir()
    (root / "ours/a").write_bytes(b"ours")
    assert not (root / "new").exists()
    make_files_directory(store, "new")
    with pytest.raises(OSError) as raised:
        (root / "ours").rename(root / "new")
    assert raised.value.errno in (errno.EEXIST, errno.ENOTEMPTY)
    assert store.read("new/file") == b"theirs"
    assert store.read("ours/a") == b"ours"
    assert store.read_if_there("new/a") is None
    store.site.umount()
