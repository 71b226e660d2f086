"""One read over all its tries: what they have brought stays."""

from collections.abc import Callable

import trio

from cachefs.origin.body import Body
from cachefs.types import BLOCK_BYTES, Buffer

_LEAST_BYTES = 256 << 10


class Reading:
    """`length` bytes are wanted. A call's deadline counts from when bytes last came."""

    def __init__(
        self, length: int, is_whole: bool, on_progress: Callable[["Reading"], None]
    ) -> None:
        """`is_whole`: they are all of the object. One of a block or less may have a digest, so it
        must come in one piece."""
        self.moved_at = float("-inf")
        self.scope: trio.CancelScope | None = None
        """Around the request that is under way."""
        self._length = length
        self._keeps = not (is_whole and length <= BLOCK_BYTES)
        self._on_progress = on_progress
        self._kept: list[memoryview] = []
        self.kept_bytes = 0

        self._most_bytes = length

    @property
    def left_bytes(self) -> int:
        return self._length - self.kept_bytes

    @property
    def next_bytes(self) -> int:
        """How much to ask for next."""
        return min(self.left_bytes, self._most_bytes)

    def new_body(self) -> Body:
        """For the next request."""
        return Body(self.next_bytes, lambda: self._on_progress(self))

    def keep(self, part: Buffer) -> None:
        """What has come, as the rest hasn't. The bytes are of the version that was asked for: an
        origin begins with them when it has seen that."""
        come = memoryview(part)
        if self._keeps and come.nbytes:
            self._kept.append(come)
            self.kept_bytes += come.nbytes

    def ask_for_less(self) -> None:
        """A request has brought nothing in time."""
        if self._keeps:
            self._most_bytes = max(_LEAST_BYTES, self._most_bytes // 4)

    def joined(self, last: Buffer) -> Buffer:
        """All of it, with what the last request has brought."""
        return b"".join([*self._kept, last]) if self._kept else last
