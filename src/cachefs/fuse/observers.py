"""Callbacks for each answered request: the access log and profiles. Usually there are none."""

from collections.abc import Callable
from typing import NamedTuple

from cachefs.errors import CachefsError
from cachefs.namespace.namespace import Namespace


class Answered(NamedTuple):
    """An answered request. docs/METRICS.md lists the values of `outcome`."""

    operation: str
    outcome: str
    lasted_ns: int
    ino: int
    name: bytes | None = None
    """LOOKUP: the name in the directory `ino`. GETXATTR: the attribute of `ino`."""
    uid: int | None = None
    pid: int | None = None
    """None for READ, which does not carry a pid."""
    offset: int | None = None
    wanted_bytes: int = 0
    given_bytes: int = 0


PathOf = Callable[[int], str]
"""Returns the present path of an inode number."""

RequestObserver = Callable[[Answered, PathOf], None]
"""Called on the loop, between the answer and the next request. It must return quickly."""


class RequestObservers(list[RequestObserver]):
    """The request observers of a mount.

    Callers test whether the list is empty before they make an `Answered`, so an empty list costs
    nothing. `on_change` receives whether there are any observers. While there are, the relay must
    leave all READs to the daemon.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_change: Callable[[bool], None] = lambda are_there: None

    def append(self, observer: RequestObserver) -> None:
        """Add a observer, and call `on_change`."""
        super().append(observer)
        self.on_change(True)

    def remove(self, observer: RequestObserver) -> None:
        """Remove a observer, and call `on_change`."""
        super().remove(observer)
        self.on_change(bool(self))


def path_of(namespace: Namespace, ino: int) -> str:
    """Return the path from the mount's root "/"; "inode N" for an inode that has vanished."""
    try:
        return f"/{namespace.table.path(namespace.inode(ino))}"
    except (CachefsError, LookupError):
        return f"inode {ino}"
