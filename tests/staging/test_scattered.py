"""Many small writes to different places of one file."""

import random
from pathlib import Path
from typing import Any

import pytest

from cachefs.types import BLOCK_BYTES
from cachefs.writes import written_file
from cachefs.writes.written_file import WrittenFile
from tests.staging.harness import a_spool, meta_of


class Base:
    """Reads the version that was changed."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def read_now(self, offset: int, size: int) -> bytes | None:
        return None

    async def read(self, offset: int, size: int) -> bytes:
        return self.content[offset : offset + size]


async def write(file: WrittenFile, content: bytearray, offset: int, data: bytes) -> None:
    if file.is_scattered:
        await file.fill(offset, offset + len(data))
    file.staged.write(offset, data)
    content[len(content) : offset] = bytes(max(0, offset - len(content)))
    content[offset : offset + len(data)] = data


async def test_the_number_of_ranges_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written_file, "MOST_RANGES", 50)
    numbers = random.Random(1)
    content = bytearray(numbers.randbytes(5 * BLOCK_BYTES + 77))
    base: Any = Base(bytes(content))
    async with a_spool(tmp_path) as spool:
        file = WrittenFile(7, spool.begin(7, "a", meta_of(base.content)), base)
        await file.staged.truncate(4 * BLOCK_BYTES + 100)
        del content[4 * BLOCK_BYTES + 100 :]
        for _ in range(2000):
            offset = numbers.randrange(6 * BLOCK_BYTES)
            await write(file, content, offset, numbers.randbytes(numbers.randrange(1, 500)))
            assert file.staged.extents is not None
            assert len(file.staged.extents) <= 50 + 7
        assert await file.read(0, len(content) + 1) == content
    async with a_spool(tmp_path) as spool:
        (staged,) = spool.files.values()
        assert await WrittenFile(7, staged, base).read(0, len(content) + 1) == content
