"""Cold reads that are watched for a moment before a thread is asked."""

import errno

import pytest
import trio

from cachefs.cache.tier import page_in
from cachefs.cache.tier.page_in import PageInPolling

FLAGS = 8


class Disk:
    """Answers after `looks_until_there` looks in vain; None is never."""

    def __init__(self, looks_until_there: int | None) -> None:
        self.left = looks_until_there
        self.looks = 0

    def read_nowait(self, fd: int, buffers: tuple[memoryview], offset: int, flags: int) -> int:
        self.looks += 1
        if self.left is None or self.left > 0:
            if self.left is not None:
                self.left -= 1
            raise BlockingIOError(errno.EAGAIN, "not there")
        buffers[0][:] = bytes(len(buffers[0]))
        return len(buffers[0])


async def test_bytes_that_come_soon_are_seen() -> None:
    disk = Disk(2)
    assert await PageInPolling(disk.read_nowait).read(3, 10, 0, FLAGS) == bytes(10)
    assert disk.looks == 3


async def test_a_part_is_not_enough() -> None:
    answers = [4, 10]
    watched = PageInPolling(lambda *_: answers.pop(0))
    assert len(await watched.read(3, 10, 0, FLAGS) or b"") == 10
    assert answers == []


async def test_slow_bytes_are_left_to_a_thread() -> None:
    assert await PageInPolling(Disk(None).read_nowait).read(3, 10, 0, FLAGS) is None


async def test_without_a_way_to_look_nobody_looks() -> None:
    disk = Disk(0)
    assert await PageInPolling(disk.read_nowait).read(3, 10, 0, None) is None
    assert disk.looks == 0


async def test_a_failing_disk_is_left_to_a_thread() -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    assert await PageInPolling(fail).read(3, 10, 0, FLAGS) is None


@pytest.fixture
def no_time_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_in, "_LOOK_FOR_S", 0.0)


@pytest.mark.usefixtures("no_time_to_look")
async def test_a_slow_disk_is_rarely_watched() -> None:
    disk = Disk(None)
    watched = PageInPolling(disk.read_nowait)
    for _ in range(1000):
        assert await watched.read(3, 10, 0, FLAGS) is None
    assert disk.looks < 30


@pytest.mark.usefixtures("no_time_to_look")
async def test_a_disk_that_became_fast_is_watched_again() -> None:
    disk = Disk(None)
    watched = PageInPolling(disk.read_nowait)
    for _ in range(100):
        await watched.read(3, 10, 0, FLAGS)
    disk.left = 0
    seen = [await watched.read(3, 10, 0, FLAGS) is not None for _ in range(100)]
    assert all(seen[-30:])


async def test_only_so_many_are_watched_at_once() -> None:
    looked_at = set()

    def look(fd: int, *_: object) -> int:
        looked_at.add(fd)
        raise BlockingIOError(errno.EAGAIN, "not there")

    watched = PageInPolling(look)
    async with trio.open_nursery() as nursery:
        for fd in range(100):
            nursery.start_soon(watched.read, fd, 10, 0, FLAGS)
    assert len(looked_at) == 32
