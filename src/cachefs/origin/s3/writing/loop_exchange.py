"""Small requests that write, sent on the event loop itself.

The way of a request through a thread costs four hand-overs of the interpreter's lock and two
wake-ups. Here a PUT of 100 KB needs neither. Bodies of more than `MOST_BYTES`, bodies that must be
read with blocking calls, and long answers go through `exchange.Exchanges`.

A request that nobody waits for any more must not be executed later, when its bytes could replace
newer ones. So a cancelled request closes its connection at once. The server drops a request whose
body is incomplete.
"""

from urllib.parse import urlsplit

import trio
from botocore.credentials import ReadOnlyCredentials

from cachefs.loop_socket import CLOSED
from cachefs.origin.s3.exchange import (
    MOST_INTERIM,
    Answer,
    BrokenAnswerError,
    Request,
    head_of,
)
from cachefs.origin.s3.fast_path.loop_connection import LoopClient, LoopConnection
from cachefs.origin.s3.fast_path.wire import ERROR_BYTES, UnusualError, read_head
from cachefs.origin.writable import Content

MOST_BYTES = 256 << 10
"""The longest body. A SHA-256 of it occupies the loop for .2 ms."""
_LONG_ANSWERS = ("uploadId=", "part-number-marker=", "delete=", "uploads=")


class _BrokenOffError(Exception):
    """The connection was closed before a byte of the answer arrived."""


class LoopExchanges(LoopClient):
    """Sends small requests to the host of one bucket. Not thread-safe: only the loop may use it."""

    def takes(self, method: str, query: str, content: Content) -> bool:
        """Return whether a request can be sent this way."""
        is_short = method == "HEAD" or (method in ("PUT", "DELETE") and not query)
        return is_short and content.is_in_memory and content.size_bytes <= MOST_BYTES and self._fits

    async def credentials(self) -> ReadOnlyCredentials | None:
        """Return the present credentials. Raises `OriginError`."""
        return await self._current_credentials()

    async def send(self, request: Request) -> Answer:
        """Send a request and return its answer. A request on a connection that the server has
        closed meanwhile is sent once more. Raises `OSError`, `EOFError`, `BrokenAnswerError`, and
        `trio.TooSlowError` if nothing moves for as long as the options allow."""
        content, method = request.content, request.method
        head = head_of(request, urlsplit(self._target.base_url).netloc)
        message = b"".join((head, content.read(0, content.size_bytes)))
        connection = self._idle_connection()
        if connection is not None:
            try:
                return await self._ask(connection, method, message)
            except _BrokenOffError:
                pass  # the server had closed the idle connection
        try:
            return await self._ask(await self._opened(), method, message)
        except _BrokenOffError as error:
            raise error.__cause__ or error from None

    async def _ask(self, connection: LoopConnection, method: str, message: bytes) -> Answer:
        failure: OSError | None = None
        try:
            with trio.fail_after(self._options.idle_timeout_s):
                try:
                    await connection.send(message)
                except OSError as error:  # perhaps the server has answered early and closed
                    failure = error
            with trio.fail_after(self._options.idle_timeout_s):
                return await self._answer(connection, method)
        except CLOSED as error:
            if connection.has_answered:
                raise BrokenAnswerError from None
            raise _BrokenOffError from failure or error
        except UnusualError:
            raise BrokenAnswerError from None
        finally:
            self._give_back(connection)

    async def _answer(self, connection: LoopConnection, method: str) -> Answer:
        head, begun = await connection.head(b"", self._piece)
        told = read_head(head, None)
        interim = 0
        while 100 <= told.status < 200:
            interim += 1
            if interim > MOST_INTERIM:
                raise UnusualError
            head, begun = await connection.head(bytes(begun), self._piece)
            told = read_head(head, None)
        body = b""
        if method == "HEAD" or told.status in (204, 304):
            connection.is_idle = told.stays_open and not begun
        elif told.is_chunked:
            body, is_whole = await connection.chunked_body(bytes(begun), self._piece)
            connection.is_idle = is_whole and told.stays_open
        elif told.length_bytes is None or told.length_bytes > ERROR_BYTES:
            body = bytes(begun)
        else:
            body = bytes(await connection.body(told.length_bytes, begun))
            connection.is_idle = told.stays_open
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in told.headers.items()
        }
        return Answer(told.status, headers, body)
