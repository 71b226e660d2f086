"""What readers of some users get at most, in bytes per second.

READ doesn't say who reads, OPEN does. So the file handles that a limited user opens carry the
number of his limit above the inode number; other handles are the inode number and nothing else, and
cost nothing. What a user has open when his limit is first set is not limited; what he opened under
it stays under it, whatever it becomes.
"""

from collections.abc import Mapping

import trio

from cachefs.origin.resilience.bandwidth import TokenBucket

_INO_BITS = 48
_INO_MASK = (1 << _INO_BITS) - 1
_USERS = 1 << 15
"""As many as the bits above the inode number tell apart; handles are signed in some places."""


class UidLimits:
    """Used on the loop. Number 0 is nobody's."""

    def __init__(self, limits: Mapping[int, int]) -> None:
        """Bytes per second by uid."""
        self._numbers: dict[int, int] = {}
        self._buckets = [TokenBucket(None)]
        for uid, bytes_per_s in limits.items():
            self.set(uid, bytes_per_s)

    def set(self, uid: int, bytes_per_s: int) -> None:
        """0 is no limit. Raises `ValueError` for the 32,768th user."""
        number = self._numbers.get(uid)
        if number is None:
            if not bytes_per_s:
                return
            if len(self._buckets) >= _USERS:
                raise ValueError(f"no more than {_USERS - 1} users can be limited")
            number = self._numbers[uid] = len(self._buckets)
            self._buckets.append(TokenBucket(None))
        self._buckets[number].set_rate(bytes_per_s or None, trio.current_time())

    def by_uid(self) -> dict[int, int]:
        """The limits that there are."""
        rates = {uid: self._buckets[number].bytes_per_s for uid, number in self._numbers.items()}
        return {uid: int(rate) for uid, rate in rates.items() if rate}

    def handle(self, ino: int, uid: int) -> int:
        """The file handle for what `uid` opens."""
        number = self._numbers.get(uid)
        return ino if number is None else ino | number << _INO_BITS

    @staticmethod
    def is_limited(handle: int) -> bool:
        return handle > _INO_MASK

    @staticmethod
    def ino(handle: int) -> int:
        """The inode number of any handle."""
        return handle & _INO_MASK

    async def wait(self, handle: int, size_bytes: int) -> None:
        """Until `size_bytes` more may be given to who opened `handle`."""
        bucket = self._buckets[handle >> _INO_BITS]
        await trio.sleep(bucket.reserve(size_bytes, trio.current_time()))
