"""Directories in memory for targets that need files."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MEMORY = Path("/dev/shm")


@contextmanager
def directory() -> Iterator[Path]:
    """An empty one, gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="cachefs-fuzz-", dir=_MEMORY if _MEMORY.is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def parts(data: bytes, most: int = 32) -> list[bytes]:
    """What stands between lines of `----`."""
    return data.split(b"\n----\n")[:most]


def check_text(error: Exception) -> None:
    """What a user is told is one line that can be written anywhere."""
    text = str(error)
    assert "\n" not in text
    assert len(text) < 2000
