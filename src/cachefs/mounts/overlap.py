"""Refuses a mount whose source, mountpoint and cache directories lie in one another.

A local directory that contains its own mountpoint has no end: each look into it leads to the mount
again. A source that contains the cache changes with each read of it. A cache below the mountpoint
waits for itself.

One directory can be visible at several paths: through links, bind mounts and other cachefs mounts
of local directories. So paths are compared by all of these names, which the mount table tells, and
by the inode numbers of the directories above.
"""

import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from cachefs.errors import UsageError
from cachefs.mounts.table import FSTYPE, MountEntry, all_mounts, deepest_mount

_TIMEOUT_S = 5.0
_SCHEMES = ("file", "local")
"""The schemes with which fsspec names local directories."""


def local_directory(source: str) -> Path | None:
    """Return the directory that a source names; None if it is no directory of this machine."""
    scheme, _, path = source.removeprefix("fsspec+").partition("://")
    if scheme not in _SCHEMES:
        return None
    return Path("/", os.path.expanduser(path))  # noqa: PTH111 - leaves an unknown user as it is


def refuse_overlaps(source: str, mountpoint: Path, caches: Sequence[Path]) -> None:
    """Raise `UsageError` if a source, its mountpoint (canonical) and its cache directories lie in
    one another. Blocks, for at most 5 s: places that do not answer are not compared."""
    found: list[str] = []

    def look() -> None:
        with suppress(OSError):
            found.extend(_Comparison(mountpoint).overlaps(source, caches))

    thread = threading.Thread(target=look, name="cachefs-overlaps", daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    if found:
        raise UsageError(found[0])


class _Comparison:
    """Compares places by their names in the present mount table."""

    def __init__(self, mountpoint: Path) -> None:
        self._mountpoint = mountpoint
        self._mounts = all_mounts()
        self._is_mounted = any(mount.mountpoint == mountpoint for mount in self._mounts)

    def overlaps(self, source: str, caches: Sequence[Path]) -> Iterable[str]:
        """Yield a text for each two places of which one lies in the other."""
        place = self._mountpoint
        # What is mounted there now is not looked at: it may be dead, or its keeper waits for us.
        places = {name / place.name for name in self._names(place.parent)} | {place}
        by_cache = {cache: self._names_and_origins(_real(cache)) for cache in caches}
        for cache, names in by_cache.items():
            if self._is_in(names, {place}):
                yield (
                    f"cache directory {cache} lies below the mountpoint {place}, which would wait "
                    "for itself; choose another place"
                )
            if self._is_in(places, {_real(cache)}):
                yield (
                    f"the mountpoint {place} lies in the cache directory {cache}; choose another "
                    "place for one of them"
                )
        directory = local_directory(source)
        if directory is None:
            return
        sources = self._names_and_origins(_real(directory))
        trees = self._names_and_origins(_real(directory), below=True)
        if self._is_in(places, trees):
            yield (
                f"the mountpoint {place} lies in {source}, so the mount would show itself without "
                "end; choose a mountpoint outside of the source"
            )
        if self._is_in(sources, {place}):
            yield (
                f"{source} lies below the mountpoint {place}, which would hide it; choose another "
                "mountpoint"
            )
        for cache, names in by_cache.items():
            if self._is_in(names, trees):
                yield (
                    f"cache directory {cache} lies in {source}, so the mount would show its own "
                    "cache, which changes with each read; choose a place outside of the source "
                    "(--cache-dir, --mem-dir)"
                )
            if self._is_in(sources, {_real(cache)}):
                yield (
                    f"{source} lies in the cache directory {cache}; choose another place for the "
                    "cache (--cache-dir, --mem-dir)"
                )

    def _names(self, path: Path) -> set[Path]:
        """Return all paths at which `path`, which has no links, is visible."""
        above = deepest_mount(self._mounts, path)
        if above is None:
            return {path}
        inner = _inner(above, path)
        names = {path}
        for mount in self._mounts:
            if mount.device == above.device and inner.is_relative_to(mount.root):
                name = mount.mountpoint / inner.relative_to(mount.root)
                if deepest_mount(self._mounts, name) is mount:  # not hidden by another mount
                    names.add(name)
        return names

    def _names_and_origins(self, path: Path, below: bool = False) -> set[Path]:
        """Return the names of `path`, and if it lies in a cachefs mount of a local directory, also
        those at the source. With `below`, add the sources of all such mounts below `path`."""
        found: set[Path] = set()
        pending = [path]
        while pending:
            path = pending.pop()
            above = deepest_mount(self._mounts, path)
            shown = None if above is None else _shown_by(above)
            if above is not None and shown is not None and path not in found:
                pending.append(_real(shown / _inner(above, path).relative_to("/")))
            for name in self._names(path) - found:
                found.add(name)
                if below:
                    pending += self._sources_below(name)
        return found

    def _sources_below(self, directory: Path) -> list[Path]:
        """Return the local directories that other cachefs mounts show below a directory."""
        mounts = [mount for mount in self._mounts if mount.mountpoint.is_relative_to(directory)]
        return [
            _real(shown / mount.root.lstrip("/"))
            for mount in mounts
            if mount.mountpoint != self._mountpoint and (shown := _shown_by(mount)) is not None
        ]

    def _is_in(self, names: Iterable[Path], directories: set[Path]) -> bool:
        """Whether one of the names lies in one of the directories, or is one of them."""
        known = {self._identity(directory) for directory in directories} - {None}
        return any(
            above in directories or self._identity(above) in known
            for name in names
            for above in (name, *name.parents)
        )

    def _identity(self, path: Path) -> tuple[int, int] | None:
        """Return what is the same for all names of a directory, also for those that differ in upper
        and lower case; None for the mountpoint if something is mounted there, and for what can't be
        looked at."""
        if self._is_mounted and path == self._mountpoint:
            return None
        try:
            found = path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino


def _shown_by(mount: MountEntry) -> Path | None:
    """Return the local directory that a cachefs mount shows; None for other mounts."""
    return local_directory(mount.source) if mount.fstype == FSTYPE else None


def _inner(mount: MountEntry, path: Path) -> Path:
    """Return the path in the file system of a mount for a path below its mountpoint."""
    return Path(mount.root) / path.relative_to(mount.mountpoint)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
