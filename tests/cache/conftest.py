"""What most tests of the cache begin with."""

from collections.abc import Iterator

import pytest

from tests.cache.faulty_disk import FaultyDisk
from tests.memory_origin import MemoryOrigin


@pytest.fixture
def origin() -> MemoryOrigin:
    return MemoryOrigin()


@pytest.fixture
def disk() -> Iterator[FaultyDisk]:
    """In order until the test says otherwise; what hangs ends with the test."""
    with FaultyDisk() as faulty:
        yield faulty
