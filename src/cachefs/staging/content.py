"""The content of a staged file: its spool file, its written ranges and its size."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EDQUOT, EFBIG, ENAMETOOLONG, ENOSPC, ENOSYS, EOPNOTSUPP
from functools import partial

import trio

from cachefs.errors import (
    CachefsError,
    FileTooLargeError,
    NameTooLongError,
    SpoolError,
    SpoolFullError,
    reason_of,
)
from cachefs.format.spool_record import (
    NONE_REFUSED,
    Attributes,
    Changed,
    Extent,
    Freed,
    PartsStale,
    Record,
    Refused,
    StateChanged,
    Synced,
    Truncate,
)
from cachefs.staging.extents import Extents, Piece, Source, pieces_of
from cachefs.staging.file_state import FileState, UploadProgress
from cachefs.staging.journal import SpoolJournal
from cachefs.staging.space import SpoolSpace
from cachefs.staging.spool_files import NotRestoredError, SpoolFiles
from cachefs.types import MOST_SIZE_BYTES, NO_POSIX, Buffer, ObjectMeta, Posix

FILE_CHARGE_BYTES = 4096
"""What a staged file is charged with besides its bytes."""
_STEP_BYTES = 16 << 20
"""How much of a spool file the loop frees at once."""
_ATTACHED = (FileState.OPEN, FileState.SENDING, FileState.FAILED)
_THREADS = 4


@dataclass(slots=True, frozen=True)
class SpoolParts:
    """The parts of a spool that its staged files use."""

    files: SpoolFiles
    journal: SpoolJournal
    space: SpoolSpace
    on_end: "Callable[[StagedContent], None]"
    """Called when a file is no longer staged."""
    on_discard: "Callable[[StagedContent], None]"
    """Called when nobody reads its bytes any more; the spool then removes them."""


_ERRORS: dict[int, type[CachefsError]] = {
    ENOSPC: SpoolFullError,
    EDQUOT: SpoolFullError,
    EFBIG: FileTooLargeError,
    ENAMETOOLONG: NameTooLongError,
}
"""By errno; any other becomes a `SpoolError`."""


@contextmanager
def spool_errors(path: str) -> Iterator[None]:
    """Raise a `SpoolError` for an `OSError`, or an error with its errno."""
    try:
        yield
    except OSError as error:
        kind = _ERRORS.get(error.errno or 0, SpoolError)
        raise kind(f"{path}: can't write to the spool: {reason_of(error)}") from error


class StagedContent:
    """The content of a staged file. Loop thread only.

    Methods that are not coroutines are bounded: they take as long as a copy into the page cache and
    an append to the journal, and wait for the disk only as `SpoolFiles.write` and `SpoolJournal`
    say. They raise `SpoolFullError` or `SpoolError`, and then the file is as before. What they
    acknowledge survives a killed daemon.
    """

    def __init__(
        self, parts: SpoolParts, number: int, ino: int, path: str, base: ObjectMeta | None
    ) -> None:
        self._parts = parts
        self.number = number
        """Its id in the spool, and the name of its spool file."""
        self.ino = ino
        self.path = path
        """The path relative to the mounted prefix; "" for a held file whose name is unknown."""
        self.size_bytes = 0 if base is None else base.size_bytes
        self.mtime_ns = 0 if base is None else base.mtime_ns
        self.posix: Posix = NO_POSIX
        """Owner, group and mode as far as a user has changed them; the rest is unknown."""
        self.base_bytes = self.size_bytes
        """How much of the base shows where nothing was written: the least size so far."""
        self.generation = 1
        """Grows with each write and truncation."""
        self.is_sealed = False
        """Whether a user has closed or synced the present content, so that it may be published."""
        self.synced: Synced | None = None
        """The last record of a sync, if the content has not changed since."""
        self.state = FileState.OPEN
        self.reason = ""
        """Why its state is CONFLICT, FAILED or HELD, for the user."""
        self.upload: UploadProgress | None = None
        self.refused_at: int | None = None
        """The first offset of a write that was refused. While it is set, the file must not be
        published: a part of what a program wanted to write is missing."""
        self.freed_bytes = 0
        """Up to here only the parts of the upload have the bytes: see `free`."""
        self._base = base
        self._extents = None if base is None else Extents()
        self._least_bytes = 0
        """The least size since the last upload began."""
        self._stored_bytes = 0
        """How much of the spool file has space on the disk, at most."""
        self._spool_mtime_ns = 0
        """The mtime of the spool file, as far as it is known."""
        self._charged_bytes = 0
        self._charge()

    @property
    def changed_at_ns(self) -> int:
        """When the spool file was last changed, in nanoseconds since 1970."""
        return self._spool_mtime_ns

    @property
    def charged_bytes(self) -> int:
        """How much of the spool it has; 0 when its bytes were removed."""
        return self._charged_bytes

    @property
    def is_synced(self) -> bool:
        """Whether the present content survives a power cut."""
        return self.synced is not None

    @property
    def base(self) -> ObjectMeta | None:
        """The version that shows where nothing was written. None for a new file, and for one that
        was truncated to 0 and so is wholly replaced."""
        return self._base if self.base_bytes else None

    @property
    def extents(self) -> Extents | None:
        """The written ranges; None for a file that began without a base: its spool file has all of
        its content."""
        return self._extents

    @property
    def is_attached(self) -> bool:
        """Whether this is the content of its inode. False for a file that was dropped or published,
        and for one that waits for a user (CONFLICT, HELD)."""
        return self.state in _ATTACHED

    # -- reading -----------------------------------------------------------------------------------

    def pieces(self, offset: int, length: int) -> list[Piece]:
        """Return what makes up a range of the file, in order, without gaps. The range is cut at
        the end of the file."""
        end = min(offset + length, self.size_bytes)
        if offset >= end:
            return []
        if self._extents is None:
            kept = max(offset, min(end, self.freed_bytes))
            freed = Piece(Source.UPLOAD, offset, kept - offset)
            return [each for each in (freed, Piece(Source.SPOOL, kept, end - kept)) if each.length]
        return pieces_of(self._extents, self.base_bytes, offset, end)

    def data_from(self, offset: int) -> int | None:
        """Return where, from `offset` on, the first byte of the file is that is not in a hole; None
        if there is none. One system call. Raises `SpoolError`."""
        if self._extents is None:
            with spool_errors(self.path):
                found = self._parts.files.data_from(self.number, offset)
        else:
            found = offset if offset < self.base_bytes else self._extents.next_from(offset)
        return found if found is not None and found < self.size_bytes else None

    def read_spool_now(self, offset: int, length: int) -> bytes | None:
        """Return bytes of the spool file if the page cache has them, without a wait; else None.

        The range must be within a piece whose source is the spool."""
        with spool_errors(self.path):
            return self._parts.files.read_now(self.number, offset, length)

    async def read_spool(self, offset: int, length: int) -> bytes:
        """Do the same, and let a worker thread wait for the disk if need be. Raises `SpoolError`
        also if the file has become shorter, or has ended."""
        data = self.read_spool_now(offset, length)
        if data is None:
            read = partial(self._parts.files.read_slowly, self.number, offset, length)
            with spool_errors(self.path):
                data = await trio.to_thread.run_sync(read, abandon_on_cancel=True)
        if len(data) < length:
            raise SpoolError(f"{self.path}: its spool file is shorter than it must be")
        return data

    def spool_fd(self) -> int:
        """Return a descriptor of the spool file. It is valid until the caller's next await, so
        duplicate it. Raises `SpoolError`."""
        with spool_errors(self.path):
            return self._parts.files.fd(self.number)

    # -- writing -----------------------------------------------------------------------------------

    def write(self, offset: int, data: Buffer) -> None:
        """Write up to 1 MiB at `offset`. A file that tracks extents appends a record."""
        end = offset + memoryview(data).nbytes
        self._check(end)
        if offset == end:
            return
        self._check_kept(offset)
        with self._changing():
            # Behind the end of the file, zeros come between it and the write.
            self._before_change(min(offset, self.size_bytes), end)
            if self._extents is None:
                self._write_whole(offset, end, data)
            else:
                self._write_tracked(self._extents, offset, end, data)
            self.note_spool_mtime()
        self._has_changed(max(self.size_bytes, end))
        if self.refused_at is not None and offset <= self.refused_at < end:
            self._accept()

    def _write_whole(self, offset: int, end: int, data: Buffer) -> None:
        stop = min(end, self.size_bytes)
        undo = [(offset, stop)] if offset < stop else []
        self._parts.files.write(self.number, offset, data, undo, self.size_bytes)
        size_bytes = max(end, self.size_bytes)
        most = size_bytes - self.freed_bytes
        self._stored_bytes = min(self._stored_bytes + end - offset, most)

    def _write_tracked(self, extents: Extents, offset: int, end: int, data: Buffer) -> None:
        undo = extents.within(offset, end)
        undo_write = self._parts.files.write(self.number, offset, data, undo)
        record = Extent(self.number, offset, end - offset, self.generation + 1)
        self._append(record, otherwise=undo_write)
        extents.add(offset, end)
        self._stored_bytes = extents.total_bytes

    async def truncate(self, size_bytes: int) -> None:
        """Change the size. What is added is zeros.

        The loop frees 16 MiB of a spool file in a step, and lets other tasks run in between. If
        the caller is cancelled, the size may be one in between."""
        self._check(size_bytes)
        if size_bytes:
            self._check_kept(size_bytes)
        if self.refused_at is not None and size_bytes <= self.refused_at:
            self._accept()
        if self._extents is None:
            await self._truncate_whole(size_bytes)
        else:
            await self._truncate_tracked(self._extents, size_bytes)

    async def _truncate_whole(self, size_bytes: int) -> None:
        """Truncate a file whose spool file has all of its content. Each step leaves a valid file,
        because the size is the spool file's."""
        while self._stored_bytes > _STEP_BYTES and self.size_bytes - size_bytes > _STEP_BYTES:
            self._truncate_step(self.size_bytes - _STEP_BYTES)
            await trio.lowlevel.checkpoint()
            self._check(size_bytes)
        self._truncate_step(size_bytes)

    def _truncate_step(self, size_bytes: int) -> None:
        with self._changing():
            self._before_change(min(size_bytes, self.size_bytes), MOST_SIZE_BYTES)
            self._parts.files.truncate(self.number, size_bytes)
            self.note_spool_mtime()
            if self.freed_bytes and not size_bytes:
                # Only now: if the file had its bytes still, the holes would count as zeros.
                self._append(Freed(self.number, 0), otherwise=self._hold_mixed)
                self.freed_bytes = 0
        self._stored_bytes = min(self._stored_bytes, size_bytes)
        self._has_changed(size_bytes)

    async def _truncate_tracked(self, extents: Extents, size_bytes: int) -> None:
        """Truncate a file that tracks extents. The record decides; what the spool file has behind
        the last extent is of no use, and is freed afterwards."""
        files, number = self._parts.files, self.number
        with self._changing():
            self._before_change(min(size_bytes, self.size_bytes), MOST_SIZE_BYTES)
            now_ns = time.time_ns()
            self._append(
                Truncate(number, size_bytes, self.generation + 1),
                Attributes(number, now_ns, self._spool_mtime_ns, self.posix),
            )
        self.mtime_ns = now_ns
        extents.cut(size_bytes)
        self.base_bytes = min(self.base_bytes, size_bytes)
        self._stored_bytes = extents.total_bytes
        self._has_changed(size_bytes)
        with spool_errors(self.path):
            while self.is_attached and files.status(number).st_size > extents.end:
                step = files.status(number).st_size - _STEP_BYTES
                files.truncate(number, max(extents.end, step))
                self.note_spool_mtime()
                await trio.lowlevel.checkpoint()

    def _before_change(self, begin: int, end: int) -> None:
        """Record that a range changes, before it does. Such a record without a change is harmless;
        after a change without the record, stale parts could be published."""
        records: list[Record] = []
        if self.is_sealed or self.is_synced:
            records.append(Changed(self.number, self.generation + 1))
        stale = () if self.upload is None else self.upload.stale_parts(begin, end)
        if stale:
            records.append(PartsStale(self.number, stale))
        self._append(*records)
        self.is_sealed, self.synced = False, None
        if self.upload is not None:
            self.upload.forget(begin, end)
        if self.state is FileState.SENDING:
            self.state = FileState.OPEN

    def note_refused(self, offset: int, reason: str) -> bool:
        """Record that a write at `offset` was refused: nothing is published until it is repeated,
        or the file is truncated before it. A content that was closed or synced is one that a
        program wanted, so it stays one that may be published: then this returns False."""
        if self.is_sealed or not self.is_attached:
            return False
        if self.refused_at is not None and self.refused_at <= offset:
            return True
        self.refused_at = offset
        self.state, self.reason = FileState.FAILED, reason
        with suppress(OSError):  # the disk is full: then only this daemon knows it
            self._append(
                Refused(self.number, offset), StateChanged(self.number, self.state.value, reason)
            )
        return True

    def _accept(self) -> None:
        """Record that no write is missing any more. Raises `SpoolError`."""
        open_ = StateChanged(self.number, FileState.OPEN.value, "")
        with spool_errors(self.path):
            self._append(Refused(self.number, NONE_REFUSED), open_)
        self.refused_at, self.state, self.reason = None, FileState.OPEN, ""

    def _check_kept(self, offset: int) -> None:
        if offset < self.freed_bytes:
            raise SpoolFullError(
                f"{self.path}: its first {self.freed_bytes} bytes are at the source already, and "
                "can't be changed before it is closed: give the spool more room with --spool-size"
            )

    async def free(self, end_bytes: int) -> None:
        """Free the space of the bytes before `end_bytes`, which the upload has in finished parts.
        Until the file is at the origin they can be neither read nor changed. Only for a file that
        has no extents, and is neither sealed nor synced. Raises `SpoolError`.

        The record is on the disk first: after a power cut the holes must not count as zeros. A
        cancelled caller gets all of it done: later calls free only what comes behind."""
        with spool_errors(self.path), trio.CancelScope(shield=True):
            await self._free(self.freed_bytes, end_bytes)

    async def _free(self, first: int, end_bytes: int) -> None:
        number = self.number
        self._append(Freed(number, end_bytes))
        self.freed_bytes = end_bytes
        await self._parts.journal.sync()
        for offset in range(first, end_bytes, _STEP_BYTES):
            if self.freed_bytes < end_bytes or not self.is_attached:
                return  # it was truncated, and may have new bytes here
            length = min(_STEP_BYTES, end_bytes - offset)
            try:
                self._parts.files.free(number, offset, length)
            except OSError as error:
                if offset == first and error.errno in (EOPNOTSUPP, ENOSYS):  # nothing has gone
                    self._append(Freed(number, first))
                    self.freed_bytes = first
                raise
            self._stored_bytes = max(0, self._stored_bytes - length)
            self._spool_mtime_ns = self._parts.files.status(number).st_mtime_ns
            self._append(Attributes(number, self.mtime_ns, self._spool_mtime_ns, self.posix))
            self._charge()
            await trio.lowlevel.checkpoint()

    def note_spool_mtime(self) -> None:
        """Take over the mtime of the spool file, after a change of it. Raises `OSError`."""
        self.mtime_ns = self._spool_mtime_ns = self._parts.files.status(self.number).st_mtime_ns

    def note_begun(self, spool_mtime_ns: int) -> None:
        """Take over the mtime of the new spool file; a file with a base keeps the base's."""
        self._spool_mtime_ns = spool_mtime_ns
        if self._base is None:
            self.mtime_ns = spool_mtime_ns

    def _has_changed(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._least_bytes = min(self._least_bytes, size_bytes)
        self.generation += 1
        self._charge()

    def _charge(self) -> None:
        charged = self._stored_bytes + FILE_CHARGE_BYTES
        if charged != self._charged_bytes:
            self._parts.space.charge(charged - self._charged_bytes)
            self._charged_bytes = charged

    def _append(self, *records: Record, otherwise: Callable[[], None] | None = None) -> None:
        """Append records; if that fails, call `otherwise`. Raises `OSError`."""
        if not records:
            return
        try:
            self._parts.journal.append(self.number, *records)
        except OSError:
            if otherwise is not None:
                otherwise()
            raise

    def _check(self, size_bytes: int) -> None:
        if not self.is_attached:
            raise SpoolError(f"{self.path}: it can't be changed any more ({self.state.name})")
        if not 0 <= size_bytes <= MOST_SIZE_BYTES:
            raise FileTooLargeError(
                f"{self.path}: a file can't be larger than {MOST_SIZE_BYTES} bytes"
            )

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Raise a `SpoolError` for an `OSError`. If a failed write could not be undone, the file is
        held: it must not be published."""
        with spool_errors(self.path):
            try:
                yield
            except NotRestoredError:
                self._hold_mixed()
                raise

    def _hold_mixed(self) -> None:
        raise NotImplementedError
