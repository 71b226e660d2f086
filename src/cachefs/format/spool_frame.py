"""The head of the spool's journal, and the frame around each record (docs/formats/spool.md).

The checksum of a record covers its offset in the journal and the spool's uuid, so that a record in
another place, or of another spool, is not valid.
"""

from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from cachefs.format.spool_record import BadRecordError, Record, encode_payload

JOURNAL_FORMAT = 1
_MAGIC = b"cachefsW"
_HEADER = Struct("<8sHHI16s16s16x")
_CHECKSUM = Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
assert HEADER_BYTES == 72

_FRAME_MAGIC = b"\xf6\x9d"
_FRAME = Struct("<2sBBI")
_CHECKSUMS = Struct("<IQ")
FRAME_BYTES = _FRAME.size + _CHECKSUMS.size
"""What stands before each payload."""
assert FRAME_BYTES == 20
MOST_PAYLOAD_BYTES = 1 << 18
_MASK = (1 << 64) - 1


class JournalHeader(NamedTuple):
    """The spool that a journal belongs to, and the running system (boot id) in which it was
    written. Each has 16 bytes."""

    uuid: bytes
    boot_id: bytes


class CutRecordError(BadRecordError):
    """The journal ends within a record: the process that wrote it was killed."""


class Frame(NamedTuple):
    """A record whose checksum is right. `end` is the offset behind it."""

    kind: int
    flags: int
    payload: bytes
    end: int


def encode_header(header: JournalHeader) -> bytes:
    """Return the first `HEADER_BYTES` of a journal."""
    data = _HEADER.pack(_MAGIC, JOURNAL_FORMAT, 0, 0, *header)
    return data + _CHECKSUM.pack(xxh3_64_intdigest(data))


def decode_header(data: bytes) -> tuple[int, JournalHeader]:
    """Return the journal's format and its header. Raises `BadRecordError` if it is damaged."""
    if len(data) < HEADER_BYTES:
        raise BadRecordError("the header is cut")
    magic, version, _, _, *fields = _HEADER.unpack_from(data)
    (checksum,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    if magic != _MAGIC or checksum != xxh3_64_intdigest(data[: _HEADER.size]):
        raise BadRecordError("the header is damaged")
    return version, JournalHeader(*fields)


def seed_of(uuid: bytes) -> int:
    """Return the number that seeds the checksums of a spool, together with each offset."""
    return int.from_bytes(uuid[:8], "little")


def encode_record(record: Record, seed: int, offset: int) -> bytes:
    """Return the bytes of a record that will stand at `offset` of the journal.

    Raises `struct.error` or `ValueError` for a value that doesn't fit its field."""
    kind, flags, payload = encode_payload(record)
    if len(payload) > MOST_PAYLOAD_BYTES:
        raise ValueError("a record is too long")
    head = _FRAME.pack(_FRAME_MAGIC, kind, flags, len(payload))
    return head + _CHECKSUMS.pack(*_checksums(head, payload, seed + offset)) + payload


def frame_at(data: bytes, seed: int, offset: int) -> Frame:
    """Return the record at `offset` of the journal `data`.

    Raises `CutRecordError` if the journal ends within it, else `BadRecordError`."""
    begin = offset + FRAME_BYTES
    if begin > len(data):
        raise CutRecordError("a record is cut")
    head = data[offset : offset + _FRAME.size]
    magic, kind, flags, length = _FRAME.unpack(head)
    checksums = _CHECKSUMS.unpack_from(data, offset + _FRAME.size)
    if magic != _FRAME_MAGIC or checksums[0] != _checksums(head, b"", seed + offset)[0]:
        raise BadRecordError("the head of a record is damaged")
    end = begin + length
    if end > len(data):
        raise CutRecordError("a record is cut")
    payload = data[begin:end]
    if checksums != _checksums(head, payload, seed + offset):
        raise BadRecordError("a record is damaged")
    return Frame(kind, flags, payload, end)


def next_frame_offset(data: bytes, seed: int, offset: int) -> int | None:
    """Return the offset of the first valid record at `offset` or behind it; None without one."""
    while (offset := data.find(_FRAME_MAGIC, offset)) >= 0:
        try:
            frame_at(data, seed, offset)
        except BadRecordError:
            offset += 1
        else:
            return offset
    return None


def _checksums(head: bytes, payload: bytes, seed: int) -> tuple[int, int]:
    """Return 32 bits of the checksum of the head, and the checksum of both."""
    seed &= _MASK
    of_head = xxh3_64_intdigest(head, seed) & 0xFFFFFFFF
    return of_head, xxh3_64_intdigest(head + payload, seed)
