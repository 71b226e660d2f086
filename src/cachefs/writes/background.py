"""Sends files that no close sends: uploads that failed, and changes after the last close.

A mapped file may change after the process has closed it, and a log file may be open for days. Such
a file is sent when it has not changed for `_QUIET_S`, but at most every `_PUBLISH_S`. A new file is
left alone: nobody else sees it before its first close or fsync.
"""

import logging

import trio

from cachefs.errors import CachefsError
from cachefs.writes.files import WrittenFiles

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_QUIET_S = 5.0
_PUBLISH_S = 60.0


class BackgroundSends:
    """Sends the files of one `WrittenFiles`. `run` runs for as long as the mount."""

    def __init__(self, files: WrittenFiles) -> None:
        self._files = files
        self._seen: dict[int, tuple[int, float]] = {}
        """By inode number: the generation of the content, and since when it has been this one."""
        self._tried_at: dict[int, float] = {}
        self.leaves_rest = False
        """Whether `finish` leaves everything in the spool, because a user does not want to wait."""

    async def run(self) -> None:
        """Look for quiet files, and send them. Never returns."""
        while True:
            await trio.sleep(_LOOK_S)
            due = self._due(trio.current_time())
            for ino in due:
                self._tried_at[ino] = trio.current_time()
                try:
                    await self._files.send(ino)
                except CachefsError:
                    pass  # the file keeps the reason, and is tried again
                except Exception:
                    log.exception("bug while sending inode %d; it is tried again", ino)

    def _due(self, now: float) -> list[int]:
        generations = self._files.generations_to_send()
        self._seen = {
            ino: self._seen[ino]
            if self._seen.get(ino, (None, 0))[0] == generation
            else (generation, now)
            for ino, generation in generations.items()
        }
        self._tried_at = {ino: at for ino, at in self._tried_at.items() if ino in generations}
        return [
            ino
            for ino, (_, since) in self._seen.items()
            if now - since >= _QUIET_S
            and now - self._tried_at.get(ino, float("-inf")) >= _PUBLISH_S
        ]

    def next_try_s(self, ino: int) -> float | None:
        """Return in how many seconds the file is sent if it does not change before; None if that is
        not known yet."""
        if ino not in self._seen:
            return None
        tried_at = self._tried_at.get(ino, float("-inf"))
        due_at = max(self._seen[ino][1] + _QUIET_S, tried_at + _PUBLISH_S)
        return max(0.0, due_at - trio.current_time())

    async def finish(self) -> None:
        """Try once to send all files whose content may be published, as the mount ends. What can't
        be sent stays in the spool, and is sent by the next mount."""
        for ino in self._files.generations_to_send():
            if self.leaves_rest:
                return
            try:
                await self._files.send(ino)
            except CachefsError as error:
                log.warning("%s; it stays in the spool for the next mount", error)
