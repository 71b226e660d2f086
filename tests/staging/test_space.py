"""Room in the spool (`staging/space.py`)."""

from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from cachefs.errors import SpoolFullError
from tests.staging.harness import FullDisk, a_spool, meta_of

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
            await spool.reserve(size_bytes, 1000)
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
            await spool.reserve(10 * KIB, 60)
        assert trio.current_time() - begun >= 60
        assert spool.space.has_room(KIB)


async def test_a_full_disk_is_noticed_and_its_end_too(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    disk = FullDisk()
    async with a_spool(tmp_path, disk=disk) as spool, trio.open_nursery() as nursery:
        disk.free = 0
        assert not spool.space.has_room(1)
        nursery.start_soon(spool.reserve, 1, 1000)
        await wait_all_tasks_blocked()
        disk.free = 1 << 40
