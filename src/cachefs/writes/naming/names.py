"""Changes of names: create, mkdir, unlink, rmdir, rename, and attributes.

Each change is done at the origin first, and then in the inode table. So a change that a process has
been told of is at the origin. The exception is a file that the origin does not have yet: its name
changes only here, until its first close sends it.

The kernel holds a directory's lock during each change of its names, so no two changes of one name
run at the same time.
"""

import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import NamedTuple

from cachefs.errors import (
    BadNameError,
    CachefsError,
    ConflictError,
    ExistsError,
    IsADirError,
    NameTooLongError,
    NotADirError,
    NotEmptyError,
    NotFoundError,
    ObjectChangedError,
)
from cachefs.format.inode_record import Inode
from cachefs.namespace.inodes import join
from cachefs.namespace.namespace import ROOT_INO, Namespace
from cachefs.namespace.own_changes import OwnChanges
from cachefs.namespace.reader import Readers
from cachefs.origin.base import Origin
from cachefs.origin.names import NAME_MAX_BYTES
from cachefs.origin.writable import ABSENT, Condition, WritableOrigin
from cachefs.types import ObjectMeta, ObjectRef, Posix
from cachefs.writes.block_copies import BlockCopies
from cachefs.writes.files import WrittenFiles
from cachefs.writes.naming.directory_rename import Copied, DirectoryRename
from cachefs.writes.sending.sender import attributes_of


class Name(NamedTuple):
    """A name in the directory with the inode number `parent`."""

    parent: int
    name: bytes


class _Move(NamedTuple):
    """A rename. The `condition` is about the new name; `write_id` is that of a copy."""

    old: Name
    new: Name
    condition: Condition | None
    write_id: str


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
        self._namespace = namespace
        self._table = namespace.table
        self._changes = changes
        self._files = files
        self._readers = readers
        self._copies = copies
        self._origin = origin
        self._writer = writer
        self._most_renamed = most_renamed

    def _path(self, parent: int, name: bytes) -> str:
        """Return the path of a name. Raises `ObjectChangedError` or `BadNameError`."""
        if len(name) > NAME_MAX_BYTES:
            raise NameTooLongError(f"the name has more than {NAME_MAX_BYTES} bytes")
        path = join(self._table.path(self._namespace.inode(parent)), name)
        if not self._writer.can_have(path):
            if all(self._writer.can_have(part) for part in path.split("/")):
                raise NameTooLongError(f"{path!r} is longer than a key of this source may be")
            raise BadNameError(f"{path!r} can't be the name of an object at this source")
        return path

    async def _find(self, parent: int, name: bytes) -> Inode:
        """Return the inode of a name. Raises `NotFoundError`, or the origin's error."""
        inode, _ = await self._namespace.lookup(parent, name)
        return inode

    async def _known(self, parent: int, name: bytes) -> Inode | None:
        """Return the inode of a name; None if it refers to nothing."""
        try:
            return await self._find(parent, name)
        except NotFoundError:
            return None

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
        path = self._path(parent, name)
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
        path = self._path(parent, name)
        dirent = self._table.dirent(parent, name)
        if dirent is not None:
            inode = self._namespace.inode(dirent.ino)
            if not (is_again and inode.is_dir):
                raise ExistsError(f"{path} exists already")
            return inode
        write_id = self._write_id("mkdir", process, path)
        try:
            attributes = attributes_of(posix)
            await self._writer.make_directory(path, attributes, is_new=True, write_id=write_id)
        except ConflictError:
            await self._show(parent, name)
            raise ExistsError(f"{path} exists already") from None
        return self._changes.make_directory(parent, name, posix)

    def _write_id(self, change: str, process: int, path: str) -> str:
        """Return the id of the write of one request: the same if the next daemon gets the request
        again, so that it recognises what this one has done."""
        request = f"{self._mount_id} {change} {process} {path}"
        return hashlib.sha256(request.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    async def _show(self, parent: int, name: bytes) -> None:
        """Let the name show what the origin has, which was believed to have nothing."""
        with suppress(CachefsError):
            await self._find_anew(parent, name)

    # -- removing --------------------------------------------------------------------------------

    async def unlink(self, parent: int, name: bytes) -> None:
        """Remove a file. Raises `NotFoundError`, `IsADirError`, or the origin's error."""
        inode = await self._find(parent, name)
        if inode.is_dir:
            raise IsADirError("it is a directory")
        async with self._files.quiet(inode.ino):
            if self._is_at_origin(inode.ino):
                await self._keep_directory(parent, name)
                await self._writer.delete(self._path(parent, name))
            self._changes.remove(parent, name)
            self._files.note_unnamed(inode.ino)

    def _is_at_origin(self, ino: int) -> bool:
        known = bool(self._namespace.inode(ino).version) or self._files.was_sent(ino)
        return known or self._hides_object(ino)

    def _hides_object(self, ino: int) -> bool:
        """Return whether this is a new file that was renamed over another one here, while the
        origin still has that one."""
        file = self._files.entry(ino)
        if file is None or self._namespace.inode(ino).version:
            return False
        return bool(file.staged.expected_version)

    async def remove_directory(self, parent: int, name: bytes) -> None:
        """Remove an empty directory. Asks the origin whether it is empty. Raises `NotEmptyError`,
        `NotFoundError`, `NotADirError`, or the origin's error."""
        inode = await self._find(parent, name)
        if not inode.is_dir:
            raise NotADirError("it is a file")
        await self._check_empty(inode.ino)
        await self._keep_directory(parent, name)
        await self._writer.remove_directory(self._path(parent, name))
        self._changes.remove(parent, name)

    async def _keep_directory(self, parent: int, name: bytes) -> None:
        """Make the marker of a directory if `name`, which is about to go, is its last name. In an
        object store the directory would end with it."""
        if self._writer.can_rename or parent == ROOT_INO or self._changes.has_names(parent, name):
            return
        directory = self._namespace.inode(parent)
        path = self._table.path(directory)
        await self._writer.make_directory(path, attributes_of(directory.posix))

    async def _check_empty(self, ino: int) -> None:
        if not self._changes.has_names(ino):
            await self._namespace.listed_since(ino, self._namespace.clock.now_ns())
        if self._changes.has_names(ino):
            raise NotEmptyError("the directory is not empty")

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
        try:
            inode = await (self._find_anew(*old) if is_again else self._find(*old))
        except NotFoundError:
            if is_again:  # it was done: no older listing may say that there is no such name
                with suppress(NotFoundError):
                    await self._find_anew(*new)
            raise
        try:
            must_ask = is_again or no_replace or inode.is_dir
            target = await (self._find_anew(*new) if must_ask else self._find(*new))
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
        write_id = self._write_id("rename", process, f"{self._path(*old)} {self._path(*new)}")
        move = _Move(old, new, ABSENT if no_replace else None, write_id)
        if inode.is_dir:
            await self._move_directory(inode, move, target is not None, is_again)
        else:
            await self._move_file(inode.ino, move, target)

    async def _find_anew(self, parent: int, name: bytes) -> Inode:
        """Do `_find`, and ask the origin, unless the file has unsent changes."""
        if self._table.own.holds(parent, name):
            return await self._find(parent, name)
        now_ns = self._namespace.clock.now_ns()
        inode = await self._namespace.lookup_since(parent, name, now_ns)
        self._namespace.absent.note_new(parent, name)  # the kernel may believe that it is absent
        return inode

    async def _check_replaceable(self, inode: Inode, target: Inode, is_again: bool) -> None:
        if inode.is_dir and not target.is_dir:
            raise NotADirError("the new name is a file")
        if target.is_dir and not inode.is_dir:
            raise IsADirError("the new name is a directory")
        if target.is_dir and (self._writer.can_rename or not is_again):
            await self._check_empty(target.ino)

    async def _move_file(self, ino: int, move: _Move, target: Inode | None) -> None:
        old, new = move.old, move.new
        await self._files.send_changed(ino)
        # A replaced file must not be sent any more: it would replace the moved one.
        replaced_ino = 0 if target is None else target.ino
        async with self._files.quiet(ino), self._files.quiet(replaced_ino):
            new_path = self._path(*new)
            inode = self._namespace.inode(ino)
            if not inode.version:
                if self._hides_object(ino):
                    await self._keep_directory(*old)
                    await self._writer.delete(self._path(*old))
                version = "" if target is None else self._namespace.inode(replaced_ino).version
                self._files.note_path(ino, new_path, version)
                if move.condition is not None and (file := self._files.entry(ino)) is not None:
                    file.staged.set_exclusive(True)
                self._changes.move(ino, *new, is_held=True)
                self._files.note_unnamed(replaced_ino)
            else:
                before = self._namespace.object_ref(inode)
                if old.parent != new.parent:
                    await self._keep_directory(*old)
                meta = await self._move_object(before, new_path, move)
                # From here on no await until the table has the move.
                is_unsent = self._files.is_unsent(ino)  # by a write that came meanwhile
                self._changes.move(ino, *new, is_held=is_unsent)
                self._files.note_unnamed(replaced_ino)
                if is_unsent:
                    self._files.note_path(ino, new_path, meta.version)
                else:
                    # Another program may have changed a local file just before its rename.
                    is_same = meta.version == before.meta.version or not self._writer.can_rename
                    self._note_moved(ino, before, meta, has_blocks=is_same)

    async def _move_object(self, before: ObjectRef, new_path: str, move: _Move) -> ObjectMeta:
        """Give an object another path, and return its version there."""
        if self._writer.can_rename:
            async with self._refusing(move):
                await self._writer.rename(before.path, new_path, move.condition)
            return await self._stat(new_path)
        async with self._refusing(move):
            meta = await self._writer.copy(
                before.path, before.meta, new_path, move.condition, move.write_id
            )
        await self._writer.delete(before.path, Condition(before.meta.version))
        return meta

    @asynccontextmanager
    async def _refusing(self, move: _Move) -> AsyncIterator[None]:
        """Convert the refusal of a condition about the new name to `ExistsError`. The name then
        shows what the origin has."""
        try:
            yield
        except ConflictError:
            await self._show(*move.new)
            raise ExistsError("the new name exists already") from None

    async def _stat(self, path: str) -> ObjectMeta:
        meta = await self._origin.stat(path)
        if not isinstance(meta, ObjectMeta):
            raise ObjectChangedError(f"{path} has become a directory")
        return meta

    def _note_moved(
        self, ino: int, before: ObjectRef, meta: ObjectMeta, *, has_blocks: bool = True
    ) -> None:
        """Note the version that an inode has at its new path. The cached blocks of `before` are
        copied in the background if they are its blocks, too (`has_blocks`). Atomic."""
        self._readers.drop(ino)
        inode = self._changes.note_stored(ino, meta)
        if has_blocks:
            self._copies.add(before, self._namespace.object_ref(inode))

    async def _move_directory(
        self, directory: Inode, move: _Move, has_target: bool, is_again: bool
    ) -> None:
        """Move a directory with everything below. Its unsent new files move only here."""
        old, new = move.old, move.new
        old_path, new_path = self._path(*old), self._path(*new)
        if f"{new_path}/".startswith(f"{old_path}/"):
            raise BadNameError("a directory can't be moved into itself")
        unsent = self._files.unsent_below(old_path)
        for ino in unsent:
            await self._files.send_changed(ino)
        async with AsyncExitStack() as stack:
            for ino in unsent:
                await stack.enter_async_context(self._files.quiet(ino))
            copied: list[Copied] = []
            if self._writer.can_rename:
                async with self._refusing(move):
                    await self._writer.rename(old_path, new_path, move.condition)
            else:
                if old.parent != new.parent:
                    await self._keep_directory(*old)
                paths = (old_path, new_path)
                rename = DirectoryRename(
                    self._namespace, self._origin, self._writer, paths, self._most_renamed
                )
                async with self._refusing(move):
                    copied = await rename.run(directory, has_target=has_target, is_again=is_again)
                if is_again:
                    self._changes.forget_listings([directory, *rename.directories])
            # No await until the table has the move.
            self._changes.move(directory.ino, *new, is_held=False)
            self._files.note_moved(old_path, new_path)
            self._readers.drop_all()
            for ino, before, _, meta in copied:
                if not self._files.is_unsent(ino):
                    self._note_moved(ino, before, meta)
                elif (file := self._files.entry(ino)) is not None:
                    file.staged.expect(meta.version)

    # -- attributes ------------------------------------------------------------------------------

    async def set_attributes(
        self, ino: int, posix: Posix, mtime_ns: int | None, atime_ns: int | None
    ) -> None:
        """Set owner, group, mode and times of an inode. They are kept here. An origin with owners
        gets all but the atime at once; others get them with the file's next upload. So does a file
        with unsent changes: at the origin it is still the version that was changed.

        Raises `SpoolError`, or the origin's error.
        """
        if self._files.note_attributes(ino, posix, mtime_ns):
            self._changes.set_attributes(ino, posix, mtime_ns, atime_ns)
            return
        async with self._files.quiet(ino):  # it may be sent now, with the attributes of before
            inode = self._namespace.inode(ino)
            meta, path = None, ""
            is_sent_later = self._files.note_attributes(ino, posix, mtime_ns)
            is_at_origin = inode.is_dir or (inode.version and self._changes.is_named(ino))
            is_other = posix != inode.posix or mtime_ns is not None
            if is_other and is_at_origin and not is_sent_later:
                path = self._table.path(inode)
                version = None if inode.is_dir else inode.version
                meta = await self._writer.set_attributes(
                    path, attributes_of(posix, mtime_ns), version
                )
            inode = self._changes.set_attributes(ino, posix, mtime_ns, atime_ns)
            if meta is not None and not inode.is_dir:
                self._note_moved(ino, self._namespace.object_ref(inode), meta)
