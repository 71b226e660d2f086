"""Confined directories of this machine (`file://`): no file outside the source is ever opened.

A daemon that root runs reads with root's rights, but other users may write into the source. So all
names are reached from one descriptor of the source, which is opened once: the owner of a directory
above can't put another one in its place. A path is opened one part at a time, and the kernel
follows no link (O_NOFOLLOW). If a part is a link, the module reads its text, replaces the part by
it, and starts again, provided that the new path is below the source. There is no check before a
later open, so a link that changes meanwhile can't escape.

A directory has a place: its inode number, and the number of its device if that is not the source's.
Who lists or changes it says which place the kernel was told of (`on_behalf.py`). If the path leads
to another directory by now, `MovedError` is raised.
"""

import contextlib
import ctypes
import errno
import logging
import os
import re
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from cachefs.errors import ObjectChangedError
from cachefs.origin.fsspec.local_acl import mode_of
from cachefs.origin.fsspec.local_identity import working_in
from cachefs.origin.on_behalf import expected_place, present_caller

_MOST_TURNS = 100
"""The most links and groups of `..` in one path. The kernel itself follows 40 links."""

_HIDDEN = ".cachefs-upload-"
_UPLOAD = re.compile(re.escape(_HIDDEN) + r"[0-9a-f]{32}(\.parts)?")

_OPEN_PART = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FUSE_MAGIC = 0x65735546
"""FUSE_SUPER_MAGIC of linux/magic.h."""
_libc = ctypes.CDLL(None, use_errno=True)


log = logging.getLogger(__name__)


class MovedError(ObjectChangedError):
    """The path leads to another directory than before."""


def upload_name(upload_id: str) -> str:
    """Return the hidden name of a file that is being written (`local_writer.py`)."""
    return _HIDDEN + upload_id


def is_hidden(name: str) -> bool:
    """Whether a name belongs to a file that is being written; listings leave it out."""
    return _UPLOAD.fullmatch(name) is not None


class ConfinedFileSystem(LocalFileSystem):  # type: ignore[misc, unused-ignore]
    """fsspec's local files below `root`. A link gets the `info` of its target.

    A link that leads out of `root`, to no file or in a circle counts as absent
    (`FileNotFoundError`). So does one that could lead out of the part of the source that another
    user may see (`_may_lead`), unless `follows_all`. `root` itself may be a link: where it leads at
    the first access holds for good.
    """

    def __init__(self, root: str, *, follows_all: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self._top = root.rstrip("/") or "/"
        self._follows_all = follows_all
        self._opening = threading.Lock()
        self._top_fd = -1
        self._top_device = 0
        self._top_parts: list[str] = []
        """The parts of the source's real path."""
        self._told_of_links = False
        self.has_places = True
        """Whether directories can be told apart. Inode numbers of FUSE file systems may change."""

    def __del__(self) -> None:
        if getattr(self, "_top_fd", -1) >= 0:
            os.close(self._top_fd)

    def info(self, path: Any, **kwargs: Any) -> dict[str, Any]:
        """See fsspec. `path` is a string: the root or a path below it."""
        fd = self.open_path(path)
        try:
            return self.described(path, fd)
        finally:
            os.close(fd)

    def ls(self, path: Any, detail: bool = False, **kwargs: Any) -> list[Any]:
        """See fsspec. A link that leads outside has the type "other"."""
        fd = self.open_path(path)
        try:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                infos = self._children(path, fd)
            else:
                infos = [self.described(path, fd)]
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

    def described(self, name: str, fd: int) -> dict[str, Any]:
        """Return fsspec's `info` of an open file or directory, with a mode that grants no more than
        its access list."""
        found = os.fstat(fd)
        return self.described_as(name, found, mode_of(f"/proc/self/fd/{fd}", found.st_mode))

    def _children(self, path: str, fd: int) -> list[dict[str, Any]]:
        infos = []
        directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
        try:
            with os.scandir(directory) as entries, working_in(directory) as prefix:
                for entry in entries:
                    if is_hidden(entry.name):
                        continue
                    name = f"{path.rstrip('/')}/{entry.name}"
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:  # it has been removed meanwhile
                        continue
                    if stat.S_ISLNK(found.st_mode):
                        infos.append(self._link(name, found))
                    else:
                        mode = mode_of(prefix + entry.name, found.st_mode)
                        infos.append(self.described_as(name, found, mode))
        finally:
            os.close(directory)
        return infos

    def _link(self, name: str, found: os.stat_result) -> dict[str, Any]:
        with contextlib.suppress(OSError):
            return self.info(name)
        return self.described_as(name, found, found.st_mode)

    def described_as(self, name: str, found: os.stat_result, mode: int) -> dict[str, Any]:
        """Return fsspec's `info` of a file with these attributes and this mode."""
        kind = "other"
        if stat.S_ISDIR(mode):
            kind = "directory"
        elif stat.S_ISREG(mode):
            kind = "file"
        return {
            "name": name,
            "size": found.st_size,
            "type": kind,
            "mode": mode,
            "uid": found.st_uid,
            "gid": found.st_gid,
            "mtime": found.st_mtime,
            "ino": found.st_ino,
            "nlink": found.st_nlink,
            "place": self.place(found) if kind == "directory" else "",
        }

    def place(self, found: os.stat_result) -> str:
        """Return the place of a directory; "" if directories can't be told apart here."""
        if not self.has_places:
            return ""
        is_here = found.st_dev == self._top_device
        return f"{found.st_ino}" if is_here else f"{found.st_ino}-{found.st_dev}"

    # -- opening -----------------------------------------------------------------------------------

    def open_path(self, path: str, *, only_trusted: bool = False) -> int:
        """Return a descriptor (O_PATH) of the target of `path`, which is no link. The caller owns
        the descriptor. With `only_trusted`, links that neither root nor this process's user nor the
        present caller has made raise `PermissionError`.

        Raises `MovedError` if `path` or the directory above it is not the expected directory.
        """
        top = self._opened_top()
        below = path.rstrip("/").removeprefix(self._top.rstrip("/")).lstrip("/")
        above, _, name = below.rpartition("/")
        walk = _Walk(path, only_trusted)
        fd, real = self._walk(os.dup(top), [], above.split("/") if above else [], walk)
        if name:
            self.check_place(fd, above)
            fd, _ = self._walk(fd, real, [name], walk)
        self.check_place(fd, below)
        return fd

    def check_place(self, fd: int, path: str) -> None:
        """Raise `MovedError` if `fd` is not the directory that is expected at `path`, and close
        it."""
        wanted = expected_place(path)
        if wanted and self.has_places and self.place(os.fstat(fd)) != wanted:
            os.close(fd)
            raise MovedError(f"another directory has the path {path or '/'} now")

    def _opened_top(self) -> int:
        with self._opening:
            if self._top_fd < 0:
                fd = os.open(self._top, os.O_PATH | os.O_CLOEXEC)
                self._top_device = os.fstat(fd).st_dev
                self._top_parts = _parts(str(Path(f"/proc/self/fd/{fd}").readlink()))
                self.has_places = not _is_fuse(fd)
                self._top_fd = fd
            return self._top_fd

    def _walk(
        self, fd: int, real: list[str], parts: Sequence[str], walk: "_Walk"
    ) -> tuple[int, list[str]]:
        """Walk down `parts` from the directory `fd`, whose path below the source without links is
        `real`. Return the descriptor and the path of the last part. Closes `fd`, also on failure;
        the caller owns the result."""
        for index, part in enumerate(parts):
            if part == "..":
                os.close(fd)
                walk.count()
                up = self._turned(walk.path, real, "/".join(parts[index:]))
                return self._walk(os.dup(self._top_fd), [], up, walk)
            fd = _opened_below(fd, part, _OPEN_PART)
            if stat.S_ISLNK(os.fstat(fd).st_mode):
                fd, real = self._followed(fd, real, walk)
            else:
                real = [*real, part]
        return fd, real

    def _followed(self, link: int, place: list[str], walk: "_Walk") -> tuple[int, list[str]]:
        """Return the target of a link in the directory `place`, as `_walk` does. Closes `link`."""
        try:
            walk.count()
            owner = os.fstat(link).st_uid
            if walk.only_trusted and not _is_trusted(owner):
                raise PermissionError(errno.EACCES, "a symbolic link of another user")
            parts = self._turned(walk.path, place, os.readlink("", dir_fd=link))
        finally:
            os.close(link)
        fd, real = self._walk(os.dup(self._top_fd), [], parts, walk)
        if not self._may_lead(owner, place, fd, real):
            os.close(fd)
            self._tell_of_link(walk.path)
            raise FileNotFoundError(f"{walk.path}: a link is not followed, because of its owner")
        return fd, real

    def _tell_of_link(self, path: str) -> None:
        if not self._told_of_links:
            self._told_of_links = True
            log.info(
                "%r is not shown: a symbolic link on its way belongs to neither root nor the owner "
                "of its target, and leads out of its directory; see --follow-links",
                path,
            )

    def _may_lead(self, owner: int, place: list[str], fd: int, real: list[str]) -> bool:
        """Whether a link of `owner` in the directory `place` may lead to `fd`, at the path `real`.

        A container may see only a directory of the mount. A user who writes there must not see more
        by a link: so it leads to something below its own directory, or of its own owner. Links of
        root and of the mount's user lead anywhere in the source."""
        is_below = real[: len(place)] == place
        return (
            self._follows_all
            or is_below
            or owner in (0, os.geteuid())
            or owner == os.fstat(fd).st_uid
        )

    def _turned(self, path: str, place: Sequence[str], target: str) -> list[str]:
        """Return the parts below the source for the text `target` of a link in the directory
        `place`. This opens nothing: a text that leaves the source must return to it by its real
        path, or by the path that was given."""
        top, ahead = self._top_parts, _parts(target)
        here = [*top, *place]
        if target.startswith("/"):
            here = []
            given = _parts(self._top)
            if ahead[: len(given)] == given:
                here, ahead = top, ahead[len(given) :]
        for index, part in enumerate(ahead):
            is_inside = here[: len(top)] == top
            if is_inside and part != "..":
                return here[len(top) :] + ahead[index:]
            here = here[:-1] if part == ".." else [*here, part]
        if here[: len(top)] != top:
            raise FileNotFoundError(f"{path} leads out of {self._top}")
        return here[len(top) :]


class _Walk:
    """The walk along one path. It ends after `_MOST_TURNS` links and `..`."""

    def __init__(self, path: str, only_trusted: bool) -> None:
        self.path = path
        self.only_trusted = only_trusted
        self._turns = 0

    def count(self) -> None:
        """Count a link or `..`."""
        self._turns += 1
        if self._turns > _MOST_TURNS:
            raise FileNotFoundError(self.path)


def _opened_below(directory: int, name: str, flags: int) -> int:
    """Open a name in a directory, and close the directory, also on failure."""
    try:
        return os.open(name, flags, dir_fd=directory)
    finally:
        os.close(directory)


def _is_trusted(owner: int) -> bool:
    caller = present_caller()
    return owner in (0, os.geteuid()) or (caller is not None and owner == caller.uid)


def _is_fuse(fd: int) -> bool:
    """Whether a descriptor belongs to a FUSE file system (statfs(2))."""
    status = (ctypes.c_long * 32)()
    return _libc.fstatfs(fd, ctypes.byref(status)) == 0 and status[0] == _FUSE_MAGIC


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _read(file: int, start: int, end: int) -> bytes:
    pieces = []
    while start < end and (piece := os.pread(file, end - start, start)):
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
