"""`ResilientWriter`: adds deadlines, retries and limits to the writer of any origin.

Every method of a `WritableOrigin` may be called again with the same arguments, also if an earlier
try has succeeded and only its answer was lost. So all failures that may be temporary are retried,
as for reads. The ids of writes are chosen here, outside the tries, so that a try recognises the
work of an earlier one.

**Deadlines.** A write fails if nothing has moved for `Resilience.write_timeout_s`, and a request if
nothing has moved for `write_request_s`. Both restart while a thread reads bytes to send them, and
at S3 also while they are sent: on a slow line, what was read last may take longer than that.
A store may take minutes to copy a large object or to join thousands of parts, and sends nothing
meanwhile; such requests have `assembly_s`.

Requests of writes take the same slots as reads, and their failures count for the same breaker. But
a write does not fail at once while the breaker is open: it waits until its deadline.
"""

import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import trio

from cachefs.errors import (
    AccessDeniedError,
    NotOfferedError,
    OriginError,
    RefusedError,
    SpoolError,
    reason_of,
)
from cachefs.origin.resilience.copying import ReadObject, copy_by_hand
from cachefs.origin.resilience.reading import Transfer
from cachefs.origin.resilience.settings import Resilience
from cachefs.origin.writable import (
    NO_ATTRIBUTES,
    Ask,
    Attributes,
    Condition,
    Content,
    Guarantees,
    PartTag,
    Upload,
    WritableOrigin,
    ask_once,
    content_of,
    new_write_id,
)
from cachefs.types import Buffer, Directory, ObjectMeta

T = TypeVar("T")

_TELL_EVERY_S = 0.1


class _Call(Protocol):
    """`ResilientOrigin._call` with the deadline of writes."""

    def __call__(
        self,
        path: str,
        attempt: Callable[[], Awaitable[T]],
        *,
        request_s: float | None = None,
        reading: Transfer | None = None,
    ) -> Awaitable[T]: ...


class _Writing(Transfer):
    """A write. `request_s` is how long a request may go without progress."""

    verb = "written"
    outlasts_outages = True

    def __init__(self, request_s: float) -> None:
        super().__init__()
        self.request_s = request_s

    def note_progress(self) -> None:
        """Record that bytes have been sent: the timeout of the request restarts."""
        self.moved_at = trio.current_time()
        if self.scope is not None:
            self.scope.deadline = max(self.scope.deadline, self.moved_at + self.request_s)


class _WatchedContent(Content):
    """Reports when bytes are taken to be sent. Created on the loop. A disk here that can't give
    them is no outage of the origin, so nothing is tried again."""

    def __init__(self, content: Content, on_progress: Callable[[], None]) -> None:
        self.size_bytes = content.size_bytes
        self.is_in_memory, self.is_zeros = content.is_in_memory, content.is_zeros
        self._content = content
        self._on_progress = on_progress
        self._token = trio.lowlevel.current_trio_token()
        self._told_at = time.monotonic()

    def read(self, offset: int, length: int) -> Buffer:
        """See `Content.read`. Raises `SpoolError` for an error of the disk."""
        try:
            data = self._content.read(offset, length)
        except OSError as error:
            if error.errno is None:  # what is written has changed meanwhile
                raise
            raise SpoolError(
                f"the bytes to be written can't be read from the spool's disk: {reason_of(error)}"
            ) from error
        now = time.monotonic()
        if now >= self._told_at + _TELL_EVERY_S:
            self._told_at = now
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._on_progress, idempotent=True)
        return data

    def note_sent(self) -> None:
        """See `Content.note_sent`."""
        self._on_progress()
        self._content.note_sent()


class ResilientWriter(WritableOrigin):
    """Wraps `inner`. `call` runs one request with slots, retries and a deadline. `read` is
    `Origin.read`, with all that, too."""

    def __init__(
        self, inner: WritableOrigin, settings: Resilience, call: _Call, read: ReadObject
    ) -> None:
        self._inner = inner
        self._read = read
        self._settings = settings
        self._call = call
        self.reads_copies = inner.reads_copies
        self._copies = True
        """Whether the store may copy objects."""
        self.keeps_attributes = inner.keeps_attributes
        self.acts_for_callers = inner.acts_for_callers
        self.can_rename = inner.can_rename
        self.checks_parts = inner.checks_parts
        self.leaves_rest = inner.leaves_rest

    @property
    def repeats_versions(self) -> bool:  # type: ignore[override]
        """See `WritableOrigin.repeats_versions`: as the inner writer says."""
        return self._inner.repeats_versions

    @property
    def guarantees(self) -> Guarantees:
        """See `WritableOrigin.guarantees`: those of the inner writer."""
        return self._inner.guarantees

    @guarantees.setter
    def guarantees(self, known: Guarantees) -> None:
        self._inner.guarantees = known

    def can_have(self, path: str) -> bool:
        """See `WritableOrigin.can_have`."""
        return self._inner.can_have(path)

    async def set_attributes(
        self, path: str, attributes: Attributes, version: str | None = None
    ) -> ObjectMeta | None:
        """See `WritableOrigin.set_attributes`."""
        return await self._ask(path, partial(self._inner.set_attributes, path, attributes, version))

    async def check_key(self) -> str | None:
        """See `WritableOrigin.check_key`."""
        return await self._inner.check_key()

    async def check_writable(self, path: str = "", ask: Ask = ask_once) -> Guarantees:
        """See `WritableOrigin.check_writable`. Each of its requests is retried by itself."""

        def ask_again(send: Callable[[], Awaitable[T]]) -> Awaitable[T]:
            return self._assemble(path, send)

        return await self._inner.check_writable(path, ask_again)

    async def put(
        self,
        path: str,
        body: Buffer | Content,
        condition: Condition | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
        write_id: str | None = None,
    ) -> ObjectMeta:
        """See `WritableOrigin.put`."""
        known = write_id or new_write_id()

        def send(content: Content) -> Awaitable[ObjectMeta]:
            return self._inner.put(path, content, condition, attributes, known)

        return await self._send(path, body, send)

    async def written_by(self, path: str, write_id: str) -> ObjectMeta | None:
        """See `WritableOrigin.written_by`."""
        return await self._ask(path, partial(self._inner.written_by, path, write_id))

    async def start_upload(
        self, path: str, attributes: Attributes = NO_ATTRIBUTES, write_id: str | None = None
    ) -> Upload:
        """See `WritableOrigin.start_upload`."""
        known = write_id or new_write_id()
        return await self._ask(path, partial(self._inner.start_upload, path, attributes, known))

    async def put_part(
        self, upload: Upload, number: int, offset: int, body: Buffer | Content
    ) -> PartTag:
        """See `WritableOrigin.put_part`."""

        def send(content: Content) -> Awaitable[PartTag]:
            return self._inner.put_part(upload, number, offset, content)

        return await self._send(upload.path, body, send)

    async def copy_part(
        self, upload: Upload, number: int, offset: int, path: str, meta: ObjectMeta, length: int
    ) -> PartTag:
        """See `WritableOrigin.copy_part`."""
        copy = partial(self._inner.copy_part, upload, number, offset, path, meta, length)
        return await self._assemble(upload.path, copy)

    async def complete(
        self,
        upload: Upload,
        parts: Sequence[PartTag],
        condition: Condition | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> ObjectMeta:
        """See `WritableOrigin.complete`."""
        complete = partial(self._inner.complete, upload, parts, condition, attributes)
        return await self._assemble(upload.path, complete)

    async def parts(self, upload: Upload) -> list[PartTag]:
        """See `WritableOrigin.parts`."""
        return await self._ask(upload.path, partial(self._inner.parts, upload))

    async def abort(self, upload: Upload) -> None:
        """See `WritableOrigin.abort`."""
        await self._ask(upload.path, partial(self._inner.abort, upload))

    async def abort_started(self, upload: Upload, began_s: float, ended_s: float) -> None:
        """See `WritableOrigin.abort_started`."""
        abort = partial(self._inner.abort_started, upload, began_s, ended_s)
        await self._ask(upload.path, abort)

    async def remove_rest(self, path: str, write_id: str) -> None:
        """See `WritableOrigin.remove_rest`."""
        await self._ask(path, partial(self._inner.remove_rest, path, write_id))

    async def copy(
        self,
        path: str,
        meta: ObjectMeta,
        target: str,
        condition: Condition | None = None,
        write_id: str | None = None,
    ) -> ObjectMeta:
        """See `WritableOrigin.copy`. What the store refuses to copy is read and written."""
        known = write_id or new_write_id()
        if self._copies:
            copy = partial(self._inner.copy, path, meta, target, condition, known)
            try:
                return await self._assemble(target, copy)
            except (RefusedError, AccessDeniedError) as error:
                if not self.reads_copies:
                    raise
                self._copies = not isinstance(error, NotOfferedError)
        return await copy_by_hand(self, self._read, path, meta, target, condition, known)

    async def metadata_of(self, path: str, meta: ObjectMeta) -> Attributes:
        """See `WritableOrigin.metadata_of`."""
        return await self._ask(path, partial(self._inner.metadata_of, path, meta))

    async def rename(self, path: str, target: str, condition: Condition | None = None) -> None:
        """See `WritableOrigin.rename`."""
        await self._ask(path, partial(self._inner.rename, path, target, condition))

    async def delete(self, path: str, condition: Condition | None = None) -> None:
        """See `WritableOrigin.delete`."""
        await self._ask(path, partial(self._inner.delete, path, condition))

    async def delete_many(self, paths: Sequence[str]) -> dict[str, OriginError]:
        """See `WritableOrigin.delete_many`."""
        return await self._assemble("", partial(self._inner.delete_many, paths))

    async def make_directory(
        self,
        path: str,
        attributes: Attributes = NO_ATTRIBUTES,
        *,
        is_new: bool = False,
        write_id: str | None = None,
    ) -> Directory | None:
        """See `WritableOrigin.make_directory`."""
        make = partial(self._inner.make_directory, path, attributes, is_new=is_new)
        return await self._ask(path, partial(make, write_id=write_id or new_write_id()))

    async def remove_directory(self, path: str) -> None:
        """See `WritableOrigin.remove_directory`."""
        await self._ask(path, partial(self._inner.remove_directory, path))

    async def _send(
        self, path: str, body: Buffer | Content, send: Callable[[Content], Awaitable[T]]
    ) -> T:
        """Send a body. Bytes that are sent postpone the deadlines."""
        writing = _Writing(self._settings.write_request_s)
        content = _WatchedContent(content_of(body), writing.note_progress)
        return await self._call(
            path, lambda: send(content), request_s=writing.request_s, reading=writing
        )

    async def _ask(self, path: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Send a request without a large body."""
        writing = _Writing(self._settings.write_request_s)
        return await self._call(path, attempt, request_s=writing.request_s, reading=writing)

    async def _assemble(self, path: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Send a request for which the store may have to work for a long time."""
        writing = _Writing(self._settings.assembly_s)
        return await self._call(path, attempt, request_s=writing.request_s, reading=writing)
