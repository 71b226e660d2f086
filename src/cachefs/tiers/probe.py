"""Find out how the event loop may read from a file system without ever waiting for a disk."""

import errno
import os
from pathlib import Path

_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


def probe_read_flags(path: Path) -> int | None:
    """Flags for `preadv` of bytes that were just written to `path`, which is removed again.

    RWF_NOWAIT where the kernel answers such a read; 0 on tmpfs and its kin, where it answers
    EAGAIN (Linux before 6.18) or EOPNOTSUPP though the bytes are in memory; None (never read on
    the loop) anywhere else. The name of the file system is asked only after such a refusal: a
    network file system refuses too, and there a plain read would wait.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, b"x" * 4096, 0)
        os.pread(fd, 4096, 0)
        buffer = bytearray(4096)
        try:
            return os.RWF_NOWAIT if os.preadv(fd, [buffer], 0, os.RWF_NOWAIT) == 4096 else None
        except OSError as error:
            refused = error.errno in (errno.EAGAIN, errno.EOPNOTSUPP)
            return 0 if refused and _file_system_of(fd) in _MEMORY_FILE_SYSTEMS else None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return None  # a full disk may cost speed, not the mount
        raise
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def _file_system_of(fd: int) -> str:
    """The type that /proc/self/mountinfo gives for the device of `fd`, "" if it isn't there."""
    device = os.fstat(fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields, _, tail = line.partition(" - ")
            if fields.split()[2] == wanted:
                return tail.split()[0]
    return ""
