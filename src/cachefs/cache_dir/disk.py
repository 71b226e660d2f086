"""Every system call on slab files. One object per cache directory.

Tests replace it by a disk that fails, hangs or loses data that was not synced. Nothing here
retries or decides. All methods except `read_nowait` may block: worker threads call them.
"""

import ctypes
import errno
import fcntl
import os
import signal
from pathlib import Path

from cachefs.trusted_path import open_own_file

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
"""Unlike it, `os.posix_fallocate` writes to every page where the file system can't allocate."""
_F_SETSIG = 10
"""From asm-generic/fcntl.h. The module `fcntl` lacks it."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a full disk, or of one on which this user may use no more."""


class Disk:
    """The real disk. All methods raise `OSError`."""

    read_nowait = staticmethod(os.preadv)
    """`(fd, buffers, offset, flags) -> length`, called on the event loop: `flags` (see `probe.py`)
    must make the read non-blocking."""

    def open(self, path: Path) -> int:
        """Open an existing file for reading and writing, and return its descriptor."""
        return open_own_file(path, os.O_RDWR)

    def create(self, path: Path, size_bytes: int) -> int:
        """Create a file, allocate all its space, and return its descriptor.

        Raises `FileExistsError` if `path` exists. If the allocation fails, removes the file.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return fd

    def create_large(self, path: Path, size_bytes: int, allocates: bool) -> int:
        """Create a file of any size in a short time, and return its descriptor. With `allocates`,
        all its space is allocated, if the file system can do that without writing it: in memory it
        can't. Raises and removes as `create`.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size_bytes)
            if allocates and _libc.fallocate(fd, 0, 0, size_bytes) != 0:
                error = ctypes.get_errno()
                if error != errno.EOPNOTSUPP:
                    raise OSError(error, os.strerror(error))
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return fd

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Ensure that the file has this size and that its space is allocated. Very cheap if so."""
        os.posix_fallocate(fd, 0, size_bytes)

    def read(self, fd: int, length: int, offset: int) -> bytes:
        """Return `length` bytes at `offset`; fewer only at the end of the file."""
        return os.pread(fd, length, offset)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        """Write all of `data` at `offset`."""
        written = os.pwrite(fd, data, offset)
        while written < len(data):
            written += os.pwrite(fd, data[written:], offset + written)

    def sync(self, fd: int) -> None:
        """Make the file's data durable (fsync)."""
        os.fsync(fd)

    def forget(self, fd: int) -> None:
        """Drop the file's clean pages from memory, so that the next read goes to the disk."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def is_used_elsewhere(self, fd: int) -> bool:
        """Whether another open file description, or a mapping of one, has this file.

        The kernel gives a write lease only to a file that nobody else has open (fcntl(2),
        F_SETLEASE). A process that opens it before the lease is given back causes a signal; the
        one that is set here is ignored. False where the file system has no leases.
        """
        try:
            fcntl.fcntl(fd, _F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    def unlink(self, path: Path) -> None:
        """Remove a file; does nothing if it is missing."""
        path.unlink(missing_ok=True)

    def free_and_total_bytes(self, path: Path) -> tuple[int, int]:
        """Return (bytes available to this user, total bytes) of the file system of `path`."""
        usage = os.statvfs(path)
        return usage.f_bavail * usage.f_frsize, usage.f_blocks * usage.f_frsize
