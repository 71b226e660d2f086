"""The bytes of one part of a file, as worker threads read them while they send it."""

from collections.abc import Awaitable, Callable

import trio

from cachefs.errors import OriginError
from cachefs.origin.writable import Content, FileContent, ZeroContent
from cachefs.staging.extents import Source
from cachefs.staging.file_state import Part
from cachefs.types import Buffer
from cachefs.writes.written_file import WrittenFile


class PartChangedError(OriginError):
    """The content of a part has changed while it was sent."""


class PartContent(Content):
    """The bytes of a part. Reading fails with `PartChangedError` when they have changed."""

    def __init__(self, file: WrittenFile, part: Part) -> None:
        """`part` is what `StagedFile.begin_part` has returned in this step."""
        self.size_bytes = part.length
        self._part = part
        upload = file.staged.upload
        self._under_way = {} if upload is None else upload.under_way
        pieces = file.staged.pieces(part.offset, part.length)
        if all(piece.source is Source.ZEROS for piece in pieces):
            self._content: Content = ZeroContent(part.length)
        elif len(pieces) == 1 and pieces[0].source is Source.SPOOL:
            self._content = FileContent(file.staged.spool_fd(), part.offset, part.length)
        else:
            self._content = LoopContent(file.read, part.offset, part.length)
        self.is_zeros = self._content.is_zeros

    def read(self, offset: int, length: int) -> Buffer:
        """See `Content.read`."""
        try:
            data = self._content.read(offset, length)
        except OSError:
            self._check()
            raise
        self._check()
        return data

    def _check(self) -> None:
        if self._under_way.get(self._part.number) is not self._part:
            raise PartChangedError("the file has changed while it was sent")


class LoopContent(Content):
    """Bytes that only the loop can read, such as those of the base. The thread waits for the loop,
    so no more than one piece is in memory. Created on the loop."""

    def __init__(
        self, read: Callable[[int, int], Awaitable[bytes]], offset: int, size_bytes: int
    ) -> None:
        self.size_bytes = size_bytes
        self._read = read
        self._offset = offset
        self._token = trio.lowlevel.current_trio_token()

    def read(self, offset: int, length: int) -> Buffer:
        """See `Content.read`."""
        at = self._offset + offset
        data = trio.from_thread.run(self._read, at, length, trio_token=self._token)
        if len(data) < length:
            raise OSError("the file to be written has become shorter")
        return data
