"""Finds out whether a store may be written to, and which conditions it checks.

Stores differ: some ignore the headers of conditions, some refuse them (501). So each condition is
tried once with a value that is false. It counts as checked only if the store refuses exactly that.
"""

import contextlib
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import trio

from cachefs.errors import (
    AccessDeniedError,
    ConflictError,
    OriginError,
    OriginUnavailableError,
)
from cachefs.origin.names import join
from cachefs.origin.s3.writing import messages
from cachefs.origin.writable import ABSENT, Condition, Guarantees, new_write_id
from cachefs.types import ObjectMeta

if TYPE_CHECKING:
    from cachefs.origin.s3.writing.writer import S3Writer

_WRONG = Condition('"00000000000000000000000000000000"')
_CLEAN_UP_S = 5.0


async def find_guarantees(writer: "S3Writer", path: str) -> Guarantees:
    """Return what the store checks. Tries it with two objects of hidden names in the directory
    `path`, and deletes them. Raises `AccessDeniedError` if something is not allowed."""
    name = join(path, f".cachefs-probe-{secrets.token_hex(8)}")
    try:
        return await _Probe(writer, name).run()
    finally:
        with trio.move_on_after(_CLEAN_UP_S) as scope:
            scope.shield = True
            for made in (name, name + "-copy"):
                with contextlib.suppress(OriginError):
                    await writer.delete(made)


class _Probe:
    def __init__(self, writer: "S3Writer", name: str) -> None:
        self._writer = writer
        self._name = name
        self._copy = name + "-copy"

    async def run(self) -> Guarantees:
        writer, name = self._writer, self._name
        write_id = new_write_id()
        meta = await writer.put(name, b"1", write_id=write_id)
        headers = await writer.described(name)
        keeps_id = headers is not None and messages.write_id_of(headers) == write_id
        put_absent = await self._checks(lambda: self._put(ABSENT))
        put_version = await self._checks(lambda: self._put(_WRONG)) and await self._accepts(
            lambda: self._put(Condition(meta.version))
        )
        complete_absent = await self._checks(lambda: self._upload(ABSENT))
        complete_version = await self._checks(lambda: self._upload(_WRONG))
        meta = await self._put(None)
        # A store that does not copy checks the conditions of the writes that take the place of it.
        if await self._accepts(lambda: self._writer.copy(name, meta, self._copy)):
            copy_absent = await self._checks(lambda: self._copied(meta, ABSENT))
            copy_version = await self._checks(lambda: self._copied(meta, _WRONG))
        else:
            copy_absent = copy_version = False
        delete_version = await self._delete()
        return Guarantees(
            put_absent,
            put_version,
            complete_absent,
            complete_version,
            copy_absent,
            copy_version,
            delete_version,
            keeps_id,
        )

    async def _put(self, condition: Condition | None) -> ObjectMeta:
        return await self._writer.put(self._name, b"2", condition)

    async def _upload(self, condition: Condition) -> None:
        upload = await self._writer.start_upload(self._name)
        try:
            part = await self._writer.put_part(upload, 1, 0, b"3")
            await self._writer.complete(upload, [part], condition)
        except BaseException:
            with trio.move_on_after(_CLEAN_UP_S) as scope, contextlib.suppress(OriginError):
                scope.shield = True
                await self._writer.abort(upload)
            raise

    async def _copied(self, meta: ObjectMeta, condition: Condition) -> None:
        await self._writer.copy(self._name, meta, self._copy, condition)

    async def _delete(self) -> bool:
        """Delete both objects. Return whether the store refused to delete another version."""
        try:
            refuses = await self._checks(lambda: self._writer.delete(self._copy, _WRONG))
            for name in (self._name, self._copy):
                await self._writer.delete(name)
        except AccessDeniedError as error:
            raise AccessDeniedError(f"objects may be written but not deleted: {error}") from None
        for name in (self._name, self._copy):
            if await self._writer.described(name) is not None:
                raise AccessDeniedError(f"{name} is still there after it was deleted")
        return refuses

    @staticmethod
    async def _checks(tried: Callable[[], Awaitable[object]]) -> bool:
        """Whether the store refuses a false condition."""
        try:
            await tried()
        except ConflictError:
            return True
        except (AccessDeniedError, OriginUnavailableError):
            raise
        except OriginError:  # it does not know the header
            return False
        return False

    @staticmethod
    async def _accepts(tried: Callable[[], Awaitable[object]]) -> bool:
        """Whether the store accepts a true condition."""
        try:
            await tried()
        except (AccessDeniedError, OriginUnavailableError):
            raise
        except OriginError:
            return False
        return True
