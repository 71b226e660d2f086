"""Golden bytes of docs/formats/index.md."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.format.index_record import (
    SlabRow,
    decode_block_key,
    decode_location,
    decode_next_slab,
    decode_recency,
    decode_slab_key,
    decode_slab_row,
    encode_block_key,
    encode_location,
    encode_next_slab,
    encode_recency,
    encode_slab_key,
    encode_slab_row,
    pack_bitmap,
    unpack_bitmap,
)
from cachefs.format.slab import WholeObject
from cachefs.types import BLOCK_BYTES, BlockKey, BlockLocation

ID = bytes(range(0x40, 0x50))


def test_golden_block() -> None:
    key = BlockKey(ID, 258)
    assert encode_block_key(key).hex() == "404142434445464748494a4b4c4d4e4f00000102"
    assert decode_block_key(encode_block_key(key)) == key
    location = BlockLocation(7, 3, 100_000, 0x0123456789ABCDEF)
    assert encode_location(location).hex() == "0700000003000000a0860100efcdab8967452301"
    assert decode_location(encode_location(location)) == location


def test_golden_next_slab() -> None:
    assert encode_next_slab(258).hex() == "02010000"
    assert decode_next_slab(encode_next_slab(258)) == 258
    assert decode_next_slab(None) == decode_next_slab(b"\1") == 0


def test_golden_slab_row() -> None:
    row = SlabRow(22, 10, 3, 77, 250_000, pack_bitmap(bytes([1, 0, 0, 0, 0, 0, 0, 0, 1, 1])))
    assert encode_slab_key(7).hex() == "00000007"
    assert decode_slab_key(encode_slab_key(7)) == 7
    assert encode_slab_row(row).hex() == ("160000000a000000030000004d00000090d00300000000000103")
    assert decode_slab_row(encode_slab_row(row)) == row


def test_golden_slab_row_with_kept_slots() -> None:
    used = pack_bitmap(bytes([1, 0, 0, 0, 0, 0, 0, 0, 1, 1]))
    pinned = pack_bitmap(bytes([1, 0, 0, 0, 0, 0, 0, 0, 0, 1]))
    row = SlabRow(22, 10, 3, 77, 250_000, used, pinned)
    assert encode_slab_row(row).hex() == "160001000a000000030000004d00000090d003000000000001030102"
    assert decode_slab_row(encode_slab_row(row)) == row
    assert decode_slab_row(encode_slab_row(row)[:-1]) is None
    assert decode_slab_row(encode_slab_row(row) + b"x") is None


def test_golden_slab_row_of_an_object() -> None:
    whole = WholeObject(bytes(range(0x40, 0x50)), 9 * BLOCK_BYTES + 5)
    row = SlabRow(59, 10, 3, 77, 250_000, b"\1\3", b"\1\2", whole)
    data = encode_slab_row(row)
    assert data.hex() == (
        "3b0003000a000000030000004d00000090d003000000000001030102"
        "0500900000000000404142434445464748494a4b4c4d4e4f"
    )
    assert decode_slab_row(data) == row
    without_pinned = row._replace(pinned_bitmap=b"")
    assert decode_slab_row(encode_slab_row(without_pinned)) == without_pinned
    for wrong in (row._replace(class_index=58), row._replace(slot_count=11)):
        assert decode_slab_row(encode_slab_row(wrong)) is None
    assert decode_slab_row(data[:-1]) is None


def test_what_is_kept_must_be_used() -> None:
    data = encode_slab_row(SlabRow(22, 10, 3, 77, 250_000, b"\1\3", b"\1\3"))
    assert decode_slab_row(data) is not None
    assert decode_slab_row(data[:-2] + b"\2\0") is None
    assert decode_slab_row(data[:2] + b"\2" + data[3:]) is None, "an unknown flag"


@pytest.mark.parametrize("cut", [0, 5, 24, 25, 27])
def test_a_row_that_contradicts_itself_is_no_row(cut: int) -> None:
    data = encode_slab_row(SlabRow(22, 10, 3, 77, 250_000, b"\1\3")) + b"x"
    assert decode_slab_row(data[:cut]) is None
    assert decode_slab_row(encode_slab_row(SlabRow(22, 10, 11, 0, 0, b"\1\3"))) is None


@given(st.lists(st.integers(0, 3), max_size=100).map(bytes))
def test_bitmaps_keep_exactly_the_ones(states: bytes) -> None:
    packed = pack_bitmap(states)
    assert len(packed) == -(-len(states) // 8)
    assert unpack_bitmap(packed, len(states)) == bytes(value == 1 for value in states)


def test_golden_recency() -> None:
    ticks = array("I", [0, 1, 0xFFFFFFFF, 0x01020304])
    data = encode_recency(33, ticks)
    assert data.hex() == "21000000" + "00000000" + "01000000" + "ffffffff" + "04030201"
    assert decode_recency(data, 33, 4) == ticks


@pytest.mark.parametrize(
    ("cut", "class_index", "slot_count"),
    [(0, 33, 3), (1, 33, 4), (20, 33, 4), (0, 32, 4), (20, 33, 0)],
)
def test_recency_of_another_layout_is_none(cut: int, class_index: int, slot_count: int) -> None:
    data = encode_recency(33, array("I", [0, 1, 2, 3]))
    assert decode_recency(data[: len(data) - cut], class_index, slot_count) is None
