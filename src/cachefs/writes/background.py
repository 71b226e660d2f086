"""Sends files that no close sends: uploads that failed, and changes after the last close.

A mapped file may change after the process has closed it, and a log file may be open for days. Such
a file is sent when it has not changed for `_QUIET_S`, or has been unsent for `--publish-interval`,
but at most once in this interval. A file that is written anew is left alone until its first close
or fsync: nobody else sees a part of it. This does not apply to files that were created for
appending, such as logs.
"""

import logging
import math
from typing import NamedTuple

import trio

from cachefs.errors import CachefsError
from cachefs.writes.files import WrittenFiles

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_QUIET_S = 5.0


class _Seen(NamedTuple):
    """What is known of an unsent file: the generation of its content, since when it has been this
    one, and since when the file has been unsent."""

    generation: int
    same_since: float
    unsent_since: float

    @classmethod
    def next(cls, before: "_Seen | None", generation: int, now: float) -> "_Seen":
        if before is None:
            return cls(generation, now, now)
        if before.generation == generation:
            return before
        return before._replace(generation=generation, same_since=now)


class BackgroundSends:
    """Sends the files of one `WrittenFiles`. `run` runs for as long as the mount."""

    def __init__(self, files: WrittenFiles, publish_s: float) -> None:
        """`publish_s`: a file is sent at most once in so many seconds."""
        self._files = files
        self._publish_s = publish_s
        self._seen: dict[int, _Seen] = {}
        """By inode number."""
        self._tried_at: dict[int, float] = {}
        self.leaves_rest = False
        """Whether `finish` leaves everything in the spool, because a user does not want to wait."""

    async def run(self) -> None:
        """Look for quiet files, and send them. Never returns."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._files.run)
            while True:
                await trio.sleep(_LOOK_S)
                for ino in self._due(trio.current_time()):
                    self._tried_at[ino] = math.inf
                    nursery.start_soon(self._send, ino)

    async def _send(self, ino: int) -> None:
        try:
            await self._files.send(ino, is_close=False)
        except CachefsError:
            pass  # the file keeps the reason, and is tried again
        except Exception:
            log.exception("bug while sending inode %d; it is tried again", ino)
        finally:
            self._tried_at[ino] = trio.current_time()

    def _due(self, now: float) -> list[int]:
        generations = self._files.generations_to_send()
        self._seen = {
            ino: _Seen.next(self._seen.get(ino), generation, now)
            for ino, generation in generations.items()
        }
        self._tried_at = {
            ino: at
            for ino, at in self._tried_at.items()
            if ino in generations or now - at < self._publish_s
        }
        return [
            ino
            for ino, seen in self._seen.items()
            if now >= self._due_at(seen, self._tried_at.get(ino, -math.inf))
        ]

    def next_try_s(self, ino: int) -> float | None:
        """Return in how many seconds the file is sent if it does not change before; None if that is
        not known yet."""
        if ino not in self._seen:
            return None
        tried_at = self._tried_at.get(ino, float("-inf"))
        return max(0.0, self._due_at(self._seen[ino], tried_at) - trio.current_time())

    def _due_at(self, seen: "_Seen", tried_at: float) -> float:
        quiet_at = min(seen.same_since + _QUIET_S, seen.unsent_since + self._publish_s)
        return max(quiet_at, tried_at + self._publish_s)

    async def finish(self) -> None:
        """Try once to send all files whose content may be published, as the mount ends. What can't
        be sent stays in the spool, and is sent by the next mount."""
        for ino in self._files.generations_to_send():
            if self.leaves_rest:
                return
            try:
                await self._files.send(ino, is_close=False)
            except CachefsError as error:
                log.warning("%s; it stays in the spool for the next mount", error)
        await self._files.finish()
