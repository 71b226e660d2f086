"""The pool of threads for blocking calls (`workers.py`)."""

import errno

import pytest

from cachefs.errors import OriginError, WorkersStoppedError
from cachefs.fuse.errno_map import errno_of
from cachefs.workers import Workers


async def test_a_call_after_the_end_does_not_blame_the_origin() -> None:
    workers = Workers(1, "test")
    assert await workers.run(int, "7") == 7
    workers.stop()
    with pytest.raises(WorkersStoppedError) as caught:
        await workers.run(int, "7")
    assert not isinstance(caught.value, OriginError)
    assert errno_of(caught.value) == errno.EIO
