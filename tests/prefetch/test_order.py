"""Which files are fetched before anybody asks for them, and which are not."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
import trio.testing

from cachefs.namespace.namespace import ROOT_INO
from cachefs.namespace.reader import Readers
from cachefs.prefetch import bug_reports
from cachefs.prefetch.look_ups import LookUpReads
from cachefs.prefetch.order import OrderPrefetcher
from cachefs.prefetch.prefetch import Prefetch
from tests.namespace.harness import Reading
from tests.prefetch.harness import FreeThrottle

FILES = 400
SIZE_BYTES = 20_000


class Epoch:
    """Reads files of a listed directory, one after the other."""

    def __init__(self, reading: Reading, nursery: trio.Nursery) -> None:
        self.reading = reading
        self.is_busy = False
        self.prefetcher = OrderPrefetcher(
            reading.tree.namespace, reading.cache, nursery, lambda: not self.is_busy
        )
        reading.readers = Readers(
            reading.tree.namespace, reading.cache, 0, self.prefetcher.note_first_read
        )

    async def read(self, names: Sequence[str]) -> None:
        for name in names:
            inode = await self.reading.tree.find(name)
            data = await self.reading.read(inode.ino, 0, inode.size_bytes)
            assert data == self.reading.origin.expected(name)

    async def fetched(self) -> list[str]:
        """The files that the origin was asked for since the last call, when all have come."""
        await trio.testing.wait_all_tasks_blocked()
        assert self.reading.cache.fetching_count == 0
        return [r[1] for r in self.reading.origin.take_requests() if r[0] == "read"]


@pytest.fixture
async def epoch(reading: Reading, nursery: trio.Nursery) -> Epoch:
    for number in range(FILES):
        reading.origin.put_generated(f"f{number:03}", SIZE_BYTES + number, seed=number)
    epoch = Epoch(reading, nursery)
    await reading.tree.entries()
    assert reading.tree.namespace.table.listing(ROOT_INO) is not None
    return epoch


def in_order(first: int, count: int, step: int = 1) -> list[str]:
    return [f"f{number:03}" for number in range(first, first + count * step, step)]


async def test_the_next_files_are_fetched_for_a_reader_in_name_order(epoch: Epoch) -> None:
    await epoch.read(in_order(0, 2))
    assert sorted(await epoch.fetched()) == in_order(0, 6), "the first name counts as two"
    await epoch.read(in_order(2, 4))
    fetched = await epoch.fetched()
    assert sorted(fetched) == in_order(6, len(fetched)), "each once, and none behind the reader"
    assert len(fetched) == 64


async def test_each_file_of_an_epoch_is_fetched_once(epoch: Epoch) -> None:
    await epoch.read(in_order(0, FILES))
    assert sorted(await epoch.fetched()) == in_order(0, FILES)


async def test_a_reader_in_random_order_fetches_nothing_ahead(epoch: Epoch) -> None:
    names = in_order(0, FILES)
    random.Random(7).shuffle(names)
    await epoch.read(names[:200])
    extra = len(await epoch.fetched()) - 200
    assert extra <= 4, "2 percent"


async def test_a_list_of_a_few_files_of_many_directories_fetches_little_ahead(
    reading: Reading, nursery: trio.Nursery
) -> None:
    names = [f"d{d:02}/f{f:02}" for d in range(50) for f in range(100)]
    for name in names:
        reading.origin.put_generated(name, 1_000, seed=1)
    epoch = Epoch(reading, nursery)
    for ino in (await reading.tree.entries()).values():
        await reading.tree.entries(ino)
    random.Random(3).shuffle(names)
    await epoch.read(names[:250])
    assert len(await epoch.fetched()) - 250 <= 5, "2 percent"


async def test_files_that_were_read_out_of_order_only_delay_a_reader_in_order(
    epoch: Epoch,
) -> None:
    names = [f"f{number:03}" for number in (300, 100, 220, 370, 150)]
    await epoch.read([*names, *in_order(20, 3)])
    assert len(await epoch.fetched()) == 8
    await epoch.read(in_order(23, 7))
    assert len(await epoch.fetched()) > 7


async def test_a_sorted_list_of_a_few_files_fetches_little_ahead(epoch: Epoch) -> None:
    """Every tenth file: their names follow each other, but not in the listing."""
    await epoch.read(in_order(0, 40, step=10))
    assert await epoch.fetched() == in_order(0, 40, step=10)


async def test_a_reader_who_leaves_the_order_wastes_one_window(epoch: Epoch) -> None:
    await epoch.read([*in_order(100, 10), *in_order(395, 1)])
    fetched = await epoch.fetched()
    assert 11 <= len(fetched) <= 10 + 64 + 1


async def test_a_reader_who_skips_files_gets_fewer_ahead(epoch: Epoch) -> None:
    await epoch.read(in_order(0, 20))
    await epoch.fetched()
    await epoch.read(in_order(70, 1))
    assert await epoch.fetched() == []
    await epoch.read(in_order(71, 3))
    assert await epoch.fetched() == [], "enough is ahead"
    await epoch.read(in_order(74, 100))
    assert len(await epoch.fetched()) >= 90, "and then it goes on"


async def test_several_readers_have_a_stream_each(epoch: Epoch) -> None:
    for first, second in zip(in_order(50, 40), in_order(250, 40), strict=True):
        await epoch.read([first, second])
    fetched = await epoch.fetched()
    assert len(fetched) == len(set(fetched))
    assert set(fetched) >= {*in_order(50, 80), *in_order(250, 80)}
    assert set(fetched) <= {*in_order(50, 40 + 64), *in_order(250, 40 + 64)}


async def test_workers_that_take_files_in_turn_are_in_order(epoch: Epoch) -> None:
    names = in_order(0, 40)
    swapped = [name for pair in zip(names[1::2], names[::2], strict=True) for name in pair]
    await epoch.read(swapped)
    fetched = await epoch.fetched()
    assert len(fetched) == len(set(fetched))
    assert len(fetched) > 40


async def test_nothing_is_fetched_ahead_while_the_origin_is_busy(epoch: Epoch) -> None:
    epoch.is_busy = True
    await epoch.read(in_order(0, 40))
    assert await epoch.fetched() == in_order(0, 40)


async def test_what_no_tier_takes_is_fetched_once(
    reading: Reading, nursery: trio.Nursery, tmp_path: Path
) -> None:
    for number in range(40):
        reading.origin.put_generated(f"f{number:03}", SIZE_BYTES, seed=number)
    await reading.cache.remove_tier(tmp_path / "cache")
    epoch = Epoch(reading, nursery)
    await reading.tree.entries()
    await epoch.read(in_order(0, 2))
    assert sorted(await epoch.fetched()) == in_order(0, 6)
    await epoch.read(in_order(2, 38))
    assert sorted(await epoch.fetched()) == in_order(6, 34)


async def test_files_of_an_unlisted_directory_are_not_fetched_ahead(
    reading: Reading, nursery: trio.Nursery
) -> None:
    for number in range(7):
        reading.origin.put_generated(f"f{number:03}", SIZE_BYTES, seed=number)
    epoch = Epoch(reading, nursery)
    await epoch.read(in_order(0, 5))
    assert await epoch.fetched() == in_order(0, 5)


@pytest.mark.expect_log("bug while fetching ahead")
async def test_a_bug_costs_no_read(
    reading: Reading, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(bug_reports, "_reported", set())
    prefetch = Prefetch(
        *(reading.tree.namespace, reading.cache, nursery, LookUpReads(reading.cache)),
        *(lambda: True, FreeThrottle(), 0),
        mode="order",
    )
    reading.readers = prefetch.readers
    monkeypatch.setattr(OrderPrefetcher, "note_first_read", fail)
    reading.origin.put_generated("a", SIZE_BYTES, seed=1)
    inode = await reading.tree.find("a")
    assert await reading.read(inode.ino, 0, SIZE_BYTES) == reading.origin.expected("a")
