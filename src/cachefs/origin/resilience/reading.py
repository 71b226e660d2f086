"""The state of one read over all its tries, with the bytes that have arrived so far."""

from collections.abc import Callable

import trio

from cachefs.origin.body import Body
from cachefs.types import BLOCK_BYTES, READER_TURN, Buffer, Turn

_LEAST_BYTES = 256 << 10
_MOST_POSTPONED = 4
"""How many times its deadline a read goes on whose tries each lose what has arrived."""


class Transfer:
    """A call that moves the bytes of an object, over all its tries."""

    verb = "read"
    """The end of the error message "... can't be read"."""
    outlasts_outages = False
    """Whether the call waits while the breaker is open, until its deadline."""
    turn = READER_TURN

    def __init__(self) -> None:
        self.moved_at = float("-inf")
        """When bytes last moved, in seconds of the loop's clock."""
        self.scope: trio.CancelScope | None = None
        """The cancel scope of the request in flight."""

    def postponed(self, deadline: float, began_at: float, deadline_s: float) -> float:
        """Return the deadline of the call after a failed try that began at `began_at`. Time in
        which bytes moved does not count. But each try moves the same bytes again, so a call whose
        tries all fail half-way must end, too."""
        return deadline + max(0.0, self.moved_at - began_at)


class Listing(Transfer):
    """One page of a listing. `patient_until`: the latest time until which its timeout is postponed
    because the origin answers other requests."""

    verb = "listed"

    def __init__(self, patient_until: float) -> None:
        super().__init__()
        self.patient_until = patient_until


class Reading(Transfer):
    """A read of `length` bytes."""

    def __init__(
        self,
        length: int,
        is_whole: bool,
        on_progress: Callable[["Reading"], None],
        turn: Turn = READER_TURN,
    ) -> None:
        """`is_whole`: the read covers the whole object. A whole object of at most one block may
        have a digest, so it must arrive in one request."""
        super().__init__()
        self.turn = turn
        self.outlasts_outages = turn.began_at is not None  # it may have begun before the outage
        self._length = length
        self._keeps = not (is_whole and length <= BLOCK_BYTES)
        self._on_progress = on_progress
        self._kept: list[memoryview] = []
        self.kept_bytes = 0
        self._postponed_s = 0.0
        self._most_bytes = length

    def postponed(self, deadline: float, began_at: float, deadline_s: float) -> float:
        """See `Transfer.postponed`. Bytes that are kept are not requested again, so the deadline
        begins again. Bytes that are lost postpone it only for so long, else a body that always
        trickles would cost one long try after another."""
        if self._keeps:
            return max(deadline, self.moved_at + deadline_s)
        left_s = _MOST_POSTPONED * deadline_s - self._postponed_s
        by_s = min(max(0.0, self.moved_at - began_at), left_s)
        self._postponed_s += by_s
        return deadline + by_s

    @property
    def left_bytes(self) -> int:
        return self._length - self.kept_bytes

    @property
    def next_bytes(self) -> int:
        """The size of the next request."""
        return min(self.left_bytes, self._most_bytes)

    def new_body(self) -> Body:
        """Return a `Body` for the next request."""
        return Body(self.next_bytes, lambda: self._on_progress(self))

    def keep(self, part: Buffer) -> None:
        """Keep a part that arrived, so that only the rest is requested again. The bytes belong to
        the requested version: an origin checks the version before it delivers bytes."""
        come = memoryview(part)
        if self._keeps and come.nbytes:
            self._kept.append(come)
            self.kept_bytes += come.nbytes

    def ask_for_less(self) -> None:
        """Make the next request smaller, because the last one brought no bytes in time."""
        if self._keeps:
            self._most_bytes = max(_LEAST_BYTES, self._most_bytes // 4)

    def joined(self, last: Buffer) -> Buffer:
        """Return all bytes: the kept parts and then `last`, the result of the last request."""
        return b"".join([*self._kept, last]) if self._kept else last
