"""Which siblings are fetched ahead of readers in random order, and what wrong guesses cost."""

import contextlib
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import trio
import trio.testing

from cachefs.errors import CachefsError, OriginUnavailableError
from cachefs.prefetch import bug_reports
from cachefs.prefetch.budget import AheadBudget
from cachefs.prefetch.look_ups import LookUpReads
from cachefs.prefetch.prefetch import Prefetch
from cachefs.prefetch.siblings import SiblingPrefetcher
from cachefs.types import BLOCK_BYTES, ObjectRef
from tests.namespace.harness import Reading, open_tier
from tests.prefetch.harness import FreeThrottle

KIB = 1 << 10
MIB = 1 << 20
LEAST_BYTES = 8 * MIB


class Epoch:
    """Reads files of a listed tree with `--prefetch siblings`, and compares at every request of the
    origin what was fetched ahead with what readers have read."""

    def __init__(self, reading: Reading, nursery: trio.Nursery) -> None:
        self.reading = reading
        self.is_busy = False
        self.throttle = FreeThrottle()
        self.prefetch = Prefetch(
            *(reading.tree.namespace, reading.cache, nursery, LookUpReads(reading.cache)),
            *(lambda: not self.is_busy, self.throttle, 0),
            mode="siblings",
        )
        reading.readers = self.prefetch.readers
        self.read_bytes = 0
        self.asked: set[str] = set()
        """Files that a reader has asked for."""
        self.got: set[str] = set()
        """Files that a reader has got."""
        self.fetched_bytes: dict[str, int] = {}
        """Bytes of each file that the origin was asked for when no reader had asked for it."""
        self.most_unused_bytes = 0
        reading.origin.on_read = self._on_read

    async def _on_read(self, path: str, offset: int, length: int) -> None:
        if path not in self.asked:
            self.fetched_bytes[path] = self.fetched_bytes.get(path, 0) + length
            unused_bytes = sum(
                size for name, size in self.fetched_bytes.items() if name not in self.got
            )
            self.most_unused_bytes = max(self.most_unused_bytes, unused_bytes)
            assert unused_bytes <= max(LEAST_BYTES, self.read_bytes)
        await trio.lowlevel.checkpoint()

    async def read(self, names: Iterable[str]) -> None:
        for name in names:
            inode = await self.reading.tree.find(name)
            self.asked.add(name)
            data = await self.reading.read(inode.ino, 0, inode.size_bytes)
            assert data == self.reading.origin.expected(name)
            self.read_bytes += 0 if name in self.got else inode.size_bytes
            self.got.add(name)

    async def settled(self) -> None:
        """Wait until nothing more is fetched."""
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert self.reading.cache.fetching_count == 0
        assert self.throttle.under_way == 0

    @property
    def siblings(self) -> SiblingPrefetcher:
        siblings = self.prefetch._siblings
        assert siblings is not None
        return siblings


def put(reading: Reading, directories: int, files: int, size: int = 40 * KIB) -> list[str]:
    """Files of different sizes, `size` on average, in random order."""
    chance = random.Random(directories * files)
    names = [f"d{d:02}/f{f:04}" for d in range(directories) for f in range(files)]
    for number, name in enumerate(names):
        reading.origin.put_generated(name, chance.randrange(size // 2, size * 3 // 2), seed=number)
    chance.shuffle(names)
    return names


async def start(reading: Reading, nursery: trio.Nursery) -> Epoch:
    """List the tree, and forget the requests that this took."""
    for ino in (await reading.tree.entries()).values():
        if reading.tree.namespace.inode(ino).is_dir:
            await reading.tree.entries(ino)
    reading.origin.take_requests()
    return Epoch(reading, nursery)


def gets(reading: Reading) -> list[str]:
    return [request[1] for request in reading.origin.requests if request[0] == "read"]


# -- the behaviour -----------------------------------------------------------------------------


@pytest.mark.long
async def test_a_shuffled_epoch_is_fetched_ahead(reading: Reading, nursery: trio.Nursery) -> None:
    names = put(reading, 4, 150)
    epoch = await start(reading, nursery)
    for name in names:
        await epoch.read([name])
        await epoch.settled()
    assert sorted(gets(reading)) == sorted(names), "each file once"
    assert {request[0] for request in reading.origin.requests} == {"read"}, "no LIST, no HEAD"
    assert len(epoch.fetched_bytes) > len(names) // 2
    budget = epoch.siblings.budget
    assert budget.unused_bytes == 0
    assert budget.read_bytes == epoch.read_bytes


@pytest.mark.long
async def test_a_list_of_a_few_files_costs_at_most_what_it_reads(
    reading: Reading, nursery: trio.Nursery
) -> None:
    names = put(reading, 10, 200)
    epoch = await start(reading, nursery)
    for name in names[:100]:
        await epoch.read([name])
        await epoch.settled()
    fetched = sum(epoch.fetched_bytes.values())
    assert 0 < fetched <= LEAST_BYTES + epoch.read_bytes
    assert epoch.siblings.budget.unused_bytes <= max(LEAST_BYTES, epoch.read_bytes)


async def test_a_look_at_a_few_files_fetches_none(reading: Reading, nursery: trio.Nursery) -> None:
    names = put(reading, 1, 1000)
    epoch = await start(reading, nursery)
    await epoch.read(names[:15])
    await epoch.settled()
    assert gets(reading) == names[:15]
    await epoch.read(names[15:16])
    await epoch.settled()
    assert len(gets(reading)) > 16


@pytest.mark.long
async def test_after_a_pause_a_job_cannot_waste_what_another_has_read(
    reading: Reading, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = put(reading, 1, 600, 100 * KIB)
    epoch = await start(reading, nursery)
    await epoch.read(names[:450])
    await epoch.settled()
    budget = epoch.siblings.budget
    assert budget.read_bytes > 4 * LEAST_BYTES
    monkeypatch.setattr("cachefs.prefetch.budget._PAUSE_S", 0.0)
    before = budget.unused_bytes
    await epoch.read(names[450:460])
    await epoch.settled()
    assert budget.recent_files == 1
    assert budget.unused_bytes <= before


async def test_readers_in_name_order_get_the_next_files(
    reading: Reading, nursery: trio.Nursery
) -> None:
    names = sorted(put(reading, 1, 500))
    epoch = await start(reading, nursery)
    await epoch.read(names[200:206])
    await epoch.settled()
    assert sorted(gets(reading))[: 6 + 4] == names[200:210]


async def test_directories_have_their_turn_one_after_the_other(
    reading: Reading, nursery: trio.Nursery
) -> None:
    names = put(reading, 3, 60)
    epoch = await start(reading, nursery)
    epoch.is_busy = True
    first = [name for name in names if name.startswith("d01")][:16]
    await epoch.read([*first, *[name for name in names if name.startswith("d02")][:1]])
    epoch.is_busy = False
    await epoch.read(first[:1])
    epoch.siblings._changed.set()
    await epoch.settled()
    ahead = [name[:3] for name in gets(reading)[17:]]
    assert ahead.count("d01") == 60 - 16
    assert "d00" not in ahead, "no reader has been there"


async def test_large_files_and_unlisted_directories_are_left_alone(
    reading: Reading, nursery: trio.Nursery
) -> None:
    names = put(reading, 1, 30)
    reading.origin.put_generated("d00/large", BLOCK_BYTES + 1, seed=1)
    epoch = Epoch(reading, nursery)
    await epoch.read(names[:20])
    await epoch.settled()
    if reading.tree.namespace.table.listing((await reading.tree.find("d00")).ino) is None:
        assert gets(reading) == names[:20]
    await reading.tree.entries((await reading.tree.find("d00")).ino)
    await epoch.read(names[20:22])
    await epoch.settled()
    assert set(names) == set(gets(reading)), "all but the large one"


async def test_nothing_is_fetched_while_the_origin_is_saturated(
    reading: Reading, nursery: trio.Nursery
) -> None:
    names = put(reading, 1, 1000)
    epoch = await start(reading, nursery)
    epoch.is_busy = True
    await epoch.read(names[:50])
    await epoch.settled()
    assert gets(reading) == names[:50]
    epoch.is_busy = False
    await epoch.read(names[50:51])
    await epoch.settled()
    assert len(gets(reading)) > 51


async def test_a_throttle_holds_all_back(reading: Reading, nursery: trio.Nursery) -> None:
    """`LoadThrottle` lets one request begin at least; this one lets none."""

    async def never(size_bytes: int = 0, requests: int = 1) -> None:
        await trio.sleep_forever()

    names = put(reading, 1, 1000)
    epoch = await start(reading, nursery)
    epoch.throttle.begin = never  # type: ignore[method-assign]
    await epoch.read(names[:50])
    await epoch.settled()
    assert gets(reading) == names[:50]


async def test_the_mode_can_change(reading: Reading, nursery: trio.Nursery) -> None:
    names = put(reading, 1, 1000)
    epoch = await start(reading, nursery)
    epoch.prefetch.mode = "off"
    await epoch.read(names[:40])
    await epoch.settled()
    assert gets(reading) == names[:40]
    epoch.prefetch.mode = "siblings"
    await epoch.read(names[40:60])
    await epoch.settled()
    fetched = len(gets(reading))
    assert fetched > 60
    epoch.prefetch.mode = "order"
    assert epoch.prefetch.mode == "order"
    left = [name for name in names if name not in gets(reading)]
    await epoch.read(left[:5])
    await epoch.settled()
    assert len(gets(reading)) == fetched + 5


# -- the budget --------------------------------------------------------------------------------


@pytest.mark.long
async def test_the_budget_holds_with_concurrent_readers(
    reading: Reading, nursery: trio.Nursery
) -> None:
    names = put(reading, 5, 200)
    epoch = await start(reading, nursery)
    for part in (names[:300], names[300:]):
        async with trio.open_nursery() as readers:
            for number in range(16):
                readers.start_soon(epoch.read, part[number::16])
        await epoch.settled()
    assert epoch.most_unused_bytes > LEAST_BYTES
    assert sorted(set(gets(reading))) == sorted(names)
    assert len(gets(reading)) == len(names)


@pytest.mark.long
async def test_the_budget_holds_with_failures(reading: Reading, nursery: trio.Nursery) -> None:
    """Requests fail now and then, those of readers too; these repeat the read."""
    names = put(reading, 4, 150)
    epoch = await start(reading, nursery)
    chance = random.Random(3)
    inner = reading.origin.on_read
    assert inner is not None

    async def fail_sometimes(path: str, offset: int, length: int) -> None:
        await inner(path, offset, length)
        if chance.random() < 0.2:
            raise OriginUnavailableError("the origin has a bad day")

    reading.origin.on_read = fail_sometimes

    async def read(names: Sequence[str]) -> None:
        for name in names:
            with trio.fail_after(300):
                while name not in epoch.got:
                    # What has failed slowly, as on a busy machine, fails at once for a second.
                    with contextlib.suppress(CachefsError):
                        await epoch.read([name])
                    await trio.sleep(0.001)

    async with trio.open_nursery() as readers:
        for number in range(4):
            readers.start_soon(read, names[number::4])
    await epoch.settled()
    assert epoch.got == set(names)


@pytest.mark.long
async def test_a_cache_smaller_than_the_tree_keeps_what_readers_have_read(
    reading: Reading, nursery: trio.Nursery, tmp_path: Path
) -> None:
    """Siblings get the free space, and no file that was read goes for them."""
    await reading.cache.remove_tier(tmp_path / "cache")
    await reading.cache.add_tier(open_tier(tmp_path / "small", reading.origin, 64 * MIB))
    names = put(reading, 2, 300, 200 * KIB)
    epoch = await start(reading, nursery)
    (tier,) = reading.cache.status()
    read: list[str] = []
    stored: list[ObjectRef] = []
    while epoch.read_bytes < tier.low_bytes * 0.55:
        read.append(names[len(read)])
        await epoch.read(read[-1:])
        await epoch.settled()
        await reading.cache.drain()
        ref = reading.tree.namespace.object_ref(await reading.tree.find(read[-1]))
        # With few slabs, a sibling that finds no slot of its size stays in memory only.
        stored += [ref] if reading.cache.is_stored(ref) else []
    (tier,) = reading.cache.status()
    assert tier.counters.evicted == 0
    assert epoch.read_bytes < tier.cached_bytes <= tier.low_bytes
    assert len(stored) > len(read) // 2
    assert all(reading.cache.is_stored(ref) for ref in stored)
    await epoch.read(names[len(read) :])


async def test_a_full_cache_gets_no_siblings(
    reading: Reading, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = put(reading, 1, 1000)
    epoch = await start(reading, nursery)
    monkeypatch.setattr(reading.cache, "has_free_space", lambda key, length: False)
    await epoch.read(names[:100])
    await epoch.settled()
    assert gets(reading) == names[:100]


async def test_what_was_evicted_counts_for_good_and_is_not_fetched_ahead_again(
    reading: Reading, nursery: trio.Nursery
) -> None:
    names = put(reading, 1, 1000)
    epoch = await start(reading, nursery)
    await epoch.read(names[:16])
    await epoch.settled()
    ahead = gets(reading)[16:]
    assert ahead
    await reading.cache.drain()
    unused_bytes = epoch.siblings.budget.unused_bytes
    for name in ahead:
        inode = await reading.tree.find(name)
        await reading.cache.objects.evict([reading.tree.namespace.object_ref(inode)])
    await epoch.read([ahead[0]])
    await epoch.settled()
    assert gets(reading).count(ahead[0]) == 2
    assert all(gets(reading).count(name) == 1 for name in ahead[1:])
    assert epoch.siblings.budget.unused_bytes >= unused_bytes


async def test_replaced_and_deleted_files_are_dropped(
    reading: Reading, nursery: trio.Nursery
) -> None:
    names = put(reading, 1, 100)
    epoch = await start(reading, nursery)
    for name in names[40:60]:
        reading.origin.delete(name)
    for name in names[60:80]:
        reading.origin.put_generated(name, 30 * KIB, seed=77)
    await epoch.read(names[:40])
    await epoch.settled()
    assert set(gets(reading)) == set(names)
    assert epoch.siblings.budget.unused_bytes <= LEAST_BYTES
    await epoch.read(names[80:])


@pytest.mark.expect_log("bug while fetching ahead")
async def test_a_bug_ends_nothing(
    reading: Reading, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bug_reports, "_reported", set())
    names = put(reading, 1, 100)
    epoch = await start(reading, nursery)
    works = SiblingPrefetcher._consider_names

    def fail(self: SiblingPrefetcher) -> None:
        raise RuntimeError

    monkeypatch.setattr(SiblingPrefetcher, "_consider_names", fail)
    await epoch.read(names[:30])
    monkeypatch.setattr(SiblingPrefetcher, "_consider_names", works)
    await epoch.read(names[30:32])
    await epoch.settled()
    assert len(gets(reading)) > 32


# -- the counts --------------------------------------------------------------------------------


async def test_the_counts_of_a_budget(autojump_clock: trio.testing.MockClock) -> None:
    budget = AheadBudget()
    assert budget.room_bytes == LEAST_BYTES
    assert budget.take(1, LEAST_BYTES)
    assert not budget.take(2, 1)
    budget.note_miss(3, is_in_flight=False)
    assert (budget.read_bytes, budget.room_bytes) == (0, 0), "not read yet"
    assert budget.note_read(3, 9 * MIB)
    assert budget.room_bytes == MIB
    assert not budget.note_read(3, 9 * MIB), "once"
    assert not budget.note_hit(4, MIB), "it was cached for another reason"
    assert budget.note_hit(1, LEAST_BYTES)
    assert (budget.unused_bytes, budget.room_bytes) == (0, 17 * MIB)
    assert budget.take(5, MIB)
    budget.note_failed(5)
    assert budget.unused_bytes == MIB
    assert budget.take(6, MIB)
    budget.note_miss(6, is_in_flight=True)
    assert budget.unused_bytes == 2 * MIB
    assert budget.note_read(6, MIB), "a reader has waited for its fetch"
    assert (budget.unused_bytes, budget.read_bytes) == (MIB, 18 * MIB)
    await trio.sleep(100)
    budget.note_miss(7, is_in_flight=False)
    assert budget.note_read(7, MIB)
    assert budget.recent_files == 1
    assert budget.room_bytes == LEAST_BYTES


async def test_a_budget_remembers_a_bounded_number_of_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cachefs.prefetch.budget._MOST_FILES", 100)
    budget = AheadBudget()
    assert [budget.take(ino, 1) for ino in range(200)].count(True) == 100
    for ino in range(5000):
        budget.note_miss(ino + 1000, is_in_flight=False)
    assert len(budget._waiting) <= 1024
