"""A file that its reader loads is fetched as a whole, and no other file is."""

import errno
import json
import random
from pathlib import Path

import pytest
import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.fetch import whole_files
from cachefs.errors import ObjectChangedError, OriginUnavailableError
from cachefs.format.inode_record import Inode
from cachefs.namespace.load_signs import share_before_load
from tests.cache.faulty_disk import FaultyDisk
from tests.cache.harness import until
from tests.memory_origin import content_of
from tests.namespace.harness import Reading, open_tier

MIB, KIB = 1 << 20, 1 << 10
SIZE = 40 * MIB
HEAD = json.dumps({"__metadata__": {}}).encode().ljust(4 * KIB)
SAFETENSORS = len(HEAD).to_bytes(8, "little") + HEAD
LMDB = bytes(16) + b"\xde\xc0\xef\xbe"
PLACES = [30, 8, 18, 24, 13, 35]
"""Where tensors of 5 MiB begin, in the order in which they are read."""


async def file_with(reading: Reading, head: bytes, size: int = SIZE, name: str = "w") -> Inode:
    data = bytearray(content_of(name, 0, size))
    data[: len(head)] = head
    reading.origin.put(name, bytes(data))
    return await reading.tree.find(name)


async def read_runs(reading: Reading, inode: Inode, places: list[int], blocks: int = 5) -> None:
    """As a loader does: the head, then tensors of so many blocks."""
    await reading.read(inode.ino, 0, 128 * KIB)
    for place in places:
        for block in range(place, place + blocks):
            found = await reading.read(inode.ino, block * MIB, MIB)
            assert found == reading.origin.expected(inode.name.decode(), block * MIB, MIB)


async def settled(reading: Reading) -> None:
    """Wait until nothing is on its way."""
    cache = reading.cache
    await until(lambda: not (cache._whole_files._files or cache.fetching_count))
    await cache.drain()


async def is_whole(reading: Reading, inode: Inode) -> bool:
    await settled(reading)
    return reading.cache.is_stored(reading.tree.namespace.object_ref(inode))


@pytest.mark.parametrize("quickest_s", [0.001, 0.03])
@pytest.mark.parametrize(
    "head", [SAFETENSORS, b"GGUF\3\0\0\0", b"PK\3\4" + bytes(22) + b"\20\0\0\0archive/data.pkl"]
)
async def test_two_tensors_of_a_file_of_weights_bring_the_whole_file_once(
    reading: Reading, head: bytes, quickest_s: float
) -> None:
    reading.origin.quickest_s = quickest_s
    inode = await file_with(reading, head)
    await read_runs(reading, inode, PLACES[:2])
    assert await is_whole(reading, inode)
    gets = reading.gets()
    assert sum(length for _, length in gets) == SIZE, "nothing twice"
    assert max(length for _, length in gets) <= 8 * MIB
    await read_runs(reading, inode, PLACES)
    assert reading.gets() == []


async def test_one_run_in_the_middle_of_weights_is_enough(reading: Reading) -> None:
    """The other blocks are published to the relay when they come."""
    published: set[int] = set()
    reading.readers.publish_ahead = lambda ino, ref, blocks: published.update(blocks)
    inode = await file_with(reading, SAFETENSORS)
    await read_runs(reading, inode, [18], 2)
    await settled(reading)
    assert sum(length for _, length in reading.gets()) < 10 * MIB
    await read_runs(reading, inode, [8], 3)
    assert await is_whole(reading, inode)
    assert len(published) >= 25


async def test_far_weights_have_16_requests_from_the_second_block_on(reading: Reading) -> None:
    reading.origin.quickest_s = 0.03
    for name, head, blocks in (("w", SAFETENSORS, 18), ("other", b"", 6)):
        inode = await file_with(reading, head, name=name)
        for block in range(2):
            await reading.read(inode.ino, block * MIB, MIB)
        await settled(reading)
        assert [length for _, length in reading.gets()] == [MIB] * blocks


@pytest.mark.parametrize(("quickest_s", "most"), [(0.001, 8), (0.03, 4)])
async def test_requests_grow_with_their_distance_from_the_reader(
    reading: Reading, quickest_s: float, most: int
) -> None:
    reading.origin.quickest_s = quickest_s
    inode = await file_with(reading, SAFETENSORS)
    assert reading.cache.fetch_whole(reading.tree.namespace.object_ref(inode), 10) is not None
    assert await is_whole(reading, inode)
    blocks = {offset >> 20: length >> 20 for offset, length in reading.gets()}
    assert all(blocks[10 + near] == 1 for near in range(4))
    assert max(blocks.values()) == most
    assert len(blocks) <= 16


@pytest.mark.parametrize("quickest_s", [0.001, 0.03])
async def test_a_look_at_the_head_of_weights_does_not_bring_the_file(
    reading: Reading, quickest_s: float
) -> None:
    reading.origin.quickest_s = quickest_s
    inode = await file_with(reading, SAFETENSORS)
    for block in range(3):
        await reading.read(inode.ino, block * MIB, MIB)
    await settled(reading)
    assert sum(length for _, length in reading.gets()) <= 24 * MIB
    assert not await is_whole(reading, inode)


@pytest.mark.parametrize("head", [SAFETENSORS, LMDB, b"PAR1", b""])
async def test_random_pieces_do_not_bring_a_file(reading: Reading, head: bytes) -> None:
    inode = await file_with(reading, head)
    places = random.Random(1).sample(range(0, 40, 4), 9)
    for place in places:
        await reading.read(inode.ino, place * MIB + 500 * KIB, 100 * KIB)
    await settled(reading)
    assert sum(length for _, length in reading.gets()) <= len(places) * MIB


@pytest.mark.parametrize(
    ("head", "few", "many"),
    [(b"", [8, 30], PLACES), (LMDB, [8, 30], [1, 10, 20, 30]), (b"PAR1", PLACES, [1, 10, 20, 30])],
)
async def test_long_runs_bring_a_file_when_enough_of_it_was_read(
    reading: Reading, head: bytes, few: list[int], many: list[int]
) -> None:
    reading.readers.readahead = 2 * MIB
    inode = await file_with(reading, head)
    await read_runs(reading, inode, few, 4)
    assert not await is_whole(reading, inode)
    reading.readers.drop(inode.ino)
    await reading.cache.objects.evict([reading.tree.namespace.object_ref(inode)])
    await read_runs(reading, inode, many, 5 if many == PLACES else 9)
    assert await is_whole(reading, inode)


async def test_without_read_ahead_nothing_is_fetched_as_a_whole(reading: Reading) -> None:
    reading.readers.readahead = 0
    inode = await file_with(reading, SAFETENSORS)
    await read_runs(reading, inode, PLACES[:3])
    await settled(reading)
    assert sum(length for _, length in reading.gets()) == 16 * MIB


@pytest.mark.parametrize("others", [0, 1])
async def test_a_file_without_free_space_is_not_fetched_as_a_whole(
    reading: Reading, others: int, tmp_path: Path, nursery: trio.Nursery
) -> None:
    quota_bytes = (SIZE + 30 * MIB) if others else SIZE
    cache = BlockCache(reading.origin, [open_tier(tmp_path / "b", reading.origin, quota_bytes)])
    await nursery.start(cache.run)
    reading = Reading(reading.tree, cache, reading.tier)
    held = trio.Event()

    async def hold(path: str, offset: int, length: int) -> None:
        if path == "other":
            await held.wait()

    reading.origin.on_read = hold
    for _ in range(others):
        other = await file_with(reading, SAFETENSORS, name="other")
        ref = reading.tree.namespace.object_ref(other)
        assert cache.fetch_whole(ref, 0) is not None
    inode = await file_with(reading, SAFETENSORS)
    assert cache.fetch_whole(reading.tree.namespace.object_ref(inode), 0) is None
    reading.gets()
    await read_runs(reading, inode, PLACES[:4])
    of_this = [request[3] for request in reading.origin.take_requests() if request[1] == "w"]
    assert sum(of_this) < SIZE, "as far as read-ahead goes"
    held.set()
    await cache.aclose()


@pytest.mark.parametrize("new", [b"2" * SIZE, None], ids=["replaced", "removed"])
async def test_a_replaced_file_is_stale_and_never_mixed(
    reading: Reading, new: bytes | None
) -> None:
    inode = await file_with(reading, SAFETENSORS)
    old = reading.origin.expected("w")
    gets = 0

    async def replace(path: str, offset: int, length: int) -> None:
        nonlocal gets
        gets += 1
        if gets == 12:
            reading.origin.delete("w") if new is None else reading.origin.put("w", new)

    reading.origin.on_read = replace
    stale = 0
    for block in (0, *range(10, 16), *range(30, 40), *range(16, 30)):
        try:
            found = await reading.read(inode.ino, block * MIB, MIB)
        except ObjectChangedError:
            stale += 1
        else:
            assert found == old[block * MIB :][:MIB]
    assert stale
    await settled(reading)


async def test_a_failure_ends_it_and_later_reads_begin_again(reading: Reading) -> None:
    inode = await file_with(reading, SAFETENSORS)
    failing = True

    async def fail(path: str, offset: int, length: int) -> None:
        if failing and length > MIB and offset >= 15 * MIB:
            raise OriginUnavailableError("the line is cut")

    reading.origin.on_read = fail
    await read_runs(reading, inode, [8])
    await settled(reading)
    assert not await is_whole(reading, inode)
    failing = False
    await read_runs(reading, inode, [18, 30])
    assert await is_whole(reading, inode)


async def test_a_reader_that_ends_ends_it(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_files, "_IDLE_S", -1.0)
    inode = await file_with(reading, SAFETENSORS)
    await read_runs(reading, inode, [8])
    assert not await is_whole(reading, inode)


async def test_an_evicted_file_is_not_fetched_on(reading: Reading) -> None:
    inode = await file_with(reading, SAFETENSORS)
    ref = reading.tree.namespace.object_ref(inode)
    held, began = trio.Event(), 0

    async def hold(path: str, offset: int, length: int) -> None:
        nonlocal began
        began += 1
        await held.wait()

    reading.origin.on_read = hold
    assert reading.cache.fetch_whole(ref, 0) is not None
    await until(lambda: began)
    await reading.cache.objects.evict([ref])
    held.set()
    await settled(reading)
    assert sum(length for _, length in reading.gets()) <= 16 * MIB


@pytest.mark.expect_log("can't (grow|store blocks)", required=False)
async def test_a_disk_that_fills_up_ends_it(
    reading: Reading, tmp_path: Path, nursery: trio.Nursery
) -> None:
    inode = await file_with(reading, SAFETENSORS)
    with FaultyDisk() as disk:
        cache = BlockCache(reading.origin, [open_tier(tmp_path / "b", reading.origin, disk=disk)])
        await nursery.start(cache.run)
        reading = Reading(reading.tree, cache, reading.tier)

        async def fill_up(path: str, offset: int, length: int) -> None:
            if cache.counters.fetched_bytes > 12 * MIB:
                disk.fail(errno.ENOSPC, "create", "write")
                await cache.drain()

        reading.origin.on_read = fill_up
        await read_runs(reading, inode, PLACES[:2])
        await settled(reading)
        gets = reading.gets()
        assert sum(length for _, length in gets) < SIZE
        await read_runs(reading, inode, PLACES[:2])
        await cache.aclose()


async def test_64_readers_bring_each_block_once(reading: Reading) -> None:
    reading.origin.quickest_s = 0.03
    inode = await file_with(reading, SAFETENSORS)

    async def load(number: int) -> None:
        await read_runs(reading, inode, random.Random(number).sample(PLACES, 3))

    async with trio.open_nursery() as nursery:
        for number in range(64):
            nursery.start_soon(load, number)
    assert await is_whole(reading, inode)
    assert sum(length for _, length in reading.gets()) == SIZE


async def test_the_next_file_goes_on_after_one_that_needs_nothing(reading: Reading) -> None:
    inodes = [await file_with(reading, SAFETENSORS, name=name) for name in ("a", "b")]
    refs = [reading.tree.namespace.object_ref(inode) for inode in inodes]
    assert reading.cache.fetch_whole(refs[0], 0) is not None
    await settled(reading)
    assert reading.cache.fetch_whole(refs[0], 0) is not None  # all requests are this file's
    assert reading.cache.fetch_whole(refs[1], 0, is_next=True) is not None
    assert await is_whole(reading, inodes[1])


async def test_an_unmount_does_not_wait_for_the_whole_file(reading: Reading) -> None:
    inode = await file_with(reading, SAFETENSORS)
    cache = reading.cache
    assert cache.fetch_whole(reading.tree.namespace.object_ref(inode), 0) is not None
    await until(lambda: cache.counters.fetched_bytes)
    before = len(reading.gets())
    await cache.aclose()
    assert before < 10
    assert len(reading.gets()) <= 4, "those that were under way"


async def test_a_shutdown_in_the_middle_ends(reading: Reading) -> None:
    inode = await file_with(reading, SAFETENSORS)
    began = trio.Event()

    async def hold(path: str, offset: int, length: int) -> None:
        began.set()
        await trio.sleep_forever()

    reading.origin.on_read = hold
    assert reading.cache.fetch_whole(reading.tree.namespace.object_ref(inode), 0) is not None
    await began.wait()
    with trio.fail_after(300):
        await reading.cache.aclose(0)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\1",
        (1 << 52).to_bytes(8, "little") + b"{}",  # a head of petabytes
        (SIZE + 1).to_bytes(8, "little") + b"{}",
        (1).to_bytes(8, "little") + b"{",
        (40).to_bytes(8, "little") + b"[]",
        b"PK\3\4" + bytes(22) + b"\x08\0\0\0data.txt",
        b"PK\3\4" + bytes(22) + b"\xff\xff\0\0a",
    ],
)
def test_heads_that_are_no_weights(head: bytes) -> None:
    assert share_before_load(head, SIZE) > 0
