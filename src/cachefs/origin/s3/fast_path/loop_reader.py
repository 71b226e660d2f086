"""Reads small objects, and small parts of objects, on the event loop itself, for waiting readers.

The way through a thread and obstore takes nearly half of the daemon's CPU time for a cold read:
with 16 readers on two cores 700 us of 1,550 us. This module needs about 300 us. It sends requests
and receives answers on the loop with non-blocking calls. Over TLS it also decrypts there: a record
of at most 16 KiB in each call. Handshakes happen in threads.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import trio
from botocore.credentials import ReadOnlyCredentials

from cachefs.loop_socket import CLOSED
from cachefs.origin.s3 import digest, redirects
from cachefs.origin.s3 import errors as s3_errors
from cachefs.origin.s3.fast_path.loop_connection import LoopClient, LoopConnection
from cachefs.origin.s3.fast_path.wire import (
    ERROR_BYTES,
    Head,
    UnusualError,
    Wanted,
    get_request,
    look_up_request,
    read_head,
)


class _RefusedError(Exception):
    """An answer whose status means that it has no object."""

    def __init__(self, head: Head, body: bytes) -> None:
        super().__init__(head.status)
        self.status = head.status
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers.items()
        }
        self.body = body


class Loaded(NamedTuple):
    """The bytes of an object, and whether they have the expected MD5 (true if none is expected)."""

    data: memoryview
    is_as_told: bool


class LookedUp(NamedTuple):
    """The result of a look-up: the headers by lower-case names, and the first bytes."""

    headers: dict[bytes, bytes]
    data: bytearray


class LoopReader(LoopClient):
    """Reads small objects of one bucket, and parts of objects, for `ObjectStoreOrigin.read` and
    `stat_and_read`. Not thread-safe: only the loop may use it."""

    async def get(self, item: Wanted, subject: str) -> Loaded | None:
        """Return the object or its part, or None if it can't be read so: `ObjectStoreOrigin.read`
        uses `BucketReader`, which finds the cause. Raises an `OriginError` about `subject` if the
        server refuses the request or does not answer."""
        request = partial(get_request, self._target, item)
        found = await self._answer(request, item, item.length_bytes, subject)
        if found is None:
            return None
        data = found.data
        return Loaded(memoryview(data), item.md5 is None or digest.has_md5(data, item.md5))

    async def look_up(self, key: str, most_bytes: int, subject: str) -> LookedUp | None:
        """Return the current version of an object with its first `most_bytes`, or None if it can't
        be read this way: then the caller sends a HEAD. Raises as `get`."""
        request = partial(look_up_request, self._target, key, most_bytes)
        return await self._answer(request, None, most_bytes, subject)

    async def _answer(
        self,
        request_with: Callable[[ReadOnlyCredentials | None, float], bytes],
        item: Wanted | None,
        most_bytes: int,
        subject: str,
    ) -> LookedUp | None:
        """Send a request on an idle connection or a new one, and return the answer."""
        credentials = None
        try:
            credentials = await self._current_credentials()
            request = request_with(credentials, time.time())
            connection = self._idle_connection()
            if connection is not None:
                try:
                    return await self._ask(connection, request, item, most_bytes)
                except CLOSED:
                    pass  # the server had closed the idle connection
            return await self._ask(await self._opened(), request, item, most_bytes)
        except _RefusedError as refused:
            if s3_errors.may_have_old_credentials("GET", refused.status, refused.body):
                # `BucketReader` waits for others. Its HEAD may not tell what has been told here.
                self._provider.note_refused(credentials, s3_errors.error_code(refused.body))
                return None
            is_elsewhere = b"<Endpoint>" in refused.body or s3_errors.concerns_region(
                refused.status, refused.headers, refused.body
            )
            if is_elsewhere:
                return None  # `BucketReader` asks there, or signs for the right region
            if item is None and not _is_plain_answer(refused.status):
                return None  # such as 416 for an empty object; the caller's HEAD tells the cause
            raise s3_errors.from_answer(
                self._target,
                subject,
                refused.status,
                refused.headers,
                refused.body,
                is_signed=not self._provider.anonymous,
            ) from None
        except (OSError, EOFError, trio.TooSlowError) as error:
            raise s3_errors.from_connection(self._target, subject, error) from None
        except Exception:  # the caller then uses the regular way, which reports the cause
            self._rest()
            return None

    async def _ask(
        self, connection: LoopConnection, request: bytes, item: Wanted | None, most_bytes: int
    ) -> LookedUp | None:
        try:
            await connection.send(request)
            return await _object(connection, item, most_bytes, self._piece)
        finally:
            self._give_back(connection)


def _is_plain_answer(status: int) -> bool:
    """Whether a status is the result of a look-up: no such object, a refusal, or a server problem.
    Rights and conditions are left out: HEAD may be allowed where GET is not, as for archived
    objects."""
    return status in (400, 404, 405, 410, 429, 451) or status >= 500


async def _object(
    connection: LoopConnection, item: Wanted | None, most_bytes: int, piece: memoryview
) -> LookedUp | None:
    """Return the object that the server sends, or None if it sends another version or a redirect,
    which `BucketReader` follows or refuses. Without an
    `item`, any version is accepted. Raises `_RefusedError` for a status without an object,
    `UnusualError` (also for a body of more than `most_bytes`), `EOFError`, and errors of sockets.
    """
    head, begun = await connection.head(b"", piece)
    told = read_head(head, item)
    if told.status < 200:
        raise UnusualError  # an interim answer: `BucketReader` passes over it
    if told.is_wanted:
        size_bytes = told.length_bytes or 0
        if size_bytes > most_bytes:
            raise UnusualError  # the server ignored the range
        data = await connection.body(size_bytes, begun)
        connection.is_idle = told.stays_open
        return LookedUp(told.headers, data)
    if told.status in (200, 206, *redirects.STATUSES):
        return None
    if told.is_chunked:
        body, is_whole = await connection.chunked_body(bytes(begun), piece)
        connection.is_idle = is_whole and told.stays_open
        raise _RefusedError(told, body)
    if told.length_bytes is None or told.length_bytes > ERROR_BYTES:
        raise _RefusedError(told, bytes(begun))
    data = await connection.body(told.length_bytes, begun)
    connection.is_idle = told.stays_open
    raise _RefusedError(told, bytes(data))
