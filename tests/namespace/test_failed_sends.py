"""Power cuts after a close or fsync that could not send the file."""

import random
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import trio

from cachefs.errors import ConflictError, OriginUnavailableError, SpoolError, SpoolFullError
from cachefs.namespace.namespace import ROOT_INO
from cachefs.staging import recovery as recovery_module
from cachefs.staging.file_state import FileState
from cachefs.staging.spool import Spool
from cachefs.staging.staged_file import StagedFile
from cachefs.writes import files
from tests.namespace.harness import Reading
from tests.namespace.test_written_names import Mount, ObjectStore
from tests.staging.harness import content_of
from tests.staging.power_cut import PowerCutDisk

CONTENT = b"checkpoint " * 20


@pytest.fixture
def disk(tmp_path: Path) -> PowerCutDisk:
    return PowerCutDisk(tmp_path)


@pytest.fixture
async def mount(
    reading: Reading, tmp_path: Path, disk: PowerCutDisk, nursery: trio.Nursery
) -> AsyncIterator[Mount]:
    spool = await Spool.open(tmp_path / "spool", reading.origin.identity, 1 << 30, disk)
    await nursery.start(spool.run)
    yield Mount(reading, spool, ObjectStore(reading.origin, can_rename=False))
    await spool.close()


async def away(kind: str, path: str) -> None:
    raise OriginUnavailableError("the origin is away")


async def written(mount: Mount, name: bytes = b"file") -> int:
    ino = await mount.create(ROOT_INO, name)
    await mount.files.write(ino, 0, CONTENT, 1)
    return ino


async def after_power_cut(mount: Mount, disk: PowerCutDisk, root: Path) -> Spool:
    """The spool as the next system finds it: of what was not synced, anything may be lost."""
    disk.cut(root / "after", random.Random(1))
    with pytest.MonkeyPatch.context() as reboot:
        reboot.setattr(recovery_module, "boot_id", lambda: b"the next system.")
        return await Spool.open(root / "after/spool", mount.origin.identity, 1 << 30)


async def test_what_the_origin_did_not_take_survives_a_power_cut(
    mount: Mount, disk: PowerCutDisk, tmp_path: Path
) -> None:
    """And is sent by the next mount."""
    ino = await written(mount)
    mount.store.before = away
    with pytest.raises(OriginUnavailableError):
        await mount.files.send(ino, is_close=True)
    spool = await after_power_cut(mount, disk, tmp_path)
    (file,) = spool.files.values()
    assert (file.path, file.state, file.is_sealed) == ("file", FileState.FAILED, True)
    assert await content_of(file) == CONTENT
    await spool.close()


@pytest.mark.expect_log("file was not stored")
async def test_the_bytes_of_a_conflict_survive_a_power_cut(
    mount: Mount, disk: PowerCutDisk, tmp_path: Path
) -> None:
    ino = await written(mount)
    mount.origin.put("file", b"of another machine")
    with pytest.raises(ConflictError):
        await mount.files.send(ino, is_close=False)
    spool = await after_power_cut(mount, disk, tmp_path)
    (file,) = spool.files.values()
    assert file.state is FileState.CONFLICT
    assert await content_of(file) == CONTENT
    await spool.close()


async def test_only_a_failure_waits_for_the_disk(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = StagedFile.sync

    async def noting(file: StagedFile) -> None:
        synced.append(file.path)
        await sync(file)

    monkeypatch.setattr(StagedFile, "sync", noting)
    await mount.files.send(await written(mount, b"sent"), is_close=True)
    assert synced == []
    ino = await written(mount)
    mount.store.before = away
    for _ in range(2):
        with pytest.raises(OriginUnavailableError):
            await mount.files.send(ino, is_close=True)
    assert synced == ["file"], "once for each content"


@pytest.mark.expect_log("can't sync file")
async def test_a_failed_sync_hides_no_error_of_the_origin(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(file: StagedFile) -> None:
        raise SpoolError("the disk is gone")

    monkeypatch.setattr(StagedFile, "sync", fail)
    ino = await written(mount)
    mount.store.before = away
    with pytest.raises(OriginUnavailableError):
        await mount.files.send(ino, is_close=True)


@pytest.fixture
async def full(reading: Reading, tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[Mount]:
    """A mount whose spool has room for 100 KiB."""
    spool = await Spool.open(tmp_path / "small", reading.origin.identity, 100 << 10)
    await nursery.start(spool.run)
    yield Mount(reading, spool, ObjectStore(reading.origin, can_rename=True))
    await spool.close()


async def test_a_file_of_which_a_write_was_refused_is_not_sent(full: Mount) -> None:
    """Neither by a close nor later: the origin keeps what it has. When the program has repeated
    the write, or has begun anew, the file is whole again."""
    full.origin.put("file", b"the former content")
    ino = (await full.tree.find("file")).ino
    await full.files.truncate(ino, 0, 1)
    await full.files.write(ino, 0, bytes(90 << 10), 1)
    with pytest.raises(SpoolFullError):
        await full.files.write(ino, 90 << 10, bytes(20 << 10), 1)
    for is_close in (True, False):
        with pytest.raises(SpoolFullError, match="a write was refused"):
            await full.files.send(ino, is_close=is_close)
    assert full.files.generations_to_send() == {}
    assert full.objects() == {"file": b"the former content"}
    await full.files.truncate(ino, 0, 1)
    await full.files.write(ino, 0, b"short", 1)
    await full.files.close(ino, 1)
    assert full.objects() == {"file": b"short"}


@pytest.mark.parametrize("state", ["clean", "stored", "closed"])
async def test_a_complete_file_lacks_a_write_that_was_refused(
    full: Mount, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """The program may ignore the error and write behind. The file stays complete before that."""
    monkeypatch.setattr(files, "_ROOM_S", 0.01)
    full.origin.put("file", b"former")
    ino, other = (await full.tree.find("file")).ino, await full.create(ROOT_INO, b"other")
    if state != "clean":
        full.store.before = away if state == "closed" else None
        await full.files.truncate(ino, 0, 1)
        await full.files.write(ino, 0, b"former", 1)
        with pytest.raises(OriginUnavailableError) if state == "closed" else nullcontext():
            await full.files.send(ino, is_close=True)
        full.store.before = None
    await full.files.write(other, 0, bytes(80 << 10), 2)
    for offset in (6, 7):
        with pytest.raises(SpoolFullError):
            await full.files.write(ino, offset, bytes(97 << 10), 1)
    await full.files.truncate(other, 0, 2)
    await full.files.write(ino, 30 << 10, b"behind", 1)
    with pytest.raises(SpoolFullError, match="a write was refused"):
        await full.files.close(ino, 1)
    assert full.objects()["file"] == b"former"
    await full.files.write(ino, 6, b"a" * (20 << 10), 1)
    await full.files.close(ino, 1)
    assert full.objects()["file"][: 20 << 10] == b"former" + b"a" * ((20 << 10) - 6)


async def test_a_write_that_was_refused_and_succeeds_later(
    full: Mount, autojump_clock: trio.testing.MockClock
) -> None:
    other, ino = await full.create(ROOT_INO, b"other"), await full.create(ROOT_INO, b"file")
    await full.files.write(other, 0, bytes(88 << 10), 1)
    with pytest.raises(SpoolFullError):
        await full.files.write(ino, 0, bytes(97 << 10), 2)
    with pytest.raises(SpoolFullError):
        await full.files.close(ino, 2)
    await full.files.close(other, 1)
    await full.files.write(ino, 0, b"a" * (20 << 10), 2)
    await full.files.close(ino, 2)
    assert full.objects()["file"] == b"a" * (20 << 10)
