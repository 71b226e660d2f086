"""The mask of the entries in a slot table, and slabs of format 2, which have none."""

import shutil
from pathlib import Path

import pytest

from cachefs.format.paths import TierPaths
from cachefs.format.slab import (
    HEADER_BYTES,
    NO_MASK,
    SlabHeader,
    SlotEntry,
    checksum_of,
    decode_header,
    encode_entry,
    encode_header,
    entry_at,
    slab_layout,
    table_offset,
)
from cachefs.types import BLOCK_BYTES
from tests.cache.harness import (
    assert_right,
    key_of,
    open_tier,
    put,
    put_many,
    recount,
    serving,
    stores,
    until,
)
from tests.memory_origin import MemoryOrigin


def header_of(data: bytes) -> SlabHeader:
    header = decode_header(data[:HEADER_BYTES])
    assert header is not None
    return header


def rewrite_as_format_2(path: Path) -> None:
    data = bytearray(path.read_bytes())
    header = header_of(data)
    table = bytes(data[HEADER_BYTES:])
    for slot in range(slab_layout(header.class_index, header.slab_bytes).slot_count):
        entry = entry_at(table, slot, header.mask)
        if entry is not None:
            row = encode_entry(entry, NO_MASK)
            data[table_offset(slot) : table_offset(slot) + len(row)] = row
    data[:HEADER_BYTES] = encode_header(header._replace(format=2))
    path.write_bytes(data)


@pytest.mark.expect_log("a block is not what was stored")
async def test_the_content_of_a_file_is_never_taken_for_an_entry(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    """A power cut can keep the new header of a slab and lose its empty table. The bytes of old
    blocks are then in the place of entries, and a user may have chosen them."""
    mine, other = put(origin, "mine", 30_000), put(origin, "other", 30_000)
    async with serving(origin, open_tier(tmp_path), crash=True) as cache:
        await assert_right(cache, origin, [mine])
        await cache.drain()
    (slab,) = TierPaths(tmp_path).slabs.iterdir()
    forged = b"forged".ljust(30_000, b".")
    header = header_of(slab.read_bytes())
    layout = slab_layout(header.class_index, header.slab_bytes)
    slot = layout.slot_count - 1
    with slab.open("r+b") as file:
        file.seek(table_offset(slot))
        file.write(
            encode_entry(SlotEntry(key_of(other), len(forged), checksum_of(forged)), NO_MASK)
        )
        file.seek(layout.slot_offset(slot))
        file.write(forged)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await until(lambda: cache.is_reconciled)
        await assert_right(cache, origin, [mine, other])
        assert cache.status()[0].counters.bad_blocks == 1
        recount(cache)
    assert origin.counters.gets == 2


async def test_slabs_of_format_2_stay_in_use(tmp_path: Path, origin: MemoryOrigin) -> None:
    old, new = put_many(origin, 20, 30_000), put_many(origin, 20, 30_000, "new")
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, old)
        await cache.drain()
    (slab,) = TierPaths(tmp_path).slabs.iterdir()
    rewrite_as_format_2(slab)
    async with serving(origin, open_tier(tmp_path), crash=True) as cache:
        await assert_right(cache, origin, old + new)
        await cache.drain()
        assert len(stores(cache)[0].slabs.by_id) == 1
    assert header_of(slab.read_bytes()).format == 2
    for file in TierPaths(tmp_path).index.iterdir():  # so all blocks come from the slot table
        file.unlink()
    async with serving(origin, open_tier(tmp_path)) as cache:
        await until(lambda: cache.status()[0].counters.adopted == 40)
        await assert_right(cache, origin, old + new)
        recount(cache)
    assert origin.counters.gets == 40


@pytest.mark.expect_log("a block is not what was stored")
async def test_blocks_whose_entries_have_another_key_are_dropped(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    """The entries are all that is left of an index that was lost."""
    ref = put(origin, "mine", 2 * BLOCK_BYTES)
    async with serving(origin, open_tier(tmp_path)) as cache:
        await assert_right(cache, origin, [ref])
        await cache.drain()
    shutil.rmtree(TierPaths(tmp_path).index)
    (slab,) = TierPaths(tmp_path).slabs.iterdir()
    with slab.open("r+b") as file:
        for slot in range(2):  # each block counts as the other one
            file.seek(table_offset(slot) + 16)
            index = file.read(4)
            file.seek(table_offset(slot) + 16)
            file.write(bytes([index[0] ^ 1]) + index[1:])
    async with serving(origin, open_tier(tmp_path)) as cache:
        (store,) = stores(cache)
        await until(lambda: store.counters.adopted == 2)
        await assert_right(cache, origin, [ref])
        assert store.counters.bad_blocks == 2
