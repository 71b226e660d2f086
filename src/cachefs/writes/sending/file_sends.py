"""`FileSends`: sends single files, and notes what has come of it.

`Sender` sends the content that a close or fsync waits for. Then the inode gets the version that the
origin has, and the cache gets the blocks. If the origin has another version than the one that was
changed, the bytes wait for a user.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import (
    CachefsError,
    ConflictError,
    ObjectChangedError,
    PartsLostError,
    SpoolError,
    SpoolFullError,
)
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import Namespace
from cachefs.namespace.own_changes import OwnChanges
from cachefs.namespace.reader import Readers
from cachefs.origin.on_behalf import expecting, present_caller
from cachefs.staging.file_state import FileState
from cachefs.staging.staged_file import StagedFile
from cachefs.types import ObjectMeta
from cachefs.writes.entries import Entries
from cachefs.writes.jobs import FileJobs
from cachefs.writes.processes import Untold
from cachefs.writes.sending.doubts import Doubts
from cachefs.writes.sending.sender import BrokenOffError, Sender
from cachefs.writes.sending.timeouts import SendTimeoutError
from cachefs.writes.sending.to_cache import give_to_cache
from cachefs.writes.written_file import State, WrittenFile

log = logging.getLogger(__name__)


class FileSends:
    """Sends the files of one writable mount. Loop thread only."""

    def __init__(
        self,
        namespace: Namespace,
        changes: OwnChanges,
        readers: Readers,
        cache: BlockCache,
        sender: Sender,
        entries: Entries,
        untold: Untold,
    ) -> None:
        self._namespace = namespace
        self._changes = changes
        self._readers = readers
        self._cache = cache
        self._sender = sender
        self._entries = entries
        self._untold = untold
        self._moving: dict[str, trio.Event] = {}
        """Directories that are being renamed."""
        self.jobs = FileJobs()
        """Work for single files that no process waits for."""
        self.doubts = Doubts(sender, entries.has, self._note_sent)
        self.keeps_attributes = sender.keeps_attributes

    async def finish(self) -> None:
        """Do at the end of the mount what must not be left: drop uploads that nobody needs."""
        await self.jobs.finish(self._give_to_cache)
        await self._sender.abort_rest()

    async def close(self, ino: int, process: int) -> None:
        """Send the file if this process (0: unknown) has changed it. The close of another process,
        such as a reader or a child that has inherited the file, waits for nothing, and reports no
        error of a writer. Raises the errors of `send`."""
        file = self._entries.get(ino)
        if file is None or (process and not file.writers & {process, 0}):
            return
        # A new file stays the one of its creator: a program of root may have inherited it.
        is_new = file.staged.caller is not None and not self._namespace.inode(ino).version
        if (caller := present_caller()) is not None and not is_new:
            file.staged.send_for(caller)
        try:
            await self.send(ino, is_close=file.is_close_of(process))
        except CachefsError:
            file.writers -= {process, 0}  # it knows; the closes of other writers try again
            raise

    async def send(self, ino: int, *, is_close: bool) -> None:
        """Send a file's unsent changes to the origin. When this returns, the origin has all that
        were made before the call. Only with `is_close` it replaces a version of others.

        Raises `ConflictError` if the origin has another version than the one that was changed in
        part, or the origin's error. The bytes then stay in the spool, and survive a power cut.
        """
        file = self._entries.get(ino)
        if file is None:
            return
        with file.closing(is_close):
            try:
                with self._sender.timeouts.limited(file.staged.path):
                    await self._send(file)
            except SendTimeoutError as error:
                await self._note_timeout(file, str(error))
                raise

    async def _note_timeout(self, file: WrittenFile, reason: str) -> None:
        """Let a file whose close has waited for too long be sent later."""
        staged = file.staged
        if file.state is State.STORED or not staged.is_attached:
            return
        if file.closes and staged.refused_at is None:
            staged.seal()
        if file.state is State.UNSENT:
            staged.fail(reason)
        await self._sync(staged)

    @contextmanager
    def moving(self, directory: str) -> Iterator[None]:
        """Let the sendings of all files below a directory wait while it is renamed. Those that have
        begun go on: `WrittenFiles.quiet` waits for them."""
        self._moving[directory] = trio.Event()
        try:
            yield
        finally:
            self._moving.pop(directory).set()

    def _move_of(self, file: WrittenFile) -> trio.Event | None:
        """Return what is set when the rename of a directory above the file has ended."""
        path = file.staged.path
        moves = self._moving.items()
        return next((ended for above, ended in moves if path.startswith(f"{above}/")), None)

    async def _send(self, file: WrittenFile) -> None:
        while True:
            async with file.lock:
                move = self._move_of(file)
                if move is None:
                    try:
                        await self._send_locked(file)
                        return
                    except BrokenOffError:
                        pass  # the change of its name or its attributes gets the lock now
                    except CachefsError:
                        await self._sync(file.staged)
                        raise
            if move is not None:
                await move.wait()

    async def _sync(self, staged: StagedFile) -> None:
        """Let the content that the origin did not take survive a power cut: nothing else has it."""
        if staged.is_synced or staged.state is FileState.ENDED:
            return
        try:
            await staged.sync()
        except SpoolError as error:
            log.warning("can't sync %s to the spool's disk: %s", staged.path, error)

    async def _send_locked(self, file: WrittenFile) -> None:
        if file.state is not State.UNSENT or not file.is_named:
            return
        if not self._entries.has(file):
            raise ConflictError(file.staged.reason)
        if file.staged.refused_at is not None:
            raise SpoolFullError(
                f"it is not sent, because a write was refused: {file.staged.reason}"
            )
        condition = file.condition
        file.state, state = State.SENDING, State.UNSENT
        try:
            if file.closes:
                file.was_closed = True
                file.staged.seal()  # whatever fails from here on, it is sent again
            inode = self._namespace.inode(file.ino)
            acting = self._sender.acting_for(file.staged, inode.posix)
            with acting, expecting(self._places(inode)):
                path, describe = self._sender.destination_of(self._namespace, file)
                meta = await self._sender.earlier_result(file, path)
                if meta is not None:
                    state = await self._note_sent(file, path, meta)
                if state is State.UNSENT:
                    meta = await self._sender.send(file, path, describe)
                    state = await self._note_sent(file, path, meta)
        except (ConflictError, ObjectChangedError) as error:
            if condition is not None and file.condition is None:
                file.staged.fail(str(error))  # a close has come meanwhile, and sends it again
            else:
                self._note_conflict(file, error)
            raise
        except PartsLostError as error:
            file.staged.hold(str(error))
            self._note_kept(file, error)
            raise
        except BrokenOffError:
            raise
        except CachefsError as error:
            file.staged.fail(str(error))
            raise
        finally:
            file.end_sending(state)
        if state is State.STORED:
            self.jobs.start(self._give_to_cache, file)

    def _places(self, inode: Inode) -> dict[str, str]:
        """Return which directory has the name of a file."""
        return self._namespace.places(self._namespace.inode(inode.parent))

    async def _note_sent(self, file: WrittenFile, path: str, meta: ObjectMeta) -> State:
        """Note that the origin has the content as of the sending. Return the file's new state.
        Atomic, once the cache has no other bytes of the version."""
        if self._sender.repeats_versions:
            await self._cache.drop_version(self._namespace.ref_at(path, meta))
        staged = file.staged
        is_present = staged.generation == staged.sending_generation
        if is_present:
            self._changes.note_stored(file.ino, meta)
            self._readers.drop(file.ino)  # it may be one of the version before
            self._namespace.write_ahead()  # before the spool forgets it
        else:
            self._changes.note_older_stored(file.ino, meta)
        try:
            is_stored = staged.finish(meta)
        except CachefsError:
            self._changes.hold(file.ino)
            raise
        file.writers = set(file.late_writers)
        if is_stored:
            file.meta = meta
            self._entries.mark(file, False)
            return State.STORED
        self._entries.take_base(file)
        return State.UNSENT

    def _note_conflict(self, file: WrittenFile, error: CachefsError) -> None:
        """Note that the origin refused the content, or no longer has the rest of it. The bytes stay
        in the spool, and the name shows the origin's version from now on. Atomic."""
        file.staged.conflict(str(error))
        self._note_kept(file, error)

    def _note_kept(self, file: WrittenFile, error: CachefsError) -> None:
        path = file.staged.path
        log.warning("%s was not stored, and its bytes stay in the spool: %s", path, error)
        self._untold.add(file.ino, file.writers, str(error))
        self._entries.give_up(file)

    async def _give_to_cache(self, file: WrittenFile) -> None:
        """Give the blocks of a stored file to the cache, and end its entry. Ends early if the file
        changes. The bytes of a file that has lost its name stay for those who have it open."""
        if self._entries.is_stored(file):
            ref = self._namespace.object_ref(self._namespace.inode(file.ino))
            await give_to_cache(file, ref, self._cache, lambda: self._entries.is_stored(file))
        if self._entries.is_stored(file) and file.is_named:
            self._entries.end(file)

    async def drop_upload(self, file: WrittenFile) -> None:
        """Drop the upload of a file that has become small or has lost its name."""
        file.stop_ahead()
        async with file.lock:
            if not file.is_named or file.is_small:
                await self._sender.drop_upload(file.staged)

    async def drop(self, file: WrittenFile) -> None:
        """Drop a file that nobody can use any more, and its upload."""
        await self.drop_upload(file)
        file.staged.drop()
