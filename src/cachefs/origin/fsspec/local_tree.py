"""Confined directories of this machine (`file://`): no file outside the source is ever opened.

A daemon that root runs reads with root's rights, but other users may write into the source. A
symbolic link there could lead to files that the link's owner can't read. So this module opens a
path one part at a time, and the kernel follows no link (O_NOFOLLOW). If a part is a link, the
module reads its text, replaces the part by it, and starts again, provided that the new path is
below the root. There is no check before a later open, so a link that changes meanwhile can't
escape.
"""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Sequence
from typing import Any

from fsspec.implementations.local import LocalFileSystem

_MOST_TURNS = 100
"""The most links and groups of `..` in one path. The kernel itself follows 40 links."""

_HIDDEN = ".cachefs-upload-"
_UPLOAD = re.compile(re.escape(_HIDDEN) + r"[0-9a-f]{32}(\.parts)?")

_OPEN_PART = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def upload_name(upload_id: str) -> str:
    """Return the hidden name of a file that is being written (`local_writer.py`)."""
    return _HIDDEN + upload_id


def is_hidden(name: str) -> bool:
    """Whether a name belongs to a file that is being written; listings leave it out."""
    return _UPLOAD.fullmatch(name) is not None


class ConfinedFileSystem(LocalFileSystem):  # type: ignore[misc, unused-ignore]
    """fsspec's local files below `root`. A link gets the `info` of its target.

    A link that leads out of `root`, to no file or in a circle counts as absent
    (`FileNotFoundError`). `root` itself may be a link, and that link may change.
    """

    def __init__(self, root: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._top = root.rstrip("/") or "/"

    def info(self, path: Any, **kwargs: Any) -> dict[str, Any]:
        """See fsspec. `path` is a string: the root or a path below it."""
        fd = self.open_path(path)
        try:
            return described(path, os.fstat(fd))
        finally:
            os.close(fd)

    def ls(self, path: Any, detail: bool = False, **kwargs: Any) -> list[Any]:
        """See fsspec. A link that leads outside has the type "other"."""
        fd = self.open_path(path)
        try:
            found = os.fstat(fd)
            if stat.S_ISDIR(found.st_mode):
                infos = self._children(path, fd)
            else:
                infos = [described(path, found)]
        finally:
            os.close(fd)
        return infos if detail else [info["name"] for info in infos]

    def cat_file(
        self, path: Any, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """Return the bytes from `start` to `end`, or fewer if the file ends before `end`."""
        fd = self.open_path(path)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise FileNotFoundError(path)
            file = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        try:
            size_bytes = os.fstat(file).st_size
            return _read(file, start or 0, size_bytes if end is None else min(end, size_bytes))
        finally:
            os.close(file)

    def _children(self, path: str, fd: int) -> list[dict[str, Any]]:
        infos = []
        directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if is_hidden(entry.name):
                        continue
                    name = f"{path.rstrip('/')}/{entry.name}"
                    try:
                        infos.append(self._child(name, entry.stat(follow_symlinks=False)))
                    except FileNotFoundError:  # it has been removed meanwhile
                        continue
        finally:
            os.close(directory)
        return infos

    def _child(self, name: str, found: os.stat_result) -> dict[str, Any]:
        if stat.S_ISLNK(found.st_mode):
            with contextlib.suppress(OSError):
                return self.info(name)
        return described(name, found)

    def open_path(self, path: str, *, only_trusted: bool = False) -> int:
        """Return a descriptor (O_PATH) of the target of `path`, which is no link. The caller owns
        the descriptor. With `only_trusted`, links that neither root nor this process's user has
        made raise `PermissionError`."""
        below = path.rstrip("/").removeprefix(self._top.rstrip("/"))
        parts = below.split("/")[1:]
        for _ in range(_MOST_TURNS):
            fd, count, target = self._walk(parts, only_trusted)
            if fd is not None:
                return fd
            parts = self._turned(path, parts[:count], target, parts[count:])
        raise FileNotFoundError(path)

    def _walk(self, parts: Sequence[str], only_trusted: bool) -> tuple[int | None, int, str]:
        """Walk down `parts` to the first link or `..`. Return the descriptor of the last part, or
        None if a link or `..` stopped the walk; the number of parts passed, including the one that
        stopped it; and the link's text, or `..`. The caller owns the descriptor."""
        fd = os.open(self._top, os.O_PATH | os.O_CLOEXEC)
        try:
            for index, part in enumerate(parts):
                if part == "..":
                    return None, index + 1, ".."
                last, fd = fd, -1
                try:
                    fd = os.open(part, _OPEN_PART, dir_fd=last)
                finally:
                    os.close(last)
                found = os.fstat(fd)
                if stat.S_ISLNK(found.st_mode):
                    if only_trusted and found.st_uid not in (0, os.geteuid()):
                        raise PermissionError(errno.EACCES, "a symbolic link of another user")
                    return None, index + 1, os.readlink("", dir_fd=fd)
            result, fd = fd, -1
            return result, len(parts), ""
        finally:
            if fd >= 0:
                os.close(fd)

    def _turned(
        self, path: str, passed: Sequence[str], target: str, rest: Sequence[str]
    ) -> list[str]:
        """Return the parts below the root for a link's `target` followed by `rest`. `passed` ends
        with the link; the parts before it contain no links. This opens nothing outside the root: a
        path that leaves the root must return to it by its text alone, through the root's real path
        or the path it was given."""
        top = _parts(os.path.realpath(self._top))
        ahead = _parts(target) + list(rest)
        place = [*top, *passed[:-1]]
        if target.startswith("/"):
            place = []
            given = _parts(self._top)
            if ahead[: len(given)] == given:
                place, ahead = top, ahead[len(given) :]
        for index, part in enumerate(ahead):
            is_inside = place[: len(top)] == top
            if is_inside and part != "..":
                return place[len(top) :] + ahead[index:]
            place = place[:-1] if part == ".." else [*place, part]
        if place[: len(top)] != top:
            raise FileNotFoundError(f"{path} leads out of {self._top}")
        return place[len(top) :]


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _read(file: int, start: int, end: int) -> bytes:
    pieces = []
    while start < end and (piece := os.pread(file, end - start, start)):
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def described(name: str, found: os.stat_result) -> dict[str, Any]:
    """Return fsspec's `info` of a file."""
    kind = "other"
    if stat.S_ISDIR(found.st_mode):
        kind = "directory"
    elif stat.S_ISREG(found.st_mode):
        kind = "file"
    return {
        "name": name,
        "size": found.st_size,
        "type": kind,
        "mode": found.st_mode,
        "uid": found.st_uid,
        "gid": found.st_gid,
        "mtime": found.st_mtime,
        "ino": found.st_ino,
        "nlink": found.st_nlink,
    }
