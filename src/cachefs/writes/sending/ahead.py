"""Sends the full parts of large files while they are still written, so that a close has little left
to send.

Only of files whose whole content is in the spool: new ones, and ones that were replaced as a whole.
Only what was written in order counts as full. A part that changes later is sent again by the close.

When a writer waits for room in the spool, the bytes of finished parts are freed there. So a file
may be larger than the spool.
"""

import logging
from collections.abc import Callable, Iterable

import trio

from cachefs.errors import CachefsError
from cachefs.staging.space import SpoolSpace
from cachefs.types import MOST_SIZE_BYTES
from cachefs.writes.sending.sender import (
    Describe,
    Sender,
    full_part_after,
    sent_in_order_bytes,
)
from cachefs.writes.written_file import State, WrittenFile

log = logging.getLogger(__name__)

_AGAIN_S = 30.0
"""After a failure no part of the file is sent ahead for so long."""


class PartsAhead:
    """Sends full parts of the files of one mount. `run` runs for as long as the mount."""

    def __init__(
        self,
        sender: Sender,
        destination: Callable[[WrittenFile], tuple[str, Describe]],
        files: Callable[[], Iterable[WrittenFile]],
        space: SpoolSpace,
    ) -> None:
        """`destination` returns the path and the attributes with which a file is sent, `files` all
        files that have an entry."""
        self._files = files
        self._space = space
        self._sender = sender
        self._destination = destination
        self._due: list[WrittenFile] = []
        self._work = trio.lowlevel.ParkingLot()
        space.on_full = self._make_room

    def note_write(self, file: WrittenFile, offset: int, end: int) -> None:
        """Note that [offset, end) was written."""
        if offset <= file.in_order_bytes < end:
            file.in_order_bytes = end
            if end >= file.ahead_at_bytes and file.ahead is None and file.staged.base is None:
                file.ahead_at_bytes = MOST_SIZE_BYTES
                if self._sender.can_send_ahead:
                    self._due.append(file)
                    self._work.unpark_all()

    async def run(self) -> None:
        """Send what is noted. Never returns."""
        async with trio.open_nursery() as nursery:
            while True:
                while self._due:
                    nursery.start_soon(self._send, self._due.pop())
                await self._work.park()

    # -- room in the spool -------------------------------------------------------------------------

    def can_free(self, file: WrittenFile) -> bool:
        """Return whether the file has a full part, at the origin or not yet, whose bytes need not
        stay in the spool. Those of a file that was closed or synced stay: then its close may have
        failed, and the bytes survive also if the origin loses the upload."""
        staged = file.staged
        return (
            self._sender.can_send_ahead
            and file.state is State.UNSENT
            and file.is_named
            and not (file.closes or file.was_closed or staged.is_sealed or staged.is_synced)
            and staged.extents is None
            and full_part_after(staged.freed_bytes) <= file.in_order_bytes
        )

    def _make_room(self) -> None:
        """Send the full parts of all files, and free their bytes in the spool, because a writer
        waits for room."""
        for file in self._files():
            if file.ahead is None and file.ahead_at_bytes < MOST_SIZE_BYTES and self.can_free(file):
                file.ahead_at_bytes = MOST_SIZE_BYTES
                self._due.append(file)
                self._work.unpark_all()

    async def _free(self, file: WrittenFile) -> None:
        """Free what the origin has of the file, if a writer waits for room."""
        if self._space.is_wanted and self.can_free(file):
            sent_bytes = sent_in_order_bytes(file.staged, file.in_order_bytes)
            if sent_bytes > file.staged.freed_bytes:
                await file.staged.free(sent_bytes)

    async def _send(self, file: WrittenFile) -> None:
        try:
            with trio.CancelScope() as file.ahead:
                is_done = False
                while not is_done:
                    is_done = await self._send_full_parts(file)
                    await trio.sleep(0 if is_done else _AGAIN_S)
        except Exception:
            log.exception("bug while sending parts of %s", file.staged.path)
        finally:
            file.ahead = None
            file.ahead_at_bytes = full_part_after(file.in_order_bytes)

    async def _send_full_parts(self, file: WrittenFile) -> bool:
        """Send all full parts. Return False if that must be tried again."""
        sent_bytes = file.staged.freed_bytes
        while full_part_after(sent_bytes) <= file.in_order_bytes:
            async with file.lock:
                if file.state is not State.UNSENT or not file.is_named:
                    return True
                sent_bytes = file.in_order_bytes
                path, describe = self._destination(file)
                try:
                    await self._sender.send_ahead(file, path, describe, sent_bytes)
                    await self._free(file)
                except CachefsError as error:
                    log.info("parts of %s are not sent yet: %s", path, error)
                    return False
            # A close that waits for the lock gets it now: it is passed on in order of arrival.
        return True
