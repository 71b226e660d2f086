"""`SendTimeouts`: ends the waits for sendings when the origin takes nothing.

A close may wait for an earlier sending of its file, for several requests one after the other, and
for their repetitions. Each of them has a deadline of its own (`origin/resilience/`), but a process
waits for their sum. So there is one more deadline for all of it, which begins again whenever the
origin takes something of any file: then a close waits in a queue that moves.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import trio

from cachefs.errors import OriginUnavailableError
from cachefs.origin.writable import Content
from cachefs.types import Buffer

_LOOK_S = 0.5
_FULL_S = 1.0
"""Within this time of the begin of a try, bytes may only have gone into buffers of this machine."""


class SendTimeoutError(OriginUnavailableError):
    """The origin has taken nothing for as long as a close waits. EIO."""


class SendTimeouts:
    """The waits for sendings of one mount. Loop thread only. `run` runs as long as the mount."""

    def __init__(self, timeout_s: float = math.inf) -> None:
        self._timeout_s = timeout_s
        self._moved_at = -math.inf
        self._began_at: dict[trio.CancelScope, float] = {}
        self._begun = trio.lowlevel.ParkingLot()

    def note_moved(self) -> None:
        """Note that the origin has taken something."""
        self._moved_at = trio.current_time()

    @contextmanager
    def limited(self, path: str) -> Iterator[None]:
        """Cancel what is done here when the origin takes nothing, and raise `SendTimeoutError`."""
        with trio.CancelScope() as scope:
            if not self._began_at:
                self._begun.unpark_all()
            self._began_at[scope] = trio.current_time()
            try:
                yield
            finally:
                del self._began_at[scope]
        if scope.cancelled_caught:
            raise SendTimeoutError(
                f"{path} is not sent yet: the source has taken nothing for "
                f"{self._timeout_s:.0f} s (--write-timeout)"
            )

    async def run(self) -> None:
        """Look for waits that have lasted too long. Never returns."""
        while True:
            if not self._began_at:
                await self._begun.park()
            await trio.sleep(_LOOK_S)
            last = trio.current_time() - self._timeout_s
            if self._moved_at > last:
                continue
            for scope, began_at in self._began_at.items():
                if began_at <= last:
                    scope.cancel()


class MovingContent(Content):
    """Reports on the loop while bytes are taken to be sent. Created on the loop."""

    def __init__(self, content: Content, on_moved: Callable[[], None]) -> None:
        self.size_bytes = content.size_bytes
        self.is_in_memory, self.is_zeros = content.is_in_memory, content.is_zeros
        self._content = content
        self._on_moved = on_moved
        self._token = trio.lowlevel.current_trio_token()
        self._tell_at = math.inf

    def read(self, offset: int, length: int) -> Buffer:
        """See `Content.read`. A try begins at offset 0."""
        data = self._content.read(offset, length)
        now = time.monotonic()
        if not offset:
            self._tell_at = now + _FULL_S
        elif now >= self._tell_at:
            self._tell_at = now + _LOOK_S
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._on_moved, idempotent=True)
        return data

    def note_sent(self) -> None:
        """See `Content.note_sent`."""
        if time.monotonic() >= self._tell_at:
            self._on_moved()
