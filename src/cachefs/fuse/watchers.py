"""Who is told of every request that has been answered: the access log, profiles; mostly nobody."""

from collections.abc import Callable
from typing import NamedTuple

from cachefs.errors import CachefsError
from cachefs.namespace.namespace import Namespace


class Answered(NamedTuple):
    """One request. `outcome` is as in docs/METRICS.md."""

    operation: str
    outcome: str
    lasted_ns: int
    ino: int
    name: bytes | None = None
    """What LOOKUP looks for in the directory `ino`; what GETXATTR asks of `ino`."""
    uid: int | None = None
    pid: int | None = None
    """READ doesn't say which process reads."""
    offset: int | None = None
    wanted_bytes: int = 0
    given_bytes: int = 0


PathOf = Callable[[int], str]
"""The path of an inode number, as it is now."""

Watcher = Callable[[Answered, PathOf], None]
"""Called on the loop, between the answer and the next request: it only takes notes."""


class Watchers(list[Watcher]):
    """To be looked at before an `Answered` is made, so that it costs nothing while there are none.

    `on_change` is told whether there are any: what others answer for us must come here then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_change: Callable[[bool], None] = lambda are_there: None

    def append(self, watcher: Watcher) -> None:
        super().append(watcher)
        self.on_change(True)

    def remove(self, watcher: Watcher) -> None:
        super().remove(watcher)
        self.on_change(bool(self))


def path_of(namespace: Namespace, ino: int) -> str:
    """From the mount's root, "/"; "inode N" for what has vanished."""
    try:
        return f"/{namespace.table.path(namespace.inode(ino))}"
    except (CachefsError, LookupError):
        return f"inode {ino}"
