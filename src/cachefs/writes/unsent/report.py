"""What of a writable mount the origin does not have yet, for the commands and the metrics."""

import logging
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from cachefs.staging.file_state import FileState
from cachefs.staging.spool import Spool
from cachefs.staging.staged_file import StagedFile
from cachefs.units import format_bytes
from cachefs.writes.background import BackgroundSends
from cachefs.writes.files import WrittenFiles
from cachefs.writes.written_file import State, WrittenFile


class UnsentState(Enum):
    """What an unsent file waits for. The values are what users see."""

    OPEN = "open"
    """It has not been closed since its last change."""
    WAITING = "waiting"
    """It was closed, and is sent soon."""
    SENDING = "sending"
    FAILED = "failed"
    """It could not be sent, and is tried again."""
    CONFLICT = "conflict"
    """The origin has another version than the one that was changed. A user must decide."""
    HELD = "held"
    """Its bytes may not be what was written, or it was never closed. A user must decide."""


log = logging.getLogger(__name__)

KEPT = (UnsentState.CONFLICT, UnsentState.HELD)
"""The states of files that only a user sends or drops."""
_KEPT_STATES = {FileState.CONFLICT: UnsentState.CONFLICT, FileState.HELD: UnsentState.HELD}


class UnsentFile(NamedTuple):
    """One file that the origin does not have as it is here."""

    number: int
    """Its number in the spool, by which commands tell files of one path apart."""
    path: str
    """Below the mountpoint; "" if only its bytes are known."""
    state: UnsentState
    size_bytes: int
    sent_bytes: int
    """How much of it an upload in parts has brought to the origin."""
    reason: str
    """Why it is FAILED, CONFLICT or HELD."""
    changed_at: float
    """When its bytes were last changed, in seconds since the epoch."""
    next_try_s: float | None
    """In how many seconds it is sent without a close; None if that is not known."""


class UnsentCounts(NamedTuple):
    """How many unsent files there are in each state, and their bytes."""

    files: Counter[UnsentState]
    size_bytes: Counter[UnsentState]


class UnsentFiles:
    """The unsent files of one writable mount. All methods are synchronous, on the loop thread."""

    def __init__(self, spool: Spool, files: WrittenFiles, background: BackgroundSends) -> None:
        self.spool = spool
        self._files = files
        self._background = background

    def all(self) -> Iterator[UnsentFile]:
        """Yield all unsent files, those that were written first at first. There must be no await
        before the iterator has ended. Some 3 us for each file."""
        for staged in self.spool.files.values():
            entry = self.entry_of(staged)
            if _is_unsent(staged, entry):
                yield self._described(staged, entry)

    def get(self, number: int) -> UnsentFile | None:
        """Return the unsent file of this number."""
        staged = self.spool.files.get(number)
        if staged is None:
            return None
        entry = self.entry_of(staged)
        return self._described(staged, entry) if _is_unsent(staged, entry) else None

    def of_inode(self, ino: int) -> UnsentFile | None:
        """Return what is unsent of an inode; None for a file that the origin has."""
        entry = self._files.entry(ino)
        return None if entry is None else self.get(entry.staged.number)

    def counts(self) -> UnsentCounts:
        """Return the numbers of unsent files and bytes, by state."""
        files: Counter[UnsentState] = Counter()
        size_bytes: Counter[UnsentState] = Counter()
        for file in self.all():
            files[file.state] += 1
            size_bytes[file.state] += file.size_bytes
        return UnsentCounts(files, size_bytes)

    def log_rest(self) -> None:
        """Say in one line of the log what is left when the mount ends."""
        counts = self.counts()
        if count := sum(counts.files.values()):
            log.info(
                "unsent files in the spool: %d (%s) in %s; the next daemon goes on with them",
                count,
                format_bytes(sum(counts.size_bytes.values())),
                self.spool.space.root,
            )

    def sending(self) -> list[int]:
        """Return the numbers of the files that are being sent."""
        return self._files.sending()

    def entry_of(self, staged: StagedFile) -> WrittenFile | None:
        """Return the entry of the inode whose present content this is; None for a file that waits
        for a user."""
        entry = self._files.entry(staged.ino)
        return entry if entry is not None and entry.staged is staged else None

    def _described(self, staged: StagedFile, entry: WrittenFile | None) -> UnsentFile:
        state = _state_of(staged, entry)
        next_try_s = None
        if entry is not None and state in (UnsentState.WAITING, UnsentState.FAILED):
            next_try_s = self._background.next_try_s(entry.ino)
        return UnsentFile(
            staged.number,
            staged.path,
            state,
            staged.size_bytes,
            0 if staged.upload is None else staged.upload.sent_bytes,
            staged.reason,
            staged.changed_at_ns / 1e9,
            next_try_s,
        )


def _is_unsent(staged: StagedFile, entry: WrittenFile | None) -> bool:
    """Return whether the origin lacks the content. A file without a name is never sent."""
    if entry is None:
        return staged.state in _KEPT_STATES
    return entry.state is not State.STORED and entry.is_named


def _state_of(staged: StagedFile, entry: WrittenFile | None) -> UnsentState:
    if entry is None:
        return _KEPT_STATES[staged.state]
    if entry.state is State.SENDING:
        return UnsentState.SENDING
    if staged.state is FileState.FAILED:
        return UnsentState.FAILED
    return UnsentState.WAITING if staged.is_sealed else UnsentState.OPEN
