"""What becomes of the spool's files when a daemon starts."""

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from cachefs.writes.files import WrittenFiles


class Staged(SimpleNamespace):
    """A staged file of one byte that notes what becomes of it."""

    held = ""
    is_dropped = False
    base = extents = upload = start = expected_version = None
    has_open_upload = False
    number, generation, size_bytes, freed_bytes = 1, 1, 1, 0

    def hold(self, reason: str) -> None:
        self.held = reason

    def drop(self) -> None:
        self.is_dropped = True


async def _do_nothing(*_: object) -> None:
    pass


def restore(
    *, is_successor: bool, is_named: bool = True, is_known: bool = True, **staged: Any
) -> Staged:
    file = Staged(**{"ino": 5, "is_attached": True, "is_sealed": True, "path": "file"} | staged)
    inode = SimpleNamespace(ino=5, is_dir=False, version="v") if is_known else None
    table = SimpleNamespace(get=lambda ino: inode)
    changes = SimpleNamespace(is_named=lambda ino: is_named, give_up=lambda ino: None)
    files = WrittenFiles(
        SimpleNamespace(table=table),  # type: ignore[arg-type]
        changes,  # type: ignore[arg-type]
        *[SimpleNamespace()] * 2,  # type: ignore[arg-type]
        SimpleNamespace(files={1: file}, space=SimpleNamespace()),  # type: ignore[arg-type]
        SimpleNamespace(  # type: ignore[arg-type]
            drop_upload=_do_nothing,
            abort_rest=_do_nothing,
            destination_of=_do_nothing,
            keeps_attributes=False,
            timeouts=None,
        ),
        None,
        lambda ino, block_count: None,
    )
    files.restore(is_successor)
    trio.run(files.finish)  # drops what is not needed
    assert not files.has(5)
    return file


@pytest.mark.parametrize("is_successor", [False, True])
def test_a_file_whose_name_another_one_has_waits_for_a_user(is_successor: bool) -> None:
    """It is never sent by itself, so it must be in the list of unsent files."""
    found = restore(is_named=False, is_successor=is_successor)
    assert found.held == "another file has its name"


BEGUN = {"size_bytes": 0, "is_sealed": False}
"""A new file whose creation is in the spool, and nothing else."""
PART = {"extents": object(), "expected_version": "v", "is_sealed": False}
"""A change of a part of an object has begun, and no byte has changed yet."""


@pytest.mark.parametrize(
    ("is_known", "is_successor"), [(False, True), (False, False), (True, False)]
)
@pytest.mark.parametrize("staged", [BEGUN, PART])
def test_a_file_without_a_change_is_dropped(
    is_known: bool, is_successor: bool, staged: dict[str, Any]
) -> None:
    """Its name is not known if the request that created it has no answer: the next daemon gets the
    request again."""
    found = restore(is_known=is_known, is_successor=is_successor, **staged)
    assert found.is_dropped
    assert not found.held


@pytest.mark.parametrize(
    "staged",
    [
        BEGUN | {"size_bytes": 1},
        BEGUN | {"is_sealed": True},
        BEGUN | {"expected_version": "v"},  # an object was truncated
        BEGUN | {"upload": object()},
        PART | {"generation": 2},
        PART | {"is_sealed": True},
    ],
)
@pytest.mark.parametrize("is_successor", [False, True])
def test_a_file_with_a_change_and_without_a_name_waits_for_a_user(
    is_successor: bool, staged: dict[str, Any]
) -> None:
    found = restore(is_known=False, is_successor=is_successor, **staged)
    assert found.held == "its name is not known any more"
    assert not found.is_dropped
