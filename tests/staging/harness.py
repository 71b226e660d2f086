"""Spools for tests: their content, and disks that fail."""

import errno
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cachefs.staging.disk import SpoolDisk
from cachefs.staging.extents import Source
from cachefs.staging.spool import Spool
from cachefs.staging.staged_file import StagedFile
from cachefs.types import ObjectMeta

SOURCE = "s3://bucket/prefix"
LIMIT = 1 << 30


def meta_of(base: bytes, version: str = "v1") -> ObjectMeta:
    return ObjectMeta(len(base), 1_000, version)


async def open_spool(root: Path, limit_bytes: int = LIMIT, **options: Any) -> Spool:
    return await Spool.open(root / "spool", SOURCE, limit_bytes, **options)


@asynccontextmanager
async def a_spool(root: Path, **options: Any) -> AsyncIterator[Spool]:
    spool = await open_spool(root, **options)
    try:
        yield spool
    finally:
        await spool.close()


async def content_of(file: StagedFile, base: bytes = b"") -> bytes:
    """The whole content, put together from its pieces."""
    data = b""
    for source, offset, length in file.pieces(0, file.size_bytes):
        match source:
            case Source.SPOOL:
                data += await file.read_spool(offset, length)
            case Source.BASE:
                data += base[offset : offset + length]
            case Source.ZEROS:
                data += bytes(length)
    return data


def crashed(root: Path, to: Path) -> Path:
    """What a SIGKILL at this moment leaves: a copy of the spool below `to`."""
    shutil.copytree(root / "spool", to / "spool")
    return to


class FullDisk(SpoolDisk):
    """A disk with only so much room: a write above it writes a part and fails."""

    def __init__(self) -> None:
        self.room_bytes: int | None = None
        """How much more can be written to any file; None: all."""
        self.only_fd: int | None = None
        """The one descriptor that this is about; None: all."""
        self.free: int | None = None
        """What `free_bytes` says; None for the truth."""
        self.truncations_fail = False

    def write(self, fd: int, data: Any, offset: int) -> None:
        view = memoryview(data).cast("B")
        if self.room_bytes is None or self.only_fd not in (None, fd):
            super().write(fd, data, offset)
            return
        # Blocks that are allocated need no room.
        allocated = max(0, min(len(view), os.fstat(fd).st_size - offset))
        part = min(len(view), allocated + self.room_bytes)
        super().write(fd, view[:part], offset)
        self.room_bytes -= max(0, part - allocated)
        if part < len(view):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def truncate(self, fd: int, size_bytes: int) -> None:
        if self.truncations_fail:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().truncate(fd, size_bytes)

    def free_bytes(self, path: Path) -> int:
        return super().free_bytes(path) if self.free is None else self.free
