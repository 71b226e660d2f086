"""Sends the content of one file to the origin: in one PUT, or in parts."""

from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from cachefs.errors import OriginError
from cachefs.origin.writable import (
    ABSENT,
    MOST_PUT_BYTES,
    Attributes,
    Condition,
    PartTag,
    Upload,
    WritableOrigin,
    part_bytes,
)
from cachefs.types import UNKNOWN_ID, UNKNOWN_MODE, ObjectMeta, Posix

_PARTS_AT_A_TIME = 4
"""Each holds its bytes in memory."""
_ABORT_S = 10.0

ReadContent = Callable[[int, int], Awaitable[bytes]]
"""Returns the bytes of a range of the content: offset and length, both inside the content."""


class Sender:
    """Sends contents to the writable origin of one mount."""

    def __init__(self, writer: WritableOrigin) -> None:
        self._writer = writer

    async def written_by(self, path: str, write_id: str) -> ObjectMeta | None:
        """Return the object at `path` if the write `write_id` has made it, otherwise None."""
        return await self._writer.written_by(path, write_id)

    async def send(
        self,
        path: str,
        size_bytes: int,
        read: ReadContent,
        condition: Condition | None,
        attributes: Attributes,
        write_id: str,
        on_start: Callable[[str], object],
    ) -> ObjectMeta:
        """Write the object at `path` from `read`, and return its new version.

        If a call with the same content is repeated, it must pass the same `write_id`: it then
        succeeds if an earlier one has. `on_start` is called before the first byte is sent, with the
        id of the upload; "" for a single request. Raises `ConflictError` if the condition is false,
        or the origin's error."""
        if size_bytes <= MOST_PUT_BYTES:
            body = await read(0, size_bytes) if size_bytes else b""
            on_start("")
            return await self._writer.put(path, body, condition, attributes, write_id)
        upload = await self._writer.start_upload(path, attributes, write_id)
        on_start(upload.upload_id)
        try:
            parts = await self._send_parts(upload, size_bytes, read)
            return await self._writer.complete(upload, parts, condition, attributes)
        except BaseException:
            with trio.CancelScope(shield=True), trio.move_on_after(_ABORT_S):
                await self.abort(*upload)
            raise

    async def _send_parts(
        self, upload: Upload, size_bytes: int, read: ReadContent
    ) -> list[PartTag]:
        tags: list[PartTag] = []
        limit = trio.CapacityLimiter(_PARTS_AT_A_TIME)

        async def send_part(number: int, offset: int, length: int) -> None:
            async with limit:
                body = await read(offset, length)
                tags.append(await self._writer.put_part(upload, number, offset, body))

        try:
            async with trio.open_nursery() as nursery:
                offset, number = 0, 1
                while offset < size_bytes:
                    length = min(part_bytes(number), size_bytes - offset)
                    nursery.start_soon(send_part, number, offset, length)
                    offset += length
                    number += 1
        except* Exception as group:
            raise _first_of(group) from None
        return sorted(tags)

    async def abort(self, path: str, upload_id: str, write_id: str) -> None:
        """Drop an upload in parts. If the origin can't be asked, its parts remain there."""
        with suppress(OriginError):
            await self._writer.abort(Upload(path, upload_id, write_id))


def _first_of(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def condition_of(base: ObjectMeta | None, is_exclusive: bool) -> Condition | None:
    """Return the condition for a content that is based on the version `base`, or that must not
    replace an object."""
    if base is not None:
        return Condition(base.version)
    return ABSENT if is_exclusive else None


def attributes_of(posix: Posix, mtime_ns: int | None = None) -> Attributes:
    """Return the attributes that travel with an object."""
    uid, gid, mode = posix
    return Attributes(
        None if mode == UNKNOWN_MODE else mode,
        None if uid == UNKNOWN_ID else uid,
        None if gid == UNKNOWN_ID else gid,
        mtime_ns,
    )
