"""Renames at the origin: of a file, and of a directory with everything below it."""

import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import NamedTuple

from trio import CancelScope, move_on_after

from cachefs.errors import (
    BadNameError,
    ConflictError,
    ExistsError,
    NotFoundError,
    ObjectChangedError,
    OriginError,
    OriginUnavailableError,
    SpoolFullError,
)
from cachefs.format.inode_record import Inode
from cachefs.namespace.namespace import Namespace
from cachefs.namespace.own_changes import OwnChanges
from cachefs.namespace.reader import Readers
from cachefs.origin.base import Origin
from cachefs.origin.writable import Condition, WritableOrigin
from cachefs.types import ObjectMeta, ObjectRef
from cachefs.writes.block_copies import BlockCopies
from cachefs.writes.files import WrittenFiles
from cachefs.writes.naming.directory_rename import Copied, DirectoryRename
from cachefs.writes.naming.present import Name, PresentNames
from cachefs.writes.written_file import State

log = logging.getLogger(__name__)

_UNDO_S = 30.0


class Move(NamedTuple):
    """A rename. The `condition` is about the new name; `write_id` is that of a copy.
    `replaces`: there is something of the new name."""

    old: Name
    new: Name
    condition: Condition | None
    write_id: str
    replaces: bool = False


class Moves:
    """Moves files and directories whose names the caller has claimed. What has the new name is
    replaced."""

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
        present: PresentNames,
    ) -> None:
        """`most_renamed` is the most objects and directories that the rename of a directory may
        copy one by one."""
        self._namespace = namespace
        self._changes = changes
        self._files = files
        self._readers = readers
        self._copies = copies
        self._origin = origin
        self._writer = writer
        self._most_renamed = most_renamed
        self._present = present

    async def move_file(self, ino: int, move: Move, target: Inode | None) -> None:
        # A replaced file must not be sent any more: it would replace the moved one.
        replaced_ino = 0 if target is None else target.ino
        is_moved = False
        while not is_moved:
            await self._files.send_changed(ino)
            async with self._quiet(ino, replaced_ino):
                # Before the lock was taken, another sending may have begun, and lost its answer.
                if not self._is_in_doubt(ino):
                    await self._move_quiet_file(ino, move, replaced_ino)
                    is_moved = True

    def _is_in_doubt(self, ino: int) -> bool:
        """Return whether the origin may have an object of this file that is not known. Then
        `send_changed` finds out."""
        file = self._files.entry(ino)
        if file is None or file.state is not State.UNSENT or not file.is_named:
            return False
        is_new = not self._namespace.inode(ino).version
        return file.is_in_doubt or (is_new and self._files.was_sent(ino))

    async def _move_quiet_file(self, ino: int, move: Move, replaced_ino: int) -> None:
        old, new = move.old, move.new
        new_path = self._present.path(*new)
        inode = self._namespace.inode(ino)
        self._check_movable([ino])
        if not inode.version:
            if self._present.hides_object(ino):
                await self._present.keep_directory(*old)
                await self._writer.delete(self._present.path(*old))
            version = await self._version_at(new_path, replaced_ino)
            self._files.note_path(ino, new_path, version)
            if move.condition is not None and (file := self._files.entry(ino)) is not None:
                file.staged.set_exclusive(True)
            self._changes.move(ino, *new, is_held=True)
            self._files.note_unnamed(replaced_ino)
            return
        before = self._namespace.object_ref(inode)
        if old.parent != new.parent:
            await self._present.keep_directory(*old)
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
            self.note_moved(ino, before, meta, has_blocks=is_same)

    def _check_movable(self, inos: Iterable[int]) -> None:
        """Raise `SpoolFullError` for an unsent file that the spool does not have as a whole: its
        upload is for the old name."""
        for ino in inos:
            file = self._files.entry(ino)
            if file is not None and file.state is State.UNSENT and file.staged.freed_bytes:
                raise SpoolFullError(
                    f"{file.staged.path} has no room in the spool as a whole, and can't be renamed "
                    "before it is closed: give the spool more room with --spool-size"
                )

    async def _version_at(self, path: str, ino: int) -> str:
        """Return the version that the origin has of a file that is about to be replaced (0: of
        none); "" if it has none. It is asked only if it may have a new file whose sending failed.
        """
        if not ino:
            return ""
        if version := self._namespace.inode(ino).version:
            return version
        if self._files.was_sent(ino):
            with suppress(NotFoundError):
                return (await self._stat(path)).version
            return ""
        file = self._files.entry(ino)
        return "" if file is None else file.staged.expected_version or ""

    @asynccontextmanager
    async def _quiet(self, *inos: int) -> AsyncIterator[None]:
        """Do `WrittenFiles.quiet` for several files, always in the same order."""
        async with AsyncExitStack() as stack:
            for ino in sorted(set(inos)):
                await stack.enter_async_context(self._files.quiet(ino))
            yield

    async def _move_object(self, before: ObjectRef, new_path: str, move: Move) -> ObjectMeta:
        """Give an object another path, and return its version there."""
        if self._writer.can_rename:
            async with self._refusing(move):
                await self._writer.rename(before.path, new_path, move.condition)
            meta = await self._stat(new_path)
            await self.make_room(new_path, meta)
            return meta
        async with self._refusing(move):
            meta = await self._writer.copy(
                before.path, before.meta, new_path, move.condition, move.write_id
            )
        try:
            await self._writer.delete(before.path, Condition(before.meta.version))
        except OriginError as error:
            if not await self._is_gone(before):
                await self._undo_copy(before, new_path, meta, move, error)
                raise
        return meta

    async def _is_gone(self, before: ObjectRef) -> bool:
        """Return whether the origin has no object of this path any more: the answer to its deletion
        may have been lost."""
        try:
            await self._origin.stat(before.path)
        except NotFoundError:
            return True
        except OriginError:
            return False
        return False

    async def _undo_copy(
        self, before: ObjectRef, new_path: str, meta: ObjectMeta, move: Move, error: OriginError
    ) -> None:
        """Remove the copy of an object that could not be deleted, unless it has replaced another
        one, or the object may still be deleted, because there was no answer."""
        is_undone = False
        if not move.replaces and not isinstance(error, OriginUnavailableError):
            with CancelScope(shield=True), move_on_after(_UNDO_S), suppress(OriginError):
                await self._writer.delete(new_path, Condition(meta.version))
                is_undone = True
        log.warning(
            "%s was not renamed: it could not be deleted (%s); its copy %s %s",
            before.path,
            error,
            new_path,
            "is removed" if is_undone else "remains",
        )
        await self._present.show(*move.new)

    @asynccontextmanager
    async def _refusing(self, move: Move) -> AsyncIterator[None]:
        """Convert the refusal of a condition about the new name to `ExistsError`. The name then
        shows what the origin has."""
        try:
            yield
        except ConflictError:
            await self._present.show(*move.new)
            raise ExistsError("the new name exists already") from None

    async def _stat(self, path: str) -> ObjectMeta:
        meta = await self._origin.stat(path)
        if not isinstance(meta, ObjectMeta):
            raise ObjectChangedError(f"{path} has become a directory")
        return meta

    async def make_room(self, path: str, meta: ObjectMeta) -> None:
        """Let the cache have no other bytes of a version that a file gets without new bytes."""
        if self._writer.repeats_versions:
            await self._copies.make_room(self._namespace.ref_at(path, meta))

    def note_moved(
        self, ino: int, before: ObjectRef, meta: ObjectMeta, *, has_blocks: bool = True
    ) -> None:
        """Note the version that an inode has at its new path. The cached blocks of `before` are
        copied in the background if they are its blocks, too (`has_blocks`). Atomic."""
        self._readers.drop(ino)
        inode = self._changes.note_stored(ino, meta)
        if has_blocks:
            self._copies.add(before, self._namespace.object_ref(inode))

    async def note_done(self, inode: Inode, old_path: str, new: Name) -> None:
        """Note a move that an earlier daemon has made at the origin, but not in the table. From now
        on the kernel calls `inode` by the new name. It has replaced what had that name, also a file
        with unsent changes. Raises `NotFoundError`, or the origin's error."""
        new_path = self._present.path(*new)
        found = await self._origin.stat(new_path)
        if inode.is_dir == isinstance(found, ObjectMeta):
            return
        # No await until the table has the move.
        replaced_ino = self._changes.move(inode.ino, *new, is_held=False)
        if replaced_ino is not None:
            self._files.note_unnamed(replaced_ino)
        if isinstance(found, ObjectMeta):
            ref = self._namespace.ref_at(new_path, found)
            self.note_moved(inode.ino, ref, found, has_blocks=False)
            return
        self._changes.forget_listings(self._directories_from(inode))
        self._files.note_moved(old_path, new_path)
        self._readers.drop_all()

    def _directories_from(self, directory: Inode) -> list[Inode]:
        """Return a directory, and all below it that the table knows."""
        found = [directory]
        for each in found:
            entries = list(self._namespace.table.dirents(each.ino))
            below = (self._namespace.table.get(entry.ino) for _, entry in entries)
            found += [inode for inode in below if inode is not None and inode.is_dir]
        return found

    async def move_directory(
        self, directory: Inode, move: Move, has_target: bool, is_again: bool
    ) -> None:
        """Move a directory with everything below. Its unsent new files move only here."""
        old, new = move.old, move.new
        old_path, new_path = self._present.path(*old), self._present.path(*new)
        if f"{new_path}/".startswith(f"{old_path}/"):
            raise BadNameError("a directory can't be moved into itself")
        is_moved = False
        while not is_moved:
            for ino in self._files.unsent_below(old_path):
                await self._files.send_changed(ino)
            # Files that change from now on are sent when the rename has ended.
            with self._files.moving(old_path):
                unsent = self._files.unsent_below(old_path)
                async with self._quiet(*unsent):
                    self._check_movable(unsent)
                    if not any(map(self._is_in_doubt, unsent)):
                        await self._move_quiet_directory(directory, move, has_target, is_again)
                        is_moved = True

    async def _move_quiet_directory(
        self, directory: Inode, move: Move, has_target: bool, is_again: bool
    ) -> None:
        old, new = move.old, move.new
        old_path, new_path = self._present.path(*old), self._present.path(*new)
        copied: list[Copied] = []
        if self._writer.can_rename:
            async with self._refusing(move):
                await self._writer.rename(old_path, new_path, move.condition)
        else:
            if old.parent != new.parent:
                await self._present.keep_directory(*old)
            paths = (old_path, new_path)
            rename = DirectoryRename(
                self._namespace, self._origin, self._writer, paths, self._most_renamed
            )
            try:
                async with self._refusing(move):
                    copied = await rename.run(directory, has_target=has_target, is_again=is_again)
            except OriginError:
                # Some objects may be new copies, and some still have the new name.
                self._changes.forget_listings([directory, *rename.directories])
                await self._present.show(*new)
                raise
            if is_again:
                self._changes.forget_listings([directory, *rename.directories])
        # No await until the table has the move.
        self._changes.move(directory.ino, *new, is_held=False)
        self._files.note_moved(old_path, new_path)
        self._readers.drop_all()
        for ino, before, _, meta in copied:
            if not self._files.is_unsent(ino):
                self.note_moved(ino, before, meta)
            elif (file := self._files.entry(ino)) is not None:
                file.staged.expect(meta.version)
