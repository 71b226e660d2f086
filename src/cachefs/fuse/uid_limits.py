"""Bandwidth limits and statistics for each user that reads.

OPEN carries the uid, READ does not. So each file handle holds a user number above the inode number.
Number 0 stands for all users without a number: they came when all numbers were taken. Behind the
relay the daemon gets no OPEN. The relay sees the uid of each READ, and assigns the numbers in the
table that it shares with the daemon.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import trio

from cachefs.origin.resilience.bandwidth import TokenBucket

INO_BITS = 48
INO_MASK = (1 << INO_BITS) - 1
_USERS = 1 << 15
"""User numbers that fit into the bits above the inode number. The highest bit stays free, because
handles are signed in some places."""


class UserUsage(NamedTuple):
    """The bytes that one user has read so far, and the time that its READs have waited.

    `uid` None stands for all users without a number.
    """

    uid: int | None
    read_bytes: int
    stalled_ns: int


class Users(Protocol):
    """The methods of `cachefs.fuse.relay._relay.Table` that `UidLimits` calls."""

    def user(self, uid: int, /) -> int: ...
    def limit_user(self, user: int, limited: bool, /) -> None: ...
    def users(self) -> list[tuple[int, int, int]]: ...
    def add_user_bytes(self, user: int, read_bytes: int, /) -> None: ...


class UidLimits:
    """Limits and counters of all users of a mount. All methods run on the loop.

    The index of each list is the user number, `handle >> INO_BITS`.
    """

    def __init__(
        self,
        limits: Mapping[int, int],
        users: Users | None = None,
        bound: Callable[[int, int], None] = lambda number, bytes_per_s: None,
    ) -> None:
        """`limits` maps uids to bytes per second.

        With `users`, the relay assigns the numbers, and serves the users without a limit. `bound`
        is called with user number and bytes per second whenever a limit is set.
        """
        self._users = users
        self._bound = bound
        self.on_change: Callable[[], None] = lambda: None
        """Called after each change of a limit."""
        count = 1 if users is None else _USERS
        self.buckets: list[TokenBucket | None] = [None] * count
        """None for a user without a limit."""
        self.read_bytes = [0] * count
        self.stalled_ns = [0] * count
        self._numbers: dict[int, int] = {}
        self._owners: dict[int, int] = {}
        """The uid of each number of `users`, as of the last `usage` call."""
        for uid, bytes_per_s in limits.items():
            self.set(uid, bytes_per_s)

    def set(self, uid: int, bytes_per_s: int) -> None:
        """Set a user's limit in bytes per second; 0 removes it. It applies to open files, too.

        Raises `ValueError` when no user numbers are left.
        """
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
                del self._numbers[uid]  # the number may soon belong to another user
            self.on_change()

    def _mark(self, users: Users, uid: int, number: int, limited: bool) -> int:
        """Mark the user in the shared table, and return its number, or 0 if there is none.

        The number stays with this uid for as long as it is `limited`.
        """
        while number:
            users.limit_user(number, limited)
            if not limited or users.user(uid) == number:
                break
            users.limit_user(number, False)  # another user got it just before
            number = self._number(uid)
        return number

    def by_uid(self) -> dict[int, int]:
        """Return the limits in bytes per second by uid."""
        found = {uid: self.buckets[number] for uid, number in self._numbers.items()}
        return {uid: int(b.bytes_per_s) for uid, b in found.items() if b and b.bytes_per_s}

    def usage(self) -> Iterator[UserUsage]:
        """Yield the usage of the users without a number first, then of each user with a number.

        With `users`, this moves the bytes that this process has served to the shared table, so the
        next daemon of the mount continues with the values that were yielded here.
        """
        if self._users is not None:
            for number, uid, sent_bytes in self._users.users():
                if self._owners.setdefault(number, uid) != uid and number:
                    self._owners[number] = uid
                    self.read_bytes[0] += self.read_bytes[number]
                    self.read_bytes[number] = self.stalled_ns[number] = 0
                given_bytes, self.read_bytes[number] = self.read_bytes[number], 0
                if given_bytes:
                    self._users.add_user_bytes(number, given_bytes)
                total_bytes = given_bytes + sent_bytes
                yield UserUsage(uid if number else None, total_bytes, self.stalled_ns[number])
            return
        yield UserUsage(None, self.read_bytes[0], self.stalled_ns[0])
        for uid, number in self._numbers.items():
            yield UserUsage(uid, self.read_bytes[number], self.stalled_ns[number])

    def uid_of(self, number: int) -> int | None:
        """Return the uid that has this number; None if no user has it."""
        if self._users is not None:
            return next((uid for given, uid, _ in self._users.users() if given == number), None)
        return next((uid for uid, given in self._numbers.items() if given == number), None)

    def handle(self, ino: int, uid: int) -> int:
        """Return the file handle for an inode that `uid` opens."""
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
        """Wait until the limit of the handle's user allows `size_bytes` more."""
        bucket = self.buckets[handle >> INO_BITS]
        if bucket is not None:
            await trio.sleep(bucket.reserve(size_bytes, trio.current_time()))
