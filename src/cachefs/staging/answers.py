"""The last answers to requests that are not idempotent.

When a daemon dies, the kernel sends its unanswered requests again to the next daemon, with bit 63
of their number set. A request whose effect is in the journal must not be repeated.
"""

from collections import OrderedDict
from collections.abc import Iterator

MOST_ANSWERS = 4096
RESENT = 1 << 63
"""The bit of a request's number that says that the kernel sends it again."""


class Answers:
    """The answers of one connection of the kernel, by the number of the request."""

    def __init__(self) -> None:
        self._errnos: OrderedDict[int, int] = OrderedDict()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Number and errno, oldest first."""
        return iter(self._errnos.items())

    def note(self, unique: int, errno: int) -> None:
        """Take over an answer that is in the journal. Only the last 4,096 are kept."""
        self._errnos[unique & ~RESENT] = errno
        if len(self._errnos) > MOST_ANSWERS:
            self._errnos.popitem(last=False)

    def get(self, unique: int) -> int | None:
        """Return the errno with which a request was answered (0: success); None if it was not, or
        if the kernel doesn't send it again."""
        if not unique & RESENT:
            return None
        return self._errnos.get(unique & ~RESENT)
