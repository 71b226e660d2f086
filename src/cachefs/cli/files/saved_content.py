"""Write the content of an unsent file to a local file, for `cachefs writes save`."""

import base64
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from cachefs.errors import CachefsError, UsageError, reason_of
from cachefs.trusted_path import open_own_file, open_place

_CHUNK_BYTES = 1 << 20


def target_of(target: str, path: str) -> Path:
    """Return the file that `target` means for an unsent file with this path: in a directory it has
    the same name. Raises `UsageError` if it exists."""
    place = Path(target)
    if place.is_dir():
        place /= Path(path).name or "unnamed"
    if os.path.lexists(place):
        raise UsageError(f"{place} exists already; name another file")
    return place


def save_content(
    target: Path, spool_file: Path, size_bytes: int, pieces: Iterable[dict[str, Any]]
) -> None:
    """Make the file `target` of `size_bytes` bytes from lines of `api.WRITES_CONTENT`. Zeros
    become holes. Raises `CachefsError`, and leaves no file then."""
    with _made(target) as into, _opened(spool_file) as spool:
        for piece in pieces:
            offset, length = piece["offset"], piece["length"]
            if piece["source"] == "spool":
                _copy(spool, into, offset, offset + length)
            elif piece["source"] == "base":
                _write(into, base64.b64decode(piece["data"]), offset)
        os.ftruncate(into, size_bytes)
        os.fsync(into)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = open_own_file(path)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _made(target: Path) -> Iterator[int]:
    """Yield a descriptor of the new file; remove the file if the body fails."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with ExitStack() as stack:
        try:
            place_fd = open_place(target.parent)
            stack.callback(os.close, place_fd)
            fd = os.open(target.name, flags, 0o600, dir_fd=place_fd)
            stack.callback(os.close, fd)
        except OSError as error:
            raise CachefsError(f"can't create {target}: {error.strerror}") from error
        try:
            yield fd
        except BaseException as error:
            with suppress(FileNotFoundError):
                os.unlink(target.name, dir_fd=place_fd)
            if isinstance(error, OSError):
                raise CachefsError(f"can't save to {target}: {reason_of(error)}") from error
            raise


def _copy(source: int, into: int, begin: int, end: int) -> None:
    """Copy a range from one file to the same range of another. Raises `OSError`."""
    while begin < end:
        data = os.pread(source, min(_CHUNK_BYTES, end - begin), begin)
        if not data:
            raise OSError("the file in the spool has become shorter")
        if data.count(0) < len(data):
            _write(into, data, begin)
        begin += len(data)


def _write(into: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(into, data, offset)
        data, offset = data[written:], offset + written
