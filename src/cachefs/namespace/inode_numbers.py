"""Gives out inode numbers, none of them twice while a kernel may remember them.

- `next_ino` is the next number.
- `_reserved_to` is the row `next_ino` of the database, as it was written last. It runs ahead.
- `_logged_to` is the greatest value of that row that is known to survive a kill of this process; 0
  until `allocate` first asks.

`allocate` gives out a number only below `_logged_to`, so the next process begins above all numbers
in use. After a power cut the row may be older. The kernel has forgotten all numbers then, too.
"""

from cachefs.db import Database
from cachefs.errors import CacheDirError

MOST_INO = (1 << 48) - (1 << 32)
"""The limit of inode numbers: the relay's table has no room for larger ones
(docs/formats/relay_table.md)."""
_YEAR_2025_S = 1_735_689_600
_LAST_START = 3 << 46
"""The greatest first number that the clock can lead to. Numbers have 48 bits, and a clock that is
wrong must not use them up."""
_RESERVE = 1 << 24
"""Numbers in each reservation: more than can be used during the slowest commit. Inode numbers have
48 bits."""


class InodeNumbers:
    """The unused inode numbers of one mount, owned by its `InodeTable`."""

    def __init__(self, db: Database, last_ino: int, now_ns: int, is_successor: bool) -> None:
        """Reserve numbers above `last_ino`, the greatest one that is stored. The caller commits
        once afterwards, before it allocates.

        With `is_successor`, the kernel has inode numbers from an earlier process. Raises
        `CacheDirError` if there are no unused numbers, which means damage.
        """
        self._db = db
        self.next_ino = max(_number_in(db.get("meta", b"next_ino")), last_ino + 1)
        """Names that get a new inode from now on get this number or a greater one."""
        if self.next_ino >= MOST_INO:
            raise CacheDirError(
                "the namespace is damaged: it has inode numbers that were never given out. Remove "
                "the directory namespace of the cache directory: its names are asked for again"
            )
        if is_successor:
            # The last process may have had another database, which is damaged or whose disk is
            # gone. This number is above all numbers that any mount has used by now.
            self.next_ino = max(self.next_ino, min(_number_of_now(now_ns), _LAST_START))
        self._reserved_to = self.next_ino
        self._logged_to = 0
        """Numbers below this may be used: their reservation survives the end of this process."""
        self._reserve()

    def allocate(self) -> int:
        """Return a new inode number. While none can be reserved, raises `CacheDirError` and
        changes nothing. A damaged database needs no reservation: the next process has a new one, in
        which it begins at the number of its time."""
        ino = self.next_ino
        if ino >= self._logged_to and not self._db.is_damaged:
            self._logged_to = _number_in(self._db.logged("meta", b"next_ino"))
            if ino >= self._logged_to:
                raise CacheDirError(
                    "names that are not known yet can't be shown: the namespace can't be written "
                    "(see the log); free some space on its disk"
                )
        self.next_ino += 1
        if self.next_ino + _RESERVE // 2 > self._reserved_to:
            self._reserve()
        return ino

    def _reserve(self) -> None:
        # Each later reservation is made half a reserve before it is needed, and the regular commits
        # store it. `allocate` checks that this has succeeded.
        self._reserved_to += _RESERVE
        self.store_again()

    def store_again(self) -> None:
        """Put the row with the reservation, which may be lost."""
        self._db.put("meta", b"next_ino", self._reserved_to.to_bytes(8, "big"))


def _number_of_now(now_ns: int) -> int:
    """Return an inode number that grows by 2^18 (more than 260,000) per second since 2025."""
    return max(0, now_ns // 1_000_000_000 - _YEAR_2025_S) << 18


def _number_in(row: bytes | None) -> int:
    return int.from_bytes(row, "big") if row else 0
