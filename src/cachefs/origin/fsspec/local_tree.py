"""Confined directories of this machine (`file://`): no file outside the source is ever opened.

A daemon that root runs reads with root's rights, but other users may write into the source. So all
names are reached from one descriptor of the source, which is opened once: the owner of a directory
above can't put another one in its place. A path is opened one part at a time, and the kernel
follows no link (O_NOFOLLOW). If a part is a link, the module reads its text, replaces the part by
it, and starts again, provided that the new path is below the source. There is no check before a
later open, so a link that changes meanwhile can't escape.

A directory has a place: its inode number, the time at which it was made (numbers are used again),
and the number of its device if that is not the source's.
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
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsspec.implementations.local import LocalFileSystem

from cachefs.errors import ObjectChangedError, reason_of
from cachefs.log import warn_once
from cachefs.origin.fsspec.errors import TEMPORARY_ERRNOS
from cachefs.origin.fsspec.local_acl import mode_of
from cachefs.origin.fsspec.local_identity import working_in
from cachefs.origin.on_behalf import expected_place, present_caller

_MOST_TURNS = 100
"""The most links and groups of `..` in one path. The kernel itself follows 40 links."""

_HIDDEN = ".cachefs-upload-"
_UPLOAD = re.compile(re.escape(_HIDDEN) + r"[0-9a-f]{32}(\.parts)?")
"""Earlier versions of cachefs also left files that end with `.parts`."""

_OPEN_PART = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FUSE_MAGIC = 0x65735546
"""FUSE_SUPER_MAGIC of linux/magic.h."""
_libc = ctypes.CDLL(None, use_errno=True)
_statx = getattr(_libc, "statx", None)
_STATX_BYTES = 256
_EMPTY_PATH, _NO_FOLLOW = 0x1000, 0x100
"""AT_EMPTY_PATH and AT_SYMLINK_NOFOLLOW of linux/fcntl.h."""
_BIRTH = 0x800
"""STATX_BTIME of linux/stat.h."""
_BIRTH_FIELD = struct.Struct("=qI")
_BIRTH_AT = 80
"""Where struct statx has seconds and nanoseconds of stx_btime (linux/stat.h)."""

log = logging.getLogger(__name__)


class LeadsOutError(FileNotFoundError):
    """A symbolic link leads out of the source."""


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
        self._told_of_way_out = False
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
        """See fsspec. A link that leads outside has the type "other". A name whose attributes
        can't be read does not hide the others: see `_unreadable`."""
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

    def root_answers(self) -> bool:
        """Whether the root itself can be looked at."""
        try:
            Path(self._top).stat()
        except OSError:
            return False
        return True

    def described(self, name: str, fd: int) -> dict[str, Any]:
        """Return fsspec's `info` of an open file or directory, with a mode that grants no more than
        its access list."""
        found = os.fstat(fd)
        mode = mode_of(f"/proc/self/fd/{fd}", found.st_mode)
        return self.described_as(name, found, mode, self.place(found, fd))

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
                        infos.append(self._child(name, entry, directory, prefix))
                    except FileNotFoundError:  # it has been removed meanwhile
                        continue
                    except OSError as error:
                        if error.errno in TEMPORARY_ERRNOS:
                            raise
                        infos += _unreadable(name, entry, error)
        finally:
            os.close(directory)
        return infos

    def _child(
        self, name: str, entry: os.DirEntry[str], directory: int, prefix: str
    ) -> dict[str, Any]:
        found = entry.stat(follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            return self._link(name, found)
        mode = mode_of(prefix + entry.name, found.st_mode)
        place = self.place(found, directory, entry.name)
        return self.described_as(name, found, mode, place)

    def _link(self, name: str, found: os.stat_result) -> dict[str, Any]:
        described = self.described_as(name, found, found.st_mode)
        try:
            return self.info(name)
        except LeadsOutError:
            return described | {"leads_out": True}
        except OSError:
            return described

    def described_as(
        self, name: str, found: os.stat_result, mode: int, place: str = ""
    ) -> dict[str, Any]:
        """Return fsspec's `info` of a file with these attributes, this mode and this place."""
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
            "place": place,
        }

    def place(self, found: os.stat_result, fd: int, name: str = "") -> str:
        """Return the place of the directory `name` in `fd`, or of `fd` itself; "" if it is no
        directory, or if directories can't be told apart here. `found` are its attributes."""
        if not (self.has_places and stat.S_ISDIR(found.st_mode)):
            return ""
        place = f"{found.st_ino}.{_made_at_ns(fd, name)}"
        return place if found.st_dev == self._top_device else f"{place}-{found.st_dev}"

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
        if wanted and self.has_places and self.place(os.fstat(fd), fd) != wanted:
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
            try:
                walk.check_search(fd, real)
                below = os.open(part, _OPEN_PART, dir_fd=fd)
                above = os.fstat(fd)
            finally:
                os.close(fd)
            if stat.S_ISLNK(os.fstat(below).st_mode):
                fd, real = self._followed(below, real, above, walk)
            else:
                fd, real = below, [*real, part]
        return fd, real

    def _followed(
        self, link: int, place: list[str], above: os.stat_result, walk: "_Walk"
    ) -> tuple[int, list[str]]:
        """Return the target of a link in the directory `place` with the attributes `above`, as
        `_walk` does. Closes `link`."""
        try:
            walk.count()
            found = os.fstat(link)
            owner = found.st_uid
            if walk.only_trusted and not _is_trusted(owner):
                raise PermissionError(errno.EACCES, "a symbolic link of another user")
            parts = self._turned(walk.path, place, os.readlink("", dir_fd=link))
        finally:
            os.close(link)
        is_free = self._follows_all or owner in (0, os.geteuid())
        with contextlib.nullcontext() if is_free else walk.of_link(found, place, above):
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

    def _tell_of_way_out(self, path: str, target: str) -> None:
        if self._told_of_way_out:
            return
        self._told_of_way_out = True
        top = "/" + "/".join(self._top_parts)
        above = os.path.commonpath([top, target])
        log.warning(
            "%r is a symbolic link that leads out of the source, to %r, so it is left out, and so "
            "are others like it; %s",
            path,
            target,
            "a mount shows only what lies below its source"
            if above == "/"
            else f"mount a directory that has both, such as {'file://' + above!r}",
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
            self._tell_of_way_out(path, "/" + "/".join(here))
            raise LeadsOutError(f"{path} leads out of {self._top}")
        return here[len(top) :]


class _Link(NamedTuple):
    """A link of a user whose rights limit where it leads."""

    owner: int
    group: int | None
    """A group whose rights the owner has; None if that is not known."""
    place: list[str]
    """The directory of the link: who reads the link may search it."""


class _Walk:
    """The walk along one path. It ends after `_MOST_TURNS` links and `..`."""

    def __init__(self, path: str, only_trusted: bool) -> None:
        self.path = path
        self.only_trusted = only_trusted
        self._turns = 0
        self._links: list[_Link] = []

    def count(self) -> None:
        """Count a link or `..`."""
        self._turns += 1
        if self._turns > _MOST_TURNS:
            raise FileNotFoundError(self.path)

    @contextlib.contextmanager
    def of_link(
        self, link: os.stat_result, place: list[str], above: os.stat_result
    ) -> Iterator[None]:
        """Walk to the target of a link in the directory `place`, which has the attributes `above`.
        Its owner is no member of the link's group if the group only comes from the directory."""
        is_given = above.st_mode & stat.S_ISGID and above.st_mode & stat.S_IWOTH
        self._links.append(_Link(link.st_uid, None if is_given else link.st_gid, place))
        try:
            yield
        finally:
            self._links.pop()

    def check_search(self, fd: int, real: list[str]) -> None:
        """Raise `FileNotFoundError` if the owner of a link on the way may not search the directory
        `fd` at `real`. Otherwise a link would show what the directory's mode closes: the kernel
        checks only the target's own mode."""
        links = [link for link in self._links if link.place[: len(real)] != real]
        if not links:
            return
        found = os.fstat(fd)
        mode = mode_of(f"/proc/self/fd/{fd}", found.st_mode)
        for link in links:
            is_open = mode & stat.S_IXOTH
            is_open |= mode & stat.S_IXUSR if link.owner == found.st_uid else 0
            is_open |= mode & stat.S_IXGRP if link.group == found.st_gid else 0
            if not is_open:
                raise FileNotFoundError(f"{self.path}: the owner of a link may not go there")


def _unreadable(name: str, entry: os.DirEntry[str], error: OSError) -> Iterator[dict[str, Any]]:
    """Yield the `info` of a directory whose attributes can't be read, such as a dead mount; it
    grants nobody anything but this process's user. A file without a known size is left out."""
    is_dir = entry.is_dir(follow_symlinks=False)  # the directory that has the name says so
    why = reason_of(OSError(error.errno, error.strerror))
    shown = "is shown, but can't be read" if is_dir else "is not shown"
    warn_once(log, name, "%r %s: %s", name, shown, why)
    if is_dir:
        mode = stat.S_IFDIR | stat.S_IRUSR | stat.S_IXUSR
        yield {
            "name": name,
            "size": None,
            "type": "directory",
            "mode": mode,
            "uid": os.geteuid(),
            "gid": os.getegid(),
            "mtime": 0.0,
            "place": "",
        }


def _is_trusted(owner: int) -> bool:
    caller = present_caller()
    return owner in (0, os.geteuid()) or (caller is not None and owner == caller.uid)


def _made_at_ns(fd: int, name: str) -> int:
    """Return when the directory `name` in `fd`, or `fd` itself, was made; 0 if the file system does
    not say it (NFS). Links are not followed."""
    data = ctypes.create_string_buffer(_STATX_BYTES)
    if _statx is None or _statx(fd, os.fsencode(name), _EMPTY_PATH | _NO_FOLLOW, _BIRTH, data) < 0:
        return 0
    if not int.from_bytes(data.raw[:4], sys.byteorder) & _BIRTH:
        return 0
    seconds, nanoseconds = _BIRTH_FIELD.unpack_from(data, _BIRTH_AT)
    return int(seconds * 1_000_000_000 + nanoseconds)


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
