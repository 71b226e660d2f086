"""Golden bytes of docs/formats/slab.md and cache_directory.md."""

import json
import struct

import pytest
import xxhash

from cachefs.errors import CacheDirError
from cachefs.format.paths import slab_id_of, slab_id_of_table, slab_name
from cachefs.format.slab import (
    MAX_SLAB_BYTES,
    MIN_SLAB_BYTES,
    NO_MASK,
    OBJECT_CLASS,
    OBJECT_FORMAT,
    SLOT_CLASSES,
    EntryMask,
    SlabHeader,
    SlotEntry,
    WholeObject,
    checksum_of,
    class_of,
    decode_header,
    decode_whole,
    encode_entry,
    encode_header,
    encode_whole,
    entry_at,
    slab_layout,
    table_offset,
)
from cachefs.format.tier_identity import TierIdentity, decode_identity, encode_identity
from cachefs.types import BLOCK_BYTES, BlockKey

UUID = bytes(range(16))
ID = bytes(range(0x40, 0x50))


def test_classes() -> None:
    assert SLOT_CLASSES == (
        512, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4608, 5120, 5632, 6144, 6656, 7168, 7680,
        8192, 9216, 10240, 11264, 12288, 13824, 15360, 16896, 18944, 20992, 23552, 26112, 29184,
        32768, 36864, 41472, 46592, 52224, 58368, 65536, 73728, 82944, 93184, 104448, 117248,
        131584, 147968, 166400, 186880, 209920, 236032, 265216, 297984, 334848, 376320, 422912,
        475648, 535040, 601600, 676352, 760832, 855552, 962048, 1048576,
    )  # fmt: skip
    for length in (1, 511, 512, 513, 100_000, BLOCK_BYTES - 1, BLOCK_BYTES):
        index = class_of(length)
        assert SLOT_CLASSES[index] >= length
        assert index == 0 or SLOT_CLASSES[index - 1] < length


@pytest.mark.parametrize("slab_bytes", [MIN_SLAB_BYTES, 16 << 20, MAX_SLAB_BYTES])
def test_layouts_fit_and_waste_less_than_a_slot(slab_bytes: int) -> None:
    for index, slot_bytes in enumerate(SLOT_CLASSES):
        layout = slab_layout(index, slab_bytes)
        assert layout.data_offset % 4096 == 0
        assert table_offset(layout.slot_count) <= layout.data_offset
        end = layout.slot_offset(layout.slot_count)
        assert end <= slab_bytes < end + slot_bytes + 2 * 4096


def test_golden_header() -> None:
    data = encode_header(SlabHeader(7, 22, MAX_SLAB_BYTES, UUID))
    assert len(data) == 4096
    assert data[:52].hex() == (
        "6361636865667353"
        "0400"
        "1600"
        "00420000"
        "7c0f0000"
        "07000000"
        "00000004"
        "000102030405060708090a0b0c0d0e0f" + xxhash.xxh3_64_digest(data[:44])[::-1].hex()
    )
    assert data[44:52].hex() == "9211b4a180ad93dc"
    assert data[52:] == bytes(4044)
    assert decode_header(data) == SlabHeader(7, 22, MAX_SLAB_BYTES, UUID)


@pytest.mark.parametrize("position", range(52))
def test_any_flipped_byte_of_the_header_is_seen(position: int) -> None:
    data = bytearray(encode_header(SlabHeader(7, 22, MAX_SLAB_BYTES, UUID)))
    data[position] ^= 1
    assert decode_header(bytes(data)) is None


WHOLE = WholeObject(ID, 70 * BLOCK_BYTES + 1)
OF_OBJECT = SlabHeader(7, OBJECT_CLASS, WHOLE.size_bytes, UUID, OBJECT_FORMAT, WHOLE)


def test_golden_header_of_an_object() -> None:
    data = encode_header(OF_OBJECT)
    assert len(data) == 4096
    assert data[:76].hex() == (
        "6361636865667353"
        "0500"
        "3b00"
        "00001000"
        "47000000"
        "07000000"
        "00000000"
        "000102030405060708090a0b0c0d0e0f"
        "0100600400000000"
        "404142434445464748494a4b4c4d4e4f" + xxhash.xxh3_64_digest(data[:68])[::-1].hex()
    )
    assert data[76:] == bytes(4020)
    assert decode_header(data) == OF_OBJECT
    assert OF_OBJECT.layout.slot_count == 71
    assert OF_OBJECT.layout.slot_offset(70) == 70 * BLOCK_BYTES
    assert OF_OBJECT.mask.covers_fields


@pytest.mark.parametrize("position", range(76))
def test_any_flipped_byte_of_the_header_of_an_object_is_seen(position: int) -> None:
    data = bytearray(encode_header(OF_OBJECT))
    data[position] ^= 1
    assert decode_header(bytes(data)) is None


@pytest.mark.parametrize("size_bytes", [0, 1 << 63])
def test_no_slab_holds_such_an_object(size_bytes: int) -> None:
    data = struct.pack("<Q16s", size_bytes, ID)
    assert decode_whole(data) is None
    assert decode_whole(encode_whole(WHOLE)[:-1]) is None
    assert decode_whole(encode_whole(WHOLE)) == WHOLE


def test_short_or_empty_header() -> None:
    assert decode_header(b"") is None
    assert decode_header(bytes(4096)) is None


def test_golden_slot_entry() -> None:
    entry = SlotEntry(BlockKey(ID, 3), 100_000, 0x0123456789ABCDEF)
    assert encode_entry(entry, NO_MASK).hex() == (
        "404142434445464748494a4b4c4d4e4f03000000a0860100efcdab8967452301"
    )
    mask = EntryMask(0xFF000000000000FF)
    data = encode_entry(entry, mask)
    assert data.hex() == "404142434445464748494a4b4c4d4e4f03000000a086010010cdab89674523fe"
    table = bytes(32) + data
    assert entry_at(table, 0, mask) is None
    assert entry_at(table, 1, mask) == entry
    assert entry_at(table, 2, mask) is None
    assert entry_at(table[:-1], 1, mask) is None


def test_golden_mask() -> None:
    header = SlabHeader(7, 22, MAX_SLAB_BYTES, UUID)
    assert header.mask == EntryMask(0xF997D1FADDFC7814, covers_fields=True)
    others = (
        header._replace(slab_id=8),
        header._replace(class_index=23),
        header._replace(tier_uuid=bytes(16)),
    )
    assert len({header.mask, *(other.mask for other in others)}) == 4


def test_a_slab_of_format_2_is_read_and_has_no_mask() -> None:
    header = SlabHeader(7, 22, MAX_SLAB_BYTES, UUID, format=2)
    data = encode_header(header)
    assert data[8:10] == b"\2\0"
    assert data[44:52].hex() == "7ce19b24ca8dd35c"
    assert decode_header(data) == header
    assert header.mask == NO_MASK


def test_a_slab_of_format_3_is_read_and_has_one_mask_for_all_entries() -> None:
    header = SlabHeader(7, 22, MAX_SLAB_BYTES, UUID, format=3)
    data = encode_header(header)
    assert data[8:10] == b"\3\0"
    assert decode_header(data) == header
    assert header.mask == EntryMask(0xF997D1FADDFC7814)


def test_an_entry_with_a_flipped_bit_has_another_checksum() -> None:
    """Golden bytes, and any bit of them."""
    entry = SlotEntry(BlockKey(ID, 3), 100_000, 0x0123456789ABCDEF)
    mask = SlabHeader(7, 22, MAX_SLAB_BYTES, UUID).mask
    data = encode_entry(entry, mask)
    assert data.hex() == "404142434445464748494a4b4c4d4e4f03000000a08601007a37ba3bf1fcac84"
    assert entry_at(data, 0, mask) == entry
    assert entry_at(memoryview(data), 0, mask) == entry
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        found = entry_at(changed, 0, mask)
        assert found is None or found.checksum != entry.checksum


@pytest.mark.parametrize("version", [1, 5])
def test_slabs_of_other_formats_are_not_read(version: int) -> None:
    header = SlabHeader(7, 22, MAX_SLAB_BYTES, UUID, format=version)
    assert decode_header(encode_header(header)) is None


def test_an_entry_without_a_checksum_is_none() -> None:
    """It is never written. What looks like it are the bytes of an old block."""
    entry = SlotEntry(BlockKey(b"0123456789abcdef", 7), 22, 0)
    assert entry_at(encode_entry(entry, EntryMask(5)), 0, EntryMask(5)) is None


def test_checksum_is_never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checksum_of(b"abc") == xxhash.xxh3_64_intdigest(b"abc")
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda _data: 0)
    assert checksum_of(b"abc") == 1


def test_golden_identity() -> None:
    identity = TierIdentity(UUID, MIN_SLAB_BYTES, "s3://host/b\u00fccket")
    data = encode_identity(identity)
    assert data == (
        b'{\n  "format": 2,\n  "uuid": "000102030405060708090a0b0c0d0e0f",\n'
        b'  "slab_bytes": 2097152,\n  "source": "s3://host/b\\u00fccket",\n'
        b'  "checksum": "db45ff41be6a7cf8"\n}\n'
    )
    assert decode_identity(data, "/c") == identity


def test_an_identity_with_other_bytes_is_refused() -> None:
    data = encode_identity(TierIdentity(UUID, MIN_SLAB_BYTES, "s3://bucket"))
    for old, new in ((b"0102", b"0103"), (b"2097152", b"4194304"), (b"bucket", b"bucked")):
        with pytest.raises(CacheDirError, match="its checksum is wrong"):
            decode_identity(data.replace(old, new), "/c")
    document = json.loads(data)
    del document["checksum"]  # earlier versions wrote none
    assert decode_identity(json.dumps(document).encode(), "/c").source == "s3://bucket"


def test_an_older_identity_is_refused() -> None:
    with pytest.raises(CacheDirError, match="/c has format 1, which is no longer read"):
        decode_identity(json.dumps({"format": 1}).encode(), "/c")


def test_newer_identity_is_refused_whatever_else_it_says() -> None:
    with pytest.raises(CacheDirError, match="/c has format 3"):
        decode_identity(json.dumps({"format": 3}).encode(), "/c")


def test_slab_names() -> None:
    assert slab_name(7) == "000007.slab"
    assert slab_name(12345678) == "12345678.slab"
    assert slab_id_of("000007.slab") == 7
    for name in ("7.slab", "0000007.slab", "000007.slab~", "x", "00000a.slab"):
        assert slab_id_of(name) is None
    assert slab_id_of_table("000007.table") == 7
    for name in ("7.table", "000007.slab", ".table", "000007.table.table"):
        assert slab_id_of_table(name) is None
