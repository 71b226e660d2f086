"""The journal of a spool (staging/replay.py, staging/recovery.py).

An input are records: kind, flags and length of one byte each, and a payload. They are framed as
they stand in a journal. A first byte of 255 makes the rest the journal as it is.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, cycle, islice, repeat

import trio

from cachefs.errors import CachefsError
from cachefs.format import spool_frame
from cachefs.format.paths import SpoolPaths
from cachefs.format.spool_identity import SpoolIdentity, encode_identity
from cachefs.format.spool_record import Record, Renamed, Synced
from cachefs.staging.extents import Source
from cachefs.staging.recovery import boot_id
from cachefs.staging.replay import replay_journal
from cachefs.staging.spool import Spool
from tests.fuzz.targets._support import check_text, directory

_UUID = bytes(range(16))
_BYTES = 50
_AS_IT_IS = 255


def _journal(data: bytes) -> bytes:
    seed = spool_frame.seed_of(_UUID)
    header = spool_frame.JournalHeader(_UUID, boot_id())
    journal = bytearray(spool_frame.encode_header(header))
    if data[:1] == bytes([_AS_IT_IS]):
        return bytes(journal[: data[1]] + data[2:]) if len(data) > 1 else b""
    at = 0
    while at + 3 <= len(data):
        kind, flags, length = data[at : at + 3]
        payload = data[at + 3 : at + 3 + length]
        at += 3 + length
        head = spool_frame._FRAME.pack(b"\xf6\x9d", kind, flags, len(payload))
        checksums = spool_frame._checksums(head, payload, seed + len(journal))
        journal += head + spool_frame._CHECKSUMS.pack(*checksums) + payload
    return bytes(journal)


async def _look(paths: SpoolPaths) -> None:
    spool = await Spool.open(paths.root, "source", 1 << 30)
    try:
        for file in spool.files.values():
            assert file.size_bytes >= 0
            if file.is_attached:
                assert spool.file_of(file.ino) is not None
            pieces = file.pieces(0, file.size_bytes)
            assert sum(piece.length for piece in pieces) == file.size_bytes
            for piece in pieces[:20]:
                if piece.source is Source.SPOOL and file.is_attached:
                    assert len(await file.read_spool(piece.offset, piece.length)) == piece.length
                if piece.source is Source.BASE:
                    assert file.base is not None
                    assert piece.offset + piece.length <= file.base.size_bytes
    finally:
        await spool.close()


async def _open(data: bytes) -> None:
    with directory() as place:
        paths = SpoolPaths(place)
        paths.files.mkdir()
        paths.identity.write_bytes(encode_identity(SpoolIdentity(_UUID, "source")))
        paths.journal.write_bytes(_journal(data))
        for number in (1, 2):
            paths.file(number).write_bytes(bytes(_BYTES))
        try:
            await _look(paths)
        except CachefsError as error:  # of a newer cachefs
            check_text(error)
            return
        await _look(paths)


def _raw(records: Iterable[bytes], count: int) -> bytes:
    """A journal of about `count` bytes, with right checksums or without."""
    header = spool_frame.encode_header(spool_frame.JournalHeader(_UUID, boot_id()))
    journal = bytearray()
    for record in records:
        if len(journal) >= count:
            break
        journal += record
    return bytes([_AS_IT_IS, len(header)]) + journal


def _encoded(records: Iterable[Record | None]) -> Iterator[bytes]:
    """Records at their offsets; None stands for one that is damaged."""
    seed, at = spool_frame.seed_of(_UUID), spool_frame.HEADER_BYTES
    for record in records:
        data = spool_frame.encode_record(record or _SYNCED, seed, at)
        at += len(data)
        yield data if record else data[:-1] + bytes([data[-1] ^ 1])


_SYNCED = Synced(1, 1, 1, 1)
_RENAMED = Renamed(1, "a")
GROWING = {
    "zeros": lambda count: _raw(repeat(bytes(1024)), count),
    "heads": lambda count: _raw(repeat(b"\xf6\x9d"), count),
    "records of no file": lambda count: _raw(_encoded(repeat(_RENAMED)), count),
    "damaged records": lambda count: _raw(
        _encoded(chain(islice(cycle([_RENAMED, None]), count // 37), [_SYNCED])), 2 * count
    ),
}
"""Inputs of about so many bytes."""


def fuzz(data: bytes) -> None:
    trio.run(_open, data)


def _replay(data: bytes, boot: bytes) -> None:
    replay_journal(_journal(data), _UUID, boot)


PARSERS = (partial(_replay, boot=boot_id()), partial(_replay, boot=bytes(16)))
"""What is measured with `GROWING`: after a kill, and after a restart of the system."""
