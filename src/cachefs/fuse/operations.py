"""The FUSE request handlers. Each one decodes a request, makes one call below, and encodes a reply.

These handlers are those of a read-only mount; `writing.py` has the others. There is no state per
open file: `fh` is the inode number, so a data path without OPEN requests (docs/ARCHITECTURE.md)
needs no other code. In a file's `fh`, the bits above the inode number hold the user number
(`uid_limits.py`). A directory position is `generation << 32 | index` in the snapshot that the
reader began with.

If a reply uses the cache's shared buffer, no await may come between `read_now` and the return.
pyfuse3 writes the reply to the kernel in the same step.

Handlers raise only `pyfuse3.FUSEError`, which carries the errno for the kernel.
"""

import errno
import logging
import math
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial, wraps
from time import perf_counter_ns
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyfuse3

from cachefs.cache.block_cache import Replying
from cachefs.cache.publisher import Publisher
from cachefs.errors import CachefsError, NotFoundError
from cachefs.format.inode_record import KIND_DIR, Inode
from cachefs.fuse.attrs import AttrBuilder, kernel_timeout_s
from cachefs.fuse.errno_map import errno_of
from cachefs.fuse.hint_requests import HintRequests
from cachefs.fuse.observers import Answered, RequestObservers, path_of
from cachefs.fuse.uid_limits import INO_BITS, INO_MASK, UidLimits
from cachefs.fuse.xattrs import HINT, PREFIX, USER_PREFIX, Xattrs
from cachefs.metrics import Requests
from cachefs.namespace.directories.snapshot import DirectorySnapshot
from cachefs.namespace.namespace import ROOT_INO, Namespace
from cachefs.namespace.reader import FileReader, Readers
from cachefs.origin.names import NAME_MAX_BYTES
from cachefs.types import Buffer, Reply

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
AnyOperations = TypeVar("AnyOperations", bound="Operations")

_POSITION_BITS = 32
_POSITION_MASK = (1 << _POSITION_BITS) - 1
_DOTS = 2
"""Positions 0 and 1 are "." and ".."; entry i of a snapshot has position i + 2."""
_TOTAL_BYTES = 1 << 50
_FUSE_BLOCK_BYTES = 4096
_ABSENT = frozenset({errno.ENOENT, pyfuse3.ENOATTR, errno.EOPNOTSUPP})


def translated(
    handler: Callable[Concatenate[AnyOperations, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[AnyOperations, P], Coroutine[Any, Any, T]]:
    """Wrap a handler: convert each exception to a `FUSEError`, and record outcome and duration.

    A `CachefsError` becomes its own errno. Any other exception is a bug: this request fails with
    EIO, and `_report_bug` logs it once per handler and exception type.
    """
    operation = handler.__name__

    @wraps(handler)
    async def answer(self: AnyOperations, /, *args: P.args, **kwargs: P.kwargs) -> T:
        began_ns = perf_counter_ns()
        requests = self.requests
        requests.waiting += 1
        outcome = "ok"
        try:
            return await handler(self, *args, **kwargs)
        except (CachefsError, pyfuse3.FUSEError) as error:
            number = error.errno if isinstance(error, pyfuse3.FUSEError) else errno_of(error)
            outcome = "absent" if number in _ABSENT else "error"
            if outcome == "error" and isinstance(error, CachefsError):
                self.note_failure(operation, args, error)
            raise pyfuse3.FUSEError(number) from None
        except Exception as error:
            outcome = "error"
            _report_bug(operation, error)
            raise pyfuse3.FUSEError(errno.EIO) from None
        finally:
            requests.waiting -= 1
            lasted_ns = perf_counter_ns() - began_ns
            requests.histogram(operation, outcome).note(lasted_ns)
            if self.observers:
                self.tell(operation, args, outcome, lasted_ns)

    return answer


_reported_bugs: set[tuple[str, type[Exception]]] = set()


def _report_bug(place: str, error: Exception) -> None:
    """Log a traceback, but only once for each exception type in each handler."""
    if (place, type(error)) not in _reported_bugs:
        _reported_bugs.add((place, type(error)))
        log.error("bug in %s; such requests fail with EIO", place, exc_info=error)


class _LostInodeError(Exception):
    """The inode of an entry was lost through damage."""

    def __init__(self, name: bytes, position: int) -> None:
        super().__init__(name)
        self.name = name
        self.position = position


class Operations(pyfuse3.Operations):
    """The handlers that pyfuse3 calls, all on the trio loop.

    pyfuse3 holds the only instance of a mount. The object keeps no state per open file.
    """

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(
        self,
        namespace: Namespace,
        readers: Readers,
        xattrs: Xattrs,
        attrs: AttrBuilder,
        on_init: Callable[[], None],
        limits: UidLimits,
        requests: Requests,
        observers: RequestObservers,
        publisher: Publisher | None = None,
        hints: HintRequests | None = None,
    ) -> None:
        """`on_init` is called when the kernel has sent INIT.

        With `publisher`, this mount is behind the relay. The kernel then sends no OPEN and no
        OPENDIR to this process, and caches a listing until the directory's mtime changes. Without
        `hints`, hint attributes do not exist."""
        super().__init__()
        self._publisher = publisher
        self._large_bytes = math.inf if publisher is None else publisher.large_bytes
        self._hints = hints
        if publisher is not None:
            namespace.outlive()
        self.requests = requests
        self.observers = observers
        self._path_of = partial(path_of, namespace)
        self._hits = requests.histogram("read", "hit")
        self._waits = requests.histogram("read", "wait")
        self._errors = requests.histogram("read", "error")
        self._namespace = namespace
        self._readers = readers
        self._xattrs = xattrs
        self._attrs = attrs
        self._on_init = on_init
        self._limits = limits
        # One object serves all directory entries, because pyfuse3 copies it into the reply at once.
        self._dir_entry = attrs.template()
        self._set_own_times: Callable[[pyfuse3.EntryAttributes, int], None] | None = None
        """Changes the times of an entry with this inode number, on a writable mount."""

    def init(self) -> None:
        """Handle INIT, the kernel's first request."""
        self._on_init()

    # -- names ---------------------------------------------------------------------------------

    @translated
    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Return the attributes of `name` in a directory.

        If the name is absent, the reply has inode 0, and the kernel caches the absence for
        what remains of the negative TTL. If nothing remains, the request fails with ENOENT. A name
        that is too long fails with ENAMETOOLONG.
        """
        if len(name) > NAME_MAX_BYTES:
            raise pyfuse3.FUSEError(errno.ENAMETOOLONG)
        try:
            inode, entry_ttl_s = await self._namespace.lookup(parent_inode, name)
        except NotFoundError:
            ttl_s = self._namespace.negative_ttl_s(parent_inode, name)
            if ttl_s <= 0:
                raise
            self._namespace.write_ahead()
            return self._attrs.negative(ttl_s)
        return self._attributes(inode, entry_ttl_s)

    async def forget(self, inode_list: Any) -> None:
        """Do nothing. There is no state per look-up: records live in the inode table."""

    # -- files ---------------------------------------------------------------------------------

    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        """Return a handle that holds the inode number and the user number of `ctx.uid`."""
        if self.observers:
            self.tell("open", (inode, ctx), "ok", 0)
        # Only writes of this kernel change the content of a file inode, so it may keep its pages.
        return pyfuse3.FileInfo(fh=self._limits.handle(inode, ctx.uid), keep_cache=True)

    async def read(  # type: ignore[override] # pyfuse3 takes any buffer, says bytes
        self, fh: int, off: int, size: int
    ) -> Buffer:
        """Return up to `size` bytes at `off`, fewer only at the end of the file.

        A hit of a user without a limit is served from the shared buffer without an await. All other
        reads go to `_read_slowly`.
        """
        # Not wrapped by `translated`, because the wrapper would make every hit more expensive.
        began_ns = perf_counter_ns()
        limits = self._limits
        user = fh >> INO_BITS
        try:
            if limits.buckets[user] is None:
                reader = self._readers.get(fh & INO_MASK)
                data = reader.read_now(off, size)
                if data is not None:
                    if self._publisher is not None:
                        self._publisher.publish(reader.inode.ino, reader.ref, off, size)
                    limits.read_bytes[user] += len(data)  # type: ignore[arg-type] # of bytes
                    lasted_ns = perf_counter_ns() - began_ns
                    self._hits.note(lasted_ns)
                    if self.observers:
                        self._tell_read(fh, off, size, "hit", lasted_ns, data)
                    return data
        except Exception as error:
            lasted_ns = perf_counter_ns() - began_ns
            self._errors.note(lasted_ns)
            if self.observers:
                self._tell_read(fh, off, size, "error", lasted_ns)
            raise self._read_failure(fh, error) from None
        return await self._read_slowly(fh, off, size, began_ns)

    async def _read_slowly(self, fh: int, off: int, size: int, began_ns: int) -> Buffer:
        """Read with waiting, and record the request as "wait" or "error" and as a stall."""
        limits = self._limits
        user = fh >> INO_BITS
        outcome = self._waits
        data: Buffer = b""
        self.requests.waiting += 1
        try:
            data = await self._read(fh, off, size)
            limits.read_bytes[user] += len(data)  # type: ignore[arg-type] # of bytes
            return data
        except Exception as error:
            outcome = self._errors
            raise self._read_failure(fh, error) from None
        finally:
            self.requests.waiting -= 1
            lasted_ns = perf_counter_ns() - began_ns
            outcome.note(lasted_ns)
            limits.stalled_ns[user] += lasted_ns
            if self.observers:
                word = "wait" if outcome is self._waits else "error"
                self._tell_read(fh, off, size, word, lasted_ns, data)

    async def _read(self, fh: int, off: int, size: int) -> Buffer:
        reader = self._readers.get(fh & INO_MASK)
        if self._limits.buckets[fh >> INO_BITS] is not None:
            left = reader.ref.meta.size_bytes - off
            await self._limits.wait(fh, max(0, min(size, left)))
            # Get the reader again: no await may come between `read_now` and the reply.
            reader = self._readers.get(fh & INO_MASK)
            data = reader.read_now(off, size)
            if data is not None:
                return data
        data = await self._readers.read(reader, off, size)
        if self._publisher is not None:
            self._publisher.publish(reader.inode.ino, reader.ref, off, size)
        return data

    def reply(
        self, fh: int, off: int, size: int, device_fd: int, unique: int, end: Callable[[bool], None]
    ) -> bool:
        """Begin to answer the READ `unique` without a task, by a thread that writes to `device_fd`.
        Return whether it has begun; if so, `end` is called later with whether the READ was
        answered. If not, `read` must handle it."""
        user = fh >> INO_BITS
        if self.observers or self._limits.buckets[user] is not None:
            return False
        try:
            reader = self._readers.get(fh & INO_MASK)
            length = min(size, reader.ref.meta.size_bytes - off)
            if length <= 0:
                return False
            reply = Reply(device_fd, unique, off, length)
            began_ns = perf_counter_ns()
            replying: Replying | None = None

            def ended(is_replied: bool) -> None:
                self.requests.waiting -= 1
                lasted_ns = perf_counter_ns() - began_ns
                if replying == "wait":
                    self._limits.stalled_ns[user] += lasted_ns
                if is_replied and replying is not None:
                    self._note_replied(reader, reply, user, replying, lasted_ns)
                end(is_replied)

            replying = self._readers.reply(reader, reply, ended)
        except Exception as error:
            if not isinstance(error, CachefsError):
                _report_bug("reply", error)
            return False  # `read` meets the error, too, and tells it
        self.requests.waiting += replying is not None
        return replying is not None

    def _note_replied(
        self, reader: FileReader, reply: Reply, user: int, replying: Replying, lasted_ns: int
    ) -> None:
        self._limits.read_bytes[user] += reply.length
        (self._hits if replying == "hit" else self._waits).note(lasted_ns)
        try:
            if self._publisher is not None:
                ino = reader.inode.ino
                self._publisher.publish(ino, reader.ref, reply.offset, reply.length)
        except Exception as error:
            _report_bug("reply", error)

    async def flush(self, fh: int) -> None:
        """Fail with ENOSYS. After this answer the kernel sends no more FLUSH on this mount."""
        raise pyfuse3.FUSEError(errno.ENOSYS)

    async def release(self, fh: int) -> None:
        """Do nothing. There is no state per open file."""

    # -- directories ---------------------------------------------------------------------------

    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        """Return the inode number as the handle."""
        return inode

    async def releasedir(self, fh: int) -> None:
        """Do nothing. There is no state per open directory."""

    @translated
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """Send entries from position `start_id` on, as many as are listed and fit in the reply.

        Position 0 opens a new snapshot. Any other position continues in the snapshot with the
        generation in its high bits.
        """
        generation, position = start_id >> _POSITION_BITS, start_id & _POSITION_MASK
        if start_id == 0:
            snapshot = self._namespace.open_directory(fh)
        else:
            snapshot = self._namespace.resume_directory(fh, generation)
        # An empty reply means the end. So if all listed entries have vanished, wait for more.
        next_position: int | None = position
        while next_position is not None:
            is_there = await self._wait_for_entry(snapshot, next_position)
            self._namespace.write_ahead()
            if not is_there:
                return
            try:
                next_position = self._reply_entries(fh, snapshot, next_position, token)
            except _LostInodeError as lost:
                await self._namespace.find_lost(fh, lost.name)
                next_position = self._reply_entries(fh, snapshot, lost.position, token, lost.name)

    async def _wait_for_entry(self, snapshot: DirectorySnapshot, position: int) -> bool:
        """Wait until the entry at `position` is listed (True) or the directory ends (False)."""
        return position < _DOTS or await snapshot.has(position - _DOTS)

    def _reply_entries(
        self,
        ino: int,
        snapshot: DirectorySnapshot,
        position: int,
        token: pyfuse3.ReaddirToken,
        gone: bytes | None = None,
    ) -> int | None:
        """Send the listed entries from `position` on.

        Return None if any entry was sent or the reply is full. Otherwise all listed entries have
        vanished, and the result is the next position. Raises `_LostInodeError` if the first
        entry's inode is lost, unless that is `gone`.
        """
        sent = False
        set_own_times = self._set_own_times
        base = snapshot.generation << _POSITION_BITS
        entry = self._dir_entry
        entry.entry_timeout = kernel_timeout_s(self._namespace.snapshot_ttl_s(snapshot))
        attr_timeout_s = kernel_timeout_s(self._namespace.ttls.attr_s)
        while position < len(snapshot) + _DOTS:
            name, child = self._entry(ino, snapshot, position)
            position += 1
            if child is None:
                continue
            named = (ino, name) if position > _DOTS else None
            stat = self._namespace.table.stat(child, named)
            if stat is None:
                if sent:
                    return None  # the kernel asks for the rest
                if named is not None and name != gone:
                    raise _LostInodeError(name, position - 1)
                continue
            entry.attr_timeout = attr_timeout_s
            self._attrs.fill(entry, child, *stat)
            if stat[1] >= self._large_bytes:
                self._note_large(self._namespace.inode(child))
            if stat[0] == KIND_DIR:
                mtime_ns, ttl_s = self._namespace.directory_mtime(child, stat[2])
                self._attrs.set_directory_times(entry, mtime_ns)
                entry.attr_timeout = kernel_timeout_s(ttl_s)
            if set_own_times is not None:
                set_own_times(entry, child)
            if not pyfuse3.readdir_reply(token, name, entry, base | position):
                return None
            sent = True
        return None if sent else position

    def _entry(
        self, ino: int, snapshot: DirectorySnapshot, position: int
    ) -> tuple[bytes, int | None]:
        """Return name and inode number at a position; no number if the name has vanished."""
        if position >= _DOTS:
            name, child = snapshot.entry(position - _DOTS)
            return name, self._namespace.listed_ino(ino, name, child, snapshot)
        if position == 0:
            return b".", ino
        return b"..", self._namespace.inode(ino).parent if ino != ROOT_INO else ROOT_INO

    # -- attributes ----------------------------------------------------------------------------

    @translated
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        """Return the attributes of an inode; ESTALE if its record is gone."""
        if self._namespace.table.is_cold:
            await self._namespace.table.bring(inode)
        return self._attributes(self._namespace.inode(inode))

    def _attributes(self, inode: Inode, entry_ttl_s: float = 0.0) -> pyfuse3.EntryAttributes:
        mtime_ns, ttl_s = inode.mtime_ns, self._namespace.ttls.attr_s
        if inode.is_dir:
            mtime_ns, ttl_s = self._namespace.directory_mtime(inode.ino, mtime_ns)
        elif inode.size_bytes >= self._large_bytes:
            self._note_large(inode)
        self._namespace.write_ahead()
        return self._attrs.build(inode, mtime_ns, ttl_s, entry_ttl_s)

    def _note_large(self, inode: Inode) -> None:
        """Let the kernel open a large file by itself, if it is cached as a whole."""
        if self._publisher is not None and not inode.is_dir:
            with suppress(CachefsError):  # its path may be lost; a READ tells that
                self._publisher.note_entry(inode.ino, self._namespace.object_ref(inode))

    @translated
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        """Return the value of one attribute: a hint's answer, or one of `Xattrs`.

        Fails with EOPNOTSUPP for a name outside "user.", ENOATTR for an unknown attribute, ENOTDIR
        for a hint on a file, and EINVAL for a malformed hint.
        """
        if not name.startswith(USER_PREFIX):
            # `ls -l` requests the security label and the access list of each file until it gets
            # EOPNOTSUPP, which stands for the whole mount. The kernel forwards every such request.
            raise pyfuse3.FUSEError(errno.EOPNOTSUPP)
        if self._hints is not None and name.startswith(HINT):
            if not self._namespace.inode(inode).is_dir:
                raise pyfuse3.FUSEError(errno.ENOTDIR)
            return self._hints.answer(ctx.uid, inode, name)
        if name.startswith(PREFIX):
            value = await self._xattrs.get(self._namespace.inode(inode), name)
            if value is not None:
                return value
        raise pyfuse3.FUSEError(pyfuse3.ENOATTR)

    @translated
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> list[bytes]:
        """Return the names of the inode's attributes."""
        return self._xattrs.names(self._namespace.inode(inode))

    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        """Return a size of 1 PiB, all free.

        The size of an object store is unknown, and programs that check for free space before they
        read must not stop.
        """
        stats = pyfuse3.StatvfsData()
        stats.f_bsize = stats.f_frsize = _FUSE_BLOCK_BYTES
        stats.f_blocks = stats.f_bfree = stats.f_bavail = _TOTAL_BYTES // _FUSE_BLOCK_BYTES
        stats.f_files = stats.f_ffree = stats.f_favail = 1 << 40
        stats.f_namemax = 255
        return stats

    # -- failures -------------------------------------------------------------------------------

    def note_failure(self, operation: str, args: tuple[Any, ...], error: CachefsError) -> None:
        """Record an error that a program gets. `args` are the handler's, as for `tell`."""
        path = self._path_of(args[0] & INO_MASK) if isinstance(args[0], int) else "/"
        if len(args) > 1 and isinstance(args[1], bytes):
            path = f"{path.rstrip('/')}/{os.fsdecode(args[1])}"
        self.requests.last_errors.note(operation, path, errno_of(error), str(error))

    def _read_failure(self, fh: int, error: Exception) -> pyfuse3.FUSEError:
        """Return the error for the kernel, and record it."""
        if isinstance(error, CachefsError):
            self.note_failure("read", (fh & INO_MASK,), error)
            return pyfuse3.FUSEError(errno_of(error))
        _report_bug("read", error)
        return pyfuse3.FUSEError(errno.EIO)

    # -- observers ------------------------------------------------------------------------------

    def tell(self, operation: str, args: tuple[Any, ...], outcome: str, lasted_ns: int) -> None:
        """Report an answered request to all observers.

        `args` are the handler's: first an inode number, then optionally a name, and last optionally
        a `RequestContext` with uid and pid.
        """
        context = args[-1] if isinstance(args[-1], pyfuse3.RequestContext) else None
        uid, pid = (None, None) if context is None else (context.uid, context.pid)
        name = args[1] if len(args) > 1 and isinstance(args[1], bytes) else None
        self._tell(Answered(operation, outcome, lasted_ns, args[0], name, uid, pid))

    def _tell_read(
        self, fh: int, off: int, size: int, outcome: str, lasted_ns: int, data: Buffer = b""
    ) -> None:
        uid = self._limits.uid_of(fh >> INO_BITS)
        given_bytes = len(data)  # type: ignore[arg-type] # of bytes
        ino = fh & INO_MASK
        self._tell(
            Answered("read", outcome, lasted_ns, ino, None, uid, None, off, size, given_bytes)
        )

    def _tell(self, answered: Answered) -> None:
        for observer in self.observers:
            observer(answered, self._path_of)


def _refuse(operation: str) -> Callable[..., Coroutine[Any, Any, None]]:
    """Make a handler that fails with EROFS."""

    async def refuse(*args: Any) -> None:
        raise pyfuse3.FUSEError(errno.EROFS)

    refuse.__name__ = operation
    refuse.__doc__ = (
        "The mount takes no changes. If it is read-only, the kernel refuses them before."
    )
    return refuse


for _operation in (
    "setattr mknod mkdir unlink rmdir symlink rename link write create setxattr removexattr"
).split():
    setattr(Operations, _operation, _refuse(_operation))
