"""The bytes that processes write: from the first write until the origin and the cache have them.

A file of a writable mount is in one of these states:

- clean: an object version, as on a read-only mount. It has no entry here.
- unsent: it has changes that the origin does not have. They lie in the spool, which is their only
  copy. Its name is held (`namespace/own_names.py`), and the relay passes its FLUSH on.
- sending: a close or fsync waits until the origin has the content. Writers wait, too, so that no
  object is a mix of two contents.
- stored: the origin has the content. The cache is given the blocks from the spool; until then
  reads are served from the spool.

A change of a stored or clean file makes it unsent again. Code between two awaits is atomic on the
loop; the methods say where this matters.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import Enum, auto
from typing import Protocol

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.errors import CachefsError, ConflictError, ObjectChangedError
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import Namespace
from cachefs.namespace.own_changes import OwnChanges
from cachefs.namespace.reader import FileReader, Readers
from cachefs.origin.writable import new_write_id
from cachefs.staging.extents import Source
from cachefs.staging.spool import Spool
from cachefs.staging.staged_file import StagedFile
from cachefs.types import BLOCK_BYTES, ObjectMeta, Posix
from cachefs.writes.sender import Sender, attributes_of, condition_of

_ROOM_S = 60.0
"""How long a write waits for room in the spool before it fails with ENOSPC."""

log = logging.getLogger(__name__)


class State(Enum):
    """The state of a file that has an entry here."""

    UNSENT, SENDING, STORED = auto(), auto(), auto()


class Marks(Protocol):
    """The relay's table, as far as it is told of unsent changes."""

    def mark_unsent(self, ino: int, is_unsent: bool, /) -> None: ...


class WrittenFile:
    """One file with an entry; owned by `WrittenFiles`."""

    def __init__(self, ino: int, staged: StagedFile, base: FileReader | None) -> None:
        """`base` reads the version on which partial changes are based."""
        self.ino = ino
        self.staged = staged
        self.base = base
        self.state = State.UNSENT
        self.meta: ObjectMeta | None = None
        """The version that the origin has, while the state is STORED."""
        self.is_exclusive = False
        """The origin must not have an object of this name."""
        self.is_named = True
        self.is_shown_open = False
        """It is sent before a close, too: a part has changed, or it was created for appending."""
        self.writers: set[int] = set()
        """The processes that have changed the file since it was sent last. The close of one of them
        sends it. 0 stands for all processes."""
        self.lock = trio.Lock()
        """Held while the file is sent, renamed or removed."""
        self.sent = trio.Event()
        """Set when the present sending ends."""
        self.absent_generation = 0
        """The generation of which it is known that the origin does not have it."""

    @property
    def is_in_doubt(self) -> bool:
        """Whether the origin may have the content because the result of a sending is not known."""
        is_sent = self.staged.is_sealed and self.staged.upload is not None
        is_known = self.staged.generation == self.absent_generation
        return self.state is State.UNSENT and is_sent and not is_known

    def may_be_published(self, is_at_origin: bool) -> bool:
        """Return whether the content may be sent although no process closes the file. An empty one
        may replace the object (`is_at_origin`): no close follows if a name was truncated."""
        is_emptied = is_at_origin and not self.staged.size_bytes
        return self.staged.is_sealed or self.is_shown_open or is_emptied

    async def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset`. Raises `SpoolError` or the origin's error."""
        found: list[bytes] = []
        for piece in self.staged.pieces(offset, size):
            if piece.source is Source.SPOOL:
                found.append(await self.staged.read_spool(piece.offset, piece.length))
            elif piece.source is Source.ZEROS:
                found.append(bytes(piece.length))
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
        self._refused: set[int] = set()
        """Inodes that lost their name by a conflict. Nothing would send further changes of them."""

    def has(self, ino: int) -> bool:
        """Return whether the file's content is in the spool, at least in part."""
        return ino in self._files

    def entry(self, ino: int) -> WrittenFile | None:
        """Return the entry of an inode; None for a clean file."""
        return self._files.get(ino)

    def is_current(self, ino: int, object_id: bytes) -> bool:
        """Return whether the content of the inode is this object, and nothing else."""
        return ino not in self._files and self._readers.get(ino).ref.object_id == object_id

    def unsent(self) -> list[int]:
        """Return the inode numbers of all unsent files that have a name."""
        return [
            ino
            for ino, file in self._files.items()
            if file.state is not State.STORED and file.is_named
        ]

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
            if inode is None or inode.is_dir:
                staged.hold("its name is not known any more")
            elif not is_successor and not staged.is_sealed:
                staged.hold("it was never closed")
                self._changes.give_up(staged.ino)
            else:
                self._restore_one(inode, staged)

    def _restore_one(self, inode: Inode, staged: StagedFile) -> None:
        base = None
        if staged.base is not None:
            before = self._namespace.ref_at(staged.path, staged.base)
            base = self._readers.new(inode, before)
        file = self._files[inode.ino] = WrittenFile(inode.ino, staged, base)
        file.writers.add(0)  # the daemon before knew them
        file.is_shown_open = base is not None
        file.is_named = self._changes.is_named(inode.ino)
        self._changes.note_content(inode.ino, staged.size_bytes, staged.mtime_ns)
        if file.is_named:
            self._changes.hold(inode.ino)

    def is_unsent(self, ino: int) -> bool:
        """Return whether the file has changes that the origin does not have."""
        file = self._files.get(ino)
        return file is not None and file.state is not State.STORED

    # -- changes -----------------------------------------------------------------------------------

    def begin_new(self, inode: Inode, path: str, *, exclusive: bool, appends: bool) -> None:
        """Note a new, empty file. With `exclusive`, sending fails if the origin has one of this
        name. `appends`: it is opened for appending. Raises `SpoolError`."""
        staged = self._stage(inode, path, None)
        self._add(inode.ino, staged, None, appends).is_exclusive = exclusive

    def _stage(self, inode: Inode, path: str, base: ObjectMeta | None) -> StagedFile:
        """Begin a staged file with the inode's owner, group and mode; or none. Raises
        `SpoolError`."""
        staged = self._spool.begin(inode.ino, path, base)
        try:
            staged.set_attributes(posix=inode.posix)
        except CachefsError:
            staged.drop()
            raise
        return staged

    def note_writer(self, ino: int, process: int) -> None:
        """Note that the process (0: any) has changed the file, if it has unsent changes."""
        if self.is_unsent(ino):
            self._files[ino].writers.add(process)

    async def write(self, ino: int, offset: int, data: bytes, process: int) -> None:
        """Write all of `data` at `offset`, for a process (0: unknown). Raises `SpoolFullError`, or
        `ObjectChangedError` for an inode that is gone."""
        await self._spool.reserve(len(data), _ROOM_S)
        file = await self._changeable(ino)
        file.staged.write(offset, data)
        self._note_change(file, process)

    async def truncate(self, ino: int, size_bytes: int, process: int) -> None:
        """Set the file's size. Bytes that this adds are zeros. Raises the errors of `write`."""
        while True:
            file = await self._changeable(ino, is_whole=size_bytes == 0)
            async with file.lock:  # a large truncation takes several steps: none may be sent
                if file.state is State.UNSENT and self._files.get(ino) is file:
                    await file.staged.truncate(size_bytes)
                    self._note_change(file, process)
                    return

    async def _changeable(self, ino: int, *, is_whole: bool = False) -> WrittenFile:
        """Return the entry in the state UNSENT; make one for a clean file. There must be no await
        between this and the change. With `is_whole`, the change replaces all bytes."""
        while (file := self._files.get(ino)) is not None:
            if file.state is State.SENDING:
                await file.sent.wait()
            elif file.is_in_doubt:
                await self._end_doubt(file)
            elif file.state is State.STORED:
                self._end(file)
            else:
                return file
        return self._begin_change(self._namespace.inode(ino), is_whole)

    async def _end_doubt(self, file: WrittenFile) -> None:
        """Find out whether a sending succeeded whose result is not known: then a change must be
        based on what it has stored. Raises the origin's error."""
        async with file.lock:
            if not file.is_in_doubt or self._files.get(file.ino) is not file:
                return
            upload, generation = file.staged.upload, file.staged.generation
            assert upload is not None
            meta = await self._sender.written_by(upload.path, upload.write_id)
            file.absent_generation = generation
            if meta is not None and file.staged.generation == generation:
                file.staged.begin_sending()
                self._note_stored(file, meta)

    def _begin_change(self, inode: Inode, is_whole: bool) -> WrittenFile:
        if inode.is_dir or not inode.version or inode.ino in self._refused:
            raise ObjectChangedError(f"the unsent content of inode {inode.ino} is gone")
        ref = self._namespace.object_ref(inode)
        base = None if is_whole or not inode.size_bytes else ref.meta
        staged = self._stage(inode, ref.path, base)
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
        file.writers.add(process)
        staged = file.staged
        self._changes.note_content(file.ino, staged.size_bytes, staged.mtime_ns)

    # -- reading -----------------------------------------------------------------------------------

    async def read(self, ino: int, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset`, fewer only at the end of the file."""
        return await self._files[ino].read(offset, size)

    # -- sending -----------------------------------------------------------------------------------

    async def close(self, ino: int, process: int) -> None:
        """Send the file if this process (0: unknown) has changed it. The close of another process,
        such as a reader or a child that has inherited the file, waits for nothing, and reports no
        error of a writer. Raises the errors of `send`."""
        file = self._files.get(ino)
        if file is None or (process and not file.writers & {process, 0}):
            return
        try:
            await self.send(ino)
        except CachefsError:
            file.writers -= {process, 0}  # it knows; the closes of other writers try again
            raise

    async def send(self, ino: int) -> None:
        """Send a file's unsent changes to the origin. When this returns, the origin has them.

        Raises `ConflictError` if the origin has another version than the one that was changed in
        part, or the origin's error. The bytes then stay in the spool.
        """
        file = self._files.get(ino)
        if file is None:
            return
        async with file.lock:
            if file.state is not State.UNSENT or not file.is_named:
                return
            file.state = State.SENDING
            try:
                self._note_stored(file, await self._send(file))
            except (ConflictError, ObjectChangedError) as error:
                self._note_conflict(file, error)
                raise
            except CachefsError as error:
                file.staged.fail(str(error))
                raise
            finally:
                if file.state is State.SENDING:
                    file.state = State.UNSENT
                file.sent.set()
                file.sent = trio.Event()
        await self._give_to_cache(file)

    async def _send(self, file: WrittenFile) -> ObjectMeta:
        inode, staged = self._namespace.inode(file.ino), file.staged
        path = self._namespace.table.path(inode)
        earlier = staged.upload
        if earlier is not None and earlier.upload_id:
            await self._sender.abort(earlier.path, earlier.upload_id, earlier.write_id)
        # A write whose answer was lost is recognised by its id, but only if it had this content.
        is_same = earlier is not None and staged.is_sealed and earlier.path == path
        write_id = earlier.write_id if earlier is not None and is_same else new_write_id()
        staged.seal()
        staged.begin_sending()
        # If it has succeeded, the version that the rest of the content comes from is gone.
        if is_same and (done := await self._sender.written_by(path, write_id)) is not None:
            return done
        return await self._sender.send(
            path,
            staged.size_bytes,
            file.read,
            condition_of(staged.base, file.is_exclusive),
            attributes_of(inode.posix, inode.mtime_ns),
            write_id,
            lambda upload_id: staged.start_upload(upload_id, write_id, path),
        )

    def _note_stored(self, file: WrittenFile, meta: ObjectMeta) -> None:
        """Note that the origin has the content. Atomic."""
        file.meta = meta
        self._changes.note_stored(file.ino, meta)
        file.state = State.STORED
        file.writers.clear()
        file.is_exclusive = False
        self._mark(file, False)

    def _note_conflict(self, file: WrittenFile, error: CachefsError) -> None:
        """Note that the origin refused the content, or no longer has the rest of it. The bytes stay
        in the spool, and the name shows the origin's version from now on. Atomic."""
        log.warning(
            "%s was not stored, and its bytes stay in the spool: %s", file.staged.path, error
        )
        file.staged.conflict(str(error))
        self.give_up(file)

    def give_up(self, file: WrittenFile) -> None:
        """End the entry of a conflict, or of a file whose unsent changes a user has dropped."""
        del self._files[file.ino]
        self._refused.add(file.ino)
        self._mark(file, False)
        self._changes.give_up(file.ino)

    def _end(self, file: WrittenFile) -> None:
        """Remove a stored file from the spool. Atomic."""
        assert file.meta is not None
        del self._files[file.ino]
        file.staged.finish(file.meta)

    async def _give_to_cache(self, file: WrittenFile) -> None:
        """Give a stored file's blocks to the cache, and end it in the spool, unless it changes."""
        ref = self._namespace.object_ref(self._namespace.inode(file.ino))
        for index in range(ref.block_count):
            if not self._is_stored(file):
                return
            try:
                data = await file.read(index * BLOCK_BYTES, ref.block_length(index))
            except CachefsError:
                break  # it was stored by an earlier daemon, and the version before is gone
            if self._is_stored(file):
                await self._cache.put_written(ref, index, data)
        if self._is_stored(file):
            self._end(file)

    def _is_stored(self, file: WrittenFile) -> bool:
        """Return whether this is still the entry of its inode, and the origin has its content."""
        return file.state is State.STORED and self._files.get(file.ino) is file

    async def send_changed(self, ino: int) -> None:
        """Send the file if it is unsent and the origin has an older version of it."""
        if self.is_unsent(ino) and self._namespace.inode(ino).version:
            await self.send(ino)

    def unsent_below(self, directory: str) -> list[int]:
        """Return the inode numbers of the unsent files below a directory."""
        start = f"{directory}/"
        return [ino for ino, file in self._files.items() if file.staged.path.startswith(start)]

    def note_moved(self, old: str, new: str) -> None:
        """Note that a directory has the path `new` instead of `old`."""
        for ino in self.unsent_below(old):
            file = self._files[ino]
            self.note_path(ino, new + file.staged.path[len(old) :])

    # -- names -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def quiet(self, ino: int) -> AsyncIterator[None]:
        """Keep the file from being sent while its name changes."""
        file = self._files.get(ino)
        if file is None:
            yield
            return
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

    def note_path(self, ino: int, path: str) -> None:
        """Note that the file has another name now."""
        file = self._files.get(ino)
        if file is not None:
            file.staged.rename(path)
            if file.base is not None:
                ref = self._namespace.ref_at(path, file.base.ref.meta)
                file.base = self._readers.new(self._namespace.inode(ino), ref)

    def note_unnamed(self, ino: int) -> None:
        """Note that the file has no name any more. Processes that have it open still use it; it is
        never sent."""
        file = self._files.get(ino)
        if file is not None:
            if file.state is not State.STORED:
                self._mark(file, False)
            file.is_named = False

    def forget(self, ino: int) -> None:
        """Remove a file without a name from the spool: no process has it open any more."""
        self._refused.discard(ino)
        file = self._files.get(ino)
        if file is not None and not file.is_named:
            del self._files[ino]
            file.staged.drop()
