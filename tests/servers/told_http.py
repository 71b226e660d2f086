"""An HTTP server on the test's own event loop that answers with what it is told to, in pieces."""

from functools import partial
from typing import Self

import trio

Piece = bytes | float | trio.Event | None
"""A part of an answer, a pause in seconds, an event to wait for, or the end of the connection."""


class ToldHttp:
    """Started by `start`; it ends with its nursery. `requests` has the head and the body of each
    request that came whole, `heads` also those whose body is on its way."""

    def __init__(self, *pieces: Piece) -> None:
        self.pieces: list[Piece] = list(pieces)
        self.answers: list[list[Piece]] = []
        """For the first requests, instead of `pieces`."""
        self.heads: list[bytes] = []
        self.requests: list[tuple[bytes, bytes]] = []
        self.connections = 0
        self.open = 0
        self.sent_bytes = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, nursery: trio.Nursery) -> Self:
        serve = partial(trio.serve_tcp, self._connection, 0, host="127.0.0.1")
        listeners = await nursery.start(serve)
        self.port = listeners[0].socket.getsockname()[1]
        return self

    async def _connection(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        self.open += 1
        try:
            await self._serve(stream)
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self.open -= 1

    async def _serve(self, stream: trio.SocketStream) -> None:
        seen = b""
        while True:
            while b"\r\n\r\n" not in seen:
                if not (more := await stream.receive_some()):
                    return
                seen += more
            head, _, seen = seen.partition(b"\r\n\r\n")
            self.heads.append(head)
            length = next(
                (
                    int(line.split(b":")[1])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                ),
                0,
            )
            while len(seen) < length:
                if not (more := await stream.receive_some()):
                    return
                seen += more
            self.requests.append((head, seen[:length]))
            seen = seen[length:]
            for piece in self.answers.pop(0) if self.answers else self.pieces:
                if piece is None:
                    return
                if isinstance(piece, bytes):
                    await stream.send_all(piece)
                    self.sent_bytes += len(piece)
                elif isinstance(piece, trio.Event):
                    if await _goes_before(piece, stream):
                        return
                else:
                    await trio.sleep(piece)


async def _goes_before(event: trio.Event, stream: trio.SocketStream) -> bool:
    """Whether the client closes the connection before the event."""
    gone = False

    async def watch() -> None:
        nonlocal gone
        gone = not await stream.receive_some()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await event.wait()
        nursery.cancel_scope.cancel()
    return gone


def endless(piece: bytes, most_bytes: int = 64 << 20) -> list[Piece]:
    """So many pieces that nobody should receive all of them."""
    return [piece] * (most_bytes // len(piece))
