"""Who reads how much: what the readers of each user got, and what they get at most.

READ doesn't say who reads, OPEN does. So the file handles that a user opens carry a number of his
above the inode number. Number 0 is for those who came when there were no more numbers. Behind the
relay there is no OPEN; it sees who reads, and gives the numbers from a table that we share.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import trio

from cachefs.origin.resilience.bandwidth import TokenBucket

INO_BITS = 48
INO_MASK = (1 << INO_BITS) - 1
_USERS = 1 << 15
"""As many as the bits above the inode number tell apart; handles are signed in some places."""


class Usage(NamedTuple):
    """What one user's readers had so far; `uid` None stands for all who have no number."""

    uid: int | None
    read_bytes: int
    stalled_ns: int


class Users(Protocol):
    """What is used of `cachefs.fuse.relay._relay.Table`."""

    def user(self, uid: int, /) -> int: ...
    def limit_user(self, user: int, limited: bool, /) -> None: ...
    def users(self) -> list[tuple[int, int, int]]: ...


class UidLimits:
    """Used on the loop. The lists are by number: `handle >> INO_BITS`."""

    def __init__(
        self,
        limits: Mapping[int, int],
        users: Users | None = None,
        bound: Callable[[int, int], None] = lambda number, bytes_per_s: None,
    ) -> None:
        """Bytes per second by uid. With `users` others give the numbers, and serve those who have
        no limit. `bound` is told each number's limit."""
        self._users = users
        self._bound = bound
        count = 1 if users is None else _USERS
        self.buckets: list[TokenBucket | None] = [None] * count
        """None for who has no limit."""
        self.read_bytes = [0] * count
        self.stalled_ns = [0] * count
        self._numbers: dict[int, int] = {}
        self._owners: dict[int, int] = {}
        """Whose the numbers of `users` were when they were looked at last."""
        for uid, bytes_per_s in limits.items():
            self.set(uid, bytes_per_s)

    def set(self, uid: int, bytes_per_s: int) -> None:
        """0 is no limit. Holds for what is open, too. Raises `ValueError` when there are no numbers
        left."""
        number = self._number(uid)
        if self._users is not None:
            number = self._mark(self._users, uid, number, bool(bytes_per_s))
        if not number and bytes_per_s:
            raise ValueError(f"no more than {_USERS - 1} users can be limited")
        if number:
            bucket = self.buckets[number]
            if bytes_per_s:
                bucket = self.buckets[number] = bucket or TokenBucket(None)
                bucket.set_rate(bytes_per_s, trio.current_time())
            elif bucket is not None:
                bucket.set_rate(None, trio.current_time())
                self.buckets[number] = None
            self._bound(number, bytes_per_s)
            if self._users is not None and not bytes_per_s:
                del self._numbers[uid]  # it may be another's soon

    def _mark(self, users: Users, uid: int, number: int, limited: bool) -> int:
        """Returns the number of `uid`, which stays as long as `limited`; 0 if there is none."""
        while number:
            users.limit_user(number, limited)
            if not limited or users.user(uid) == number:
                break
            users.limit_user(number, False)  # it was given to somebody else just before
            number = self._number(uid)
        return number

    def by_uid(self) -> dict[int, int]:
        """The limits that there are."""
        found = {uid: self.buckets[number] for uid, number in self._numbers.items()}
        return {uid: int(b.bytes_per_s) for uid, b in found.items() if b and b.bytes_per_s}

    def usage(self) -> Iterator[Usage]:
        """Of those without a number, and of everybody who has opened something, in this order."""
        if self._users is not None:
            for number, uid, his_bytes in self._users.users():
                if self._owners.setdefault(number, uid) != uid and number:
                    self._owners[number] = uid
                    self.read_bytes[0] += self.read_bytes[number]
                    self.read_bytes[number] = self.stalled_ns[number] = 0
                given_bytes = self.read_bytes[number] + his_bytes
                yield Usage(uid if number else None, given_bytes, self.stalled_ns[number])
            return
        yield Usage(None, self.read_bytes[0], self.stalled_ns[0])
        for uid, number in self._numbers.items():
            yield Usage(uid, self.read_bytes[number], self.stalled_ns[number])

    def uid_of(self, number: int) -> int | None:
        """Whose a number is; None for those who have none."""
        if self._users is not None:
            return next((uid for his, uid, _ in self._users.users() if his == number), None)
        return next((uid for uid, his in self._numbers.items() if his == number), None)

    def handle(self, ino: int, uid: int) -> int:
        """The file handle for what `uid` opens."""
        return ino | self._number(uid) << INO_BITS

    def _number(self, uid: int) -> int:
        if self._users is not None:
            self._numbers[uid] = self._users.user(uid)
            return self._numbers[uid]
        number = self._numbers.get(uid)
        if number is None:
            if len(self.buckets) >= _USERS:
                return 0
            number = self._numbers[uid] = len(self.buckets)
            self.buckets.append(None)
            self.read_bytes.append(0)
            self.stalled_ns.append(0)
        return number

    async def wait(self, handle: int, size_bytes: int) -> None:
        """Until `size_bytes` more may be given to who opened `handle`."""
        bucket = self.buckets[handle >> INO_BITS]
        if bucket is not None:
            await trio.sleep(bucket.reserve(size_bytes, trio.current_time()))
