"""Hints from jobs: a getxattr request on a directory, with the hint in the attribute name.

Most mounts are read-only, and only the owner may use a mount's control socket. So a job in a
container has no other way to send data to the daemon. docs/HINTS.md describes the form.
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
"""Most incomplete paths, over all jobs. Above it, the oldest one is dropped."""


class TakesHints(Protocol):
    """The receiver of complete hints: `prefetch.Hints`, or a test's object.

    `take` returns False if the job has sent enough for now.
    """

    def take(self, job_key: tuple[int, bytes], directory: int, path: bytes) -> bool: ...


class HintRequests:
    """Joins the parts of long paths. Runs on the loop; no method waits."""

    def __init__(self, hints: TakesHints) -> None:
        self._hints = hints
        self._parts: OrderedDict[tuple[int, bytes], bytes] = OrderedDict()

    def answer(self, uid: int, directory: int, name: bytes) -> bytes:
        """Return the value of the attribute `name`, which must begin with `HINT`.

        The value is `TAKEN`, or `FULL` if the job has sent enough for now. Raises `FUSEError`
        (EINVAL) for a malformed hint.
        """
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
        self._parts.pop(key, None)  # after FULL the job sends the whole path again
        return TAKEN if self._hints.take(key, directory, path) else FULL
