"""A staged file: its content, its generations and its upload (`staging/staged_file.py`)."""

import os
from pathlib import Path

import pytest
import trio

from cachefs.errors import SpoolError, SpoolFullError
from cachefs.staging import content as content_module
from cachefs.staging.extents import Piece, Source
from cachefs.staging.file_state import FileState
from cachefs.types import UNKNOWN_ID, UNKNOWN_MODE, Posix
from tests.cache.harness import until
from tests.staging.harness import FullDisk, a_spool, content_of, meta_of

BASE = bytes(range(200)) * 50


async def test_a_new_file(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        file = spool.begin(7, "a/b", None)
        assert spool.file_of(7) is file
        assert spool.files == {file.number: file}
        file.write(3, b"abc")
        assert file.size_bytes == 6
        assert await content_of(file) == b"\0\0\0abc"
        file.write(4, b"XYZ")
        assert await content_of(file) == b"\0\0\0aXYZ"
        await file.truncate(4)
        await file.truncate(6)
        assert await content_of(file) == b"\0\0\0a\0\0"
        assert file.pieces(2, 100) == [Piece(Source.SPOOL, 2, 4)]
        assert file.pieces(6, 1) == []
        assert file.base is None
        assert file.extents is None
        path = tmp_path / "spool/files/000001.staged"
        assert path.stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "spool").stat().st_mode & 0o777 == 0o700
        assert file.mtime_ns == path.stat().st_mtime_ns


async def test_a_change_of_a_part(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        file = spool.begin(7, "a", meta_of(BASE))
        expected = bytearray(BASE)
        assert await content_of(file, BASE) == expected
        file.write(100, b"new")
        expected[100:103] = b"new"
        assert await content_of(file, BASE) == expected
        await file.truncate(5_000)
        await file.truncate(6_000)
        expected[5_000:] = bytes(1_000)
        assert await content_of(file, BASE) == expected
        assert file.base_bytes == 5_000
        assert file.base == meta_of(BASE)
        file.write(7_000, b"end")
        assert await content_of(file, BASE) == expected + bytes(1_000) + b"end"
        await file.truncate(0)
        assert file.base is None, "wholly replaced"
        file.write(1, b"x")
        assert await content_of(file, BASE) == b"\0x"


async def test_each_change_is_another_generation(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        file = spool.begin(7, "a", None)
        seen = [file.generation]
        for change in (b"a", b"bb", None):
            if change is None:
                await file.truncate(1)
            else:
                file.write(0, change)
            seen.append(file.generation)
        assert seen == sorted(set(seen))


async def test_a_change_unseals(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        file = spool.begin(7, "a", None)
        file.write(0, b"abc")
        assert not file.is_sealed
        assert file.seal() == file.generation
        assert file.is_sealed
        await file.sync()
        assert file.is_synced
        file.write(0, b"d")
        assert not file.is_sealed
        assert not file.is_synced


async def test_large_truncations_let_other_tasks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_module, "_STEP_BYTES", 1000)
    async with a_spool(tmp_path) as spool, trio.open_nursery() as nursery:
        sizes = []

        async def watch() -> None:
            while True:
                sizes.append(os.path.getsize(tmp_path / "spool/files/000001.staged"))
                await trio.lowlevel.checkpoint()

        file = spool.begin(7, "a", None)
        file.write(0, bytes(10_000))
        nursery.start_soon(watch)
        await file.truncate(500)
        nursery.cancel_scope.cancel()
        assert file.size_bytes == 500
        assert any(500 < size < 10_000 for size in sizes), "seen between two steps"


@pytest.mark.parametrize("tracks", [False, True])
async def test_a_write_for_which_the_disk_has_no_room_changes_nothing(
    tmp_path: Path, tracks: bool
) -> None:
    disk = FullDisk()
    async with a_spool(tmp_path, disk=disk) as spool:
        file = spool.begin(7, "a", meta_of(BASE) if tracks else None)
        file.write(0, b"old" * 1000)
        before = await content_of(file, BASE)
        known = (file.size_bytes, file.generation, spool.space.used_bytes)
        for room in (0, 1, 500):
            disk.room_bytes = room
            with pytest.raises(SpoolFullError, match="No space left"):
                file.write(2_000, b"new" * 1000)
            disk.room_bytes = None
            assert await content_of(file, BASE) == before
            assert known == (file.size_bytes, file.generation, spool.space.used_bytes)
        assert file.state is FileState.OPEN
        file.write(2_000, b"new" * 1000)
        assert (await content_of(file, BASE))[2_000:5_000] == b"new" * 1000


async def test_a_full_journal_undoes_the_write(tmp_path: Path) -> None:
    disk = FullDisk()
    async with a_spool(tmp_path, disk=disk) as spool:
        file = spool.begin(7, "a", meta_of(BASE))
        file.write(0, b"old" * 1000)
        disk.only_fd = spool._journal.fd
        for room in (0, 7, 20):
            disk.room_bytes = room
            with pytest.raises(SpoolFullError):
                file.write(2_000, b"new" * 1000)
            assert (await content_of(file, BASE))[:3_000] == b"old" * 1000
        disk.room_bytes = None
        file.write(2_000, b"new" * 1000)


async def test_a_write_that_can_not_be_undone_holds_the_file(tmp_path: Path) -> None:
    disk = FullDisk()
    async with a_spool(tmp_path, disk=disk) as spool:
        file = spool.begin(7, "a", None)
        disk.room_bytes = 1
        disk.truncations_fail = True
        with pytest.raises(SpoolError):
            file.write(0, b"new")
        assert file.state is FileState.HELD
        assert "could not be undone" in file.reason
        assert spool.file_of(7) is None
        disk.truncations_fail, disk.room_bytes = False, None


async def test_parts_whose_content_changes_are_stale(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        file = spool.begin(7, "a", None)
        file.write(0, bytes(30))
        upload = file.start_upload("id", "write", "a")
        parts = [file.begin_part(number, 10 * number - 10, 10) for number in (1, 2, 3)]
        assert file.finish_part(parts[0], "tag 1")
        file.write(12, b"x")  # while part 2 is sent
        assert not file.finish_part(parts[1], "tag 2")
        assert file.finish_part(parts[2], "tag 3")
        assert sorted(upload.parts) == [1, 3]
        assert upload.parts[1].tag == "tag 1"
        file.write(9, b"x")
        assert sorted(upload.parts) == [3]
        file.write(30, b"behind all parts")
        assert sorted(upload.parts) == [3]
        await file.truncate(29)
        assert sorted(upload.parts) == []
        again = file.begin_part(1, 0, 10)
        assert again.generation == file.generation
        file.end_upload()
        assert not file.finish_part(again, "tag")
        assert file.upload is None


async def test_a_file_ends_when_its_content_is_at_the_origin(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool, trio.open_nursery() as nursery:
        await nursery.start(spool.run)
        file = spool.begin(7, "a", None)
        file.write(0, b"abc")
        generation = file.begin_sending()
        assert file.state is FileState.SENDING
        assert generation == file.generation
        assert file.finish(meta_of(b"abc"))
        assert file.state is FileState.ENDED
        assert spool.file_of(7) is None
        assert await file.read_spool(0, 3) == b"abc", "for those who have not got it elsewhere yet"
        file.discard()
        file.discard()
        assert spool.space.used_bytes == 0
        await until(lambda: not list((tmp_path / "spool/files").iterdir()))
        with pytest.raises(SpoolError):
            file.write(0, b"x")
        nursery.cancel_scope.cancel()


async def test_a_file_that_changes_while_it_is_sent_stays(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        file = spool.begin(7, "a", meta_of(BASE))
        file.write(0, b"first")
        file.begin_sending()
        sent = await content_of(file, BASE)
        file.write(100, b"second")
        assert file.state is FileState.OPEN
        await file.truncate(3_000)
        await file.truncate(4_000)
        now = await content_of(file, BASE)
        assert not file.finish(meta_of(sent, "v2"))
        assert file.base == meta_of(sent, "v2")
        assert file.base_bytes == 3_000
        assert await content_of(file, sent) == now
        file.begin_sending()
        file.set_attributes(mtime_ns=5)
        assert not file.finish(meta_of(now, "v3")), "the upload has the former attributes"
        file.begin_sending()
        assert file.finish(meta_of(now, "v4"))


async def test_states_and_attributes(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        file = spool.begin(7, "a", None)
        file.fail("no network")
        assert (file.state, file.reason) == (FileState.FAILED, "no network")
        file.write(0, b"still the content of its inode")
        file.conflict("another version")
        assert spool.file_of(7) is None
        assert list(spool.files) == [1], "kept until a user decides"
        with pytest.raises(SpoolError, match="CONFLICT"):
            file.write(0, b"x")
        other = spool.begin(7, "a", None)
        assert spool.file_of(7) is other
        file.drop()
        assert spool.file_of(7) is other
        assert list(spool.files) == [2]
        other.set_attributes(posix=Posix(mode=0o640))
        other.set_attributes(mtime_ns=12, posix=Posix(uid=5))
        assert other.posix == Posix(5, UNKNOWN_ID, 0o640)
        assert other.mtime_ns == 12
        assert other.posix.mode != UNKNOWN_MODE
        other.rename("b")
        assert other.path == "b"
        with pytest.raises(SpoolError, match="staged already"):
            spool.begin(7, "b", None)
