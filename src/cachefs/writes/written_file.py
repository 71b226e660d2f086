"""`WrittenFile`: one file whose content is in the spool."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Protocol

import trio

from cachefs.format.inode_record import Inode
from cachefs.namespace.reader import FileReader
from cachefs.origin.writable import MOST_PUT_BYTES, Condition
from cachefs.staging.extents import Source
from cachefs.staging.file_state import FileState, no_longer_here
from cachefs.staging.staged_file import StagedFile
from cachefs.types import BLOCK_BYTES, ObjectMeta

MOST_RANGES = 1 << 16
"""Up to so many written ranges of a file are tracked one by one: 16 bytes of memory each."""


class Marks(Protocol):
    """The relay's table, as far as it is told of unsent changes."""

    def mark_unsent(self, ino: int, is_unsent: bool, /) -> None: ...


class State(Enum):
    """The state of a file that has an entry in `WrittenFiles`."""

    UNSENT = auto()
    SENDING = auto()
    STORED = auto()


class WrittenFile:
    """One file with an entry; owned by `WrittenFiles`. Loop thread only."""

    def __init__(self, ino: int, staged: StagedFile, base: FileReader | None) -> None:
        """`base` reads the version on which partial changes are based."""
        self.ino = ino
        self.staged = staged
        self.base = base
        self.state = State.UNSENT
        self.meta: ObjectMeta | None = None
        """The version that the origin has, while the state is STORED."""
        self.is_named = True
        self.is_shown_open = False
        """It is sent before a close, too: a part has changed, or it was created for appending."""
        self.writers: set[int] = set()
        """The processes that have changed the file since it was sent last. The close of one of them
        sends it. 0 stands for all processes."""
        self.late_writers: set[int] = set()
        """Those of them that have changed it since the present sending took its content."""
        self.lock = trio.Lock()
        """Held while the file or a part is sent, and while it is renamed or removed."""
        self.sent = trio.Event()
        """Set when the present sending ends."""
        self.keeps_writers_out = False
        """Writers wait until the present sending ends, because it was overtaken several times."""
        self.knows_parts = True
        """Whether this daemon has seen which parts of the upload the origin has."""
        self.failed_lists = 0
        """How many sendings have failed because the parts of the upload could not be listed."""
        self.in_order_bytes = 0
        """The file was written without a gap up to here."""
        self.ahead_at_bytes = MOST_PUT_BYTES + 1
        """When it is written up to here, full parts are sent."""
        self.ahead: trio.CancelScope | None = None
        """Cancelling it ends the sending of full parts."""
        self.sending_parts: trio.CancelScope | None = None
        """Cancelling it ends a sending that has not asked the origin to complete its upload."""
        self.absent_generation = 0
        """The generation of which it is known that the origin does not have it."""
        self.closes = 0
        """How many closes and fsyncs send the file now, or wait until they can."""
        self.was_closed = False
        """Whether a close or fsync has tried to send it, and it was not stored as a whole since."""
        self._truncations = 0
        self._rested = trio.Event()

    @property
    def has_open_upload(self) -> bool:
        """Whether an upload in parts has begun, or may have, and not ended."""
        upload = self.staged.upload
        return self.staged.start is not None or (upload is not None and bool(upload.upload_id))

    @property
    def is_small(self) -> bool:
        """Whether a single request can send the file."""
        return self.staged.size_bytes <= MOST_PUT_BYTES and not self.staged.freed_bytes

    @property
    def is_in_upload(self) -> bool:
        """Whether the present content may be stored already, and the spool does not have all of it:
        then no other content can be sent."""
        return (
            self.state is State.UNSENT
            and self.staged.freed_bytes > 0
            and self.was_asked_for_present
        )

    @property
    def is_in_doubt(self) -> bool:
        """Whether the origin may have the content although no sending has succeeded: the answer was
        lost, or the daemon that sent it was killed."""
        return (
            self.state is State.UNSENT
            and self.is_named
            and self.staged.generation != self.absent_generation
            and self.was_asked_for_present
        )

    @property
    def was_asked_for_present(self) -> bool:
        """Whether the origin was asked to store the present content, as a whole."""
        upload = self.staged.upload
        return upload is not None and upload.asked_generation == self.staged.generation

    def may_be_published(self, is_at_origin: bool) -> bool:
        """Return whether the content may be sent although no process closes the file. An empty one
        may replace the object (`is_at_origin`): no close follows if a name was truncated."""
        if self.staged.refused_at is not None:
            return False
        is_emptied = is_at_origin and not self.staged.size_bytes
        return self.staged.is_sealed or self.is_shown_open or is_emptied

    async def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset`, fewer only at the end of the file. Raises
        `SpoolError` or the origin's error."""
        found: list[bytes] = []
        for piece in self.staged.pieces(offset, size):
            if piece.source is Source.SPOOL:
                found.append(await self.staged.read_spool(piece.offset, piece.length))
            elif piece.source is Source.ZEROS:
                found.append(bytes(piece.length))
            elif piece.source is Source.UPLOAD:
                raise no_longer_here(self.staged.path, self.staged.freed_bytes)
            else:
                found.append(await self._read_base(piece.offset, piece.length))
        return found[0] if len(found) == 1 else b"".join(found)

    async def _read_base(self, offset: int, size: int) -> bytes:
        assert self.base is not None
        parts = []
        while size > 0:
            length = min(size, BLOCK_BYTES)
            data = self.base.read_now(offset, length)
            parts.append(bytes(await self.base.read(offset, length) if data is None else data))
            offset += length
            size -= length
        return b"".join(parts)

    # -- changes -----------------------------------------------------------------------------------

    @property
    def is_scattered(self) -> bool:
        """Whether so many ranges were written that no block may get more: see `fill`."""
        extents = self.staged.extents
        return extents is not None and len(extents) > MOST_RANGES

    async def fill(self, begin: int, end: int) -> None:
        """Write the bytes of the base to the gaps of the blocks that have a byte of [begin, end).
        Each of them then counts as one range, so memory and journal stay bounded. There must be
        room in the spool for these blocks. Raises `SpoolError` or the origin's error."""
        for start in range(begin - begin % BLOCK_BYTES, end, BLOCK_BYTES):
            data = await self.read(start, BLOCK_BYTES)
            # What is a piece of the base now was one before the await, with the same bytes.
            for source, offset, length in self.staged.pieces(start, BLOCK_BYTES):
                at = offset - start
                if source is Source.BASE:
                    self.staged.write(offset, data[at : at + length])
                elif source is Source.ZEROS:
                    self.staged.write(offset, bytes(length))

    def note_writer(self, process: int) -> None:
        """Note that the process (0: any) has changed the file."""
        self.writers.add(process)
        self.late_writers.add(process)

    async def truncate(self, size_bytes: int) -> None:
        """Set the size, in several steps if it is large: nothing in between is sent. The first step
        is done before the first await."""
        self._truncations += 1
        try:
            if size_bytes == 0 and self.staged.expected_version:
                self.staged.set_exclusive(False)  # from now on it is replaced as a whole
            await self.staged.truncate(size_bytes)
        finally:
            self._truncations -= 1
            self.in_order_bytes = min(self.in_order_bytes, size_bytes)
            self._rested.set()
            self._rested = trio.Event()

    async def rest(self) -> None:
        """Wait until no truncation is half done."""
        while self._truncations:
            await self._rested.wait()

    @property
    def is_at_rest(self) -> bool:
        """Whether no truncation is half done."""
        return not self._truncations

    def is_still(self, generation: int) -> bool:
        """Return whether the content is that of the generation, and no truncation is half done."""
        return not self._truncations and self.staged.generation == generation

    # -- sending -----------------------------------------------------------------------------------

    @contextmanager
    def closing(self, is_close: bool) -> Iterator[None]:
        """Let the sendings in this context replace what is there, if `is_close`."""
        self.closes += is_close
        try:
            yield
        finally:
            self.closes -= is_close

    def is_close_of(self, process: int) -> bool:
        """Return whether the close or fsync of this process (0: unknown) counts as one of the
        content. Otherwise it only repeats the sending of what was closed before."""
        return process in self.writers or not self.staged.is_sealed

    @property
    def condition(self) -> Condition | None:
        """The condition under which the present content may be stored. The close of a file that was
        written as a whole replaces what is there. A later repetition must not."""
        staged = self.staged
        if staged.base is None and self.closes and not staged.is_exclusive:
            return None
        return Condition(staged.expected_version or None)

    def begin_sending(self) -> None:
        """Note that the present content is what is sent."""
        self.staged.seal()
        self.staged.begin_sending()
        self.late_writers.clear()

    def end_sending(self, state: State) -> None:
        """Note that a sending ended with this state of the file, and wake those who wait."""
        self.state = state
        self.keeps_writers_out = False
        self.sent.set()
        self.sent = trio.Event()

    def stop_ahead(self) -> None:
        """Break off the sending of full parts. It gives the lock back soon."""
        if self.ahead is not None:
            self.ahead.cancel()

    def stop_parts(self) -> None:
        """Let the sender of parts of the file give the lock back soon. A close or fsync takes it
        again afterwards, and sends the file under its new name, if it still has one. Once the
        origin was asked to store the file, it is too late: then the lock comes with the answer."""
        self.stop_ahead()
        if self.sending_parts is not None:
            self.sending_parts.cancel()


def restored(inode: Inode, staged: StagedFile) -> WrittenFile:
    """Return an entry, without the reader of its base, for a staged file that an earlier daemon has
    left."""
    if staged.expected_version is None:
        staged.expected_version = inode.version
    file = WrittenFile(inode.ino, staged, None)
    file.note_writer(0)  # the daemon before knew them
    file.is_shown_open = staged.base is not None
    file.knows_parts = False
    has_failed = staged.state is FileState.FAILED and staged.refused_at is None
    file.was_closed = staged.is_sealed or has_failed
    if staged.base is None:
        file.in_order_bytes = staged.size_bytes
    return file


def nameless(staged: StagedFile) -> WrittenFile:
    """Return an entry for a staged file that no name refers to."""
    file = WrittenFile(staged.ino, staged, None)
    file.is_named = False
    return file
