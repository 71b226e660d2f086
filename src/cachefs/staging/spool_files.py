"""The spool files: sparse files with the written bytes of staged files, one each.

Descriptors are opened when needed, and the ones that were used longest ago are closed. Everything
here runs on the loop thread unless it says otherwise.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from errno import EINVAL, ENXIO
from functools import partial

from cachefs.format.paths import SpoolPaths
from cachefs.staging.disk import SpoolDisk
from cachefs.types import Buffer

_MOST_OPEN = 256
"""How many spool files are open at a time."""
_BLOCK_BYTES = 4096


class NotRestoredError(OSError):
    """A write failed and could not be undone: the file has a mix of old and new bytes."""


class SpoolFiles:
    """The spool files of one spool, by number. All methods raise `OSError`."""

    def __init__(self, paths: SpoolPaths, disk: SpoolDisk) -> None:
        self._paths = paths
        self._disk = disk
        self._fds: OrderedDict[int, int] = OrderedDict()

    def create(self, number: int) -> None:
        """Create an empty file. Takes tens of microseconds."""
        self._keep(number, self._disk.create(self._paths.file(number)))

    def status(self, number: int) -> os.stat_result:
        """Return the file's status: one system call, without a wait."""
        return os.fstat(self.fd(number))

    def write(
        self,
        number: int,
        offset: int,
        data: Buffer,
        undo: list[tuple[int, int]],
        size_bytes: int | None = None,
    ) -> Callable[[], None]:
        """Write all of `data`, or raise and leave the file as it was. Return what undoes the write.

        `undo` are the ranges that matter if the write fails; `size_bytes` is the file's size if it
        matters. The loop waits only where the kernel does: when a range of `undo` is not in the
        page cache, or too many dirty pages wait for the disk."""
        fd = self.fd(number)
        replaced = [(begin, self._disk.read(fd, end - begin, begin)) for begin, end in undo]
        restore = partial(self._restore, number, replaced, size_bytes)
        try:
            self._disk.write(fd, data, offset)
        except OSError:
            restore()
            raise
        return restore

    def _restore(
        self, number: int, replaced: list[tuple[int, bytes]], size_bytes: int | None
    ) -> None:
        """Give the file its former size and bytes again. Only blocks that differ are written: they
        have their space on the disk already."""
        fd = self.fd(number)
        try:
            if size_bytes is not None:
                self._disk.truncate(fd, size_bytes)
            for begin, old in replaced:
                now = self._disk.read(fd, len(old), begin)
                for at in range(0, len(old), _BLOCK_BYTES):
                    if old[at : at + _BLOCK_BYTES] != now[at : at + _BLOCK_BYTES]:
                        self._disk.write(fd, old[at : at + _BLOCK_BYTES], begin + at)
        except OSError as error:
            raise NotRestoredError(error.errno, error.strerror) from error

    def truncate(self, number: int, size_bytes: int) -> None:
        """Change the file's size. Takes about 0.1 ms for each MiB of the page cache that it
        frees."""
        self._disk.truncate(self.fd(number), size_bytes)

    def free(self, number: int, offset: int, length: int) -> None:
        """Free the space of a range. Takes about 0.1 ms for each MiB of the page cache that it
        frees."""
        self._disk.free(self.fd(number), offset, length)

    def data_from(self, number: int, offset: int) -> int | None:
        """Return where the next bytes from `offset` on are that are in no hole; None if there are
        none."""
        try:
            return os.lseek(self.fd(number), offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == ENXIO:
                return None
            if error.errno == EINVAL:  # the file system does not know
                return offset
            raise

    def read(self, number: int, offset: int, length: int) -> bytes:
        """Return `length` bytes; fewer only at the end of the file. Waits for the disk if they are
        not in the page cache."""
        return self._disk.read(self.fd(number), length, offset)

    def read_now(self, number: int, offset: int, length: int) -> bytes | None:
        """Return the bytes if they are in the page cache, without a wait; else None."""
        buffer = bytearray(length)
        try:
            got = os.preadv(self.fd(number), [buffer], offset, os.RWF_NOWAIT)
        except OSError:  # not in memory, or a file system that can't say so
            return None
        if got < length and offset + got < os.fstat(self.fd(number)).st_size:
            return None
        return bytes(buffer[:got])

    def read_slowly(self, number: int, offset: int, length: int) -> bytes:
        """Do the same as `read`, in a worker thread, with a descriptor of its own."""
        fd = self._disk.open(self._paths.file(number))
        try:
            return self._disk.read(fd, length, offset)
        finally:
            os.close(fd)

    def sync_slowly(self, number: int, is_new: bool) -> os.stat_result:
        """Make the file durable, in a worker thread, and return its status from before; `is_new`
        makes its name durable, too."""
        fd = self._disk.open(self._paths.file(number))
        try:
            status = os.fstat(fd)
            self._disk.sync(fd)
        finally:
            os.close(fd)
        if is_new:
            self._disk.sync_directory(self._paths.files)
        return status

    def sync_all_slowly(self, numbers: list[int]) -> list[os.stat_result]:
        """Do the same for several files."""
        statuses = [self.sync_slowly(number, is_new=False) for number in numbers]
        self._disk.sync_directory(self._paths.files)
        return statuses

    def close(self, number: int) -> None:
        """Close the file if it is open."""
        fd = self._fds.pop(number, None)
        if fd is not None:
            os.close(fd)

    def close_all(self) -> None:
        """Close all files."""
        for number in list(self._fds):
            self.close(number)

    def remove_slowly(self, numbers: Iterable[int]) -> None:
        """Remove closed files, in a worker thread."""
        for number in numbers:
            self._disk.unlink(self._paths.file(number))

    def fd(self, number: int) -> int:
        """Return the descriptor of a file, which may be closed by the next call of a method."""
        fd = self._fds.get(number)
        if fd is None:
            fd = self._keep(number, self._disk.open(self._paths.file(number)))
        else:
            self._fds.move_to_end(number)
        return fd

    def _keep(self, number: int, fd: int) -> int:
        self._fds[number] = fd
        if len(self._fds) > _MOST_OPEN:
            os.close(self._fds.popitem(last=False)[1])
        return fd
