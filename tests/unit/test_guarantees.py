"""A daemon that replaces another knows what the store guarantees, and which mount it is."""

from types import SimpleNamespace
from typing import Any

import pytest

from cachefs.daemon.writing import keep_guarantees, mount_id_in, take_over_guarantees
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
