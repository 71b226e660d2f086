"""Copies an object of a store that has no request for it: reads it, and writes it again."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import trio

from cachefs.errors import OriginError
from cachefs.origin.writable import (
    MOST_PARTS,
    MOST_PUT_BYTES,
    Condition,
    PartTag,
    Upload,
    WritableOrigin,
    part_bytes,
)
from cachefs.types import Buffer, ObjectMeta

_READ_BYTES = 8 << 20
_MEMORY_BYTES = 64 << 20
"""Of the parts of one copy that are in memory at a time, unless one part is larger."""
_ABORT_S = 5.0

ReadObject = Callable[[str, ObjectMeta, int, int], Awaitable[Buffer]]
"""`Origin.read`."""


async def copy_by_hand(
    writer: WritableOrigin,
    read: ReadObject,
    path: str,
    meta: ObjectMeta,
    target: str,
    condition: Condition | None,
    write_id: str,
) -> ObjectMeta:
    """Do `WritableOrigin.copy`. The bytes pass through this machine twice. Raises the errors of
    reads and writes."""
    attributes = await writer.metadata_of(path, meta)
    if meta.size_bytes <= MOST_PUT_BYTES:
        body = await _read_all(read, path, meta, 0, meta.size_bytes)
        return await writer.put(target, body, condition, attributes, write_id)
    upload = await writer.start_upload(target, attributes, write_id)
    try:
        tags = await _send_parts(writer, read, path, meta, upload)
        return await writer.complete(upload, tags, condition, attributes)
    except BaseException:
        with trio.move_on_after(_ABORT_S) as scope:
            scope.shield = True
            with suppress(OriginError):  # the first error says more
                await writer.abort(upload)
        raise


async def _send_parts(
    writer: WritableOrigin, read: ReadObject, path: str, meta: ObjectMeta, upload: Upload
) -> Sequence[PartTag]:
    size_bytes = part_bytes(meta.size_bytes)
    starts = iter(enumerate(range(0, meta.size_bytes, size_bytes), 1))
    if meta.size_bytes > size_bytes * MOST_PARTS:
        raise OriginError(f"{path} is too large to be written again")
    tags: list[PartTag] = []
    failures: list[OriginError] = []

    async def send_some() -> None:
        for number, offset in starts:
            length = min(size_bytes, meta.size_bytes - offset)
            try:
                body = await _read_all(read, path, meta, offset, length)
                tags.append(await writer.put_part(upload, number, offset, body))
            except OriginError as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(max(1, _MEMORY_BYTES // size_bytes)):
            nursery.start_soon(send_some)
    if failures:
        raise failures[0]
    return tags


async def _read_all(
    read: ReadObject, path: str, meta: ObjectMeta, offset: int, length: int
) -> bytes:
    pieces = []
    for at in range(offset, offset + length, _READ_BYTES):
        pieces.append(await read(path, meta, at, min(_READ_BYTES, offset + length - at)))
    return b"".join(pieces)
