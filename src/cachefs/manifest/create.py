"""Find the files for a new manifest: below a URL, or below a mounted directory."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from cachefs.errors import CachefsError, OriginError
from cachefs.namespace.work_stack import work_off
from cachefs.origin.base import Origin
from cachefs.types import ObjectMeta

_VERSION = "user.cachefs.version"

Found = Callable[[str, ObjectMeta], None]


async def find_in_source(origin: Origin, found: Found) -> None:
    """Call `found` with the path and attributes of each file, in no fixed order. Memory is needed
    only for directories that are not listed yet; the last one found is listed first. Raises
    `OriginError`, for example if the source does not exist."""
    directories = [""]
    failures: list[OriginError] = []

    async def list_one(directory: str) -> None:
        if failures:
            return
        try:
            await _list(origin, directory, directories, found)
        except OriginError as error:
            failures.append(error)

    await work_off(directories, list_one)
    if failures:
        raise failures[0]


async def _list(origin: Origin, directory: str, below: list[str], found: Found) -> None:
    async for page in origin.list_dir(directory):
        for name, meta in page:
            path = f"{directory}/{name}" if directory else name
            if isinstance(meta, ObjectMeta):
                found(path, meta)
            else:
                below.append(path)


def find_in_mount(directory: Path, prefix: str, found: Found) -> None:
    """Call `found` for each file below a directory of a mount. `prefix` is the directory's path in
    the mount. Raises `CachefsError`."""
    directories = [(directory, prefix)]
    try:
        while directories:
            place, above = directories.pop()
            for entry in _entries(place):
                path = f"{above}/{entry.name}" if above else entry.name
                if entry.is_dir(follow_symlinks=False):
                    directories.append((place / entry.name, path))
                else:
                    info = entry.stat(follow_symlinks=False)
                    version = os.getxattr(entry.path, _VERSION)
                    found(
                        path,
                        ObjectMeta(
                            info.st_size,
                            info.st_mtime_ns,
                            version.decode("utf-8", "surrogateescape"),
                        ),
                    )
    except OSError as error:
        raise CachefsError(f"can't read {error.filename or directory}: {error.strerror}") from error


def _entries(place: Path) -> Iterator["os.DirEntry[str]"]:
    with os.scandir(place) as entries:
        yield from entries
