"""Changes to a table that are not in LMDB yet."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping

ChangedRows = dict[bytes, bytes | None]
"""From key to new value; None deletes the row."""


class PendingChanges:
    """The uncommitted changes of one table.

    A commit in progress writes `flushing`; later changes go to `pending`. Where both have a key,
    `pending` wins.
    """

    __slots__ = ("_new_keys", "_sorted_keys", "flushing", "pending")

    def __init__(self) -> None:
        self.pending: ChangedRows = {}
        self.flushing: ChangedRows = {}
        self._sorted_keys: list[bytes] | None = None
        """The keys of both in order, without `_new_keys`; None until the first scan."""
        self._new_keys: list[bytes] = []

    def write(self, key: bytes, value: bytes | None) -> None:
        """Add one change; None deletes the row."""
        if self._sorted_keys is not None and key not in self.pending and key not in self.flushing:
            self._new_keys.append(key)
        self.pending[key] = value

    def write_all(self, changes: Mapping[bytes, bytes]) -> None:
        """Do the same as `write` for many rows."""
        if self._sorted_keys is not None:
            known, flushing = self.pending, self.flushing
            self._new_keys += [key for key in changes if key not in known and key not in flushing]
        self.pending.update(changes)

    def begin_commit(self) -> ChangedRows:
        """Begin a commit: return the changes to write. The caller must not change them."""
        self.flushing, self.pending = self.pending, {}
        return self.flushing

    def end_commit(self, committed: bool) -> None:
        """End a commit. Changes that were not committed are pending again, but newer ones win."""
        if not committed:
            self.pending = self.all()
        self.flushing = {}
        self._sorted_keys = None
        self._new_keys = []

    def all(self) -> ChangedRows:
        """Return a copy of all changes."""
        return self.flushing | self.pending

    def _keys(self) -> list[bytes]:
        """Return all keys in order. Most writes before a scan are near the greatest key, so only
        the keys from the least new key on are sorted again."""
        if self._sorted_keys is None:
            self._sorted_keys = sorted(self.pending.keys() | self.flushing.keys())
        elif self._new_keys:
            keys, new = self._sorted_keys, sorted(self._new_keys)
            start = bisect_left(keys, new[0])
            keys[start:] = sorted(keys[start:] + new)
            self._new_keys = []
        return self._sorted_keys

    def changes_from(self, start: bytes, prefix: bytes) -> list[tuple[bytes, bytes | None]]:
        """Return the changes whose key is >= `start` and begins with `prefix`, in key order."""
        keys = self._keys()
        found = []
        for position in range(bisect_left(keys, start), len(keys)):
            key = keys[position]
            if not key.startswith(prefix):
                break
            value = self.pending[key] if key in self.pending else self.flushing[key]
            found.append((key, value))
        return found


def merged(
    stored: Iterator[tuple[bytes, bytes]], changes: list[tuple[bytes, bytes | None]]
) -> Iterator[tuple[bytes, bytes]]:
    """Merge two inputs that are in key order. Where both have a key, the change wins."""
    position = 0
    for key, value in stored:
        while position < len(changes) and changes[position][0] < key:
            changed_key, changed_value = changes[position]
            position += 1
            if changed_value is not None:
                yield changed_key, changed_value
        if position < len(changes) and changes[position][0] == key:
            changed_value = changes[position][1]
            position += 1
            if changed_value is not None:
                yield key, changed_value
        else:
            yield key, value
    for changed_key, changed_value in changes[position:]:
        if changed_value is not None:
            yield changed_key, changed_value
