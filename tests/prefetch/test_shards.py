"""A reader that loads one shard of a model gets the next ones ahead."""

import json
from pathlib import Path

import pytest
import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import OriginUnavailableError
from cachefs.format.inode_record import Inode
from cachefs.prefetch import shards
from cachefs.prefetch.prefetch import Prefetch
from tests.cache.harness import until
from tests.memory_origin import content_of
from tests.namespace.harness import Reading, open_tier
from tests.namespace.test_loads import SAFETENSORS
from tests.prefetch.harness import FreeThrottle

MIB = 1 << 20
SIZE = 24 * MIB


class _LookUps:
    is_on = False

    def note_first_read(self, inode: Inode) -> None:
        pass


def with_prefetch(reading: Reading, nursery: trio.Nursery) -> Prefetch:
    prefetch = Prefetch(
        reading.tree.namespace,
        reading.cache,
        nursery,
        _LookUps(),
        lambda: True,
        FreeThrottle(),
        64 * MIB,
        "order",
    )
    reading.readers = prefetch.readers
    return prefetch


def shard(number: int, count: int = 5) -> str:
    return f"m/model-{number:05}-of-{count:05}.safetensors"


def put_model(reading: Reading, index: bytes | None = None, count: int = 5) -> None:
    names = [shard(number, count) for number in range(1, count + 1)]
    for name in names:
        reading.origin.put(name, SAFETENSORS + content_of(name, len(SAFETENSORS), SIZE))
    if index is None:
        weights = {f"layer.{number}": Path(name).name for number, name in enumerate(names)}
        index = json.dumps({"metadata": {"total_size": 1}, "weight_map": weights}).encode()
    reading.origin.put("m/model.safetensors.index.json", index)


async def load(reading: Reading, name: str) -> Inode:
    """Read two tensors, as a loader does."""
    inode = await reading.tree.find(name)
    await reading.read(inode.ino, 0, 4096)
    for block in (*range(14, 19), *range(4, 9)):
        found = await reading.read(inode.ino, block * MIB, MIB)
        assert found == reading.origin.expected(name, block * MIB, MIB)
    return inode


async def settled(reading: Reading, prefetch: Prefetch) -> None:
    """Wait until nothing is on its way; models may wait for their readers."""

    def is_quiet() -> bool:
        models = prefetch._shards._models.values()
        waits = all(m.ahead and len(m.ahead) >= m.read_count for m in models)
        return waits and not (reading.cache._whole_files._files or reading.cache.fetching_count)

    await until(is_quiet)
    await reading.cache.drain()


async def whole(reading: Reading, count: int = 5) -> list[int]:
    """The numbers of the shards that are cached as a whole."""
    found = []
    for number in range(1, count + 1):
        ref = reading.tree.namespace.object_ref(await reading.tree.find(shard(number, count)))
        if reading.cache.is_stored(ref):
            found.append(number)
    return found


async def test_the_next_shards_come_as_fast_as_they_are_read(
    reading: Reading, nursery: trio.Nursery
) -> None:
    put_model(reading)
    prefetch = with_prefetch(reading, nursery)
    await load(reading, shard(2))
    await settled(reading, prefetch)
    assert await whole(reading) == [2, 3], "one shard ahead of the first"
    inode = await reading.tree.find(shard(3))
    await reading.read(inode.ino, 0, 4096)
    await settled(reading, prefetch)
    assert await whole(reading) == [2, 3, 4, 5], "two ahead of the second"
    inode = await reading.tree.find(shard(4))
    await reading.read(inode.ino, 0, 4096)
    await settled(reading, prefetch)
    assert await whole(reading) == [1, 2, 3, 4, 5]
    index_bytes = len(reading.origin.expected("m/model.safetensors.index.json"))
    assert sum(length for _, length in reading.gets()) == 5 * SIZE + index_bytes, "nothing twice"


async def test_a_loaded_file_goes_before_the_next_shards(reading: Reading) -> None:
    """Both have requests under way when the loaded one comes; then it has all that begin."""
    put_model(reading)
    ahead, loaded = [
        reading.tree.namespace.object_ref(await reading.tree.find(shard(number)))
        for number in (1, 2)
    ]
    seen: list[str] = []
    go = trio.Event()

    async def note(path: str, offset: int, length: int) -> None:
        seen.append(path)
        await go.wait()

    reading.origin.on_read = note
    assert reading.cache.fetch_whole(ahead, 0, is_next=True) is not None
    await until(lambda: len(seen) == 4)
    assert reading.cache.fetch_whole(loaded, 0) is not None
    go.set()
    await until(lambda: not reading.cache._whole_files._files)
    last = max(index for index, path in enumerate(seen) if path == shard(2))
    assert shard(1) not in seen[4:last]


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"{" * 100_000,
        b'"' * 500_000,
        b"model-00001-of-00005.safetensors" * 40_000,
        json.dumps({"a": "model-00002-of-00005.safetensors"}).encode(),
        json.dumps([f"{number}.safetensors" for number in range(1_000_000)]).encode()
        + b'"model-00001-of-00005.safetensors"',
    ],
    ids=["empty", "deep", "quotes", "one text", "another file", "a million names"],
)
async def test_an_index_that_says_nothing_useful_costs_nothing(
    reading: Reading, nursery: trio.Nursery, index: bytes
) -> None:
    put_model(reading, index)
    prefetch = with_prefetch(reading, nursery)
    await load(reading, shard(1))
    await settled(reading, prefetch)
    await until(lambda: not prefetch._shards._models)
    assert await whole(reading) == [1]
    asked = {path for kind, path, *_ in reading.origin.take_requests() if kind == "stat"}
    assert len(asked) < 10


async def test_only_plain_names_beside_the_index_count(
    reading: Reading, nursery: trio.Nursery
) -> None:
    own = Path(shard(1)).name
    reading.origin.put("secret.safetensors", bytes(SIZE))
    reading.origin.put("m/directory.safetensors/file", bytes(SIZE))
    reading.origin.put("m/.safetensors", bytes(SIZE))
    names = [
        own, "../secret.safetensors", "/etc/passwd.safetensors", "directory.safetensors",
        "directory.safetensors/file", "..", ".", "", ".safetensors", "a\0.safetensors",
        "\\u002e\\u002e/secret.safetensors", "x" * 300 + ".safetensors",
        "model.bin", "config.json",
    ]  # fmt: skip
    put_model(reading, json.dumps(names).encode())
    prefetch = with_prefetch(reading, nursery)
    await load(reading, shard(1))
    await settled(reading, prefetch)
    await until(lambda: not prefetch._shards._models)
    reads = {request[1] for request in reading.origin.take_requests() if request[0] == "read"}
    assert reads == {shard(1), "m/model.safetensors.index.json"}


async def test_an_index_of_gigabytes_is_not_read(reading: Reading, nursery: trio.Nursery) -> None:
    put_model(reading)
    reading.origin.put_generated("m/model.safetensors.index.json", 4 << 30)
    prefetch = with_prefetch(reading, nursery)
    await load(reading, shard(1))
    await settled(reading, prefetch)
    await until(lambda: not prefetch._shards._models)
    reads = {request[1] for request in reading.origin.take_requests() if request[0] == "read"}
    assert reads == {shard(1)}


@pytest.mark.parametrize("piece_bytes", [1, 7, 40])
async def test_names_are_found_wherever_the_pieces_end(
    reading: Reading, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(shards, "_PIECE_BYTES", piece_bytes)
    weights = {"a": "model-00001-of-00005.safetensors", "b": "../" + "y" * 300 + ".safetensors"}
    weights |= {"c": "model-00005-of-00005.safetensors"}
    reading.origin.put("index", json.dumps(weights).encode())
    ref = reading.tree.namespace.object_ref(await reading.tree.find("index"))
    found = await with_prefetch(reading, nursery)._shards._names_in(ref)
    assert found == {weights["a"].encode(), weights["c"].encode()}


async def test_shards_without_space_are_left_and_evict_nothing(
    reading: Reading, nursery: trio.Nursery, tmp_path: Path
) -> None:
    put_model(reading)
    cache = BlockCache(reading.origin, [open_tier(tmp_path / "b", reading.origin, 64 * MIB)])
    await nursery.start(cache.run)
    reading = Reading(reading.tree, cache, reading.tier)
    prefetch = with_prefetch(reading, nursery)
    await load(reading, shard(1))
    await settled(reading, prefetch)
    inode = await reading.tree.find(shard(2))
    await reading.read(inode.ino, 0, 4096)
    await until(lambda: not prefetch._shards._models)
    await settled(reading, prefetch)
    assert await whole(reading) == [1, 2]
    assert [tier.counters.evicted for tier in cache.status()] == [0]
    await cache.aclose()


async def test_a_failing_origin_and_a_vanished_shard_end_it(
    reading: Reading, nursery: trio.Nursery
) -> None:
    put_model(reading)

    async def fail(path: str, offset: int, length: int) -> None:
        if path == shard(2):
            raise OriginUnavailableError("the line is cut")

    reading.origin.on_read = fail
    prefetch = with_prefetch(reading, nursery)
    await load(reading, shard(1))
    await until(lambda: not prefetch._shards._models)
    await settled(reading, prefetch)
    assert await whole(reading) == [1]
    reading.origin.on_read = None
    reading.origin.delete(shard(4))
    reading.tree.clock.advance(1_000)
    await load(reading, shard(3))
    await until(lambda: not prefetch._shards._models)
    await settled(reading, prefetch)


async def test_without_a_reader_it_ends(
    reading: Reading, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_IDLE_S", 0.01)
    put_model(reading)
    prefetch = with_prefetch(reading, nursery)
    await load(reading, shard(1))
    await until(lambda: not prefetch._shards._models)
    await settled(reading, prefetch)
    assert await whole(reading) == [1, 2]


async def test_prefetch_off_fetches_no_shards(reading: Reading, nursery: trio.Nursery) -> None:
    put_model(reading)
    prefetch = with_prefetch(reading, nursery)
    prefetch.mode = "off"
    await load(reading, shard(1))
    await settled(reading, prefetch)
    assert await whole(reading) == [1]
