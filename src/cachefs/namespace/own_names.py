"""Names that this mount has changed itself: they outrank what the origin said before.

A name is *held* while its file has changes that the origin does not have. No answer of the origin
changes a held name. A name that this mount has removed is noted with the time at which the origin
had removed it: answers to older requests still show it, and are ignored. (An answer that shows an
old version of a changed name needs no note here: the name's `checked_at_ns` is newer.)
"""

from collections import OrderedDict

_MOST_REMOVED = 200_000
"""The most removed names that are remembered; the oldest are dropped first. They are needed until
the listings that ran at the time of the removal have ended."""


class OwnNames:
    """The changed names of one mount, by directory and name. All methods are synchronous. A
    read-only mount has none, and the object is then false."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, bytes], None] = {}
        self._removed_at_ns: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        self.is_writable = False
        """Whether this mount may change names. Owner and mode of its files are then kept where the
        origin's listings have none."""

    def __bool__(self) -> bool:
        return bool(self._held or self._removed_at_ns)

    def hold(self, parent: int, name: bytes) -> None:
        """Ignore what the origin says about the name, until `release`."""
        self._held[parent, name] = None
        self._removed_at_ns.pop((parent, name), None)

    def release(self, parent: int, name: bytes) -> None:
        """Note that the origin has the file's content, or that the name was removed."""
        self._held.pop((parent, name), None)

    def holds(self, parent: int, name: bytes) -> bool:
        """Return whether the name is held."""
        return (parent, name) in self._held

    def note_removed(self, parent: int, name: bytes, now_ns: int) -> None:
        """Note that the name is not at the origin since `now_ns` at the latest (wall clock)."""
        self.release(parent, name)
        self._removed_at_ns[parent, name] = now_ns
        self._removed_at_ns.move_to_end((parent, name))
        if len(self._removed_at_ns) > _MOST_REMOVED:
            self._removed_at_ns.popitem(last=False)

    def outranks(self, parent: int, name: bytes, observed_ns: int) -> bool:
        """Return whether an answer of the origin to a request from `observed_ns` must be ignored
        for this name. A newer answer to a removed name ends the note."""
        key = (parent, name)
        if key in self._held:
            return True
        removed_at_ns = self._removed_at_ns.get(key)
        if removed_at_ns is None:
            return False
        if observed_ns <= removed_at_ns:
            return True
        del self._removed_at_ns[key]
        return False
