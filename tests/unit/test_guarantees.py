"""A daemon that replaces another knows what the store guarantees, and which mount it is."""

from types import SimpleNamespace
from typing import Any

import pytest

from cachefs.daemon.writing import (
    check_writable,
    keep_guarantees,
    mount_id_in,
    take_over_guarantees,
)
from cachefs.origin.writable import UNCHECKED, Guarantees


class FakeDatabase(dict[tuple[str, bytes], bytes]):
    def put(self, table: str, key: bytes, value: bytes) -> None:
        self[table, key] = value

    def get(self, table: str, key: bytes) -> bytes | None:  # type: ignore[override]
        return super().get((table, key))


def writer(guarantees: Guarantees) -> Any:
    return SimpleNamespace(guarantees=guarantees)


@pytest.mark.parametrize(
    "found", [Guarantees(), UNCHECKED, Guarantees(put_version=False, keeps_write_id=False)]
)
def test_what_the_first_daemon_found_is_taken_over(found: Guarantees) -> None:
    db: Any = FakeDatabase()
    keep_guarantees(db, writer(found))
    successor = writer(UNCHECKED)
    take_over_guarantees(db, successor)
    assert successor.guarantees == found


def test_the_row_in_the_database() -> None:
    db: Any = FakeDatabase()
    keep_guarantees(db, writer(Guarantees(complete_version=False, copy_version=False)))
    row = b"put_absent put_version complete_absent copy_absent delete_version keeps_write_id"
    assert db == {("meta", b"guarantees"): row}


def test_all_daemons_of_a_mount_have_its_id() -> None:
    db: Any = FakeDatabase()
    known = mount_id_in(db)
    assert mount_id_in(db) == known
    assert mount_id_in(FakeDatabase()) != known  # type: ignore[arg-type]


def test_without_the_row_nothing_is_relied_on() -> None:
    db: Any = FakeDatabase()
    successor = writer(UNCHECKED)
    take_over_guarantees(db, successor)
    assert successor.guarantees == UNCHECKED


class Checked:
    """A writer whose checks are counted."""

    def __init__(self, key: str | None = "key") -> None:
        self.key = key
        self.guarantees = UNCHECKED
        self.checks = 0

    async def check_key(self) -> str | None:
        return self.key

    async def check_writable(self) -> Guarantees:
        self.checks += 1
        self.guarantees = Guarantees(copy_absent=False)
        return self.guarantees


async def checks_of(db: Any, key: str | None = "key") -> int:
    found: Any = Checked(key)
    await check_writable(db, found)
    assert found.guarantees == Guarantees(copy_absent=False)
    checks: int = found.checks
    return checks


async def test_a_later_mount_relies_on_a_check() -> None:
    db: Any = FakeDatabase()
    assert [await checks_of(db), await checks_of(db)] == [1, 0]
    assert await checks_of(db, "another store, other options") == 1
    assert await checks_of(db) == 1, "one result is kept"
    assert [await checks_of(db, None), await checks_of(db, None)] == [1, 1], "it costs nothing"


async def test_an_old_or_strange_result_of_a_check_is_not_relied_on() -> None:
    db: Any = FakeDatabase()
    await checks_of(db)
    row = db["meta", b"write check"]
    format_, key, at_s, *names = row.split(b" ")
    strange = [
        b"",
        b"\xff\xfe",
        b" ".join([b"2", key, at_s, *names]),
        b" ".join([format_, key, at_s, *names, b"unknown"]),
        b" ".join([format_, key, b"9" * 400, *names]),
        b" ".join([format_, key, b"%d" % (int(at_s) + 3600), *names]),
        b" ".join([format_, key, b"%d" % (int(at_s) - 8 * 86_400), *names]),
        b" ".join([format_, key]),
    ]
    for other in strange:
        db["meta", b"write check"] = other
        assert await checks_of(db) == 1, other
    db["meta", b"write check"] = row
    assert await checks_of(db) == 0
