"""What a user decides about unsent files: send them, drop them, or save their content."""

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import ConflictError, NotFoundError, SpoolError
from cachefs.namespace.namespace import Namespace
from cachefs.origin.writable import Condition
from cachefs.staging.staged_file import StagedFile
from cachefs.writes.files import WrittenFiles
from cachefs.writes.sending.sender import Sender
from cachefs.writes.unsent.kept import StagedReader
from cachefs.writes.unsent.report import KEPT, UnsentFile, UnsentFiles, UnsentState
from cachefs.writes.written_file import State

_ABORT_S = 10.0
"""How long the drop of a file waits for the origin to drop its parts."""


class Decisions:
    """Carries out what users decide about the unsent files of one mount."""

    def __init__(
        self,
        unsent: UnsentFiles,
        files: WrittenFiles,
        namespace: Namespace,
        cache: BlockCache,
        sender: Sender,
    ) -> None:
        self._unsent = unsent
        self._files = files
        self._namespace = namespace
        self._cache = cache
        self._sender = sender
        self._busy: set[int] = set()
        """Numbers of the kept files that are being sent."""

    def reader(self, number: int) -> tuple[StagedFile, StagedReader]:
        """Return an unsent file, and what reads it. Raises `NotFoundError`."""
        self._found(number)
        staged = self._unsent.spool.files[number]
        return staged, StagedReader(staged, self._namespace, self._cache)

    def _found(self, number: int) -> UnsentFile:
        found = self._unsent.get(number)
        if found is None:
            raise NotFoundError(f"there is no unsent file with the id {number}")
        return found

    async def drop(self, number: int) -> UnsentFile:
        """Drop an unsent file, and return what it was. Raises `NotFoundError`; `SpoolError` for a
        file that is being written or sent."""
        found = self._found(number)
        staged = self._unsent.spool.files[number]
        entry = self._unsent.entry_of(staged)
        if found.state is UnsentState.OPEN:
            raise SpoolError(f"{found.path} is open: close it, or remove it")
        is_sending = entry is not None and (entry.state is State.SENDING or entry.lock.locked())
        if is_sending or number in self._busy:
            raise SpoolError(f"{found.path} is being sent now: try again when that has ended")
        upload = staged.upload
        staged.drop()
        if entry is not None:
            self._files.give_up(entry)
        if upload is not None and upload.upload_id:
            with trio.move_on_after(_ABORT_S):
                await self._sender.abort(upload.path, upload.upload_id, upload.write_id)
        return found

    async def send(self, number: int, *, overwrite: bool = False) -> UnsentFile:
        """Send an unsent file now, and return what it was before. A held file or a conflict is
        sent to its path, and leaves the spool after that. With `overwrite`, it replaces what is
        there; without, it replaces only the version that was changed.

        Raises `NotFoundError`, `ConflictError`, `SpoolError`, or the origin's error; the file then
        stays as it was."""
        found = self._found(number)
        staged = self._unsent.spool.files[number]
        entry = self._unsent.entry_of(staged)
        if entry is not None:
            await self._files.send(entry.ino, is_close=overwrite)
            return found
        if number in self._busy:
            raise SpoolError(f"{found.path} is being sent already")
        self._busy.add(number)
        try:
            await self._send_kept(staged, overwrite)
        finally:
            self._busy.discard(number)
        return found

    async def _send_kept(self, staged: StagedFile, overwrite: bool) -> None:
        if not staged.path:
            raise SpoolError("only the bytes of this file are known, not its name: save it")
        if any(each.path == staged.path and each.state not in KEPT for each in self._unsent.all()):
            raise SpoolError(
                f"{staged.path} was written again and is unsent, too: send or drop that first"
            )
        condition = None
        if not overwrite:
            condition = Condition(staged.expected_version or None)
        try:
            read = StagedReader(staged, self._namespace, self._cache).read
            await self._sender.send_kept(staged, read, condition)
        except ConflictError as error:
            raise ConflictError(
                f"{error}; save the file, or replace what is there: cachefs writes send "
                f"--overwrite {staged.number}"
            ) from error
        staged.drop()
