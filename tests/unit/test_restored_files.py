"""What becomes of the spool's files when a daemon starts."""

from types import SimpleNamespace
from typing import Any

import pytest

from cachefs.writes.files import WrittenFiles


class Staged(SimpleNamespace):
    """A staged file that notes why it is held."""

    held = ""

    def hold(self, reason: str) -> None:
        self.held = reason


def restore(*, is_named: bool, is_successor: bool, **staged: Any) -> Staged:
    file = Staged(ino=5, is_attached=True, is_sealed=True, path="file", **staged)
    inode = SimpleNamespace(ino=5, is_dir=False, version="v")
    table = SimpleNamespace(get=lambda ino: inode if ino == 5 else None)
    changes = SimpleNamespace(is_named=lambda ino: is_named)
    files = WrittenFiles(
        SimpleNamespace(table=table),  # type: ignore[arg-type]
        changes,  # type: ignore[arg-type]
        *[SimpleNamespace()] * 2,  # type: ignore[arg-type]
        SimpleNamespace(files={1: file}),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        None,
        lambda ino, block_count: None,
    )
    files.restore(is_successor)
    assert not files.has(5)
    return file


@pytest.mark.parametrize("is_successor", [False, True])
def test_a_file_whose_name_another_one_has_waits_for_a_user(is_successor: bool) -> None:
    """It is never sent by itself, so it must be in the list of unsent files."""
    found = restore(is_named=False, is_successor=is_successor)
    assert found.held == "another file has its name"
