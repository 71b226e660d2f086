"""The compiled part. engine.h describes how it works.

No function waits, except `Engine.close` and `Transfer.give`. A buffer is held until the transfer
has ended, so the caller may drop it at once.
"""

from collections.abc import Iterable
from typing import Any, final

from typing_extensions import Buffer

from cachefs.origin.http.wire import Expected

def md5_of_each(buffers: Iterable[Buffer], /) -> list[bytes]:
    """Return the MD5 of each buffer. Releases the interpreter's lock. Raises `BufferError` for a
    buffer that is not contiguous."""

@final
class Engine:
    def __new__(cls, threads: int, /) -> Engine: ...
    def start(
        self,
        method: str,
        url: str,
        headers: tuple[str, ...],
        body: Buffer | int | None,
        sink: Buffer | None,
        expected: Expected | None,
        wants_md5: bool,
        reply: tuple[int, int, int, bytes | None] | None,
        is_patient: bool,
        bounds: tuple[int, int, int, int, int],
        route: tuple[str | None, str | None, str | None, int],
        /,
    ) -> Transfer:
        """Send a request. `bounds`: the most bytes of an answer that has no sink, and the most
        milliseconds to connect, without progress, and for all (0: any), and how much longer the
        first byte may take. `route`: the proxy, the file and the directory of CAs, and the most
        seconds that a used connection was idle. `reply`: answer the READ of the kernel with this
        number by so many bytes of the sink from an offset on, as soon as the sink is full by an
        expected answer, which has this MD5. With `is_patient`, `fileno` may become readable a
        little later, for several transfers together.

        `body` is the body of the request, or its length if `Transfer.give` gives it.

        The body of an answer 200 or 206 goes to the sink, if there is one: at once if the answer is
        `expected`, else after `Transfer.go_on`. Raises `ValueError` for a header that can't be
        sent, `RuntimeError` after `close`."""

    def collect(self) -> list[Transfer]:
        """Return the transfers that have ended or are held since the last call."""

    def reply(self, data: Buffer, more: Buffer, unique: int, /) -> Transfer:
        """Request nothing: answer the READ of the kernel with this number by these bytes, `data`
        and then `more`. The transfer is patient. Raises `RuntimeError` after `close`."""

    def reply_to(self, device_fd: int, /) -> None:
        """Send replies to a duplicate of this descriptor of /dev/fuse. Call it before the first
        `start` with a reply. Later calls do nothing. Raises `OSError`."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while `collect` would return some."""

    def close(self) -> list[Transfer]:
        """Cancel all transfers, and return them. Waits for the threads."""

@final
class Room(Buffer):
    """Memory for so many bytes. It is not cleared, so only bytes that were received may be read."""

    def __new__(cls, size_bytes: int, /) -> Room: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Transfer:
    waiter: Any
    """For the caller; None at first."""

    @property
    def filled(self) -> int:
        """How many bytes the sink has by now."""

    @property
    def sent(self) -> int:
        """How many bytes of the body were sent by now, on the present connection."""

    @property
    def is_ended(self) -> bool:
        """Whether `Engine.collect` has returned it for the last time."""

    @property
    def status(self) -> int:
        """The status; 0 before there is an answer."""

    @property
    def head(self) -> bytes:
        """The head of the answer, after `Engine.collect` has returned the transfer."""

    @property
    def is_replied(self) -> bool:
        """Whether the kernel has got its reply."""

    @property
    def md5(self) -> bytes:
        """The MD5 of the body, if it was wanted and all went well."""

    def cancel(self) -> None:
        """End it, and close its connection. It is collected like any other."""

    def go_on(self, skip_bytes: int, stops_when_full: bool, /) -> None:
        """Receive the body of a held answer into the sink, except its first `skip_bytes`. With
        `stops_when_full` bytes that the sink can't hold are not received; otherwise they are an
        error."""

    def give(self, offset: int, piece: Buffer, /) -> int:
        """Give the piece at `offset` of the body, and return the offset of the next one, which is
        an earlier one if the body must be sent once more; -1 if the transfer has ended. Waits for
        room, and after the last piece for the end, so threads call it."""

    def take_room(self) -> Room:
        """Return the collected body of the answer, which `result` has no more then."""

    def result(self) -> tuple[int, int, int, bytes, bytes, int, int, bool, bool]:
        """Return how it ended (`enum end` in engine.h) with a detail, the status, the head and the
        collected body of the answer, the bytes in the sink, the microseconds to the first byte,
        whether the connection was a kept one, and whether the answer was expected."""
