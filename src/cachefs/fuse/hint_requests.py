"""Hints as they come from the kernel: getxattr on a directory, with the hint in the name.

A mount is read-only and its control socket belongs to its owner, so a job in a container has no
other way to say something to the daemon. The form is described in docs/HINTS.md.
"""

import errno
from collections import OrderedDict
from typing import Protocol

import pyfuse3

from cachefs.fuse.xattrs import HINT

TAKEN, FULL = b"1", b"0"
_JOB_BYTES = 16
_PATH_BYTES = 4096
_UNFINISHED = 64
"""Paths of which a part has come, of all jobs together."""


class TakesHints(Protocol):
    """`prefetch.Hints`, or a test's."""

    def take(self, job_key: tuple[int, bytes], directory: int, path: bytes) -> bool: ...


class HintRequests:
    """Puts the pieces of long paths together. On the loop; nothing waits."""

    def __init__(self, hints: TakesHints) -> None:
        self._hints = hints
        self._parts: OrderedDict[tuple[int, bytes], bytes] = OrderedDict()

    def answer(self, uid: int, directory: int, name: bytes) -> bytes:
        """The value of the attribute `name`, which begins with `HINT`: `TAKEN`, or `FULL` if the
        job has sent enough. Raises `FUSEError` (EINVAL) for what is no hint."""
        job, dot, rest = name[len(HINT) :].partition(b".")
        if not job or len(job) > _JOB_BYTES or not dot or rest[:1] not in (b"+", b"="):
            raise pyfuse3.FUSEError(errno.EINVAL)
        key = (uid, job)
        path = self._parts.get(key, b"") + rest[1:]
        if not path or len(path) > _PATH_BYTES:
            self._parts.pop(key, None)
            raise pyfuse3.FUSEError(errno.EINVAL)
        if rest[:1] == b"+":
            self._parts[key] = path
            if len(self._parts) > _UNFINISHED:
                self._parts.popitem(last=False)
            return TAKEN
        self._parts.pop(key, None)  # after FULL all of the path comes again
        return TAKEN if self._hints.take(key, directory, path) else FULL
