"""Reading: which bytes come, and which requests they cost."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.publisher import SEEN_EVERY
from cachefs.errors import ObjectChangedError, OriginUnavailableError
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import ROOT_INO
from cachefs.namespace.reader import Readers
from cachefs.types import BLOCK_BYTES, Reply
from tests.cache.harness import until
from tests.namespace.harness import Reading, open_tier

MIB = 1 << 20
KIB = 1 << 10
REQUEST = 128 * KIB
"""What the kernel asks for in one request of a sequential read, at the least."""


async def generated(reading: Reading, name: str, size: int) -> Inode:
    reading.origin.put_generated(name, size, seed=size)
    return await reading.tree.find(name)


def rounded(gets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """GETs in MiB: (first block, blocks)."""
    return [(offset // MIB, -(-length // MIB)) for offset, length in gets]


async def read_sequentially(reading: Reading, inode: Inode, request: int = REQUEST) -> bytes:
    offsets = range(0, inode.size_bytes, request)
    return b"".join([await reading.read(inode.ino, offset, request) for offset in offsets])


async def test_a_sequential_read_of_64_mib_takes_few_large_gets(reading: Reading) -> None:
    inode = await generated(reading, "a", 64 * MIB)
    assert await read_sequentially(reading, inode, MIB) == reading.origin.expected("a")
    gets = reading.gets()
    assert sum(length for _, length in gets) == 64 * MIB, "nothing twice"
    assert len({offset for offset, _ in gets}) == len(gets)
    assert len(gets) <= 14
    assert max(length for _, length in gets) == 8 * MIB
    # One block, and a second to know the direction; then a window that doubles.
    assert sorted(rounded(gets))[:5] == [(0, 1), (1, 1), (2, 2), (4, 3), (7, 6)]


async def test_small_requests_read_ahead_like_large_ones(reading: Reading) -> None:
    inode = await generated(reading, "a", 24 * MIB + 77)
    assert await read_sequentially(reading, inode) == reading.origin.expected("a")
    gets = reading.gets()
    assert sum(length for _, length in gets) == 24 * MIB + 77
    assert len(gets) <= 8


async def test_the_window_stops_at_readahead_bytes(reading: Reading) -> None:
    inode = await generated(reading, "a", 48 * MIB)
    reading.readers = Readers(reading.tree.namespace, reading.cache, 4 * MIB)
    furthest = 0
    for offset in range(0, 40 * MIB, MIB):
        await reading.read(inode.ino, offset, MIB)
        furthest = max([furthest, *(start + length for start, length in reading.gets())])
        assert furthest <= offset + (1 + 4) * MIB
    assert furthest > 40 * MIB


async def test_no_read_ahead_fetches_block_by_block(reading: Reading) -> None:
    inode = await generated(reading, "a", 6 * MIB)
    reading.readers = Readers(reading.tree.namespace, reading.cache, 0)
    await read_sequentially(reading, inode)
    assert rounded(reading.gets()) == [(number, 1) for number in range(6)]


async def test_a_sequential_read_from_the_middle_reads_ahead_from_its_third_block(
    reading: Reading,
) -> None:
    inode = await generated(reading, "a", 32 * MIB)
    for block in (10, 11):
        await reading.read(inode.ino, block * MIB, MIB)
    assert rounded(reading.gets()) == [(10, 1), (11, 1)]
    await reading.read(inode.ino, 12 * MIB, MIB)
    assert sum(length for _, length in reading.gets()) > MIB


async def test_random_reads_fetch_only_the_blocks_they_touch(reading: Reading) -> None:
    inode = await generated(reading, "a", 64 * MIB)
    blocks = [37, 3, 60, 12, 59, 24, 0, 44, 8, 50]
    for block in blocks:
        offset = block * MIB + 12_288
        data = await reading.read(inode.ino, offset, 4 * KIB)
        assert data == reading.origin.expected("a", offset, 4 * KIB)
    assert rounded(reading.gets()) == [(block, 1) for block in blocks]
    for block in blocks:
        await reading.read(inode.ino, block * MIB + 500_000, 4 * KIB)
    assert reading.gets() == []


async def test_random_reads_of_a_large_file_get_their_range_first(reading: Reading) -> None:
    inode = await generated(reading, "a", 160 * MIB)
    for block in (90, 30):
        offset = block * MIB + 12_288
        data = await reading.read(inode.ino, offset, 4 * KIB)
        assert data == reading.origin.expected("a", offset, 4 * KIB)
    await until(lambda: not (reading.cache._fragments.queued or reading.cache.fetching_count))
    assert sorted(reading.gets()) == [
        *((30 * MIB, MIB), (30 * MIB + 12_288, 4 * KIB)),
        *((90 * MIB, MIB), (90 * MIB + 12_288, 4 * KIB)),
    ]


async def test_a_sequential_read_of_a_large_file_takes_no_small_gets(reading: Reading) -> None:
    inode = await generated(reading, "a", 160 * MIB)
    for offset in range(0, 4 * MIB, REQUEST):
        await reading.read(inode.ino, offset, REQUEST)
    assert all(length >= MIB for _, length in reading.gets())


@pytest.mark.parametrize("distance_s", [0.001, 0.03])
async def test_read_ahead_goes_on_while_the_relay_serves_most_blocks(
    reading: Reading, distance_s: float
) -> None:
    reading.origin.quickest_s = distance_s
    inode = await generated(reading, "a", 160 * MIB)
    published: set[int] = set()
    reading.readers.publish_ahead = lambda ino, ref, blocks: published.update(blocks)
    asked = [0]
    for block in range(160):
        if block not in published or block % SEEN_EVERY == 0:
            await reading.read(inode.ino, block * MIB, MIB)
            asked.append(block)
    await until(lambda: not reading.cache.fetching_count)
    gets = reading.gets()
    assert sum(length for _, length in gets) == 160 * MIB, "nothing twice, and no gaps"
    assert len({offset for offset, _ in gets}) == len(gets)
    assert len(asked) <= 40
    assert max(later - block for block, later in pairwise(asked)) == SEEN_EVERY


async def test_a_far_origin_has_a_full_window_within_16_mib(reading: Reading) -> None:
    reading.origin.quickest_s = 0.03
    inode = await generated(reading, "a", 128 * MIB)
    for offset in range(0, 16 * MIB, MIB):
        await reading.read(inode.ino, offset, MIB)
    await until(lambda: not reading.cache.fetching_count)
    gets = reading.gets()
    assert len({offset for offset, _ in gets}) == len(gets), "nothing twice"
    assert max(offset + length for offset, length in gets) >= (16 + 60) * MIB
    assert len([offset for offset, _ in gets if offset >= 16 * MIB]) >= 14


async def test_reading_backwards_fetches_only_what_it_touches(reading: Reading) -> None:
    inode = await generated(reading, "a", 16 * MIB)
    for block in range(15, 4, -1):
        await reading.read(inode.ino, block * MIB, 64 * KIB)
    assert rounded(reading.gets()) == [(block, 1) for block in range(15, 4, -1)]


async def test_two_interleaved_streams_both_read_ahead(reading: Reading) -> None:
    inode = await generated(reading, "a", 64 * MIB)
    for block in range(32):
        for start in (0, 32):
            offset = (start + block) * MIB
            data = await reading.read(inode.ino, offset, MIB)
            assert data == reading.origin.expected("a", offset, MIB)
    gets = reading.gets()
    # On a busy machine a block may be asked for once more.
    assert 64 * MIB <= sum(length for _, length in gets) <= 66 * MIB
    assert len(gets) <= 20


@pytest.mark.parametrize("size", [0, 1, 100, MIB - 1, MIB, MIB + 1, 3 * MIB + 5])
async def test_reads_at_and_past_the_end(reading: Reading, size: int) -> None:
    inode = await generated(reading, "a", size)
    whole = reading.origin.expected("a")
    for offset in (0, max(0, size - 1), size, size + 1, size + 10 * MIB):
        for length in (1, 4 * KIB, MIB, 2 * MIB):
            assert await reading.read(inode.ino, offset, length) == whole[offset:][:length]


async def test_reads_across_blocks(reading: Reading) -> None:
    inode = await generated(reading, "a", 4 * MIB + 10)
    whole = reading.origin.expected("a")
    for offset in (MIB - 1, 2 * MIB - 100_000, MIB // 2, 3 * MIB + 11):
        for length in (2, 200_000, MIB, 2 * MIB + 2):
            for _ in range(2):
                assert await reading.read(inode.ino, offset, length) == whole[offset:][:length]
    assert sum(length for _, length in reading.gets()) == 4 * MIB + 10


async def test_a_read_across_blocks_asks_for_all_of_them_at_once(reading: Reading) -> None:
    inode = await generated(reading, "a", 16 * MIB)
    began, held = 0, trio.Event()

    async def hold(path: str, offset: int, length: int) -> None:
        nonlocal began
        began += 1
        await held.wait()

    reading.origin.on_read = hold
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reading.read, inode.ino, 5 * MIB + 300_000, MIB)
        await until(lambda: began == 2)
        held.set()


async def test_an_empty_file_costs_no_get(reading: Reading) -> None:
    inode = await generated(reading, "a", 0)
    assert await reading.read(inode.ino, 0, MIB) == b""
    assert reading.gets() == []


async def test_many_readers_of_one_cold_file_cost_one_get(reading: Reading) -> None:
    inode = await generated(reading, "a", 100_000)
    whole = reading.origin.expected("a")
    found = []

    async def read() -> None:
        found.append(await reading.read(inode.ino, 0, REQUEST))

    async with trio.open_nursery() as nursery:
        for _ in range(64):
            nursery.start_soon(read)
    assert found == [whole] * 64
    assert reading.gets() == [(0, 100_000)]


async def test_a_file_version_is_read_or_stale_never_mixed(reading: Reading) -> None:
    reading.origin.put("a", b"1" * (2 * MIB))
    old = await reading.tree.find("a")
    assert await reading.read(old.ino, 0, 4) == b"1111"
    reading.origin.put("a", b"2" * (3 * MIB))
    assert await reading.read(old.ino, 8, 4) == b"1111", "that block is cached"
    with pytest.raises(ObjectChangedError):
        await reading.read(old.ino, MIB, 4)
    assert await reading.read(old.ino, 0, 4) == b"1111", "and stays so"


async def test_after_a_stale_read_the_next_look_up_sees_the_new_version(
    reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cachefs")
    reading.origin.put("a", b"1" * (2 * MIB))
    old = await reading.tree.find("a")
    reading.origin.put("a", b"2" * (3 * MIB))
    with pytest.raises(ObjectChangedError):
        await reading.read(old.ino, 0, 4)
    await trio.testing.wait_all_tasks_blocked()
    new = await reading.tree.find("a")
    assert (new.size_bytes, new.ino != old.ino) == (3 * MIB, True)
    assert old.ino not in reading.readers._readers, "a replaced file holds no memory"
    assert reading.tree.unbound == [(ROOT_INO, b"a")]
    with pytest.raises(ObjectChangedError):
        await reading.read(old.ino, 0, 4)
    (said,) = [text for text in caplog.messages if "ESTALE" in text]
    assert "test/a has changed" in said, "once, not for each read"
    assert await reading.read(new.ino, 0, 4) == b"2222"


async def test_an_object_that_is_gone_is_stale_and_its_name_goes(reading: Reading) -> None:
    reading.origin.put("a", b"1" * 100)
    old = await reading.tree.find("a")
    reading.origin.delete("a")
    with pytest.raises(ObjectChangedError):
        await reading.read(old.ino, 0, 4)
    await trio.testing.wait_all_tasks_blocked()
    assert reading.tree.namespace.table.dirent(ROOT_INO, b"a") is None
    assert reading.tree.unbound == [(ROOT_INO, b"a")]


async def test_a_failing_origin_fails_the_read_and_the_next_one_tries_again(
    reading: Reading,
) -> None:
    reading.origin.put("a", b"1" * 100)
    inode = await reading.tree.find("a")
    reading.origin.fail_next(1, OriginUnavailableError("no luck"))
    with pytest.raises(OriginUnavailableError, match="no luck"):
        await reading.read(inode.ino, 0, 4)
    assert await reading.read(inode.ino, 0, 4) == b"1111"


async def test_readers_are_bounded(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachefs.namespace.reader._READERS", 4)
    for number in range(10):
        reading.origin.put(f"{number}", b"%d" % number)
    for _ in range(2):
        for number in range(10):
            inode = await reading.tree.find(f"{number}")
            assert await reading.read(inode.ino, 0, 10) == b"%d" % number
    assert len(reading.readers._readers) == 4
    assert len(reading.gets()) == 10


async def test_a_restart_reads_everything_again_without_a_request(
    reading: Reading, tmp_path: Path, nursery: trio.Nursery
) -> None:
    inode = await generated(reading, "a", 2 * MIB + 100)
    whole = await read_sequentially(reading, inode)
    await reading.cache.aclose()
    await reading.tree.restart()
    tier = open_tier(tmp_path / "cache", reading.origin)
    cache = BlockCache(reading.origin, [tier])
    await nursery.start(cache.run)
    again = Reading(reading.tree, cache, tier)
    reading.origin.take_requests()
    assert await read_sequentially(again, await reading.tree.find("a")) == whole
    assert reading.origin.take_requests() == []
    await cache.aclose()


def test_a_block_is_a_mebibyte() -> None:
    assert BLOCK_BYTES == MIB


async def test_a_read_that_is_given_back_counts_once(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever notes which files are read hears of each pass over a file once."""
    inode = await generated(reading, "a", 5000)
    ends: list[Callable[[memoryview | None], None]] = []

    def begin(*args: Any) -> bool:
        ends.append(args[2])
        return True

    monkeypatch.setattr(reading.origin, "begin_read", begin)
    first_reads: list[Inode] = []
    readers = Readers(reading.tree.namespace, reading.cache, 0, first_reads.append)
    reader = readers.get(inode.ino)
    replied: list[bool] = []
    assert readers.reply(reader, Reply(-1, 12, 0, 5000), replied.append)
    ends.pop()(None)
    assert replied == [False]
    await readers.read(reader, 0, 5000)
    assert len(first_reads) == 1
    await readers.read(reader, 0, 5000)
    assert len(first_reads) == 2
