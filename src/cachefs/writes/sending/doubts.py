"""Finds out whether sendings have succeeded whose results are not known: their answers were lost,
or the daemon that sent the file was killed."""

from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from cachefs.errors import CachefsError
from cachefs.types import ObjectMeta
from cachefs.writes.sending.sender import Sender
from cachefs.writes.written_file import State, WrittenFile

_PATIENCE_S = 5.0


class Doubts:
    """The doubtful sendings of one mount."""

    def __init__(
        self,
        sender: Sender,
        is_entry: Callable[[WrittenFile], bool],
        note_sent: Callable[[WrittenFile, str, ObjectMeta], Awaitable[State]],
    ) -> None:
        """`is_entry` returns whether this is still the entry of its inode. `note_sent` notes that
        the origin has what was sent to a path, and returns the file's new state."""
        self._sender = sender
        self._is_entry = is_entry
        self._note_sent = note_sent

    async def end(self, file: WrittenFile) -> None:
        """Ask the origin whether it has the present content of a file in doubt, before a change:
        the change must be based on what the origin has."""
        async with file.lock:
            if file.is_in_doubt and self._is_entry(file):
                generation = file.staged.generation
                await self._look(file)
                file.absent_generation = generation

    async def has_replaced_base(self, file: WrittenFile) -> bool:
        """Find out, when the base of a file is gone, whether a sending of this mount or of an
        earlier daemon has replaced it. Then the file has another base, the origin has its present
        content, or its entry has ended."""
        base = file.base
        async with file.lock:
            if not self._is_entry(file):
                return True
            if file.state is State.UNSENT and file.is_named and file.base is base:
                await self._look(file)
        is_stored = file.state is State.STORED and file.is_named
        return is_stored or file.base is not base or not self._is_entry(file)

    async def _look(self, file: WrittenFile) -> None:
        """Ask the origin. If it is away, the next sending asks again."""
        upload, meta = file.staged.upload, None
        if upload is not None:
            with suppress(CachefsError), trio.move_on_after(_PATIENCE_S):
                meta = await self._sender.earlier_result(file, upload.path)
        if upload is not None and meta is not None:
            file.state = await self._note_sent(file, upload.path, meta)
