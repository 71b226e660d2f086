"""Writes to a directory of this machine into which other users may write, too."""

import fcntl
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from cachefs.errors import AccessDeniedError, ObjectChangedError
from cachefs.origin.base import Origin
from cachefs.origin.fsspec.local_steps import Task, locked
from cachefs.origin.on_behalf import acting_for
from cachefs.origin.open_origin import open_origin
from cachefs.origin.writable import Attributes, Content, WritableOrigin
from cachefs.types import Buffer, Caller, ObjectMeta
from tests.cache.harness import until

OTHER_UID = 12_345


@pytest.fixture
async def origin(tmp_path: Path) -> AsyncIterator[Origin]:
    opened = open_origin(f"file://{tmp_path}")
    yield opened
    await opened.aclose()


@pytest.fixture
def writer(origin: Origin) -> WritableOrigin:
    assert origin.writer is not None
    return origin.writer


async def test_what_a_killed_write_has_left_is_removed_and_nothing_else(
    writer: WritableOrigin, tmp_path: Path
) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "other").write_bytes(b"kept")
    upload = await writer.start_upload("dir/file", write_id="a write")
    again = await writer.start_upload("dir/file", write_id="a write")
    kept = await writer.start_upload("dir/file", write_id="another")
    await writer.put_part(upload, 1, 0, b"part")
    hidden = ".cachefs-upload-" + upload.upload_id
    assert upload.upload_id[:16] == again.upload_id[:16] != kept.upload_id[:16]
    planted = tmp_path / "dir" / (hidden[:-16] + 16 * "0")
    planted.symlink_to(tmp_path / "other")
    (tmp_path / "dir" / (hidden[:-16] + 16 * "1")).mkdir()
    (tmp_path / "dir" / f"{hidden}.name").write_bytes(b"kept")
    await writer.remove_rest("dir/file", "a write")
    await writer.remove_rest("nowhere/file", "a write")
    assert sorted(entry.name for entry in (tmp_path / "dir").iterdir()) == sorted(
        [f"{hidden}.name", hidden[:-16] + 16 * "1", ".cachefs-upload-" + kept.upload_id]
    )
    assert (tmp_path / "other").read_bytes() == b"kept"


@pytest.mark.root
async def test_only_links_of_root_and_of_the_daemon_are_followed(
    writer: WritableOrigin, tmp_path: Path
) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "own").symlink_to("target")
    (tmp_path / "foreign").symlink_to("target")
    os.lchown(tmp_path / "foreign", OTHER_UID, OTHER_UID)
    await writer.put("own/file", b"1")
    assert (tmp_path / "target/file").read_bytes() == b"1"
    for change in (
        lambda: writer.put("foreign/file", b"2"),
        lambda: writer.delete("foreign/file"),
        lambda: writer.rename("foreign/file", "stolen"),
        lambda: writer.make_directory("foreign/dir"),
        lambda: writer.set_attributes("foreign/file", Attributes(mode=0o777)),
    ):
        with pytest.raises(AccessDeniedError):
            await change()
    assert [entry.name for entry in (tmp_path / "target").iterdir()] == ["file"]
    assert (tmp_path / "target/file").read_bytes() == b"1"
    assert (tmp_path / "target/file").stat().st_mode & 0o777 != 0o777


async def test_attributes_are_not_those_of_a_link_or_of_another_version(
    writer: WritableOrigin, origin: Origin, tmp_path: Path
) -> None:
    (tmp_path / "private").write_bytes(b"private")
    (tmp_path / "private").chmod(0o600)
    (tmp_path / "mine").write_bytes(b"mine")
    before = await origin.stat("mine")
    assert isinstance(before, ObjectMeta)
    (tmp_path / "mine").unlink()
    (tmp_path / "mine").symlink_to("private")
    with pytest.raises(AccessDeniedError):
        await writer.set_attributes("mine", Attributes(mode=0o666), before.version)
    (tmp_path / "mine").unlink()
    (tmp_path / "private").rename(tmp_path / "mine")
    with pytest.raises(ObjectChangedError):
        await writer.set_attributes("mine", Attributes(mode=0o666), before.version)
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o600


class _WatchedContent(Content):
    size_bytes = 1

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.modes: list[int] = []

    def read(self, offset: int, length: int) -> Buffer:
        self.modes += [entry.stat().st_mode & 0o777 for entry in self._directory.iterdir()]
        return b"1"


async def test_nobody_else_can_read_a_file_before_it_has_its_mode(
    writer: WritableOrigin, tmp_path: Path
) -> None:
    content = _WatchedContent(tmp_path)
    await writer.put("private", content, attributes=Attributes(mode=0o640))
    assert content.modes == [0o600]
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o640
    await writer.put("usual", b"")
    (tmp_path / "like it").write_bytes(b"")
    modes = {(tmp_path / name).stat().st_mode for name in ("usual", "like it")}
    assert len(modes) == 1


async def test_nobody_else_can_hold_the_lock(writer: WritableOrigin, tmp_path: Path) -> None:
    await writer.put("before", b"1")
    lock = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        await writer.put("file", b"1")
        await writer.rename("file", "other")
        await writer.delete("before")
    finally:
        os.close(lock)
    assert os.listdir(tmp_path) == ["other"]


async def test_a_lock_that_nobody_waits_for_leaves_no_thread_behind(
    writer: WritableOrigin, tmp_path: Path
) -> None:
    place = os.open(tmp_path, os.O_RDONLY)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with locked(place, Task()):
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        held.wait()
        with trio.move_on_after(0.3):
            await writer.put("file", b"1")
        await until(lambda: not os.listdir(tmp_path))  # its hidden file is removed
    finally:
        done.set()
        thread.join()
        os.close(place)
    await writer.put("file", b"2")
    assert (tmp_path / "file").read_bytes() == b"2"


@pytest.mark.root
async def test_a_new_version_counts_for_the_quota_of_the_owner(
    writer: WritableOrigin, tmp_path: Path
) -> None:
    """Also where only the daemon may make a file, which passes over quotas."""
    tmp_path.chmod(0o755)
    await writer.check_writable()  # it opens the source, to which others can't get here
    for directory, mode in ((tmp_path / "closed", 0o755), (tmp_path / "open", 0o777)):
        directory.mkdir()
        directory.chmod(mode)
        (directory / "f").write_bytes(b"1")
        os.chown(directory / "f", OTHER_UID, OTHER_UID)
        (directory / "f").chmod(0o666)
        with acting_for(Caller(OTHER_UID + 1, OTHER_UID + 1)):
            upload = await writer.start_upload(f"{directory.name}/f")
            owners = {path.name: path.stat().st_uid for path in directory.iterdir()}
            assert len(owners) == 2
            assert set(owners.values()) == {OTHER_UID}
            part = await writer.put_part(upload, 1, 0, b"22")
            await writer.complete(upload, [part])
        assert [path.read_bytes() for path in directory.iterdir()] == [b"22"]


async def test_a_copied_part_keeps_its_holes(
    writer: WritableOrigin, origin: Origin, tmp_path: Path
) -> None:
    with (tmp_path / "f").open("wb") as file:
        for offset in (0, 40 << 20, 90 << 20):
            file.seek(offset)
            file.write(b"data")
        file.truncate(100 << 20)
    before = await origin.stat("f")
    assert isinstance(before, ObjectMeta)
    upload = await writer.start_upload("f")
    half = 50 << 20
    parts = [
        await writer.copy_part(upload, 1, 0, "f", before, half),
        await writer.copy_part(upload, 2, half, "f", before, half),
    ]
    wanted = (tmp_path / "f").read_bytes()
    await writer.complete(upload, parts)
    assert (tmp_path / "f").read_bytes() == wanted
    assert (tmp_path / "f").stat().st_blocks * 512 < 1 << 20
