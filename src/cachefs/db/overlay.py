"""Changes to a table that LMDB doesn't hold yet."""

from bisect import bisect_left
from collections.abc import Mapping

Changes = dict[bytes, bytes | None]
"""Key to new value; None deletes."""


class Overlay:
    """Those of one table: `pending` ones win over `flushing`."""

    __slots__ = ("_new_keys", "_sorted_keys", "flushing", "pending")

    def __init__(self) -> None:
        self.pending: Changes = {}
        self.flushing: Changes = {}
        self._sorted_keys: list[bytes] | None = None
        """Of both, but for the new ones; None until somebody scans."""
        self._new_keys: list[bytes] = []

    def write(self, key: bytes, value: bytes | None) -> None:
        if self._sorted_keys is not None and key not in self.pending and key not in self.flushing:
            self._new_keys.append(key)
        self.pending[key] = value

    def write_all(self, changes: Mapping[bytes, bytes]) -> None:
        if self._sorted_keys is not None:
            known, flushing = self.pending, self.flushing
            self._new_keys += [key for key in changes if key not in known and key not in flushing]
        self.pending.update(changes)

    def freeze(self) -> Changes:
        self.flushing, self.pending = self.pending, {}
        return self.flushing

    def thaw(self, committed: bool) -> None:
        """End of a commit. What could not be committed is pending again, below newer changes."""
        if not committed:
            self.pending = self.flushing | self.pending
        self.flushing = {}
        self._sorted_keys = None
        self._new_keys = []

    def _keys(self) -> list[bytes]:
        """In order. Most scans follow upon writes near the greatest key, so only the keys from
        the least new one on are sorted again."""
        if self._sorted_keys is None:
            self._sorted_keys = sorted(self.pending.keys() | self.flushing.keys())
        elif self._new_keys:
            keys, new = self._sorted_keys, sorted(self._new_keys)
            start = bisect_left(keys, new[0])
            keys[start:] = sorted(keys[start:] + new)
            self._new_keys = []
        return self._sorted_keys

    def changes_from(self, start: bytes, prefix: bytes) -> list[tuple[bytes, bytes | None]]:
        """Changes with keys >= start that have the prefix, in key order."""
        keys = self._keys()
        found = []
        for position in range(bisect_left(keys, start), len(keys)):
            key = keys[position]
            if not key.startswith(prefix):
                break
            value = self.pending[key] if key in self.pending else self.flushing[key]
            found.append((key, value))
        return found
