"""Changes that this mount makes to its own names: create, write, store, move, remove.

All methods are synchronous, and so atomic on the loop thread. They are called when the change is
certain: after the origin has confirmed it, or, for files with unsent changes, after these are in
the spool. A file that the origin does not have yet has the version "".
"""

from collections.abc import Iterable
from dataclasses import replace

from cachefs.errors import ObjectChangedError
from cachefs.format.inode_record import KIND_DIR, KIND_FILE, Inode, Listing, OwnTimes
from cachefs.namespace.namespace import Namespace
from cachefs.types import Directory, ObjectMeta, Posix


class OwnChanges:
    """Changes the names of one writable mount. It uses the tables of its `Namespace`."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._table = namespace.table
        self._own = namespace.table.own
        self._own.is_writable = True

    def create_file(self, parent: int, name: bytes, posix: Posix) -> Inode:
        """Bind the name to a new, empty file that the origin does not have, and hold it. Return
        its inode. Raises `CacheDirError` if no inode number can be reserved."""
        inode = self._bind_new(KIND_FILE, parent, name, Directory(posix))
        self._own.hold(parent, name)
        return inode

    def make_directory(self, parent: int, name: bytes, made: Directory) -> Inode:
        """Bind the name to a new directory, which the origin has just made. It counts as listed,
        because it is empty. Return its inode. Raises `CacheDirError`."""
        inode = self._bind_new(KIND_DIR, parent, name, made)
        self._table.finish_listing(inode.ino, Listing(inode.mtime_ns, 0))
        return inode

    def _bind_new(self, kind: int, parent: int, name: bytes, made: Directory) -> Inode:
        now_ns = self._namespace.clock.now_ns()
        inode = self._table.bind_own(kind, parent, name, made, now_ns)
        self._namespace.absent.drop(parent, name)
        self._note_change(parent)
        return inode

    def hold(self, ino: int) -> None:
        """Note that the file has unsent changes. Nothing changes for a file without a name."""
        inode = self._namespace.inode(ino)
        if self._has_name(inode):
            self._own.hold(inode.parent, inode.name)

    def note_content(self, ino: int, size_bytes: int, mtime_ns: int) -> None:
        """Note that a file has another content since `mtime_ns`."""
        inode = self._namespace.inode(ino)
        self._table.put(replace(inode, size_bytes=size_bytes, mtime_ns=mtime_ns))
        times = self._table.own_times(ino)
        if times is not None:
            self._table.put_own_times(ino, times._replace(ctime_ns=mtime_ns))

    def set_attributes(
        self, ino: int, asked: Posix, mtime_ns: int | None = None, atime_ns: int | None = None
    ) -> Inode:
        """Set what is asked for of owner, group and mode of an inode, and the given times. Return
        the inode."""
        inode = self._namespace.inode(ino)
        self._note_ctime(inode, atime_ns)
        mtime_ns = inode.mtime_ns if mtime_ns is None else mtime_ns
        inode = replace(inode, mtime_ns=mtime_ns, posix=inode.posix.with_known(asked))
        self._table.put(inode)
        return inode

    def _note_ctime(self, inode: Inode, atime_ns: int | None = None) -> None:
        """Note that the attributes or the name of the inode change now."""
        if atime_ns is None:
            times = self._table.own_times(inode.ino)
            atime_ns = inode.mtime_ns if times is None else times.atime_ns
        now_ns = self._namespace.clock.now_ns()
        self._table.put_own_times(inode.ino, OwnTimes(now_ns, atime_ns))

    def note_stored(self, ino: int, meta: ObjectMeta) -> Inode:
        """Note that the origin has the file's content, as the version `meta`. The inode stays, and
        its mtime too. The name is no longer held. Return the inode."""
        self._table.note_posix(ino, meta.posix)
        inode = self._namespace.inode(ino)
        inode = replace(inode, size_bytes=meta.size_bytes, version=meta.version)
        self._table.put(inode)
        if self._has_name(inode):
            self._own.release(inode.parent, inode.name)
            now_ns = self._namespace.clock.now_ns()
            self._table.note_checked(inode.parent, inode.name, now_ns)
        return inode

    def note_older_stored(self, ino: int, meta: ObjectMeta) -> None:
        """Note that the origin has an older content of a file with unsent changes, as `meta`. Its
        name is still held."""
        self._table.put(replace(self._namespace.inode(ino), version=meta.version))

    def give_up(self, ino: int) -> None:
        """Unbind the name of a file whose changes the origin has refused. The next look-up asks the
        origin what the name is."""
        inode = self._namespace.inode(ino)
        if self._has_name(inode):
            self._own.release(inode.parent, inode.name)
            self._table.unbind(inode.parent, inode.name, self._namespace.clock.now_ns())
            self._expire_listing(inode.parent)
            self._namespace.absent.drop(inode.parent, inode.name)
            self._note_change(inode.parent)

    def _expire_listing(self, directory: int) -> None:
        """Make the directory's last listing one of long ago. While it counts, names that are not
        bound are absent."""
        listing = self._table.listing(directory)
        if listing is not None:
            self._table.finish_listing(directory, listing._replace(listed_at_ns=0))

    def remove(self, parent: int, name: bytes) -> int | None:
        """Unbind a name that is no longer at the origin. Return its inode number; None if it had
        none. Processes that have the file open still use the inode."""
        now_ns = self._namespace.clock.now_ns()
        ino = self._table.unbind_own(parent, name)
        self._own.note_removed(parent, name, now_ns)
        self._namespace.absent.note(parent, name, now_ns)
        self._note_change(parent)
        return ino

    def move(self, ino: int, parent: int, name: bytes, *, is_held: bool) -> int | None:
        """Give an inode the name `name` in the directory `parent`; it loses its present one.
        `is_held` says that it has unsent changes. Return the inode number that the new name had
        before; None if it had none."""
        inode = self._namespace.inode(ino)
        self._note_ctime(inode)
        replaced = self._table.unbind_own(parent, name)
        now_ns = self._namespace.clock.now_ns()
        if self._has_name(inode):
            self._table.unbind_own(inode.parent, inode.name, is_moved=True)
            self._own.note_removed(inode.parent, inode.name, now_ns)
            self._namespace.absent.note(inode.parent, inode.name, now_ns)
            self._note_change(inode.parent)
        self._table.bind_moved(replace(inode, parent=parent, name=name), now_ns)
        self._namespace.absent.drop(parent, name)
        self._own.release(parent, name)
        if is_held:
            self._own.hold(parent, name)
        self._note_change(parent)
        return replaced

    def forget_listings(self, directories: Iterable[Inode]) -> None:
        """Let the origin be asked again for all names in these directories."""
        for directory in directories:
            self._table.forget_listing(directory.ino)
            self._note_change(directory.ino)

    def has_names(self, ino: int, but: bytes | None = None) -> bool:
        """Return whether the table has a name in this directory, other than `but`."""
        return any(name != but for name, _ in self._table.dirents(ino))

    def is_named(self, ino: int) -> bool:
        """Return whether a name refers to the inode."""
        try:
            return self._has_name(self._namespace.inode(ino))
        except ObjectChangedError:
            return False

    def _has_name(self, inode: Inode) -> bool:
        dirent = self._table.dirent(inode.parent, inode.name)
        return dirent is not None and dirent.ino == inode.ino

    def _note_change(self, parent: int) -> None:
        self._namespace.validators.touch(parent)
