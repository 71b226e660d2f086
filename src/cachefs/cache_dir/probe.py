"""Finds the read flags with which the event loop never waits for a file system's disk."""

import errno
import os
from pathlib import Path

from cachefs.cache_dir.disk import NO_SPACE
from cachefs.trusted_path import open_own_file

_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


def probe_read_flags(path: Path) -> int | None:
    """Return the flags for a non-blocking `preadv`, after a test with a temporary file at `path`.

    Returns RWF_NOWAIT if such a read of bytes just written succeeds. Returns 0 (plain reads) on
    tmpfs, ramfs and hugetlbfs if the kernel answers EAGAIN (Linux before 6.18) or EOPNOTSUPP,
    although the bytes are in memory. Returns None (never read on the loop) otherwise, also if the
    disk is full. The type of the file system matters because a network file system refuses too,
    and a plain read would wait there. Raises `OSError`.
    """
    try:
        path.unlink(missing_ok=True)
        fd = open_own_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            return _probe(fd)
        finally:
            os.close(fd)
            path.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in NO_SPACE:
            return None  # a full disk costs speed, but must not fail the mount
        raise


def _probe(fd: int) -> int | None:
    os.pwrite(fd, b"x" * 4096, 0)
    os.pread(fd, 4096, 0)
    buffer = bytearray(4096)
    try:
        return os.RWF_NOWAIT if os.preadv(fd, [buffer], 0, os.RWF_NOWAIT) == 4096 else None
    except OSError as error:
        refused = error.errno in (errno.EAGAIN, errno.EOPNOTSUPP)
        return 0 if refused and _file_system_of(fd) in _MEMORY_FILE_SYSTEMS else None


def is_in_memory(path: Path) -> bool:
    """Return whether a directory is on a file system in memory. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _file_system_of(fd) in _MEMORY_FILE_SYSTEMS
    finally:
        os.close(fd)


def _file_system_of(fd: int) -> str:
    """Return the file system type of `fd` from /proc/self/mountinfo, "" if it isn't there."""
    device = os.fstat(fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields, _, tail = line.partition(" - ")
            if fields.split()[2] == wanted:
                return tail.split()[0]
    return ""
