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
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from functools import partial

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import CachefsError, FileTooLargeError, ObjectChangedError, SpoolError
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import Namespace
from cachefs.namespace.own_changes import OwnChanges
from cachefs.namespace.reader import FileReader, Readers
from cachefs.origin.on_behalf import present_caller
from cachefs.staging.file_state import FileState, is_only_begun
from cachefs.staging.spool import Spool
from cachefs.staging.staged_file import StagedFile
from cachefs.types import BLOCK_BYTES, MOST_SIZE_BYTES, NO_POSIX, ObjectMeta, Posix
from cachefs.writes.entries import Entries
from cachefs.writes.processes import Untold, check_alive
from cachefs.writes.sending.ahead import PartsAhead
from cachefs.writes.sending.file_sends import FileSends
from cachefs.writes.sending.sender import Sender
from cachefs.writes.written_file import Marks, State, WrittenFile, nameless, restored

_ROOM_S = 60.0
"""When the spool got no room for so long, a write that waits for it fails with ENOSPC."""

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
        self._spool = spool
        self._withdraw = withdraw
        self._entries = Entries(namespace, changes, readers, marks)
        self._removed: set[int] = set()
        """Inodes without a name that this mount has removed or replaced itself: those who have them
        open may go on. Nothing would send changes of others that have no name."""
        self._refused: dict[int, tuple[int, str]] = {}
        """The first offset of the writes that were refused since a file was complete (clean, stored
        or closed), and why, by inode. The file lacks them once it changes."""
        self.untold = Untold(marks)
        self._timeouts = sender.timeouts
        self._ahead = PartsAhead(
            sender, partial(sender.destination_of, namespace), self._entries.all, spool.space
        )
        self._sends = FileSends(
            namespace, changes, readers, cache, sender, self._entries, self.untold
        )

    async def run(self) -> None:
        """Do what no process waits for. Never returns."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ahead.run)
            nursery.start_soon(self._sends.jobs.run)
            nursery.start_soon(self._timeouts.run)

    async def finish(self) -> None:
        """See `FileSends.finish`."""
        await self._sends.finish()

    def has(self, ino: int) -> bool:
        """Return whether the file's content is in the spool, at least in part."""
        return self._entries.get(ino) is not None

    def entry(self, ino: int) -> WrittenFile | None:
        """Return the entry of an inode; None for a clean file."""
        return self._entries.get(ino)

    def is_current(self, ino: int, object_id: bytes) -> bool:
        """Return whether the content of the inode is this object, and nothing else."""
        return not self.has(ino) and self._readers.get(ino).ref.object_id == object_id

    def sending(self) -> list[int]:
        """Return the numbers in the spool of the files that are being sent."""
        files = self._entries.all()
        return [file.staged.number for file in files if file.state is State.SENDING]

    def unsent(self) -> list[int]:
        """Return the inode numbers of all unsent files that have a name."""
        files = self._entries.all()
        return [file.ino for file in files if file.state is not State.STORED and file.is_named]

    def generations_to_send(self) -> dict[int, int]:
        """Return, by inode number, the generations of the unsent files that may be sent although
        no process closes them."""
        return {
            file.ino: file.staged.generation
            for file in self._entries.all()
            if file.state is State.UNSENT
            and file.is_named
            and file.may_be_published(bool(self._namespace.inode(file.ino).version))
        }

    def restore(self, is_successor: bool) -> None:
        """Take over the files of the spool that an earlier daemon has left.

        If the kernel has not asked this mount anything before (`is_successor` is false), no process
        has them open. A file that was never closed is then held until a user decides."""
        for staged in list(self._spool.files.values()):
            if not staged.is_attached:
                continue
            inode = self._namespace.table.get(staged.ino)
            is_useless = not staged.path or is_only_begun(staged)
            if is_useless and (inode is None or not is_successor):
                # It was removed, or created by a request without an answer, or nothing was written.
                if inode is not None and not inode.is_dir:
                    self._changes.give_up(inode.ino)
                self._sends.jobs.start(self._sends.drop, nameless(staged))
            elif inode is None or inode.is_dir:
                self._hold(staged, "its name is not known any more")
            elif staged.path and not self._changes.is_named(staged.ino):
                # A power cut has taken changes of names that the spool's journal has.
                self._hold(staged, "another file has its name")
            elif not is_successor and not staged.is_sealed:
                self._hold(staged, "it was never closed")
                self._changes.give_up(staged.ino)
            else:
                self._restore_one(inode, staged)

    def _hold(self, staged: StagedFile, reason: str) -> None:
        """Let a file that an earlier daemon has left wait for a user."""
        staged.hold(reason)
        if not staged.freed_bytes:
            self._sends.jobs.start(self._sends.drop_upload, nameless(staged))

    def _restore_one(self, inode: Inode, staged: StagedFile) -> None:
        file = restored(inode, staged)
        self._entries.take_base(file)
        self._changes.note_content(inode.ino, staged.size_bytes, staged.mtime_ns)
        self._entries.add(file)
        if not file.is_named and (staged.upload is not None or file.has_open_upload):
            self._sends.jobs.start(self._sends.drop_upload, file)

    def is_unsent(self, ino: int) -> bool:
        """Return whether the file has changes that the origin does not have."""
        file = self._entries.get(ino)
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
            inode.ino, path, base, is_exclusive=is_exclusive, expected_version=inode.version
        )
        try:
            staged.set_attributes(posix=self._stated(inode))
            if (caller := present_caller()) is not None:
                staged.send_for(caller)
        except CachefsError:
            staged.drop()
            raise
        return staged

    def _stated(self, inode: Inode) -> Posix:
        """Return what is stated of a file that nobody has given attributes yet. Where the origin
        keeps them, that is only the mode of a new file."""
        if not self._sends.keeps_attributes:
            return inode.posix
        return NO_POSIX if inode.version else Posix(mode=inode.posix.mode)

    def note_writer(self, ino: int, process: int) -> None:
        """Note that the process (0: any) has changed the file, if it has unsent changes."""
        file = self._entries.get(ino)
        if file is not None and file.state is not State.STORED:
            file.note_writer(process)

    async def write(self, ino: int, offset: int, data: bytes, process: int) -> None:
        """Write all of `data` at `offset`, for a process (0: unknown). Raises `SpoolFullError`, or
        `ObjectChangedError` for an inode that is gone. A file of which a write was refused is not
        sent before that write is repeated."""
        try:
            await self._write(ino, offset, data, process)
        except FileTooLargeError:
            raise  # there is no such place in any file
        except SpoolError as error:
            file = self._entries.get(ino)
            if file is None or not file.staged.note_refused(offset, str(error)):
                known, _ = self._refused.get(ino, (offset, ""))
                self._refused[ino] = min(known, offset), str(error)
            if file is not None:
                file.note_writer(process)  # its close fails, too
            raise

    async def _write(self, ino: int, offset: int, data: bytes, process: int) -> None:
        file = self._entries.get(ino)
        if file is not None and file.is_scattered:
            await self._reserve(file, len(data) + 2 * BLOCK_BYTES)
            await file.fill(offset, offset + len(data))
        began_at = trio.current_time()
        await self._reserve(file, len(data))
        file = await self._changeable(ino)
        check_alive(process, began_at)
        file.staged.write(offset, data)
        self._note_change(file, process)
        self._note_missing(file, offset, offset + len(data))
        self._ahead.note_write(file, offset, offset + len(data))

    async def _reserve(self, file: WrittenFile | None, more_bytes: int) -> None:
        space = self._spool.space
        if space.has_room(more_bytes):
            return
        holder = None if file is None else file.staged
        shrinks = file is not None and self._ahead.can_free(file)
        await space.reserve(more_bytes, _ROOM_S, holder, shrinks=shrinks)

    async def truncate(self, ino: int, size_bytes: int, process: int) -> None:
        """Set the file's size. Bytes that this adds are zeros. Raises the errors of `write`."""
        began_at = trio.current_time()
        file = await self._changeable(ino, is_whole=size_bytes == 0)
        check_alive(process, began_at)
        await file.truncate(size_bytes)
        self._note_change(file, process)
        self._note_missing(file, size_bytes, MOST_SIZE_BYTES)
        if file.is_small and file.has_open_upload:
            self._sends.jobs.start(self._sends.drop_upload, file)

    async def _changeable(self, ino: int, *, is_whole: bool = False) -> WrittenFile:
        """Return the entry of a file that may be changed; make one for a clean file. There must be
        no await between this and the change. With `is_whole`, the change replaces all bytes."""
        while (file := self._entries.get(ino)) is not None:
            if file.keeps_writers_out:
                await file.sent.wait()
            elif file.is_in_doubt:
                await self._sends.doubts.end(file)
            elif file.is_in_upload and not is_whole:
                raise SpoolError(f"{file.staged.path}: wait until the source has all of it")
            elif file.state is State.STORED:
                self._entries.end(file)
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
        file = WrittenFile(ino, staged, base)
        file.is_shown_open = is_shown_open
        self._entries.add(file)
        return file

    def _note_change(self, file: WrittenFile, process: int) -> None:
        file.note_writer(process)
        staged = file.staged
        self._changes.note_content(file.ino, staged.size_bytes, staged.mtime_ns)

    def _note_missing(self, file: WrittenFile, begin: int, end: int) -> None:
        """Let a content that was complete until this change of [begin, end) lack the write that was
        refused before."""
        offset, reason = self._refused.pop(file.ino, (begin, ""))
        if not begin <= offset < end:
            file.staged.note_refused(offset, reason)

    # -- reading -----------------------------------------------------------------------------------

    async def read(self, ino: int, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset`, fewer only at the end of the file. Raises
        `SpoolError` also if the entry has ended: then the cache reads the file."""
        while (file := self._entries.get(ino)) is not None:
            try:
                return await file.read(offset, size)
            except SpoolError:
                # Another change has begun meanwhile, on top of what the origin has.
                if self._entries.get(ino) in (file, None):
                    raise
            except ObjectChangedError:
                if not await self._sends.doubts.has_replaced_base(file):
                    raise
                if self._entries.is_stored(file) and file.is_named:
                    self._entries.end(file)
        raise SpoolError(f"inode {ino} is no longer in the spool")

    # -- sending -----------------------------------------------------------------------------------

    async def close(self, ino: int, process: int) -> None:
        """See `FileSends.close`."""
        await self._sends.close(ino, process)

    async def send(self, ino: int, *, is_close: bool) -> None:
        """See `FileSends.send`."""
        await self._sends.send(ino, is_close=is_close)

    def give_up(self, file: WrittenFile) -> None:
        """See `Entries.give_up`."""
        self._entries.give_up(file)

    async def send_changed(self, ino: int) -> None:
        """Send the file if it is unsent and the origin has an older version of it, or may have."""
        if self.is_unsent(ino) and (self._namespace.inode(ino).version or self.was_sent(ino)):
            await self.send(ino, is_close=False)

    def was_sent(self, ino: int) -> bool:
        """Return whether the origin was asked to store an unsent file: it may have it, even though
        this is not known."""
        file = self._entries.get(ino)
        upload = None if file is None else file.staged.upload
        return upload is not None and (not upload.upload_id or upload.asked_generation > 0)

    def unsent_below(self, directory: str) -> list[int]:
        """Return the inode numbers of the unsent files below a directory."""
        start = f"{directory}/"
        return [f.ino for f in self._entries.all() if f.staged.path.startswith(start)]

    def note_moved(self, old: str, new: str) -> None:
        """Note that a directory has the path `new` instead of `old`."""
        for file in self._entries.all():
            if file.staged.path.startswith(f"{old}/"):
                self._note_path(file, new + file.staged.path[len(old) :])

    # -- names -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def quiet(self, ino: int) -> AsyncIterator[None]:
        """Keep the file from being sent while its name changes. A sending of a large file is broken
        off, so this takes no longer than a request."""
        file = self._entries.get(ino)
        if file is None:
            yield
            return
        file.stop_parts()
        async with file.lock:
            yield

    def moving(self, directory: str) -> AbstractContextManager[None]:
        """See `FileSends.moving`."""
        return self._sends.moving(directory)

    def note_attributes(self, ino: int, posix: Posix, mtime_ns: int | None) -> bool:
        """Note attributes that travel with the file's next upload, or with the present one as long
        as its content is not complete. Return False if the file has no unsent changes, or the
        origin has been asked to store them. Raises `SpoolError`."""
        file = self._entries.get(ino)
        if file is None or file.state is State.STORED or file.staged.state is FileState.SENDING:
            return False
        file.staged.set_attributes(mtime_ns, posix)
        return True

    def note_path(self, ino: int, path: str, version: str) -> None:
        """Note that the file has another name now, which may have replaced a file. `version` is the
        one that the origin has of that name; "" for none."""
        file = self._entries.get(ino)
        if file is not None:
            self._note_path(file, path)
            file.staged.set_exclusive(False)
            file.staged.expect(version)

    def _note_path(self, file: WrittenFile, path: str) -> None:
        file.staged.rename(path)
        self._entries.take_base(file)

    def note_unnamed(self, ino: int) -> None:
        """Note that the file has no name any more. Processes that have it open still use it; it is
        never sent."""
        self._removed.add(ino)
        file = self._entries.get(ino)
        if file is not None:
            if file.state is not State.STORED:
                self._entries.mark(file, False)
            file.is_named = False
            with suppress(SpoolError):  # it would only be shown as lost after a crash
                file.staged.rename("")
            if file.has_open_upload:
                self._sends.jobs.start(self._sends.drop_upload, file)

    def forget(self, ino: int) -> None:
        """Remove a file without a name from the spool: no process has it open any more."""
        self._removed.discard(ino)
        self._refused.pop(ino, None)
        self.untold.forget(ino)
        file = self._entries.get(ino)
        if file is None or file.is_named:
            return
        if file.state is State.STORED:
            self._entries.end(file)
            return
        self._entries.remove(file)
        if file.staged.upload is None and not file.has_open_upload:
            file.staged.drop()
        else:
            self._sends.jobs.start(self._sends.drop, file)
