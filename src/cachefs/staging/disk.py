"""Every system call on the files of a spool. One object per spool.

Tests replace it by a disk that fails, or loses what was not synced. Nothing here retries or
decides, except that `write` writes all or raises.
"""

import os
from ctypes import CDLL, c_long, get_errno
from pathlib import Path

from cachefs.trusted_path import open_own_file
from cachefs.types import Buffer

_PIECE_BYTES = 128 << 10
"""The most bytes of one pwrite. ext4 takes one page of up to 2 MiB for a longer one. Where the host
of a virtual machine takes back what is free, such a page costs .7 ms per MiB, small ones .1."""
_PUNCH_HOLE = 3
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of fallocate(2)."""
_libc = CDLL(None, use_errno=True)
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class SpoolDisk:
    """The real disk. All methods raise `OSError`."""

    def open(self, path: Path) -> int:
        """Open an existing file for reading and writing, and return its descriptor."""
        return open_own_file(path, os.O_RDWR)

    def create(self, path: Path) -> int:
        """Create an empty file with mode 0600, and return its descriptor.

        Raises `FileExistsError` if `path` exists."""
        return os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)

    def read(self, fd: int, length: int, offset: int) -> bytes:
        """Return `length` bytes at `offset`; fewer only at the end of the file."""
        return os.pread(fd, length, offset)

    def write(self, fd: int, data: Buffer, offset: int) -> None:
        """Write all of `data` at `offset`. After an `OSError` a part of it may be written."""
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(fd, view[:_PIECE_BYTES], offset)
            view, offset = view[written:], offset + written

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Change the size of a file."""
        os.ftruncate(fd, size_bytes)

    def free(self, fd: int, offset: int, length: int) -> None:
        """Free the space of a range, which reads as zeros from then on."""
        if _libc.fallocate(fd, _PUNCH_HOLE, c_long(offset), c_long(length)):
            number = get_errno()
            raise OSError(number, os.strerror(number))

    def sync(self, fd: int) -> None:
        """Make a file durable with its size and mtime (fsync). Blocks: only in a worker thread."""
        os.fsync(fd)

    def sync_data(self, fd: int) -> None:
        """Make a file's bytes and size durable (fdatasync). Blocks: only in a worker thread."""
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable. Blocks: only in a worker thread."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file, over another one if there is one."""
        old.rename(new)

    def unlink(self, path: Path) -> None:
        """Remove a file; does nothing if it is missing. Blocks for a large file."""
        path.unlink(missing_ok=True)

    def free_bytes(self, path: Path) -> int:
        """Return the bytes that this user may still use on the file system of `path`."""
        usage = os.statvfs(path)
        return usage.f_bavail * usage.f_frsize
