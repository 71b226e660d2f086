"""Single steps of writes to directories of this machine, for `local_files.py`. They block."""

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import struct
import threading
import time
from collections.abc import Iterator

from cachefs.errors import (
    CachefsError,
    ConflictError,
    ObjectChangedError,
    OriginError,
    OriginUnavailableError,
)
from cachefs.mounts.runtime import runtime_dir
from cachefs.origin.fsspec.local_acl import copy_attributes
from cachefs.origin.fsspec.local_identity import acting_as_daemon
from cachefs.origin.fsspec.local_tree import upload_name
from cachefs.origin.writable import Attributes, Content
from cachefs.types import MOST_MODE

_PIECE_BYTES = 1 << 20
_ZEROS = bytes(_PIECE_BYTES)
_PRESENT_NS = 5_000_000_000
_LOCK_FILE = "source.lock"
_LOCK_AGAIN_S = 0.02
_MOST_OFFSET = (1 << 62) - 1
_F_OFD_SETLK = 37
"""The number of this command in linux/fcntl.h; Python's module has it from 3.13 on."""
_NOREPLACE = 1
"""RENAME_NOREPLACE of linux/fs.h."""
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


class Task:
    """One call in a thread. After `given_up`, the thread changes no name any more."""

    def __init__(self) -> None:
        self.given_up = False

    def check(self) -> None:
        if self.given_up:
            raise OriginUnavailableError("nobody waits for this write any more")


class Refused(Exception):
    """The text continues the name of the path; `kind` is the error for the caller."""

    def __init__(self, kind: type[OriginError], why: str) -> None:
        super().__init__(why)
        self.kind = kind


def new_file(place: int, upload_id: str) -> int:
    """Create the hidden file of an upload in the directory `place`, and return its descriptor. Only
    the daemon's user can open it before it has its owner and mode."""
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
    return os.open(upload_name(upload_id), flags, 0o600, dir_fd=place)


@contextlib.contextmanager
def locked(place: int, task: Task) -> Iterator[None]:
    """Exclude other mounts of this user on this machine from a directory.

    The lock is in a file that nobody else can open: a byte of it stands for a directory, or for
    several. It belongs to an open file description (fcntl(2)), and each thread has one, so threads
    exclude each other, too. Without the file, only this process's own checks remain. Raises
    `OriginUnavailableError` when nobody waits for the lock any more."""
    fd = _this_thread.lock_fd()
    if fd is None:
        yield
        return
    found = os.fstat(place)
    byte = hash((found.st_dev, found.st_ino)) & _MOST_OFFSET
    while not _try_lock(fd, fcntl.F_WRLCK, byte):
        task.check()
        time.sleep(_LOCK_AGAIN_S)
    try:
        yield
    finally:
        _try_lock(fd, fcntl.F_UNLCK, byte)


def _try_lock(fd: int, kind: int, byte: int) -> bool:
    try:
        fcntl.fcntl(fd, _F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))
    except BlockingIOError:
        return False
    return True


class _LockFile:
    """One open file description of the lock file."""

    def __init__(self) -> None:
        path = runtime_dir() / _LOCK_FILE
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(path, flags, 0o600)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class _Thread(threading.local):
    """The lock file of this thread; it is closed with the thread."""

    _file: _LockFile | None = None

    def lock_fd(self) -> int | None:
        """Return its descriptor; None if there is no such file."""
        if self._file is None:
            with contextlib.suppress(OSError, CachefsError), acting_as_daemon():
                self._file = _LockFile()
        return None if self._file is None else self._file.fd


_this_thread = _Thread()


def apply(target: int | str, attributes: Attributes, *, must_own: bool) -> None:
    """Set what is stated of a descriptor or path. Only root may give a file to others; without
    `must_own`, the owner then stays as it is."""
    uid = -1 if attributes.uid is None else attributes.uid
    gid = -1 if attributes.gid is None else attributes.gid
    if (uid, gid) != (-1, -1):
        with contextlib.suppress(*(() if must_own else (PermissionError,))):
            os.chown(target, uid, gid)
    if attributes.mode is not None:
        found = os.stat(target).st_mode  # noqa: PTH116
        # A mount does not show this bit, so nobody means to take it from a directory.
        kept = found & stat.S_ISGID if stat.S_ISDIR(found) else 0
        mode = attributes.mode & MOST_MODE | kept
        os.chmod(target, mode)  # noqa: PTH101 - not a path of this program
    if attributes.mtime_ns is not None:
        _set_mtime(target, attributes.mtime_ns)


def _set_mtime(target: int | str, mtime_ns: int) -> None:
    try:
        os.utime(target, ns=(mtime_ns, mtime_ns))
    except PermissionError:
        # Only the owner sets a time of its choice. Who may write the file sets the present one.
        if abs(time.time_ns() - mtime_ns) > _PRESENT_NS:
            raise
        os.utime(target)


def have_one_owner(file: int, other: int) -> bool:
    """Return whether two open files have the same owner and group."""
    found, others = os.fstat(file), os.fstat(other)
    return (found.st_uid, found.st_gid) == (others.st_uid, others.st_gid)


def give_owner(old: int, fd: int) -> None:
    """Give the new version `fd` of the file `old` its owner and group. A daemon without root's
    rights can't."""
    if not have_one_owner(old, fd):
        found = os.fstat(old)
        with contextlib.suppress(*(() if os.geteuid() == 0 else (PermissionError,))):
            os.fchown(fd, found.st_uid, found.st_gid)


def take_over(old: int, fd: int) -> None:
    """Give the new version `fd` of the file `old` its owner, mode, access list and other extended
    attributes."""
    give_owner(old, fd)
    copy_attributes(old, fd)
    os.fchmod(fd, os.fstat(old).st_mode & MOST_MODE)


def write_content(
    fd: int, offset: int, content: Content, task: Task, *, is_new: bool = True
) -> None:
    """Write a content to a file from `offset` on. If the file `is_new` there, zeros become holes,
    which need no place at the source: `grow` it afterwards."""
    done = content.size_bytes if content.is_zeros and is_new else 0
    while done < content.size_bytes:
        task.check()
        length = min(_PIECE_BYTES, content.size_bytes - done)
        piece = memoryview(content.read(done, length))
        if is_new and piece[0] == 0 and bytes(piece) == _ZEROS[:length]:
            done += length
            continue
        while piece:
            count = os.pwrite(fd, piece, offset + done)
            piece = piece[count:]
            done += count


def grow(fd: int, size_bytes: int) -> None:
    """Let a file have this size if it is smaller: the end of its content may be a hole. Nobody else
    may write it meanwhile, because that could be cut off."""
    if os.fstat(fd).st_size < size_bytes:
        os.ftruncate(fd, size_bytes)


def rename_to_absent(old: int, old_name: str, new: int, new_name: str) -> None:
    """Rename between two directories, if there is nothing of the new name. Raises `Refused`. A file
    system or C library that can't compare in the same step (NFS) does not: the caller has compared,
    and holds the lock."""
    if _renameat2 is not None:
        names = os.fsencode(old_name), os.fsencode(new_name)
        if _renameat2(old, names[0], new, names[1], _NOREPLACE) == 0:
            return
        number = ctypes.get_errno()
        if number == errno.EEXIST:
            raise Refused(ConflictError, "exists already")
        if number not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(number, os.strerror(number), old_name)
    os.rename(old_name, new_name, src_dir_fd=old, dst_dir_fd=new)


def copy_bytes(
    source: int, offset: int, length: int, fd: int, task: Task, *, is_new: bool = True
) -> None:
    """Copy bytes to the same place of another file; a file system may share them instead. If the
    file `is_new` there, holes stay holes: `grow` it afterwards."""
    end = offset + length
    if os.fstat(source).st_size < end:
        raise Refused(ObjectChangedError, "can't be made: its source has become shorter")
    while offset < end:
        task.check()
        stop = end
        if is_new:
            offset, stop = _next_data(source, offset, end)
        count = 0
        with contextlib.suppress(OSError):  # between file systems, or where it does not exist
            count = os.copy_file_range(
                source, fd, min(stop - offset, 16 * _PIECE_BYTES), offset, offset
            )
        if not count and offset < end:
            piece = os.pread(source, min(stop - offset, _PIECE_BYTES), offset)
            if not piece:
                raise Refused(ObjectChangedError, "can't be made: its source has become shorter")
            count = os.pwrite(fd, piece, offset)
        offset += count


def _next_data(file: int, offset: int, end: int) -> tuple[int, int]:
    """Return where the next bytes from `offset` on begin that are no hole, and where they stop;
    `end` twice if only a hole is left."""
    try:
        begin = min(os.lseek(file, offset, os.SEEK_DATA), end)
        return begin, min(os.lseek(file, begin, os.SEEK_HOLE), end) if begin < end else end
    except OSError as error:
        return (end, end) if error.errno == errno.ENXIO else (offset, end)
