"""Owners and groups that an origin knows by name, as ids of this machine.

The name services that know them (LDAP, say) may take their time: only worker threads ask them, and
what they said is kept for a while.
"""

import grp
import pwd
import time
from collections.abc import Callable

from cachefs.types import UNKNOWN_ID, Posix

_KEPT_NAMES = 10_000
_KEPT_S = 300.0
_MODE_BITS = 0o1777
"""No setuid, no setgid: the source's word is not enough for these."""


class NameCache:
    """What names stand for, asked again after five minutes. May be used by several threads."""

    def __init__(self, look_up: Callable[[str], int]) -> None:
        """`look_up` raises `KeyError` or `ValueError` for what is no name here."""
        self._look_up = look_up
        self._known: dict[str, tuple[int, float]] = {}

    def id(self, name: str) -> int:
        """`UNKNOWN_ID` if this machine has no such name and it is no number either. Blocks."""
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
    if not (name.isascii() and name.isdecimal()):
        return UNKNOWN_ID
    return min(int(name[:11]), UNKNOWN_ID)


_users = NameCache(lambda name: pwd.getpwnam(name).pw_uid)
_groups = NameCache(lambda name: grp.getgrnam(name).gr_gid)


def named_posix(owner: str, group: str, mode: int) -> Posix:
    """From names; empty ones are unknown. Blocks."""
    return Posix(_users.id(owner), _groups.id(group), mode & _MODE_BITS)


def numbered_posix(uid: int, gid: int, mode: int) -> Posix:
    """From ids of this machine."""
    return Posix(uid, gid, mode & _MODE_BITS)
