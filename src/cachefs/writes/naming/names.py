"""Changes of names: create, mkdir, unlink, rmdir, rename, and attributes.

Each change is done at the origin first, and then in the inode table. So a change that a process has
been told of is at the origin. The exception is a file that the origin does not have yet: its name
changes only here, until its first close sends it.

The kernel's locks do not keep all changes apart that concern each other (`name_locks.py` says why),
so each claims its names here.
"""

import hashlib
from contextlib import AsyncExitStack, suppress

import trio

from cachefs.errors import (
    CachefsError,
    ConflictError,
    ExistsError,
    IsADirError,
    NotADirError,
    NotFoundError,
    ObjectChangedError,
)
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import Namespace
from cachefs.namespace.own_changes import OwnChanges
from cachefs.namespace.reader import Readers
from cachefs.origin.base import Origin
from cachefs.origin.writable import ABSENT, WritableOrigin
from cachefs.types import NO_POSIX, Directory, Posix
from cachefs.writes.block_copies import BlockCopies
from cachefs.writes.files import WrittenFiles
from cachefs.writes.naming.moves import Move, Moves
from cachefs.writes.naming.name_locks import NameLocks
from cachefs.writes.naming.present import Name, PresentNames
from cachefs.writes.sending.sender import attributes_of

_RENAME_TURNS, _RENAME_AGAIN_S = 20, 0.25
"""How often, and after how many seconds, a rename that a killed daemon has begun looks again."""


class _VanishedError(Exception):
    """What was to be moved is no longer there."""


class WrittenNames:
    """Changes the names of one writable mount."""

    def __init__(
        self,
        namespace: Namespace,
        changes: OwnChanges,
        files: WrittenFiles,
        readers: Readers,
        copies: BlockCopies,
        origin: Origin,
        writer: WritableOrigin,
        most_renamed: int,
        mount_id: str,
    ) -> None:
        """`most_renamed` is the most objects and directories that the rename of a directory may
        copy one by one. `mount_id` is the same for all daemons of this mount, and no other mount
        has it."""
        self._mount_id = mount_id
        self._locks = NameLocks(namespace.table.get)
        self._namespace = namespace
        self._table = namespace.table
        self._changes = changes
        self._files = files
        self._writer = writer
        self._present = PresentNames(namespace, changes, files, writer)
        self._moves = Moves(
            namespace,
            changes,
            files,
            readers,
            copies,
            origin,
            writer,
            most_renamed,
            present=self._present,
        )

    # -- making ----------------------------------------------------------------------------------

    async def create(
        self,
        parent: int,
        name: bytes,
        posix: Posix,
        *,
        exclusive: bool,
        replaces: bool,
        is_again: bool,
        appends: bool = False,
    ) -> Inode:
        """Create an empty file, and return its inode. An existing file is returned as it is, but
        with `exclusive` only if `is_again` and an earlier request has created it.

        Another client may create the name before the file is sent. With `replaces` (O_TRUNC), its
        file is then replaced; otherwise the changes are refused, because they were meant for an
        empty file. `appends`: it is opened for appending. Raises `ExistsError`, `BadNameError`, or
        the error of the spool.
        """
        async with self._locks.claim((parent, name)):
            return self._create(parent, name, posix, exclusive, replaces, is_again, appends)

    def _create(
        self,
        parent: int,
        name: bytes,
        posix: Posix,
        exclusive: bool,
        replaces: bool,
        is_again: bool,
        appends: bool,
    ) -> Inode:
        """Do `create`. Atomic."""
        path = self._present.path(parent, name)
        dirent = self._table.dirent(parent, name)
        if dirent is not None:
            inode = self._namespace.inode(dirent.ino)
            is_own = is_again and self._files.is_unsent(inode.ino)
            if inode.is_dir or (exclusive and not is_own):
                raise ExistsError(f"{path} exists already")
            return inode
        inode = self._changes.create_file(parent, name, posix)
        try:
            is_exclusive = exclusive or not replaces
            self._files.begin_new(inode, path, exclusive=is_exclusive, appends=appends)
        except CachefsError:
            self._changes.remove(parent, name)
            raise
        return inode

    async def make_directory(
        self, parent: int, name: bytes, posix: Posix, *, is_again: bool, process: int
    ) -> Inode:
        """Make a directory for a process, and return its inode. The origin is asked whether there
        is something of this name: an older answer is not believed. Raises `ExistsError`,
        `BadNameError`, or the origin's error."""
        async with self._locks.claim((parent, name)):
            return await self._make_directory(parent, name, posix, is_again, process)

    async def _make_directory(
        self, parent: int, name: bytes, posix: Posix, is_again: bool, process: int
    ) -> Inode:
        path = self._present.path(parent, name)
        dirent = self._table.dirent(parent, name)
        if dirent is not None:
            inode = self._namespace.inode(dirent.ino)
            if not (is_again and inode.is_dir):
                raise ExistsError(f"{path} exists already")
            return inode
        write_id = self._write_id("mkdir", process, path)
        attributes = attributes_of(self._stated(posix))
        try:
            async with self._present.meaning(parent):
                made = await self._writer.make_directory(
                    path, attributes, is_new=True, write_id=write_id
                )
        except ConflictError:
            await self._present.show(parent, name)
            raise ExistsError(f"{path} exists already") from None
        return self._changes.make_directory(parent, name, made or Directory(posix))

    def _stated(self, posix: Posix) -> Posix:
        """Return what to state of a new directory: elsewhere its owner follows from the caller."""
        return Posix(mode=posix.mode) if self._writer.keeps_attributes else posix

    def _write_id(self, change: str, process: int, path: str) -> str:
        """Return the id of the write of one request: the same if the next daemon gets the request
        again, so that it recognises what this one has done."""
        request = f"{self._mount_id} {change} {process} {path}"
        return hashlib.sha256(request.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    # -- removing --------------------------------------------------------------------------------

    async def unlink(self, parent: int, name: bytes) -> None:
        """Remove a file. Raises `NotFoundError`, `IsADirError`, or the origin's error."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._locks.claim((parent, name)))
            inode = await self._present.find(parent, name)
            if inode.is_dir:
                raise IsADirError("it is a directory")
            await stack.enter_async_context(self._files.quiet(inode.ino))
            if self._is_at_origin(inode.ino):
                await self._present.keep_directory(parent, name)
                async with self._present.meaning(parent):
                    await self._writer.delete(self._present.path(parent, name))
            self._changes.remove(parent, name)
            self._files.note_unnamed(inode.ino)

    def _is_at_origin(self, ino: int) -> bool:
        known = bool(self._namespace.inode(ino).version) or self._files.was_sent(ino)
        return known or self._present.hides_object(ino)

    async def remove_directory(self, parent: int, name: bytes) -> None:
        """Remove an empty directory. Asks the origin whether it is empty. Raises `NotEmptyError`,
        `NotFoundError`, `NotADirError`, or the origin's error."""
        async with self._locks.claim((parent, name), has_below=True):
            inode = await self._present.find(parent, name)
            if not inode.is_dir:
                raise NotADirError("it is a file")
            try:
                await self._present.check_empty(inode.ino)
            except NotFoundError:  # it is gone: by the daemon before, or by another client
                self._changes.remove(parent, name)
                raise
            await self._present.keep_directory(parent, name)
            async with self._present.meaning(parent):
                await self._writer.remove_directory(self._present.path(parent, name))
            self._changes.remove(parent, name)

    # -- renaming --------------------------------------------------------------------------------

    async def rename(
        self, old: Name, new: Name, no_replace: bool, *, process: int, is_again: bool = False
    ) -> None:
        """Give a file or directory another name, for a process. At no time does it have neither
        name at the origin. With `no_replace`, an existing target fails with `ExistsError`: the
        origin is asked, and an older answer is not believed. `is_again`: an earlier daemon may have
        begun it, so the origin is asked what both names are.

        Raises `NotFoundError`, `NotEmptyError`, `IsADirError`, `NotADirError`, `TooManyError`, or
        the origin's error.
        """
        async with self._locks.claim(old, new, has_below=True):
            for _ in range(_RENAME_TURNS if is_again else 1):
                try:
                    return await self._rename(old, new, no_replace, process, is_again)
                except _VanishedError:
                    await trio.sleep(_RENAME_AGAIN_S)
            raise ObjectChangedError("objects below the old name vanish while they are copied")

    async def _rename(
        self, old: Name, new: Name, no_replace: bool, process: int, is_again: bool
    ) -> None:
        old_path, known = self._present.path(*old), self._table.dirent(*old)
        try:
            inode = await (self._present.find_anew(*old) if is_again else self._present.find(*old))
        except NotFoundError:
            if is_again:  # it was done: no older listing may say that there is no such name
                with suppress(NotFoundError):
                    found = await self._present.find_anew(*new)
                    before = None if known is None else self._table.get(known.ino)
                    if before is not None and before.ino != found.ino:
                        await self._moves.note_done(before, old_path, new)
            raise
        try:
            must_ask = is_again or no_replace or inode.is_dir
            target = await (self._present.find_anew(*new) if must_ask else self._present.find(*new))
        except NotFoundError:
            target = None
        if target is not None:
            # Only a copy can have been begun, and its condition finds out whose it is.
            is_begun = is_again and not self._writer.can_rename
            if no_replace and not (is_begun and (inode.is_dir or inode.version)):
                raise ExistsError("the new name exists already")
            if target.ino == inode.ino:
                return
            await self._check_replaceable(inode, target, is_again)
        write_id = self._write_id(
            "rename", process, f"{self._present.path(*old)} {self._present.path(*new)}"
        )
        move = Move(old, new, ABSENT if no_replace else None, write_id, target is not None)
        try:
            async with self._present.meaning(old.parent, new.parent):
                if inode.is_dir:
                    await self._moves.move_directory(inode, move, target is not None, is_again)
                else:
                    await self._moves.move_file(inode.ino, move, target)
        except NotFoundError as error:
            if is_again:  # the store still does what the daemon before has sent
                raise _VanishedError from error
            raise

    async def _check_replaceable(self, inode: Inode, target: Inode, is_again: bool) -> None:
        if inode.is_dir and not target.is_dir:
            raise NotADirError("the new name is a file")
        if target.is_dir and not inode.is_dir:
            raise IsADirError("the new name is a directory")
        if target.is_dir and (self._writer.can_rename or not is_again):
            await self._present.check_empty(target.ino)

    # -- attributes ------------------------------------------------------------------------------

    async def set_attributes(
        self, ino: int, asked: Posix, mtime_ns: int | None, atime_ns: int | None
    ) -> None:
        """Set those of owner, group, mode and times of an inode that are asked for. They are kept
        here. An origin with owners gets all but the atime at once; others get them with the file's
        next upload. So does the mtime of a file with unsent changes, and a new file: at the origin
        it is still the version that was changed, and may be another user's by now.

        Raises `SpoolError`, or the origin's error.
        """
        is_asked_now = (
            self._writer.keeps_attributes
            and asked != NO_POSIX
            and bool(self._namespace.inode(ino).version)
        )
        if not is_asked_now and self._files.note_attributes(ino, asked, mtime_ns):
            self._changes.set_attributes(ino, asked, mtime_ns, atime_ns)
            return
        async with self._files.quiet(ino):  # it may be sent now, with the attributes of before
            inode = self._namespace.inode(ino)
            meta, path = None, ""
            noted = NO_POSIX if is_asked_now else asked
            is_sent_later = self._files.note_attributes(ino, noted, mtime_ns)
            is_at_origin = inode.is_dir or (inode.version and self._changes.is_named(ino))
            if is_sent_later:
                mtime_at_once_ns, is_due = None, is_asked_now
            else:
                mtime_at_once_ns, is_due = mtime_ns, asked != NO_POSIX or mtime_ns is not None
            if is_due and is_at_origin:
                path = self._table.path(inode)
                version = None if inode.is_dir else inode.version
                stated = attributes_of(asked, mtime_at_once_ns)
                places = {inode.parent, ino} if inode.is_dir else {inode.parent}
                async with self._present.meaning(*places):
                    meta = await self._writer.set_attributes(path, stated, version)
                if meta is not None and meta.version != version:
                    await self._moves.make_room(path, meta)
            inode = self._changes.set_attributes(ino, asked, mtime_ns, atime_ns)
            if meta is not None and not (inode.is_dir or is_sent_later):
                self._moves.note_moved(ino, self._namespace.object_ref(inode), meta)
