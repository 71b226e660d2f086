"""Single steps of writes to directories of this machine, for `local_files.py`. They block."""

import contextlib
import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Iterator

from cachefs.errors import ConflictError, ObjectChangedError, OriginError, OriginUnavailableError
from cachefs.origin.fsspec.local_tree import upload_name
from cachefs.origin.writable import Attributes, Content

_PIECE_BYTES = 1 << 20
_LOCK_AGAIN_S = 0.02
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
    """Exclude other mounts of cachefs from a directory, where it can be locked.

    Any user who can open the directory can hold the lock. So the thread ends when nobody waits for
    it any more, and raises `OriginUnavailableError`."""
    is_locked = False
    while not is_locked:
        task.check()
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        except BlockingIOError:
            time.sleep(_LOCK_AGAIN_S)
        except OSError:  # this file system has no locks
            break
    try:
        yield
    finally:
        if is_locked:
            fcntl.flock(place, fcntl.LOCK_UN)


def apply(target: int | str, attributes: Attributes, *, must_own: bool) -> None:
    """Set what is stated of a descriptor or path. Only root may give a file to others; without
    `must_own`, the owner then stays as it is."""
    uid = -1 if attributes.uid is None else attributes.uid
    gid = -1 if attributes.gid is None else attributes.gid
    if (uid, gid) != (-1, -1):
        with contextlib.suppress(*(() if must_own else (PermissionError,))):
            os.chown(target, uid, gid)
    if attributes.mode is not None:
        os.chmod(target, attributes.mode & 0o1777)  # noqa: PTH101 - not a path of this program
    if attributes.mtime_ns is not None:
        os.utime(target, ns=(attributes.mtime_ns, attributes.mtime_ns))


def write_content(fd: int, offset: int, content: Content, task: Task) -> None:
    done = 0
    while done < content.size_bytes:
        task.check()
        length = min(_PIECE_BYTES, content.size_bytes - done)
        piece = memoryview(content.read(done, length))
        while piece:
            count = os.pwrite(fd, piece, offset + done)
            piece = piece[count:]
            done += count


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


def copy_bytes(source: int, offset: int, length: int, fd: int, task: Task) -> None:
    """Copy bytes to the same place of another file; a file system may share them instead."""
    end = offset + length
    while offset < end:
        task.check()
        count = 0
        with contextlib.suppress(OSError):  # between file systems, or where it does not exist
            count = os.copy_file_range(
                source, fd, min(end - offset, 16 * _PIECE_BYTES), offset, offset
            )
        if not count:
            piece = os.pread(source, min(end - offset, _PIECE_BYTES), offset)
            if not piece:
                raise Refused(ObjectChangedError, "can't be made: its source has become shorter")
            count = os.pwrite(fd, piece, offset)
        offset += count
