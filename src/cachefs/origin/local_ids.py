"""Converts the names of owners and groups at an origin to ids of this machine.

Name services such as LDAP may be slow. So only worker threads query them, and the results are
cached.
"""

import grp
import pwd
import time
from collections.abc import Callable

from cachefs.foreign_numbers import whole_number
from cachefs.types import UNKNOWN_ID, Posix

_KEPT_NAMES = 10_000
_KEPT_S = 300.0
_MODE_BITS = 0o1777
"""Without setuid and setgid, for which the source is not trusted."""


class NameCache:
    """A cache of ids by name; each is looked up again after five minutes. Several threads may use
    it at once."""

    def __init__(self, look_up: Callable[[str], int]) -> None:
        """`look_up` raises `KeyError` or `ValueError` if this machine lacks the name."""
        self._look_up = look_up
        self._known: dict[str, tuple[int, float]] = {}

    def id(self, name: str) -> int:
        """Return the id of `name`. If this machine lacks the name, return the number it states, or
        `UNKNOWN_ID`. Blocks."""
        now = time.monotonic()
        found = self._known.get(name)
        if found is not None and now < found[1]:
            return found[0]
        try:
            number = self._look_up(name)
        except (KeyError, ValueError):
            number = _as_number(name)
        if len(self._known) >= _KEPT_NAMES:
            self._known.clear()
        self._known[name] = (number, now + _KEPT_S)
        return number


def _as_number(name: str) -> int:
    number = whole_number(name)
    return UNKNOWN_ID if number is None else min(number, UNKNOWN_ID)


_users = NameCache(lambda name: pwd.getpwnam(name).pw_uid)
_groups = NameCache(lambda name: grp.getgrnam(name).gr_gid)


def named_posix(owner: str, group: str, mode: int) -> Posix:
    """Return a `Posix` from names; an empty name gives `UNKNOWN_ID`. Blocks."""
    return Posix(_users.id(owner), _groups.id(group), mode & _MODE_BITS)


def numbered_posix(uid: int, gid: int, mode: int) -> Posix:
    """Return a `Posix` from ids of this machine."""
    return Posix(uid, gid, mode & _MODE_BITS)
