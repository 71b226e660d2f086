"""What the names of a writable mount are now, as far as changes need to know it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from cachefs.errors import (
    BadNameError,
    CachefsError,
    NameTooLongError,
    NotEmptyError,
    ObjectChangedError,
)
from cachefs.format.inode_record import Inode
from cachefs.namespace.inodes import join
from cachefs.namespace.namespace import ROOT_INO, Namespace
from cachefs.namespace.own_changes import OwnChanges
from cachefs.origin.names import NAME_MAX_BYTES
from cachefs.origin.on_behalf import expecting
from cachefs.origin.writable import WritableOrigin
from cachefs.writes.files import WrittenFiles
from cachefs.writes.sending.sender import attributes_of


class Name(NamedTuple):
    """A name in the directory with the inode number `parent`."""

    parent: int
    name: bytes


class PresentNames:
    """Asks the table, and the origin where the table may be too old."""

    def __init__(
        self,
        namespace: Namespace,
        changes: OwnChanges,
        files: WrittenFiles,
        writer: WritableOrigin,
    ) -> None:
        self._namespace = namespace
        self._table = namespace.table
        self._changes = changes
        self._files = files
        self._writer = writer

    def path(self, parent: int, name: bytes) -> str:
        """Return the path of a name. Raises `ObjectChangedError` or `BadNameError`."""
        if len(name) > NAME_MAX_BYTES:
            raise NameTooLongError(f"the name has more than {NAME_MAX_BYTES} bytes")
        path = join(self._table.path(self._namespace.inode(parent)), name)
        if not self._writer.can_have(path):
            if all(self._writer.can_have(part) for part in path.split("/")):
                raise NameTooLongError(f"{path!r} is longer than a key of this source may be")
            raise BadNameError(f"{path!r} can't be the name of an object at this source")
        return path

    @asynccontextmanager
    async def meaning(self, *directories: int) -> AsyncIterator[None]:
        """Change names in these directories, by inode number, at the origin. If another directory
        has the path of one by now, the change raises `ObjectChangedError`, and the next look-up
        finds that one."""
        inodes = [self._namespace.inode(ino) for ino in directories]
        with expecting(self._namespace.places(*inodes)):
            try:
                yield
            except ObjectChangedError:
                for inode in inodes:
                    await self._namespace.note_object_changed(inode)
                raise

    async def find(self, parent: int, name: bytes) -> Inode:
        """Return the inode of a name. Raises `NotFoundError`, or the origin's error."""
        inode, _ = await self._namespace.lookup(parent, name)
        return inode

    async def find_anew(self, parent: int, name: bytes) -> Inode:
        """Do `_find`, and ask the origin, unless the file has unsent changes."""
        if self._table.own.holds(parent, name):
            return await self.find(parent, name)
        now_ns = self._namespace.clock.now_ns()
        inode = await self._namespace.lookup_since(parent, name, now_ns)
        self._namespace.absent.note_new(parent, name)  # the kernel may believe that it is absent
        return inode

    async def show(self, parent: int, name: bytes) -> None:
        """Let the name show what the origin has, which was believed to have nothing."""
        with suppress(CachefsError):
            await self.find_anew(parent, name)

    async def keep_directory(self, parent: int, name: bytes) -> None:
        """Make the marker of a directory if `name`, which is about to go, is its last name. In an
        object store the directory would end with it."""
        if self._writer.can_rename or parent == ROOT_INO or self._changes.has_names(parent, name):
            return
        directory = self._namespace.inode(parent)
        path = self._table.path(directory)
        await self._writer.make_directory(path, attributes_of(directory.posix))

    async def check_empty(self, ino: int) -> None:
        if not self._changes.has_names(ino):
            await self._namespace.listed_since(ino, self._namespace.clock.now_ns())
        if self._changes.has_names(ino):
            raise NotEmptyError("the directory is not empty")

    def hides_object(self, ino: int) -> bool:
        """Return whether this is a new file that was renamed over another one here, while the
        origin still has that one."""
        file = self._files.entry(ino)
        if file is None or self._namespace.inode(ino).version:
            return False
        return bool(file.staged.expected_version)
