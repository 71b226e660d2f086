"""What most tests of the shared tier begin with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.shared import tier
from tests.memory_origin import MemoryOrigin
from tests.shared.harness import Members, memcacheds


@pytest.fixture
def origin() -> MemoryOrigin:
    return MemoryOrigin()


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    """Three real members."""
    with memcacheds(tmp_path, 3) as started:
        yield started


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Members]:
    """One real member."""
    with memcacheds(tmp_path, 1) as started:
        yield started


@pytest.fixture
def _patient_with_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node waits as long as needed for another one that fetches the same block."""
    monkeypatch.setattr(tier, "_MOST_WAIT_S", 300.0)
    monkeypatch.setattr(tier, "_LEAST_WAIT_S", 300.0)
