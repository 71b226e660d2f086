"""The handlers of requests that change files, for a writable mount.

There is no state per open file here either: all state of an unsent change belongs to the inode
(`writes/`). So open files continue after the daemon was replaced.
"""

import errno
import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

import pyfuse3

from cachefs.errors import NotFoundError, SpoolError
from cachefs.format.inode_record import Inode
from cachefs.fuse.callers import caller_of
from cachefs.fuse.operations import Operations, translated
from cachefs.fuse.session import request_process, request_sender
from cachefs.fuse.uid_limits import INO_MASK
from cachefs.origin.on_behalf import acting_for
from cachefs.origin.writable import MOST_OBJECT_BYTES
from cachefs.types import MOST_MODE, NO_POSIX, UNKNOWN_ID, UNKNOWN_MODE, Buffer, Posix
from cachefs.writes.background import BackgroundSends
from cachefs.writes.files import WrittenFiles
from cachefs.writes.naming.names import WrittenNames
from cachefs.writes.naming.present import Name

_RESENT_PID = 1 << 30
"""Set in the pid of a request that the kernel sends again (`fuse/relay/session.c`)."""


class Writers(NamedTuple):
    """The objects that change files and names."""

    files: WrittenFiles
    names: WrittenNames
    background: BackgroundSends
    acts_for_callers: bool
    """See `WritableOrigin.acts_for_callers`."""


class WritingOperations(Operations):
    """The handlers of a writable mount."""

    def __init__(self, *args: Any, writers: Writers, **kwargs: Any) -> None:
        """`args` and `kwargs` are those of `Operations`."""
        super().__init__(*args, **kwargs)
        self._files = writers.files
        self._names = writers.names
        self._acts_for_callers = writers.acts_for_callers
        self._set_own_times = self._show_own_times

    def _acting(self, uid: int, gid: int, thread: int) -> AbstractContextManager[None]:
        """Act at the origin for the sender of a request, if the origin can."""
        if not self._acts_for_callers:
            return nullcontext()
        return acting_for(caller_of(uid, gid, thread & ~_RESENT_PID))

    def _acting_for(self, ctx: pyfuse3.RequestContext) -> AbstractContextManager[None]:
        return self._acting(ctx.uid, ctx.gid, ctx.pid)

    def _acting_for_sender(self, ino: int) -> AbstractContextManager[None]:
        """Do `_acting_for` where pyfuse3 does not say who sent the request, before the first await:
        if the file has unsent changes."""
        return self._acting(*request_sender()) if self._files.has(ino) else nullcontext()

    # -- names ---------------------------------------------------------------------------------

    @translated
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        """Create a file, and return a handle with its inode number."""
        process = request_process()
        with self._acting_for(ctx):
            inode = await self._names.create(
                parent_inode,
                name,
                _posix(mode, ctx),
                exclusive=bool(flags & os.O_EXCL),
                replaces=bool(flags & os.O_TRUNC),
                is_again=_is_again(ctx),
                appends=bool(flags & os.O_APPEND),
            )
            self._files.note_writer(inode.ino, process)
            if flags & os.O_TRUNC and inode.size_bytes:
                await self._files.truncate(inode.ino, 0, process)
                inode = self._namespace.inode(inode.ino)
        handle = self._limits.handle(inode.ino, ctx.uid)
        info = pyfuse3.FileInfo(fh=handle, keep_cache=True)
        return info, self._entry_of(inode)

    @translated
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Create a file. Fails with EPERM for anything but a regular file."""
        if not stat.S_ISREG(mode):
            raise pyfuse3.FUSEError(errno.EPERM)
        with self._acting_for(ctx):
            inode = await self._names.create(
                parent_inode,
                name,
                _posix(mode, ctx),
                exclusive=True,
                replaces=False,
                is_again=_is_again(ctx),
            )
        return self._entry_of(inode)

    @translated
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Fail with EPERM: an object can't be a symbolic link."""
        raise pyfuse3.FUSEError(errno.EPERM)

    @translated
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Fail with EPERM: an object has one name."""
        raise pyfuse3.FUSEError(errno.EPERM)

    @translated
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Make a directory."""
        with self._acting_for(ctx):
            inode = await self._names.make_directory(
                parent_inode,
                name,
                _posix(mode, ctx),
                is_again=_is_again(ctx),
                process=ctx.pid & ~_RESENT_PID,
            )
        return self._entry_of(inode)

    @translated
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove a file's name."""
        with self._acting_for(ctx):
            await _unless_done(ctx, self._names.unlink, parent_inode, name)
        self._namespace.write_ahead()

    @translated
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove an empty directory."""
        with self._acting_for(ctx):
            await _unless_done(ctx, self._names.remove_directory, parent_inode, name)
        self._namespace.write_ahead()

    @translated
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        """Rename a file or directory. EXCHANGE is refused with EINVAL."""
        if flags & ~pyfuse3.RENAME_NOREPLACE:
            raise pyfuse3.FUSEError(errno.EINVAL)
        old, new = Name(parent_inode_old, name_old), Name(parent_inode_new, name_new)
        process = ctx.pid & ~_RESENT_PID
        rename = partial(self._names.rename, process=process, is_again=_is_again(ctx))
        with self._acting_for(ctx):
            await _unless_done(ctx, rename, old, new, bool(flags))
        self._namespace.write_ahead()

    def _entry_of(self, inode: Inode) -> pyfuse3.EntryAttributes:
        return self._attributes(inode, self._namespace.ttls.entry_s)

    async def forget(self, inode_list: Any) -> None:
        """Drop the unsent changes of files without a name, which no process has open any more."""
        for ino, _ in inode_list:
            self._files.forget(ino)

    # -- bytes ---------------------------------------------------------------------------------

    async def read(  # type: ignore[override] # see Operations.read
        self, fh: int, off: int, size: int
    ) -> Buffer:
        """Return up to `size` bytes at `off`; of a file with unsent changes those of the spool."""
        if self._files.has(fh & INO_MASK):
            return await self._read_slowly(fh, off, size, perf_counter_ns())
        return await super().read(fh, off, size)

    def reply(
        self, fh: int, off: int, size: int, device_fd: int, unique: int, end: Callable[[bool], None]
    ) -> bool:
        """See `Operations.reply`; not for a file with unsent changes."""
        if self._files.has(fh & INO_MASK):
            return False
        return super().reply(fh, off, size, device_fd, unique, end)

    async def _read(self, fh: int, off: int, size: int) -> Buffer:
        if self._files.has(fh & INO_MASK):
            try:
                return await self._files.read(fh & INO_MASK, off, size)
            except SpoolError:
                # The cache may have got the file, and the spool removed it, during the read.
                if self._files.has(fh & INO_MASK):
                    raise
        return await super()._read(fh, off, size)

    @translated
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        """Write all of `buf` to the spool. Fails with EFBIG behind the largest object."""
        if off + len(buf) > MOST_OBJECT_BYTES:
            raise pyfuse3.FUSEError(errno.EFBIG)
        ino, process = fh & INO_MASK, request_process()
        if self._files.has(ino):
            await self._files.write(ino, off, buf, process)
        else:
            # Of mapped pages that the kernel writes, the sender is not known.
            sender = request_sender()
            with self._acting(*sender) if process else nullcontext():
                await self._files.write(ino, off, buf, process)
        self._namespace.write_ahead()
        return len(buf)

    @translated
    async def flush(self, fh: int) -> None:
        """Send a file to the origin if the process that closes it has changed it. Every close waits
        for this."""
        ino, process = fh & INO_MASK, request_process()
        with self._acting_for_sender(ino), self._files.untold.telling(ino, process):
            await self._files.close(ino, process)
        self._namespace.write_ahead()

    @translated
    async def fsync(self, fh: int, datasync: bool) -> None:
        """Send a file with unsent changes to the origin, also those of other processes."""
        ino, process = fh & INO_MASK, request_process()
        with self._acting_for_sender(ino), self._files.untold.telling(ino, process):
            file = self._files.entry(ino)
            if file is not None:
                await self._files.send(ino, is_close=file.is_close_of(process))
        self._namespace.write_ahead()

    # -- attributes ----------------------------------------------------------------------------

    @translated
    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        """Set size, owner, group, mode or times."""
        with self._acting_for(ctx):
            if fields.update_size:
                if attr.st_size > MOST_OBJECT_BYTES:
                    raise pyfuse3.FUSEError(errno.EFBIG)
                await self._files.truncate(inode, attr.st_size, request_process())
            asked = Posix(
                attr.st_uid if fields.update_uid else UNKNOWN_ID,
                attr.st_gid if fields.update_gid else UNKNOWN_ID,
                attr.st_mode & MOST_MODE if fields.update_mode else UNKNOWN_MODE,
            )
            mtime_ns = attr.st_mtime_ns if fields.update_mtime else None
            atime_ns = attr.st_atime_ns if fields.update_atime else None
            if asked != NO_POSIX or (mtime_ns, atime_ns) != (None, None):
                await self._names.set_attributes(inode, asked, mtime_ns, atime_ns)
        return self._attributes(self._namespace.inode(inode))

    @translated
    async def setxattr(
        self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext
    ) -> None:
        """Fail with EOPNOTSUPP: objects have none that can be set."""
        raise pyfuse3.FUSEError(errno.EOPNOTSUPP)

    @translated
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Fail with EOPNOTSUPP, as `setxattr` does."""
        raise pyfuse3.FUSEError(errno.EOPNOTSUPP)

    def _attributes(self, inode: Inode, entry_ttl_s: float = 0.0) -> pyfuse3.EntryAttributes:
        attributes = super()._attributes(inode, entry_ttl_s)
        self._show_own_times(attributes, inode.ino)
        if self._namespace.table.is_unnamed(inode.ino):
            attributes.st_nlink = 0
        return attributes

    def _show_own_times(self, into: pyfuse3.EntryAttributes, ino: int) -> None:
        """Set the ctime and the atime that this mount has noted. The entries of a directory have
        changed after its attributes if its mtime is later."""
        times = self._namespace.table.own_times(ino)
        if times is None:
            return
        into.st_atime_ns = times.atime_ns
        if stat.S_ISDIR(into.st_mode):
            into.st_ctime_ns = max(times.ctime_ns, into.st_ctime_ns)
        else:
            into.st_ctime_ns = times.ctime_ns


class RefusingOperations(Operations):
    """The handlers of a writable mount that can't reach its spool: `Operations` refuses all changes
    with EROFS. ENOSYS would tell the kernel to send no FLUSH and no FSYNC to later daemons."""

    async def flush(self, fh: int) -> None:
        """Fail with EIO: behind the relay only files with unsent changes have a FLUSH."""
        raise pyfuse3.FUSEError(errno.EIO)

    async def fsync(self, fh: int, datasync: bool) -> None:
        """Fail with EIO: what the file's writers have changed can't be sent."""
        raise pyfuse3.FUSEError(errno.EIO)


def _is_again(ctx: pyfuse3.RequestContext) -> bool:
    """Return whether the daemon before may have done this request already."""
    return bool(ctx.pid & _RESENT_PID)


def _posix(mode: int, ctx: pyfuse3.RequestContext) -> Posix:
    return Posix(ctx.uid, ctx.gid, mode & ~ctx.umask & MOST_MODE)


async def _unless_done(
    ctx: pyfuse3.RequestContext, change: Callable[..., Any], *args: object
) -> None:
    """Make the change. If the kernel sends the request again, and the name is gone, the daemon
    before has made the change already."""
    try:
        await change(*args)
    except NotFoundError:
        if not _is_again(ctx):
            raise
