"""`LastErrors`: what programs were refused lately, and why. It writes one line per kind to the log.

A store may fail for thousands of files in the same way, so errors count as one kind if they differ
only in the file and in numbers.
"""

import errno
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypedDict

from cachefs.foreign_text import escaped

MOST_SHOWN = 10
PAUSE_S = 60.0
"""A kind is logged again after this time, with the number of errors since."""
MOST_LINES = 20
"""The most lines in `PAUSE_S`, of all kinds."""
_MOST_KINDS = 64
_MOST_CHARACTERS = 1000
_TOLD = frozenset({errno.EIO, errno.EACCES, errno.ESTALE})
_NUMBERS = re.compile(r"\d+")

log = logging.getLogger(__name__)


class LastError(TypedDict):
    """Errors of one kind. `path` and `text` are those of the last one; the times are seconds since
    the epoch."""

    errno: str
    operation: str
    path: str
    text: str
    count: int
    first_at: float
    last_at: float


class LastErrors:
    """The errors of one mount. Only the loop thread uses it."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._kinds: OrderedDict[object, _Kind] = OrderedDict()
        self._window_began_at = float("-inf")
        self._lines = 0

    def note(self, operation: str, path: str, number: int, text: str) -> None:
        """Record that `operation` of `path` has failed with the errno `number` because of `text`.
        Only errors that a user can't explain himself count: EIO, EACCES and ESTALE."""
        if number not in _TOLD:
            return
        name = path.strip("/")
        key = number, _NUMBERS.sub("0", text.replace(name, "") if name else text)
        now = self._clock()
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(now)
            if len(self._kinds) > _MOST_KINDS:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(key)
        kind.note(operation, path, number, text, now)
        if now >= kind.logged_at + PAUSE_S and self._may_log(now):
            kind.log(now)

    def _may_log(self, now: float) -> bool:
        if now >= self._window_began_at + PAUSE_S:
            self._window_began_at, self._lines = now, 0
        self._lines += 1
        return self._lines <= MOST_LINES

    def report(self) -> list[LastError]:
        """Return the last kinds, the newest first."""
        return [kind.error for kind in list(self._kinds.values())[: -MOST_SHOWN - 1 : -1]]


class _Kind:
    def __init__(self, now: float) -> None:
        self.logged_at = float("-inf")
        self._logged_count = 0
        self.error = LastError(
            errno="", operation="", path="", text="", count=0, first_at=now, last_at=now
        )

    def note(self, operation: str, path: str, number: int, text: str, now: float) -> None:
        error = self.error
        error["errno"], error["operation"] = errno.errorcode[number], operation
        error["path"] = escaped(path)
        error["text"] = escaped(text[:_MOST_CHARACTERS])
        error["count"] += 1
        error["last_at"] = now

    def log(self, now: float) -> None:
        error = self.error
        more = error["count"] - self._logged_count - 1
        times = f" (and {more} more like this since the last such line)" if more else ""
        self.logged_at, self._logged_count = now, error["count"]
        log.warning(
            "%s of %s gave %s: %s%s",
            error["operation"],
            error["path"],
            error["errno"],
            error["text"],
            times,
        )
