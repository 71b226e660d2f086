"""Golden bytes of docs/formats/spool.md."""

import json
from array import array

import pytest
from xxhash import xxh3_64_intdigest

from cachefs.errors import SpoolError
from cachefs.format import spool_record
from cachefs.format.paths import spool_file_name, spool_number_of
from cachefs.format.spool_frame import (
    FRAME_BYTES,
    HEADER_BYTES,
    CutRecordError,
    JournalHeader,
    decode_header,
    encode_header,
    encode_record,
    frame_at,
    next_frame_offset,
    seed_of,
)
from cachefs.format.spool_identity import SpoolIdentity, decode_identity, encode_identity
from cachefs.format.spool_record import (
    Attributes,
    BadRecordError,
    Begin,
    Changed,
    Completing,
    Done,
    Dropped,
    Exclusive,
    Expected,
    Extent,
    Freed,
    PartDone,
    PartsStale,
    Ranges,
    Rebased,
    Record,
    Refused,
    Renamed,
    Sealed,
    SentFor,
    Starting,
    StateChanged,
    Synced,
    Truncate,
    UploadEnded,
    UploadStarted,
    decode_payload,
    encode_payload,
)
from cachefs.types import ObjectMeta, Posix

UUID = bytes(range(16))
SEED = seed_of(UUID)
HEADER = JournalHeader(UUID, bytes(range(16, 32)))
META = ObjectMeta(0x500, 0x600, "v1", Posix(7, 8, 0o640))
META_HEX = "0005000000000000 0006000000000000 07000000 08000000 a001 0200 7631"

NUMBER = "0201000000000000"
GOLDEN: list[tuple[Record, int, int, str]] = [
    (
        Begin(0x102, 3, 4, 5, 6, 1, "a/b", ObjectMeta(6, 0x600, "v1", Posix(7, 8, 0o640))),
        1,
        1,
        NUMBER + "0300000000000000 0400000000000000 0500000000000000 0600000000000000 01"
        "0300 612f62 01" + META_HEX.replace("0005", "0600", 1),
    ),
    (
        Begin(0x102, 3, 4, 0, 0, 0, "\udcff", None),
        1,
        1,
        NUMBER + "0300000000000000 0400000000000000 0000000000000000 0000000000000000 000100 ff 00",
    ),
    (
        Extent(0x102, 16, 32, 4),
        2,
        1,
        NUMBER + "1000000000000000 2000000000000000 0400000000000000",
    ),
    (Truncate(0x102, 16, 4), 4, 1, NUMBER + "1000000000000000 0400000000000000"),
    (
        Attributes(0x102, -1, 2, Posix(7, 8, 0o640)),
        5,
        1,
        NUMBER + "ffffffffffffffff 0200000000000000 07000000 08000000 a001",
    ),
    (Renamed(0x102, "a/b"), 6, 1, NUMBER + "0300 612f62"),
    (Changed(0x102, 4), 7, 1, NUMBER + "0400000000000000"),
    (Sealed(0x102, 4), 8, 1, NUMBER + "0400000000000000"),
    (
        Synced(0x102, 4, 5, 6),
        9,
        0,
        NUMBER + "0400000000000000 0500000000000000 0600000000000000",
    ),
    (UploadStarted(0x102, "id", "w", "a"), 10, 1, NUMBER + "0200 6964 0100 77 0100 61"),
    (
        PartDone(0x102, 9, 16, 32, 4, "tag"),
        11,
        1,
        NUMBER + "09000000 1000000000000000 2000000000000000 0400000000000000 0300 746167",
    ),
    (PartsStale(0x102, (1, 2)), 12, 1, NUMBER + "02000000 01000000 02000000"),
    (UploadEnded(0x102), 13, 1, NUMBER),
    (Done(0x102, 4, META), 14, 1, NUMBER + "0400000000000000" + META_HEX),
    (
        Rebased(0x102, 4, 5, META),
        15,
        1,
        NUMBER + "0400000000000000 0500000000000000" + META_HEX,
    ),
    (Dropped(0x102), 16, 1, NUMBER),
    (StateChanged(0x102, 3, "no"), 17, 1, NUMBER + "03 0200 6e6f"),
    (Exclusive(0x102, 1), 19, 1, NUMBER + "01"),
    (Completing(0x102, 4), 20, 1, NUMBER + "0400000000000000"),
    (Starting(0x102, 4, "w", "a"), 21, 0, NUMBER + "0400000000000000 0100 77 0100 61"),
    (Expected(0x102, "v1"), 22, 1, NUMBER + "0200 7631"),
    (
        SentFor(0x102, 3, 4, 5, (6, 7)),
        23,
        0,
        NUMBER + "03000000 04000000 0500000000000000 02000000 06000000 07000000",
    ),
    (Refused(0x102, 3), 24, 1, NUMBER + "0300000000000000"),
    (Freed(0x102, 3), 25, 1, NUMBER + "0300000000000000"),
]


@pytest.mark.parametrize(("record", "kind", "flags", "payload"), GOLDEN)
def test_payloads(record: Record, kind: int, flags: int, payload: str) -> None:
    assert encode_payload(record) == (kind, flags, bytes.fromhex(payload))
    decoded = decode_payload(kind, bytes.fromhex(payload))
    assert (type(decoded), decoded) == (type(record), record)
    assert decode_payload(kind, bytes.fromhex(payload) + b"more") == record


def test_ranges() -> None:
    record = Ranges(0x102, array("Q", (1, 3, 5, 8)))
    payload = bytes.fromhex(
        NUMBER + "04000000 0100000000000000 0300000000000000 0500000000000000 0800000000000000"
    )
    assert encode_payload(record) == (3, 1, payload)
    assert decode_payload(3, payload) == record


def test_every_kind_has_its_golden_bytes() -> None:
    kinds = {kind for _, kind, _, _ in GOLDEN} | {3}
    assert kinds == {layout.kind for layout in spool_record._LAYOUTS}
    assert decode_payload(99, b"") is None


def test_the_header() -> None:
    data = encode_header(HEADER)
    assert len(data) == HEADER_BYTES == 72
    assert data[:16].hex() == "6361636865667357" + "0100" + "0000" + "00000000"
    assert data[16:64] == bytes(range(32)) + bytes(16)
    assert data[64:] == xxh3_64_intdigest(data[:64]).to_bytes(8, "little")
    assert decode_header(data + b"more") == (1, HEADER)
    for position in range(72):
        bad = bytearray(data)
        bad[position] ^= 1
        with pytest.raises(BadRecordError):
            decode_header(bytes(bad))
    with pytest.raises(BadRecordError):
        decode_header(data[:71])


def test_the_frame() -> None:
    data = encode_record(Sealed(0x102, 4), SEED, 72)
    payload = bytes.fromhex(NUMBER + "0400000000000000")
    head = bytes.fromhex("f69d 08 01 10000000")
    seed = int.from_bytes(UUID[:8], "little") + 72
    of_head = xxh3_64_intdigest(head, seed) & 0xFFFFFFFF
    of_all = xxh3_64_intdigest(head + payload, seed)
    assert data[:8] == head
    assert data[8:12] == of_head.to_bytes(4, "little")
    assert data[12:20] == of_all.to_bytes(8, "little")
    assert data[20:] == payload
    assert FRAME_BYTES == 20
    journal = encode_header(HEADER) + data
    assert frame_at(journal, SEED, 72) == (8, 1, payload, 108)
    for cut in range(72, 108):
        with pytest.raises(CutRecordError):
            frame_at(journal[:cut], SEED, 72)


def test_a_record_is_valid_in_its_place_only() -> None:
    first, second = (encode_record(Sealed(1, at), SEED, at) for at in (72, 108))
    journal = encode_header(HEADER) + first + second
    assert next_frame_offset(journal, SEED, 73) == 108
    assert next_frame_offset(journal, SEED, 109) is None
    moved = encode_header(HEADER) + second + first
    assert next_frame_offset(moved, SEED, 72) is None
    assert next_frame_offset(journal, SEED + 1, 72) is None, "another spool's"


@pytest.mark.parametrize(
    "record",
    [
        Begin(1, 2, 3, 1 << 63, 0, 0, "a", None),
        Begin(1, 2, 3, 4, 5, 0, "a", ObjectMeta(9, 0, "v")),
        Begin(1, 2, 3, 4, 10, 1, "a", ObjectMeta(9, 0, "v")),
        Begin(1, 2, 3, 4, 0, 2, "a", None),
        Begin(1, 2, 3, 4, 1, 1, "a", None),
        Extent(1, (1 << 63) - 1, 1, 1),
        Extent(1, 0, 0, 1),
        Truncate(1, 1 << 63, 1),
        Ranges(1, array("Q", (1,))),
        Ranges(1, array("Q", (3, 2))),
        Attributes(1, 0, 0, Posix(0, 0, 0o4777)),
        PartDone(1, 1, 1 << 63, 1, 1, ""),
        Rebased(1, 1, 10, ObjectMeta(9, 0, "v")),
        Exclusive(1, 2),
    ],
    ids=str,
)
def test_impossible_values_are_refused(record: Record) -> None:
    kind, _, payload = encode_payload(record)
    with pytest.raises(BadRecordError):
        decode_payload(kind, payload)


def test_cut_payloads_are_refused() -> None:
    for _, kind, _, text in GOLDEN:
        payload = bytes.fromhex(text)
        for cut in range(len(payload)):
            with pytest.raises(BadRecordError):
                decode_payload(kind, payload[:cut])


def test_the_identity() -> None:
    identity = SpoolIdentity(UUID, "s3://bucket/prefix")
    data = encode_identity(identity)
    assert json.loads(data) == {
        "format": 1,
        "uuid": "000102030405060708090a0b0c0d0e0f",
        "source": "s3://bucket/prefix",
        "checksum": "2a2ea75392242efd",
    }
    assert decode_identity(data, "d") == identity
    for bad in (
        data.replace(b"0e0f", b"0e0e"),
        data.replace(b"prefix", b"prefiy"),
        b"",
        b"[]",
        b"{}",
        b'{"format": 2}',
        b"[" * 9999,
        data.replace(b"00", b"x"),
    ):
        with pytest.raises(SpoolError):
            decode_identity(bad, "d")


def test_names() -> None:
    assert spool_file_name(42) == "000042.staged"
    assert spool_number_of("000042.staged") == 42
    assert spool_number_of("1234567.staged") == 1_234_567
    for name in ("42.staged", "0000042.staged", "000042", "000042.slab", "9" * 20 + ".staged"):
        assert spool_number_of(name) is None
