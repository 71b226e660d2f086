"""Names of users as ids of this machine."""

import pwd

import pytest

from cachefs.origin import local_ids
from cachefs.origin.local_ids import NameCache, named_posix, numbered_posix
from cachefs.types import UNKNOWN_ID, Posix


def test_known_names_numbers_and_unknown_names() -> None:
    root = pwd.getpwuid(0).pw_name
    assert named_posix(root, "1001", 0o640) == Posix(0, 1001, 0o640)
    assert named_posix("", "no such group", 0o755) == Posix(UNKNOWN_ID, UNKNOWN_ID, 0o755)


@pytest.mark.parametrize(
    "name", ["-1", "1e3", "\u0661", "a\0b", "\udcff", "4294967295", "9" * 5000, "x" * 5000]
)
def test_what_is_no_name_and_no_id_is_unknown(name: str) -> None:
    assert named_posix(name, name, 0) == Posix(UNKNOWN_ID, UNKNOWN_ID, 0)


def test_modes_have_no_setuid_and_no_type() -> None:
    assert numbered_posix(1, 2, 0o107777) == Posix(1, 2, 0o1777)


def test_a_name_is_looked_up_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    asked = []

    def look_up(name: str) -> int:
        asked.append(name)
        if len(asked) < 3:
            raise KeyError(name)
        return 7

    monkeypatch.setattr(local_ids.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(local_ids, "_KEPT_NAMES", 2)
    names = NameCache(look_up)
    assert [names.id("new"), names.id("new")] == [UNKNOWN_ID, UNKNOWN_ID]
    now_s = 301
    assert names.id("new") == UNKNOWN_ID
    now_s = 602
    assert names.id("new") == 7, "a user who has come since"
    assert asked == ["new"] * 3
    assert [names.id(name) for name in "abcnew"[:3]] == [7, 7, 7]
    assert len(names._known) <= 2
