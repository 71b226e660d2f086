"""Sends all unsent files below a path because a user wants it, and tells how far that is."""

import logging
from collections.abc import AsyncGenerator
from typing import NamedTuple

import trio

from cachefs.errors import CachefsError, OriginUnavailableError
from cachefs.writes.files import WrittenFiles
from cachefs.writes.unsent.report import KEPT, UnsentFile, UnsentFiles, UnsentState

_AT_A_TIME = 4
_LOOK_S = 0.25

log = logging.getLogger(__name__)


class FlushProgress(NamedTuple):
    """How far a flush is: files and bytes that are sent, and those that are left to send."""

    sent_files: int
    sent_bytes: int
    left_files: int
    left_bytes: int


class FlushFailure(NamedTuple):
    """A file that was not sent, and why."""

    path: str
    reason: str


class Flushes:
    """Flushes the unsent files of one mount. The sends run in `nursery`, and so they go on when
    nobody waits for them any more."""

    def __init__(self, unsent: UnsentFiles, files: WrittenFiles, nursery: trio.Nursery) -> None:
        self._unsent = unsent
        self._files = files
        self._nursery = nursery
        self._turns = trio.CapacityLimiter(_AT_A_TIME)

    async def flush(
        self, below: str, *, is_close: bool = True
    ) -> AsyncGenerator[FlushProgress | FlushFailure, None]:
        """Send what is unsent at or below a path now ("" is everything). Yield each failure, and
        the progress until the end; the last value is a progress without files left. `is_close`: it
        replaces other versions as a close does."""
        flush = _Flush(self._files, self._turns, is_close)
        for failure in flush.begin(self._unsent, below, self._nursery):
            yield failure
        while True:
            while flush.failures:
                yield flush.failures.pop(0)
            yield flush.progress(self._unsent)
            if not flush.left:
                return
            with trio.move_on_after(_LOOK_S):
                await flush.has_ended.wait()


class _Flush:
    """One flush."""

    def __init__(self, files: WrittenFiles, turns: trio.CapacityLimiter, is_close: bool) -> None:
        self._files = files
        self._is_close = is_close
        self._turns = turns
        self.left: dict[int, int] = {}
        """Sizes in bytes of the files that are left, by number."""
        self._left_bytes = self._sent_files = self._sent_bytes = 0
        self._sending: set[int] = set()
        self._waiting: list[tuple[UnsentFile, int]] = []
        """The files that no task sends yet, with their inode numbers."""
        self.failures: list[FlushFailure] = []
        self.has_ended = trio.Event()

    def begin(self, unsent: UnsentFiles, below: str, nursery: trio.Nursery) -> list[FlushFailure]:
        """Begin to send what can be sent. Return the files that can't. Atomic."""
        failures = []
        may_be_sent = self._files.generations_to_send()
        for file in unsent.all():
            if not is_below(file.path, below):
                continue
            entry = unsent.entry_of(unsent.spool.files[file.number])
            if entry is None:
                failures.append(FlushFailure(file.path, _why_kept(file)))
            elif file.state is UnsentState.SENDING or entry.ino in may_be_sent:
                self.left[file.number] = file.size_bytes
                self._left_bytes += file.size_bytes
                self._waiting.append((file, entry.ino))
            else:
                why = "it is open and not complete yet; its next close sends it"
                failures.append(FlushFailure(file.path, why))
        self._waiting.reverse()
        for _ in range(min(_AT_A_TIME, len(self._waiting))):
            nursery.start_soon(self._send_all)
        return failures

    async def _send_all(self) -> None:
        while self._waiting:
            await self._send(*self._waiting.pop())

    async def _send(self, file: UnsentFile, ino: int) -> None:
        try:
            async with self._turns:
                self._sending.add(file.number)
                await self._files.send(ino, is_close=self._is_close)
            self._sent_files += 1
            self._sent_bytes += file.size_bytes
        except CachefsError as error:
            self.failures.append(FlushFailure(file.path, str(error)))
            if isinstance(error, OriginUnavailableError):
                self._give_up_waiting()
        except Exception as error:
            log.exception("bug while sending inode %d", ino)
            self.failures.append(FlushFailure(file.path, f"internal error: {error}"))
        finally:
            self._sending.discard(file.number)
            self._left_bytes -= self.left.pop(file.number)
            if not self.left:
                self.has_ended.set()

    def _give_up_waiting(self) -> None:
        """Do not try the other files: each would wait until its deadline."""
        for file, _ in self._waiting:
            why = "it was not tried, because the source does not answer; it is tried again later"
            self.failures.append(FlushFailure(file.path, why))
            self._left_bytes -= self.left.pop(file.number)
        self._waiting.clear()

    def progress(self, unsent: UnsentFiles) -> FlushProgress:
        """Return how far it is."""
        sent_bytes = 0
        for number in self._sending:
            found = unsent.get(number)
            sent_bytes += 0 if found is None else min(found.sent_bytes, self.left[number])
        return FlushProgress(
            self._sent_files,
            self._sent_bytes + sent_bytes,
            len(self.left),
            self._left_bytes - sent_bytes,
        )


def is_below(path: str, below: str) -> bool:
    """Return whether a path is `below` or lies below it."""
    return not below or path == below or path.startswith(f"{below}/")


def _why_kept(file: UnsentFile) -> str:
    assert file.state in KEPT
    return f"{file.state.value}: {file.reason}; see cachefs writes"
