"""The bytes that processes write: from the first write until the origin and the cache have them.

A file of a writable mount is in one of these states:

- clean: an object version, as on a read-only mount. It has no entry here.
- unsent: it has changes that the origin does not have. They lie in the spool, which is their only
  copy. Its name is held (`namespace/own_names.py`), and the relay passes its FLUSH on.
- sending: a close or fsync waits until the origin has the content. What is changed meanwhile makes
  it unsent again (`sender.py` says why no object is a mix of two contents).
- stored: the origin has the content. The cache is given the blocks from the spool; until then
  reads are served from the spool.

Code between two awaits is atomic on the loop; the methods say where this matters.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import CachefsError, ConflictError, ObjectChangedError, SpoolError
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import Namespace
from cachefs.namespace.own_changes import OwnChanges
from cachefs.namespace.reader import FileReader, Readers
from cachefs.origin.writable import MOST_PUT_BYTES
from cachefs.staging.spool import Spool
from cachefs.staging.staged_file import StagedFile
from cachefs.types import BLOCK_BYTES, ObjectMeta, Posix
from cachefs.writes.jobs import FileJobs
from cachefs.writes.processes import Untold, check_alive
from cachefs.writes.sending.ahead import PartsAhead
from cachefs.writes.sending.doubts import Doubts
from cachefs.writes.sending.sender import Sender, destination_of
from cachefs.writes.sending.to_cache import give_to_cache
from cachefs.writes.written_file import Marks, State, WrittenFile, nameless, restored

_ROOM_S = 60.0
"""How long a write waits for room in the spool before it fails with ENOSPC."""

log = logging.getLogger(__name__)


class WrittenFiles:
    """All files of one writable mount that have an entry."""

    def __init__(
        self,
        namespace: Namespace,
        changes: OwnChanges,
        readers: Readers,
        cache: BlockCache,
        spool: Spool,
        sender: Sender,
        marks: Marks | None,
        withdraw: Callable[[int, int], None],
    ) -> None:
        """`withdraw(ino, block_count)` makes the relay serve none of the file's blocks."""
        self._namespace = namespace
        self._changes = changes
        self._readers = readers
        self._cache = cache
        self._spool = spool
        self._sender = sender
        self._marks = marks
        self._withdraw = withdraw
        self._files: dict[int, WrittenFile] = {}
        self._removed: set[int] = set()
        """Inodes without a name that this mount has removed or replaced itself: those who have them
        open may go on. Nothing would send changes of others that have no name."""
        self.untold = Untold(marks)
        self._ahead = PartsAhead(sender, partial(destination_of, namespace))
        self._jobs = FileJobs()
        self._doubts = Doubts(sender, self._is_entry, self._note_sent)

    async def run(self) -> None:
        """Do what no process waits for. Never returns."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ahead.run)
            nursery.start_soon(self._jobs.run)

    async def finish(self) -> None:
        """Do at the end of the mount what must not be left: drop uploads that nobody needs."""
        await self._jobs.finish(self._give_to_cache)
        await self._sender.abort_rest()

    def has(self, ino: int) -> bool:
        """Return whether the file's content is in the spool, at least in part."""
        return ino in self._files

    def entry(self, ino: int) -> WrittenFile | None:
        """Return the entry of an inode; None for a clean file."""
        return self._files.get(ino)

    def is_current(self, ino: int, object_id: bytes) -> bool:
        """Return whether the content of the inode is this object, and nothing else."""
        return ino not in self._files and self._readers.get(ino).ref.object_id == object_id

    def sending(self) -> list[int]:
        """Return the numbers in the spool of the files that are being sent."""
        return [file.staged.number for file in self._files.values() if file.state is State.SENDING]

    def unsent(self) -> list[int]:
        """Return the inode numbers of all unsent files that have a name."""
        files = self._files.items()
        return [ino for ino, file in files if file.state is not State.STORED and file.is_named]

    def generations_to_send(self) -> dict[int, int]:
        """Return, by inode number, the generations of the unsent files that may be sent although
        no process closes them."""
        return {
            ino: file.staged.generation
            for ino, file in self._files.items()
            if file.state is State.UNSENT
            and file.is_named
            and file.may_be_published(bool(self._namespace.inode(ino).version))
        }

    def restore(self, is_successor: bool) -> None:
        """Take over the files of the spool that an earlier daemon has left.

        If the kernel has not asked this mount anything before (`is_successor` is false), no process
        has them open. A file that was never closed is then held until a user decides."""
        for staged in list(self._spool.files.values()):
            if not staged.is_attached:
                continue
            inode = self._namespace.table.get(staged.ino)
            if not staged.path and (inode is None or not is_successor):
                self._jobs.start(self._drop, nameless(staged))  # it was removed
            elif inode is None or inode.is_dir:
                staged.hold("its name is not known any more")
                self._jobs.start(self._drop_upload, nameless(staged))
            elif not is_successor and not staged.is_sealed:
                staged.hold("it was never closed")
                self._jobs.start(self._drop_upload, nameless(staged))
                self._changes.give_up(staged.ino)
            else:
                self._restore_one(inode, staged)

    def _restore_one(self, inode: Inode, staged: StagedFile) -> None:
        base = None
        if staged.base is not None:
            before = self._namespace.ref_at(staged.path, staged.base)
            base = self._readers.new(inode, before)
        file = self._files[inode.ino] = restored(inode, staged, base)
        file.is_named = self._changes.is_named(inode.ino)
        self._changes.note_content(inode.ino, staged.size_bytes, staged.mtime_ns)
        if file.is_named:
            self._changes.hold(inode.ino)
        elif staged.upload is not None or file.has_open_upload:
            self._jobs.start(self._drop_upload, file)

    def is_unsent(self, ino: int) -> bool:
        """Return whether the file has changes that the origin does not have."""
        file = self._files.get(ino)
        return file is not None and file.state is not State.STORED

    # -- changes -----------------------------------------------------------------------------------

    def begin_new(self, inode: Inode, path: str, *, exclusive: bool, appends: bool) -> None:
        """Note a new, empty file. With `exclusive`, sending fails if the origin has one of this
        name. `appends`: it is opened for appending. Raises `SpoolError`."""
        self._add(inode.ino, self._stage(inode, path, None, exclusive), None, appends)

    def _stage(
        self, inode: Inode, path: str, base: ObjectMeta | None, is_exclusive: bool = False
    ) -> StagedFile:
        """Begin a staged file with the inode's owner, group and mode; or none. Raises
        `SpoolError`."""
        staged = self._spool.begin(
            *(inode.ino, path, base), is_exclusive=is_exclusive, expected_version=inode.version
        )
        try:
            staged.set_attributes(posix=inode.posix)
        except CachefsError:
            staged.drop()
            raise
        return staged

    def note_writer(self, ino: int, process: int) -> None:
        """Note that the process (0: any) has changed the file, if it has unsent changes."""
        if self.is_unsent(ino):
            self._files[ino].note_writer(process)

    async def write(self, ino: int, offset: int, data: bytes, process: int) -> None:
        """Write all of `data` at `offset`, for a process (0: unknown). Raises `SpoolFullError`, or
        `ObjectChangedError` for an inode that is gone."""
        file = self._files.get(ino)
        if file is not None and file.is_scattered:
            await self._spool.reserve(len(data) + 2 * BLOCK_BYTES, _ROOM_S)
            await file.fill(offset, offset + len(data))
        began_at = trio.current_time()
        await self._spool.reserve(len(data), _ROOM_S)
        file = await self._changeable(ino)
        check_alive(process, began_at)
        file.staged.write(offset, data)
        self._note_change(file, process)
        self._ahead.note_write(file, offset, offset + len(data))

    async def truncate(self, ino: int, size_bytes: int, process: int) -> None:
        """Set the file's size. Bytes that this adds are zeros. Raises the errors of `write`."""
        began_at = trio.current_time()
        file = await self._changeable(ino, is_whole=size_bytes == 0)
        check_alive(process, began_at)
        await file.truncate(size_bytes)
        self._note_change(file, process)
        if size_bytes <= MOST_PUT_BYTES and file.has_open_upload:
            self._jobs.start(self._drop_upload, file)

    async def _drop_upload(self, file: WrittenFile) -> None:
        """Drop the upload of a file that has become small or has lost its name."""
        file.stop_ahead()
        async with file.lock:
            if not file.is_named or file.staged.size_bytes <= MOST_PUT_BYTES:
                await self._sender.drop_upload(file.staged)

    async def _changeable(self, ino: int, *, is_whole: bool = False) -> WrittenFile:
        """Return the entry of a file that may be changed; make one for a clean file. There must be
        no await between this and the change. With `is_whole`, the change replaces all bytes."""
        while (file := self._files.get(ino)) is not None:
            if file.keeps_writers_out:
                await file.sent.wait()
            elif file.is_in_doubt:
                await self._doubts.end(file)
            elif file.state is State.STORED:
                self._end(file)
            else:
                return file
        return self._begin_change(self._namespace.inode(ino), is_whole)

    def _begin_change(self, inode: Inode, is_whole: bool) -> WrittenFile:
        is_lost = not (inode.ino in self._removed or self._changes.is_named(inode.ino))
        if inode.is_dir or not inode.version or is_lost:
            raise ObjectChangedError(f"no name of the origin refers to inode {inode.ino} any more")
        ref = self._namespace.object_ref(inode)
        base = None if is_whole or not inode.size_bytes else ref.meta
        # A part of an empty file has no base, but depends on its version, too.
        staged = self._stage(inode, ref.path, base, not (is_whole or inode.size_bytes))
        reader = None if base is None else self._readers.new(inode, ref)
        # From here on nobody gets the old version's bytes as those of this inode.
        self._withdraw(inode.ino, ref.block_count)
        self._readers.drop(inode.ino)
        return self._add(inode.ino, staged, reader, not is_whole)

    def _add(
        self, ino: int, staged: StagedFile, base: FileReader | None, is_shown_open: bool
    ) -> WrittenFile:
        file = self._files[ino] = WrittenFile(ino, staged, base)
        file.is_shown_open = is_shown_open
        file.is_named = self._changes.is_named(ino)
        if file.is_named:
            self._mark(file, True)
        return file

    def _mark(self, file: WrittenFile, is_unsent: bool) -> None:
        if is_unsent:
            self._changes.hold(file.ino)
        if self._marks is not None:
            self._marks.mark_unsent(file.ino, is_unsent)

    def _note_change(self, file: WrittenFile, process: int) -> None:
        file.note_writer(process)
        staged = file.staged
        self._changes.note_content(file.ino, staged.size_bytes, staged.mtime_ns)

    # -- reading -----------------------------------------------------------------------------------

    async def read(self, ino: int, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset`, fewer only at the end of the file. Raises
        `SpoolError` also if the entry has ended: then the cache reads the file."""
        while (file := self._files.get(ino)) is not None:
            try:
                return await file.read(offset, size)
            except SpoolError:
                # Another change has begun meanwhile, on top of what the origin has.
                if self._files.get(ino) in (file, None):
                    raise
            except ObjectChangedError:
                if not await self._doubts.has_replaced_base(file):
                    raise
                if self._is_stored(file) and file.is_named:
                    self._end(file)
        raise SpoolError(f"inode {ino} is no longer in the spool")

    # -- sending -----------------------------------------------------------------------------------

    async def close(self, ino: int, process: int) -> None:
        """Send the file if this process (0: unknown) has changed it. The close of another process,
        such as a reader or a child that has inherited the file, waits for nothing, and reports no
        error of a writer. Raises the errors of `send`."""
        file = self._files.get(ino)
        if file is None or (process and not file.writers & {process, 0}):
            return
        try:
            await self.send(ino, is_close=file.is_close_of(process))
        except CachefsError:
            file.writers -= {process, 0}  # it knows; the closes of other writers try again
            raise

    async def send(self, ino: int, *, is_close: bool) -> None:
        """Send a file's unsent changes to the origin. When this returns, the origin has all that
        were made before the call. Only with `is_close` it replaces a version of others.

        Raises `ConflictError` if the origin has another version than the one that was changed in
        part, or the origin's error. The bytes then stay in the spool.
        """
        file = self._files.get(ino)
        if file is None:
            return
        with file.closing(is_close):
            await self._send(file)

    async def _send(self, file: WrittenFile) -> None:
        async with file.lock:
            if file.state is not State.UNSENT or not file.is_named:
                return
            if self._files.get(file.ino) is not file:
                raise ConflictError(file.staged.reason)
            condition = file.condition
            file.state, state = State.SENDING, State.UNSENT
            try:
                if file.closes:
                    file.staged.seal()  # whatever fails from here on, it is sent again
                path, describe = destination_of(self._namespace, file)
                meta = await self._sender.earlier_result(file, path)
                if meta is not None:
                    state = self._note_sent(file, meta)
                if state is State.UNSENT:
                    state = self._note_sent(file, await self._sender.send(file, path, describe))
            except (ConflictError, ObjectChangedError) as error:
                if condition is not None and file.condition is None:
                    file.staged.fail(str(error))  # a close has come meanwhile, and sends it again
                else:
                    self._note_conflict(file, error)
                raise
            except CachefsError as error:
                file.staged.fail(str(error))
                raise
            finally:
                file.end_sending(state)
        if state is State.STORED:
            self._jobs.start(self._give_to_cache, file)

    def _note_sent(self, file: WrittenFile, meta: ObjectMeta) -> State:
        """Note that the origin has the content as of the sending. Return the file's new state.
        Atomic."""
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
            self._mark(file, False)
            return State.STORED
        if staged.base is not None:
            before = self._namespace.ref_at(staged.path, staged.base)
            file.base = self._readers.new(self._namespace.inode(file.ino), before)
        return State.UNSENT

    def _note_conflict(self, file: WrittenFile, error: CachefsError) -> None:
        """Note that the origin refused the content, or no longer has the rest of it. The bytes stay
        in the spool, and the name shows the origin's version from now on. Atomic."""
        path = file.staged.path
        log.warning("%s was not stored, and its bytes stay in the spool: %s", path, error)
        file.staged.conflict(str(error))
        self.untold.add(file.ino, file.writers, str(error))
        self.give_up(file)

    def give_up(self, file: WrittenFile) -> None:
        """End the entry of a conflict, or of a file whose unsent changes a user has dropped."""
        del self._files[file.ino]
        self._mark(file, False)
        self._changes.give_up(file.ino)

    def _end(self, file: WrittenFile) -> None:
        """Remove the entry and the bytes of a stored file. Atomic."""
        del self._files[file.ino]
        file.staged.discard()

    async def _give_to_cache(self, file: WrittenFile) -> None:
        """Give the blocks of a stored file to the cache, and end its entry. Ends early if the file
        changes. The bytes of a file that has lost its name stay for those who have it open."""
        if self._is_stored(file):
            ref = self._namespace.object_ref(self._namespace.inode(file.ino))
            await give_to_cache(file, ref, self._cache, lambda: self._is_stored(file))
        if self._is_stored(file) and file.is_named:
            self._end(file)

    def _is_stored(self, file: WrittenFile) -> bool:
        """Return whether this is still the entry of its inode, and the origin has its content."""
        return file.state is State.STORED and self._is_entry(file)

    def _is_entry(self, file: WrittenFile) -> bool:
        """Return whether this is still the entry of its inode."""
        return self._files.get(file.ino) is file

    async def send_changed(self, ino: int) -> None:
        """Send the file if it is unsent and the origin has an older version of it, or may have."""
        if self.is_unsent(ino) and (self._namespace.inode(ino).version or self.was_sent(ino)):
            await self.send(ino, is_close=False)

    def was_sent(self, ino: int) -> bool:
        """Return whether the origin was asked to store an unsent file: it may have it, even though
        this is not known."""
        file = self._files.get(ino)
        return file is not None and file.staged.upload is not None

    def unsent_below(self, directory: str) -> list[int]:
        """Return the inode numbers of the unsent files below a directory."""
        start = f"{directory}/"
        return [ino for ino, file in self._files.items() if file.staged.path.startswith(start)]

    def note_moved(self, old: str, new: str) -> None:
        """Note that a directory has the path `new` instead of `old`."""
        for ino in self.unsent_below(old):
            self._note_path(self._files[ino], new + self._files[ino].staged.path[len(old) :])

    # -- names -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def quiet(self, ino: int) -> AsyncIterator[None]:
        """Keep the file from being sent while its name changes."""
        file = self._files.get(ino)
        if file is None:
            yield
            return
        file.stop_ahead()
        async with file.lock:
            yield

    def note_attributes(self, ino: int, posix: Posix, mtime_ns: int | None) -> bool:
        """Note attributes that travel with the file's next upload, if it has unsent changes. Return
        whether it has. Raises `SpoolError`."""
        file = self._files.get(ino)
        if file is None or file.state is not State.UNSENT:
            return False
        file.staged.set_attributes(mtime_ns, posix)
        return True

    def note_path(self, ino: int, path: str, version: str) -> None:
        """Note that the file has another name now, which may have replaced a file. `version` is the
        one that the origin has of that name; "" for none."""
        file = self._files.get(ino)
        if file is not None:
            self._note_path(file, path)
            file.staged.set_exclusive(False)
            file.staged.expect(version)

    def _note_path(self, file: WrittenFile, path: str) -> None:
        file.staged.rename(path)
        if file.base is not None:
            before = self._namespace.ref_at(path, file.base.ref.meta)
            file.base = self._readers.new(self._namespace.inode(file.ino), before)

    def note_unnamed(self, ino: int) -> None:
        """Note that the file has no name any more. Processes that have it open still use it; it is
        never sent."""
        self._removed.add(ino)
        file = self._files.get(ino)
        if file is not None:
            if file.state is not State.STORED:
                self._mark(file, False)
            file.is_named = False
            with suppress(SpoolError):  # it would only be shown as lost after a crash
                file.staged.rename("")
            if file.has_open_upload:
                self._jobs.start(self._drop_upload, file)

    def forget(self, ino: int) -> None:
        """Remove a file without a name from the spool: no process has it open any more."""
        self._removed.discard(ino)
        self.untold.forget(ino)
        file = self._files.get(ino)
        if file is None or file.is_named:
            return
        if file.state is State.STORED:
            self._end(file)
            return
        del self._files[ino]
        if file.staged.upload is None and not file.has_open_upload:
            file.staged.drop()
        else:
            self._jobs.start(self._drop, file)

    async def _drop(self, file: WrittenFile) -> None:
        await self._drop_upload(file)
        file.staged.drop()
