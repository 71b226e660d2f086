"""The journal is written anew while the spool goes on (`staging/compaction.py`)."""

import errno
import os
from pathlib import Path

import pytest
import trio

from cachefs.format.paths import SpoolPaths
from cachefs.staging import compaction as compaction_module
from cachefs.staging import journal as journal_module
from cachefs.staging.compaction import JournalCopy, compact
from cachefs.staging.disk import SpoolDisk
from cachefs.staging.spool import Spool
from tests.cache.harness import until
from tests.staging.harness import a_spool, content_of, crashed, meta_of

BASE = bytes(range(200)) * 50
FILES = 30


async def compact_now(spool: Spool) -> None:
    paths = spool._directory.paths
    await compact(spool._journal, paths, spool._header, spool._files, spool._disk)


async def contents(spool: Spool) -> dict[str, tuple[bytes, bool]]:
    return {
        file.path: (await content_of(file, BASE), file.is_sealed) for file in spool.files.values()
    }


async def test_a_large_journal_becomes_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_DEAD_BYTES", 20_000)
    async with a_spool(tmp_path) as spool, trio.open_nursery() as nursery:
        await nursery.start(spool.run)
        file = spool.begin(1, "a", meta_of(BASE))
        journal = SpoolPaths(tmp_path / "spool").journal
        number = os.stat(journal).st_ino
        for at in range(1_000):
            file.write(at % 100, b"x")
        assert journal.stat().st_size > 50_000
        await until(lambda: journal.stat().st_ino != number)
        assert journal.stat().st_size < 20_000
        nursery.cancel_scope.cancel()
    async with a_spool(tmp_path) as spool:
        assert await content_of(spool.files[1], BASE) == b"x" * 100 + BASE[100:]


async def test_what_is_done_meanwhile_is_in_both_journals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step of the copy files change, begin and end. What each kill would leave is right."""
    monkeypatch.setattr(compaction_module, "_CHUNK_BYTES", 1)
    kills: list[tuple[Path, dict[str, tuple[bytes, bool]]]] = []

    async with a_spool(tmp_path) as spool:
        for ino in range(1, FILES + 1):
            spool.begin(ino, f"f{ino}", meta_of(BASE) if ino % 2 else None).write(0, b"old")

        async def change() -> None:
            step = len(kills)
            for ino in (step + 1, FILES - step):
                file = spool.file_of(ino)
                if file is not None:
                    file.write(step, b"new")
                    file.seal()
            spool.begin(100 + step, f"g{step}", None).write(0, b"g")
            gone = spool.file_of(step)
            if gone is not None and step % 3 == 0:
                gone.drop()
            kills.append((crashed(tmp_path, tmp_path / f"kill{step}"), await contents(spool)))

        flush = JournalCopy.flush

        async def flush_and_change(copy: JournalCopy) -> None:
            await flush(copy)
            if len(kills) < FILES:
                await change()

        monkeypatch.setattr(JournalCopy, "flush", flush_and_change)
        put_in_place = compaction_module._put_in_place

        def put_in_place_and_change(*args: object) -> None:
            trio.from_thread.run(change)
            put_in_place(*args)
            trio.from_thread.run(change)

        monkeypatch.setattr(compaction_module, "_put_in_place", put_in_place_and_change)
        await compact_now(spool)
        await change()
        expected = await contents(spool)
    assert len(kills) == FILES + 3
    for step in (0, 1, FILES // 2, FILES - 1, FILES, FILES + 1, FILES + 2):
        place, left = kills[step]
        async with a_spool(place) as spool:
            assert await contents(spool) == left, step
            assert not spool.report.ignored_bytes
    async with a_spool(tmp_path) as spool:
        assert await contents(spool) == expected


class FailingDisk(SpoolDisk):
    """A disk on which some calls fail."""

    fails = ""

    def _face(self, name: str) -> None:
        if self.fails == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def create(self, path: Path) -> int:
        self._face("create")
        return super().create(path)

    def sync(self, fd: int) -> None:
        self._face("sync")
        super().sync(fd)

    def rename(self, old: Path, new: Path) -> None:
        self._face("rename")
        super().rename(old, new)

    def sync_directory(self, path: Path) -> None:
        self._face("sync_directory")
        super().sync_directory(path)


@pytest.mark.parametrize("fails", ["create", "sync", "rename", "sync_directory"])
async def test_a_failure_leaves_one_good_journal(tmp_path: Path, fails: str) -> None:
    disk = FailingDisk()
    async with a_spool(tmp_path, disk=disk) as spool:
        file = spool.begin(1, "a", meta_of(BASE))
        file.write(0, b"one")
        disk.fails = fails
        if fails == "sync_directory":
            await compact_now(spool)
        else:
            with pytest.raises(OSError, match="No space"):
                await compact_now(spool)
        disk.fails = ""
        file.write(3, b"two")
        assert not SpoolPaths(tmp_path / "spool").new_journal.exists()
        place = crashed(tmp_path, tmp_path / "kill")
        await compact_now(spool)
        file.write(6, b"three")
    async with a_spool(place) as spool:
        assert (await content_of(spool.files[1], BASE))[:6] == b"onetwo"
    async with a_spool(tmp_path) as spool:
        assert (await content_of(spool.files[1], BASE))[:11] == b"onetwothree"


async def test_a_cancelled_copy_leaves_the_journal(tmp_path: Path) -> None:
    async with a_spool(tmp_path) as spool:
        file = spool.begin(1, "a", meta_of(BASE))
        with trio.CancelScope() as scope:
            scope.cancel()
            await compact_now(spool)
        file.write(0, b"one")
        assert not SpoolPaths(tmp_path / "spool").new_journal.exists()
        await file.sync()
    async with a_spool(tmp_path) as spool:
        assert (await content_of(spool.files[1], BASE))[:3] == b"one"
