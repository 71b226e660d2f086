"""Finds out whether a store may be written to, and which conditions it checks.

Stores differ: some ignore the headers of conditions, some refuse them (501). So each condition is
tried once with a value that is false. It counts as checked only if the store refuses exactly that.
"""

import contextlib
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import trio

from cachefs.errors import (
    AccessDeniedError,
    ConflictError,
    OriginError,
    OriginFullError,
    OriginUnavailableError,
)
from cachefs.origin.names import join
from cachefs.origin.s3.writing import messages
from cachefs.origin.writable import (
    ABSENT,
    NO_ATTRIBUTES,
    Ask,
    Condition,
    Guarantees,
    Upload,
    new_write_id,
)
from cachefs.types import ObjectMeta

if TYPE_CHECKING:
    from cachefs.origin.s3.writing.writer import S3Writer

_WRONG = Condition('"00000000000000000000000000000000"')
_CLEAN_UP_S = 5.0


async def find_guarantees(writer: "S3Writer", path: str, ask: Ask) -> Guarantees:
    """Return what the store checks. Tries it with two objects of hidden names in the directory
    `path`, and deletes them. `ask` sends each request. Raises `AccessDeniedError` if something is
    not allowed."""
    probe = _Probe(writer, join(path, f".cachefs-probe-{secrets.token_hex(8)}"), ask)
    # What may not be deleted must not be written, or each refused mount would leave something.
    await probe.try_deletion()
    try:
        return await probe.run()
    finally:
        with trio.move_on_after(_CLEAN_UP_S) as scope:
            scope.shield = True
            await probe.clean_up()


class _Probe:
    def __init__(self, writer: "S3Writer", name: str, ask: Ask) -> None:
        self._writer = writer
        self._name = name
        self._copy = name + "-copy"
        self._ask = ask
        self._has_ended = False
        """Nothing of it is left."""
        self._starts = 0
        """Requests that begin an upload."""
        self._ended_uploads = 0

    async def try_deletion(self) -> None:
        """Delete an object that does not exist. Raises `AccessDeniedError`."""
        try:
            await self._ask(partial(self._writer.delete, self._name))
        except AccessDeniedError as error:
            raise AccessDeniedError(
                f"objects may not be deleted, so nothing can be written: {error}"
            ) from None

    async def run(self) -> Guarantees:
        writer, name = self._writer, self._name
        write_id = new_write_id()
        meta = await self._ask(partial(writer.put, name, b"1", write_id=write_id))
        headers = await self._ask(partial(writer.described, name))
        keeps_id = headers is not None and messages.write_id_of(headers) == write_id
        put_absent = await self._checks(lambda: self._put(ABSENT))
        put_version = await self._checks(lambda: self._put(_WRONG)) and await self._accepts(
            lambda: self._put(Condition(meta.version))
        )
        complete_absent = await self._checks(lambda: self._upload(ABSENT))
        complete_version = await self._checks(lambda: self._upload(_WRONG))
        meta = await self._put(None)
        # A store that does not copy checks the conditions of the writes that take the place of it.
        if await self._accepts(lambda: self._copied(meta, None)):
            copy_absent = await self._checks(lambda: self._copied(meta, ABSENT))
            copy_version = await self._checks(lambda: self._copied(meta, _WRONG))
        else:
            copy_absent = copy_version = False
        delete_version = await self._delete()
        self._has_ended = True
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
        put = self._writer.put
        return await self._ask(
            partial(put, self._name, b"2", condition, NO_ATTRIBUTES, new_write_id())
        )

    async def _upload(self, condition: Condition) -> None:
        writer = self._writer

        async def start() -> Upload:
            self._starts += 1
            return await writer.start_upload(self._name)

        upload = await self._ask(start)
        try:
            part = await self._ask(partial(writer.put_part, upload, 1, 0, b"3"))
            await self._ask(partial(writer.complete, upload, [part], condition))
        except BaseException:
            with trio.move_on_after(_CLEAN_UP_S) as scope, contextlib.suppress(OriginError):
                scope.shield = True
                await self._ask(partial(writer.abort, upload))
                self._ended_uploads += 1
            raise
        self._ended_uploads += 1

    async def _copied(self, meta: ObjectMeta, condition: Condition | None) -> None:
        copy = partial(self._writer.copy, self._name, meta, self._copy, condition, new_write_id())
        await self._ask(copy)

    async def _delete(self) -> bool:
        """Delete both objects. Return whether the store refused to delete another version."""
        writer = self._writer
        names = (self._name, self._copy)
        try:
            refuses = await self._checks(
                lambda: self._ask(partial(writer.delete, self._copy, _WRONG))
            )
            for name in names:
                await self._ask(partial(writer.delete, name))
        except AccessDeniedError as error:
            raise AccessDeniedError(f"objects may be written but not deleted: {error}") from None
        for name in names:
            if await self._ask(partial(writer.described, name)) is not None:
                raise AccessDeniedError(f"{name} is still there after it was deleted")
        return refuses

    async def clean_up(self) -> None:
        """Delete what a check that has failed has left, and uploads whose answers were lost."""
        if not self._has_ended:
            for name in (self._name, self._copy):
                with contextlib.suppress(OriginError):
                    await self._ask(partial(self._writer.delete, name))
        if self._starts != self._ended_uploads:
            with contextlib.suppress(OriginError):
                await self._ask(partial(self._writer.abort_all, self._name))

    @staticmethod
    async def _checks(tried: Callable[[], Awaitable[object]]) -> bool:
        """Whether the store refuses a false condition."""
        try:
            await tried()
        except ConflictError:
            return True
        except (AccessDeniedError, OriginFullError, OriginUnavailableError):
            raise
        except OriginError:  # it does not know the header
            return False
        return False

    @staticmethod
    async def _accepts(tried: Callable[[], Awaitable[object]]) -> bool:
        """Whether the store accepts a true condition."""
        try:
            await tried()
        except (AccessDeniedError, OriginFullError, OriginUnavailableError):
            raise
        except OriginError:
            return False
        return True
