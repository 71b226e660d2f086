"""Every system call on slab files. One object per cache directory.

It exists so that tests can put a disk in its place that fails, hangs or forgets what was not
synced. Nothing here retries or decides; all of it but `read_now` may block, and is called from
worker threads.
"""

import os
from pathlib import Path


class Disk:
    """The real thing. All methods raise `OSError`."""

    read_now = staticmethod(os.preadv)
    """`(fd, buffers, offset, flags) -> length`: on the event loop, with flags that never wait."""

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def create(self, path: Path, size_bytes: int) -> int:
        """A new file with all of its space allocated; nothing is left behind if that fails."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return fd

    def allocate(self, fd: int, size_bytes: int) -> None:
        """See to it that the file has that size and space; costs next to nothing if it has."""
        os.posix_fallocate(fd, 0, size_bytes)

    def read(self, fd: int, length: int, offset: int) -> bytes:
        """Shorter than `length` only where the file ends."""
        return os.pread(fd, length, offset)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        """All of it."""
        written = os.pwrite(fd, data, offset)
        while written < len(data):
            written += os.pwrite(fd, data[written:], offset + written)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def forget(self, fd: int) -> None:
        """Drop the file's clean pages from memory: the next read asks the disk."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def free_and_total_bytes(self, path: Path) -> tuple[int, int]:
        """What the file system of `path` still gives us, and its size."""
        usage = os.statvfs(path)
        return usage.f_bavail * usage.f_frsize, usage.f_blocks * usage.f_frsize
