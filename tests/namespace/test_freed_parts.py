"""Files larger than the spool: only an upload has their first bytes (`StagedContent.free`)."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.errors import (
    NotFoundError,
    OriginUnavailableError,
    PartsLostError,
    SpoolError,
    UploadLostError,
)
from cachefs.namespace.namespace import ROOT_INO
from cachefs.origin.writable import MOST_PARTS, Upload
from cachefs.staging.file_state import FileState
from cachefs.staging.spool import Spool
from cachefs.writes import written_file
from cachefs.writes.sending import sender
from cachefs.writes.unsent.kept import StagedReader
from cachefs.writes.written_file import WrittenFile
from tests.namespace.harness import Reading
from tests.namespace.test_sent_anew import PartStore
from tests.namespace.test_written_names import Mount

KIB = 1024
SPOOL_BYTES = 128 * KIB
PART_BYTES = 16 * KIB
MORE_BYTES = 64 * KIB


class LosingStore(PartStore):
    """Says definitely which uploads it does not have."""

    def _parts(self, upload: Upload) -> dict[int, bytes]:
        try:
            return super()._parts(upload)
        except NotFoundError as error:
            raise UploadLostError(str(error)) from None

    async def complete(self, upload: Upload, *more: Any, **named: Any) -> Any:
        meta = await super().complete(upload, *more, **named)
        self._write_ids[meta.version] = upload.write_id
        return meta


def small_parts(size_bytes: int, most_parts: int = MOST_PARTS) -> int:
    return PART_BYTES if size_bytes <= PART_BYTES * min(most_parts, 64) else 4 * PART_BYTES


@pytest.fixture
async def mount(
    reading: Reading, tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Mount]:
    for module in (sender, written_file):
        monkeypatch.setattr(module, "MOST_PUT_BYTES", PART_BYTES)
    monkeypatch.setattr(sender, "part_bytes", small_parts)
    spool = await Spool.open(tmp_path / "spool", reading.origin.identity, SPOOL_BYTES)
    await nursery.start(spool.run)
    mount = Mount(reading, spool, LosingStore(reading.origin))
    nursery.start_soon(mount.files.run)
    yield mount
    await spool.close()


def store_of(mount: Mount) -> Any:
    return mount.store


def entry_of(mount: Mount, ino: int) -> WrittenFile:
    file = mount.files.entry(ino)
    assert file is not None
    return file


async def larger_than_the_spool(
    mount: Mount, size_bytes: int = 2 * SPOOL_BYTES
) -> tuple[int, bytes]:
    """A new file that is not closed, and its content."""
    ino, content = await mount.create(ROOT_INO, b"large"), os.urandom(size_bytes)
    for offset in range(0, size_bytes, 10_000):
        await mount.files.write(ino, offset, content[offset : offset + 10_000], 1)
    assert entry_of(mount, ino).staged.freed_bytes
    return ino, content


async def test_a_file_larger_than_the_spool(mount: Mount) -> None:
    ino, content = await larger_than_the_spool(mount)
    await mount.files.close(ino, 1)
    assert mount.objects() == {"large": content}
    assert store_of(mount).uploads == {}


async def test_one_that_outgrows_its_parts(mount: Mount) -> None:
    """The parts that the spool does not have any more stay as they are."""
    ino, content = await larger_than_the_spool(mount, 100 * PART_BYTES + 5)
    await mount.files.close(ino, 1)
    assert mount.objects() == {"large": content}


async def test_no_part_is_forgotten_that_the_spool_does_not_have(mount: Mount) -> None:
    """A store may list too few. It compares all tags when it completes the upload."""
    ino, content = await larger_than_the_spool(mount)
    store = store_of(mount)
    entry_of(mount, ino).knows_parts = False
    parts = store.parts

    async def too_few(upload: Upload) -> Any:
        return (await parts(upload))[1:]

    store.parts = too_few
    await mount.files.close(ino, 1)
    assert mount.objects() == {"large": content}


@pytest.mark.parametrize("kind", ["part", "list", "complete"])
async def test_a_vague_404_ends_no_upload(mount: Mount, kind: str) -> None:
    """Such as one of a gateway, or `NoSuchBucket`: the upload has what nothing else has."""
    ino, content = await larger_than_the_spool(mount)
    entry_of(mount, ino).knows_parts = False

    async def misled(each: str, path: str) -> None:
        if each == kind:
            raise NotFoundError("no such bucket")

    mount.store.before = misled
    with pytest.raises(NotFoundError):
        await mount.files.close(ino, 1)
    assert entry_of(mount, ino).staged.state is FileState.FAILED
    mount.store.before = None
    await mount.files.send(ino, is_close=True)
    assert mount.objects() == {"large": content}


@pytest.mark.expect_log("was not stored, and its bytes stay in the spool")
async def test_a_lost_upload_is_not_stored(mount: Mount) -> None:
    ino, _ = await larger_than_the_spool(mount)
    staged = entry_of(mount, ino).staged
    store_of(mount).gone.update(store_of(mount).uploads)
    with pytest.raises(PartsLostError):
        await mount.files.close(ino, 1)
    assert staged.state is FileState.HELD
    assert mount.objects() == {}


async def test_what_may_be_stored_is_not_changed(mount: Mount) -> None:
    """Not at the second try either."""
    ino, content = await larger_than_the_spool(mount)

    async def lost(kind: str, path: str) -> None:
        if kind == "complete":
            raise OriginUnavailableError("away")

    mount.store.before = lost
    with pytest.raises(OriginUnavailableError):
        await mount.files.close(ino, 1)
    for _ in range(3):
        with pytest.raises(SpoolError):
            await mount.files.write(ino, len(content), b"more", 1)
        with pytest.raises(SpoolError):
            await mount.files.truncate(ino, len(content) - 1, 1)
    mount.store.before = None
    await mount.files.close(ino, 1)
    await mount.files.send(ino, is_close=True)
    assert mount.objects() == {"large": content}


@pytest.mark.parametrize("failing", [("start", "part"), ("complete",)])
async def test_a_file_whose_close_has_failed_stays_in_the_spool(
    mount: Mount, failing: tuple[str, ...]
) -> None:
    """Also while more is written to it, and when it is not known whether the store has it."""
    ino = await mount.create(ROOT_INO, b"log")
    for offset in range(0, 5 * PART_BYTES, PART_BYTES):
        await mount.files.write(ino, offset, bytes(PART_BYTES), 1)

    async def away(kind: str, path: str) -> None:
        if kind in failing:
            raise OriginUnavailableError("away")

    mount.store.before = away
    with pytest.raises(OriginUnavailableError):
        await mount.files.close(ino, 1)
    mount.store.before = None
    for offset in range(5 * PART_BYTES, SPOOL_BYTES - PART_BYTES, PART_BYTES):
        await mount.files.write(ino, offset, bytes(PART_BYTES), 1)
    with pytest.raises(SpoolError):
        await mount.files.write(ino, SPOOL_BYTES - PART_BYTES, bytes(PART_BYTES), 1)
    assert entry_of(mount, ino).staged.freed_bytes == 0


async def test_parts_get_larger_before_their_numbers_are_used(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones that are not in the spool any more can't be joined."""
    monkeypatch.setattr(sender, "MOST_PARTS", 20)
    ino, content = await larger_than_the_spool(mount, 700 * KIB)
    await mount.files.close(ino, 1)
    assert mount.objects() == {"large": content}


@pytest.mark.expect_log("was not stored, and its bytes stay in the spool")
async def test_a_user_completes_a_file_of_which_the_store_has_lost_a_part(mount: Mount) -> None:
    """One that the spool still has. The store says only that the upload can't be completed."""
    ino, content = await larger_than_the_spool(mount)
    file, store = entry_of(mount, ino), store_of(mount)
    (parts,) = store.uploads.values()

    async def lose_the_last(kind: str, path: str) -> None:
        if kind == "complete":
            del parts[max(parts)]
            store.before = None
            raise UploadLostError("InvalidPart")

    store.before = lose_the_last
    with pytest.raises(PartsLostError):
        await mount.files.close(ino, 1)
    assert file.staged.state is FileState.HELD
    reader = StagedReader(file.staged, mount.tree.namespace, mount.cache)
    await mount.sender.send_kept(file.staged, reader.read, None)
    assert mount.objects() == {"large": content}
