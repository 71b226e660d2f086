"""Room in the spool (`staging/space.py`)."""

import errno
import os
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner
from trio.testing import wait_all_tasks_blocked

from cachefs.cli import main
from cachefs.errors import SpoolError, SpoolFullError
from cachefs.staging import content
from cachefs.staging.disk import SpoolDisk
from cachefs.staging.extents import Piece, Source
from cachefs.staging.file_state import FileState
from tests.staging.harness import FullDisk, a_spool, content_of, crashed, meta_of

KIB = 1024


async def test_what_is_charged(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        whole, part = spool.begin(1, "a", None), spool.begin(2, "b", meta_of(bytes(100 * KIB)))
        assert spool.space.used_bytes == 8 * KIB
        whole.write(0, bytes(10 * KIB))
        part.write(50 * KIB, bytes(5 * KIB))
        part.write(52 * KIB, bytes(5 * KIB))
        assert spool.space.used_bytes == (8 + 10 + 7) * KIB
        whole.write(0, bytes(10 * KIB))
        assert spool.space.used_bytes == (8 + 10 + 7) * KIB
        await whole.truncate(1 << 40)
        assert spool.space.used_bytes < 100 * KIB, "holes cost nothing"
        await whole.truncate(KIB)
        await part.truncate(51 * KIB)
        assert spool.space.used_bytes == (8 + 1 + 1) * KIB
        part.drop()
        whole.drop()
        assert spool.space.used_bytes == 0


async def test_writers_wait_for_room_in_their_order(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with a_spool(tmp_path, limit_bytes=100 * KIB) as spool:
        first = spool.begin(1, "a", None)
        first.write(0, bytes(90 * KIB))
        assert spool.space.has_room(6 * KIB)
        assert not spool.space.has_room(7 * KIB)
        done = []

        async def write(ino: int, size_bytes: int) -> None:
            file = spool.begin(ino, str(ino), None)
            await spool.space.reserve(size_bytes, 1000)
            file.write(0, bytes(size_bytes))
            done.append(ino)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, 2, 60 * KIB)
            await wait_all_tasks_blocked()
            nursery.start_soon(write, 3, KIB)
            await wait_all_tasks_blocked()
            assert not spool.space.has_room(1), "nobody passes those who wait"
            first.drop()
        assert done == [2, 3]


async def test_a_full_spool_is_reported_after_a_while(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with a_spool(tmp_path, limit_bytes=100 * KIB) as spool:
        spool.begin(1, "a", None).write(0, bytes(90 * KIB))
        begun = trio.current_time()
        with pytest.raises(SpoolFullError, match="--spool-size"):
            await spool.space.reserve(10 * KIB, 60)
        assert trio.current_time() - begun >= 60
        assert spool.space.has_room(KIB)


async def test_a_full_disk_is_noticed_and_its_end_too(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    disk = FullDisk()
    async with a_spool(tmp_path, disk=disk) as spool, trio.open_nursery() as nursery:
        disk.free = 0
        assert not spool.space.has_room(1)
        nursery.start_soon(spool.space.reserve, 1, 1000)
        await wait_all_tasks_blocked()
        disk.free = 1 << 40


async def test_files_that_fit_alone_do_not_wait_for_one_another(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Each writer keeps its bytes until it has all of them, so the spool is full at once."""
    async with a_spool(tmp_path, limit_bytes=100 * KIB) as spool:
        most_bytes = 0

        async def write(ino: int) -> None:
            nonlocal most_bytes
            file = spool.begin(ino, str(ino), None)
            for offset in range(0, 90 * KIB, 5 * KIB):
                await spool.space.reserve(5 * KIB, 60, file)
                file.write(offset, bytes(5 * KIB))
                most_bytes = max(most_bytes, spool.space.used_bytes)
                await trio.lowlevel.checkpoint()
            file.drop()

        async with trio.open_nursery() as nursery:
            for ino in range(1, 7):
                nursery.start_soon(write, ino)
        assert most_bytes <= 200 * KIB
        assert spool.space.used_bytes == 0


async def test_a_writer_waits_as_long_as_room_is_made(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with a_spool(tmp_path, limit_bytes=100 * KIB) as spool:
        files = [spool.begin(ino, str(ino), None) for ino in range(1, 5)]
        for file in files:
            file.write(0, bytes(18 * KIB))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(spool.space.reserve, 90 * KIB, 60)
            for file in files:
                await trio.sleep(50)
                file.drop()


async def test_a_file_that_can_not_fit_fails_at_once(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with a_spool(tmp_path, limit_bytes=100 * KIB) as spool:
        file = spool.begin(1, "a", None)
        file.write(0, bytes(90 * KIB))
        begun = trio.current_time()
        with pytest.raises(SpoolFullError, match="--spool-size"):
            await spool.space.reserve(10 * KIB, 60, file)
        assert trio.current_time() == begun


async def test_one_file_that_waits_for_long_gives_way(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Such as one whose program does something else, or whose close has failed."""
    async with a_spool(tmp_path, limit_bytes=100 * KIB) as spool:
        idle, other = spool.begin(1, "a", None), spool.begin(2, "b", None)
        for file, size_bytes in ((other, 40 * KIB), (idle, 52 * KIB), (idle, 8 * KIB)):
            offset = file.size_bytes
            await spool.space.reserve(size_bytes, 60, file)
            file.write(offset, bytes(size_bytes))
        await spool.space.reserve(40 * KIB, 60, other)


async def test_what_only_an_upload_has_is_neither_read_nor_changed(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        file = spool.begin(1, "a", None)
        file.write(0, b"x" * 100 * KIB)
        file.set_attributes(mtime_ns=5)
        await file.free(64 * KIB)
        assert spool.space.used_bytes == (4 + 36) * KIB
        assert spool.file_path(file.number).stat().st_blocks * 512 == 36 * KIB
        crashed(tmp_path, tmp_path / "crashed")
        for change in (lambda: file.write(64 * KIB - 1, b"ab"), lambda: file.write(0, b"a")):
            with pytest.raises(SpoolFullError):
                change()
        with pytest.raises(SpoolFullError):
            await file.truncate(KIB)
    async with a_spool(tmp_path / "crashed") as spool, a_spool(tmp_path) as closed:
        for each in (spool, closed):
            (file,) = each.files.values()
            assert (file.size_bytes, file.mtime_ns) == (100 * KIB, 5)
            assert file.pieces(0, 100 * KIB) == [
                Piece(Source.UPLOAD, 0, 64 * KIB),
                Piece(Source.SPOOL, 64 * KIB, 36 * KIB),
            ]
            file.write(64 * KIB, b"y")
            await file.truncate(0)
            file.write(0, b"new")
    async with a_spool(tmp_path) as spool:
        (file,) = spool.files.values()
        assert await content_of(file) == b"new", "nothing of it is missing"


class KilledInTruncation(SpoolDisk):
    """Keeps what a kill leaves just before a spool file is truncated, and just behind it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def truncate(self, fd: int, size_bytes: int) -> None:
        crashed(self._root, self._root / "before")
        super().truncate(fd, size_bytes)
        crashed(self._root, self._root / "behind")


async def test_holes_never_count_as_zeros(tmp_path: Path) -> None:
    """A truncation to nothing makes an end of them."""
    async with a_spool(tmp_path, disk=KilledInTruncation(tmp_path)) as spool:
        file = spool.begin(1, "a", None)
        file.write(0, b"x" * 100 * KIB)
        await file.free(64 * KIB)
        await file.truncate(0)
    async with a_spool(tmp_path / "before") as spool:
        (file,) = spool.files.values()
        assert file.pieces(0, 64 * KIB) == [Piece(Source.UPLOAD, 0, 64 * KIB)]
    async with a_spool(tmp_path / "behind") as spool:
        (file,) = spool.files.values()
        file.write(0, b"new")
        assert await content_of(file) == b"new"


async def test_bytes_are_freed_although_their_sender_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "_STEP_BYTES", 16 * KIB)
    async with a_spool(tmp_path) as spool:
        file = spool.begin(1, "a", None)
        file.write(0, b"x" * 100 * KIB)
        with trio.CancelScope() as scope:
            scope.cancel()
            await file.free(64 * KIB)
        assert spool.space.used_bytes == (4 + 36) * KIB


class DiskWithoutHoles(SpoolDisk):
    def free(self, fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


async def test_nothing_is_missing_where_there_can_be_no_holes(tmp_path: Path) -> None:
    async with a_spool(tmp_path, disk=DiskWithoutHoles()) as spool:
        file = spool.begin(1, "a", None)
        file.write(0, b"x" * 100 * KIB)
        with pytest.raises(SpoolError):
            await file.free(64 * KIB)
        assert await content_of(file) == b"x" * 100 * KIB
        file.write(0, b"y")
    async with a_spool(tmp_path) as spool:
        (file,) = spool.files.values()
        assert await content_of(file) == b"y" + b"x" * (100 * KIB - 1)


async def test_a_file_with_holes_is_not_saved(tmp_path: Path) -> None:
    """Its first bytes are only in an upload."""
    async with a_spool(tmp_path) as spool:
        file = spool.begin(1, "a", None)
        file.write(0, b"x" * 100 * KIB)
        await file.free(64 * KIB)
    asked = ["writes", "save", "a", "--cache-dir", str(tmp_path / "spool")]
    refused = CliRunner().invoke(main, [*asked, str(tmp_path / "saved")])
    assert refused.exit_code == 1
    assert "had no room in the spool" in refused.output
    assert not (tmp_path / "saved").exists()
    assert "lacks its first 65536 bytes" in CliRunner().invoke(main, asked).output


@pytest.mark.parametrize("how", ["repeated", "cut"])
async def test_a_refused_write_is_known_until_it_is_repeated_or_cut_off(
    tmp_path: Path, how: str
) -> None:
    async with a_spool(tmp_path) as spool:
        file = spool.begin(1, "a", None)
        file.write(0, bytes(10))
        file.note_refused(10, "no room")
        file.note_refused(20, "no room")
        file.write(15, b"a")
        assert file.refused_at == 10
    async with a_spool(tmp_path) as spool:
        (file,) = spool.files.values()
        assert (file.refused_at, file.state, file.reason) == (10, FileState.FAILED, "no room")
        if how == "repeated":
            file.write(8, b"aaa")
        else:
            await file.truncate(10)
        assert file.refused_at is None
    async with a_spool(tmp_path) as spool:
        (file,) = spool.files.values()
        assert (file.refused_at, file.state) == (None, FileState.OPEN)
