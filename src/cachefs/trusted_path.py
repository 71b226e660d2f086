"""Opens what an operator names: mountpoints, cache directories, logs, secrets, lists, and so on.

cachefs often runs as root on machines that many users share. A path that leads through a directory
of another user can lead somewhere else at the next moment, so a path is followed component by
component, from one descriptor to the next:

- A link is followed only if root or this process's own user owns it.
- What root writes lies only below directories that nobody else can change (`_refuse_directory`).
  A sticky directory such as /tmp is one of them, because only the owner of an entry can replace it.
- A file must be a regular one, so that a FIFO never waits and a device is never read. A file that
  is written must have one name and belong to root or to this user.

`/dev/stdin`, `/dev/fd/N` and the like are descriptors that this process was given, so they are used
as they are. In a user namespace, files of users that it doesn't have count as root's: outside of it
nothing can be told about them.

Below a directory whose path and content are checked (`open_directory`, `check_tree`), nobody else
can change anything. There, the functions for an "own" file follow nothing.
"""

import errno
import functools
import logging
import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from cachefs.errors import UntrustedPathError
from cachefs.units import format_bytes

_MOST_LINKS = 40
"""Links in one path. Linux follows as many, see path_resolution(7)."""
_DEEPEST = 8
"""Directories below each other in a checked tree. cachefs makes three."""
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE_BYTES = 64 << 10
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITES = os.O_WRONLY | os.O_RDWR
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_NULL_DEVICE = os.makedev(1, 3)
"""The number of /dev/null, see Documentation/admin-guide/devices.txt of Linux."""
_LEAST_USER_GID = 1000
"""Groups below are those of services, which the distribution lets write in directories of root:
/var/log is writable for the group syslog on Ubuntu."""
_USERS_GID = 100
"""The group "users" of many distributions: everybody is in it."""
_STANDARD_FILES = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
_OWN_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/([0-9]{1,9})")
_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}

_logger = logging.getLogger(__name__)


def open_file(
    path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o600, *, make: bool = False
) -> int:
    """Open a regular file, or /dev/null, and return its descriptor.

    `flags` and `mode` are those of `os.open`. With `make`, missing directories are created. Raises
    `OSError`, of which `UntrustedPathError` says what is wrong with the path.
    """
    given = _given_descriptor(path)
    if given is not None:
        return os.dup(given)
    writes = bool(flags & _WRITES)
    with _parent_of(path, strict=writes, make=make) as (parent, name, shown):
        return _open_entry(parent, name, shown, flags, mode, own=writes, or_null=True)


def read_file(path: str | Path, most_bytes: int) -> bytes:
    """Return the content of a regular file. Raises `OSError`, also if it has more bytes than
    allowed."""
    with os.fdopen(open_file(path), "rb") as stream:
        return _bounded(stream, most_bytes)


def read_secret(path: str | Path, most_bytes: int) -> bytes:
    """Do the same as `read_file`, and `warn_if_public`."""
    with os.fdopen(open_file(path), "rb") as stream:
        warn_if_public(stream.fileno(), path)
        return _bounded(stream, most_bytes)


def warn_if_public(fd: int, path: str | Path) -> None:
    """Log a warning, once for each path, if every user may read the secret in an open file.

    Not so for a file below a directory that is closed to others, or on a file system that is
    read-only, as are the secrets of Kubernetes: nobody can change their modes.
    """
    if not os.fstat(fd).st_mode & stat.S_IROTH or os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        return
    with suppress(OSError):
        if all(above.stat().st_mode & stat.S_IXOTH for above in resolve(path).parents):
            _warn_once(str(path))


@functools.lru_cache(maxsize=256)
def _warn_once(path: str) -> None:
    _logger.warning("%s has a secret, and all users may read it; run: chmod o-r %s", path, path)


def _bounded(stream: BinaryIO, most_bytes: int) -> bytes:
    # In pieces: `read` of so many bytes would at once take all the memory that is allowed.
    data = bytearray()
    while piece := stream.read(min(_PIECE_BYTES, most_bytes + 1 - len(data))):
        data += piece
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {format_bytes(most_bytes)}")
    return bytes(data)


def open_own_file(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a file in a directory that is checked already. It is a regular file with one name, and
    belongs to root or to this user. Raises `OSError`."""
    return _open_entry(None, str(path), str(path), flags, mode, own=True)


def read_own_file(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file as `open_own_file` opens it. Raises `OSError`, also if it has
    more bytes than allowed."""
    with os.fdopen(open_own_file(path), "rb") as stream:
        return _bounded(stream, most_bytes)


def check_own_file(path: Path) -> None:
    """Check a file for a library that opens it by its name, as `open_own_file` does. It may be
    missing. Raises `OSError`."""
    with suppress(FileNotFoundError):
        _refuse_file(path.lstat(), str(path), own=True)


def open_directory(path: str | Path, *, make: bool = False) -> int:
    """Open a directory of root or this user, in which files are written, and return its descriptor.

    With `make`, missing directories are created: the last one with mode 700, others with 755.
    Raises `OSError`.
    """
    with _parent_of(path, strict=True, make=make) as (parent, name, shown):
        if make:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=parent)
        fd = os.open(name, _DIRECTORY, dir_fd=parent)
    try:
        _refuse_owner(os.fstat(fd), shown)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_directory(path: str | Path) -> None:
    """Check a directory, which may be missing, as `open_directory` does. Raises `OSError`."""
    with suppress(FileNotFoundError):
        os.close(open_directory(path))


def open_place(path: str | Path) -> int:
    """Return an O_PATH descriptor of what is at `path`, which is no link. Raises `OSError`.

    Directories on the way may belong to others: the descriptor stays at the place that was found.
    """
    with _parent_of(path) as (parent, name, _):
        return os.open(name, _PLACE, dir_fd=parent)


@contextmanager
def opened_parent(path: str | Path, *, strict: bool = False) -> Iterator[tuple[int, str]]:
    """Yield an O_PATH descriptor of the directory in which `path` lies, and the name there.

    With `strict`, nobody but root and this user can change what lies on the way. Raises `OSError`.
    """
    with _parent_of(path, strict=strict) as (parent, name, _):
        yield parent, name


def resolve(path: str | Path) -> Path:
    """Return the absolute path without links. What can't be looked at is left as it is written.

    Raises `UntrustedPathError` for a link of another user.
    """
    walk = _Walk(path)
    try:
        name = walk.to_last()
    except UntrustedPathError:
        raise
    except OSError:
        return Path(walk.shown(), *reversed(walk.pending))
    finally:
        os.close(walk.fd)
    return Path(walk.shown(name))


def check_tree(
    directory_fd: int,
    shown: str,
    only: Collection[str] | None = None,
    leave: Collection[str] = (),
    twice: Collection[str] = (),
    close: bool = False,
) -> list[str]:
    """Check what lies below a directory: directories and regular files with one name each, all of
    root or this user. Return the directories that others may write to.

    `only` names the entries of the directory to look at (None: all). Directories named in `leave`
    are not entered. Files named in `twice` may have two names. With `close`, take the right to
    write away from others. Raises `OSError`, of which `UntrustedPathError` names the entry.
    """
    return _check_below(directory_fd, shown, only, leave, twice, close, _DEEPEST)


def _check_below(
    fd: int,
    shown: str,
    only: Collection[str] | None,
    leave: Collection[str],
    twice: Collection[str],
    close: bool,
    deepest: int,
) -> list[str]:
    public = []
    info = os.fstat(fd)
    _refuse_owner(info, shown)
    if info.st_mode & _OTHERS_WRITE:
        public.append(shown)
        if close:
            os.fchmod(fd, stat.S_IMODE(info.st_mode) & ~_OTHERS_WRITE)
    if only is not None and not only:
        return public
    if not deepest:
        raise UntrustedPathError(f"{shown} lies too deep to be of cachefs; remove it")
    for name in os.listdir(fd):
        if only is not None and name not in only:
            continue
        place = f"{shown}/{name}"
        try:
            below = os.open(name, _DIRECTORY, dir_fd=fd)
        except OSError as error:
            if error.errno == errno.ENOENT:
                continue
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            _refuse_file(found, place, own=True, most_names=2 if name in twice else 1)
            continue
        try:
            entries = () if name in leave else None
            public += _check_below(below, place, entries, leave, twice, close, deepest - 1)
        finally:
            os.close(below)
    return public


# -- the way to a file -----------------------------------------------------------------------------


class _Walk:
    """The way along a path. `fd` is the directory that was reached; the caller closes it."""

    def __init__(self, path: str | Path, *, strict: bool = False, make: bool = False) -> None:
        self._strict = strict and os.geteuid() == 0
        self._make = make
        self._links = 0
        self.pending = os.path.abspath(path).split("/")[:0:-1]
        """The components that remain, the next one last."""
        self._names: list[str] = []
        self.fd = os.open("/", _PLACE | os.O_DIRECTORY)

    def shown(self, name: str = ".") -> str:
        """Return the path of the directory that was reached, or of an entry of it."""
        return os.path.join("/", *self._names, *([] if name == "." else [name]))

    def to_last(self) -> str:
        """Go to the directory that has the last component, and return the component's name; "." if
        it is that directory itself. Raises `OSError`; `pending` is then what was not reached."""
        self._check()
        while self.pending:
            name = self.pending[-1]
            if name not in ("", ".", ".."):
                is_last = len(self.pending) == 1
                target = self._target_of(name, is_last)
                if target is not None:
                    self._follow(target)
                    continue
                if is_last:
                    return name
            self._enter(name or ".")
            self.pending.pop()
        return "."

    def _target_of(self, name: str, is_last: bool) -> str | None:
        """Return where the link `name` leads; None if it is none, or is missing."""
        try:  # asks no file system about what is mounted there, as stat does: it may hang
            os.readlink(name, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT) or is_last:
                return None
            raise
        link = os.open(name, _PLACE, dir_fd=self.fd)
        try:
            info = os.fstat(link)
            if stat.S_ISLNK(info.st_mode) and info.st_uid not in _trusted_owners():
                raise UntrustedPathError(
                    f"{self.shown(name)} is a link of uid {info.st_uid}, who can lead it anywhere; "
                    "name the place to which it leads"
                )
            return os.readlink("", dir_fd=link)
        finally:
            os.close(link)

    def _follow(self, target: str) -> None:
        self._links += 1
        if self._links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        self.pending.pop()
        self.pending += target.split("/")[::-1]
        if target.startswith("/"):
            self._names.clear()
            self._reach(os.open("/", _PLACE | os.O_DIRECTORY))

    def _enter(self, name: str) -> None:
        flags = _PLACE | os.O_DIRECTORY
        try:
            fd = os.open(name, flags, dir_fd=self.fd)
        except FileNotFoundError:
            if not self._make:
                raise
            with suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=self.fd)
            fd = os.open(name, flags, dir_fd=self.fd)
        if name == "..":
            del self._names[-1:]
        elif name != ".":
            self._names.append(name)
        self._reach(fd)
        self._check()

    def _reach(self, fd: int) -> None:
        os.close(self.fd)
        self.fd = fd

    def _check(self) -> None:
        if not self._strict:
            return
        info = os.fstat(self.fd)
        if _is_public(info) and info.st_uid == os.geteuid() and self._is_own_volume(info):
            Path(f"/proc/self/fd/{self.fd}").chmod(stat.S_IMODE(info.st_mode) | stat.S_ISVTX)
            _logger.info("%s, a volume for all users, got the sticky bit", self.shown())
            return
        _refuse_directory(info, self.shown())

    def _is_own_volume(self, info: os.stat_result) -> bool:
        """Return whether a file system is mounted here that has nothing of other users. An emptyDir
        of Kubernetes belongs to root and has the mode 777."""
        if info.st_dev == os.stat("..", dir_fd=self.fd).st_dev:
            return False
        fd = os.open(".", _DIRECTORY, dir_fd=self.fd)
        try:
            entries = os.listdir(fd)
            owners = {os.stat(name, dir_fd=fd, follow_symlinks=False).st_uid for name in entries}
        finally:
            os.close(fd)
        return owners <= _trusted_owners()


@contextmanager
def _parent_of(
    path: str | Path, *, strict: bool = False, make: bool = False
) -> Iterator[tuple[int, str, str]]:
    """Yield a descriptor of the directory that has the last component of `path`, the component, and
    their path."""
    walk = _Walk(path, strict=strict, make=make)
    try:
        name = walk.to_last()
        yield walk.fd, name, walk.shown(name)
    finally:
        os.close(walk.fd)


def _given_descriptor(path: str | Path) -> int | None:
    """Return the descriptor that `path` stands for, if it is one that this process was given."""
    name = os.path.abspath(path)
    found = _OWN_DESCRIPTOR.fullmatch(name)
    return int(found[1]) if found is not None else _STANDARD_FILES.get(name)


def _open_entry(
    parent: int | None,
    name: str,
    shown: str,
    flags: int,
    mode: int,
    own: bool,
    or_null: bool = False,
) -> int:
    with suppress(FileNotFoundError):  # looked at first: to open a device may have an effect
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        _refuse_file(found, shown, own, or_null)
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, mode, dir_fd=parent)
    try:
        _refuse_file(os.fstat(fd), shown, own, or_null)
    except BaseException:
        os.close(fd)
        raise
    return fd


# -- what is refused -------------------------------------------------------------------------------


def _refuse_file(
    info: os.stat_result, shown: str, own: bool, or_null: bool = False, most_names: int = 1
) -> None:
    kind = stat.S_IFMT(info.st_mode)
    if or_null and kind == stat.S_IFCHR and info.st_rdev == _NULL_DEVICE:
        return
    if kind != stat.S_IFREG:
        raise UntrustedPathError(f"{shown} is {_KINDS.get(kind, 'no file')}, not a regular file")
    if own:
        _refuse_owner(info, shown)
        if info.st_nlink > most_names:
            raise UntrustedPathError(
                f"{shown} has {info.st_nlink} names, so it may be somebody else's file; remove it"
            )


def _refuse_owner(info: os.stat_result, shown: str) -> None:
    if info.st_uid not in _trusted_owners():
        raise UntrustedPathError(
            f"{shown} belongs to another user (uid {info.st_uid}), who can change it; name a place "
            "of your own"
        )


def _refuse_directory(info: os.stat_result, shown: str) -> None:
    """Raise `UntrustedPathError` if others than root can replace what lies in a directory. Only
    root asks."""
    if info.st_uid not in _trusted_owners():
        raise UntrustedPathError(
            f"{shown} belongs to another user (uid {info.st_uid}), who can replace what lies in "
            "it; name a place below a directory of root"
        )
    is_of_users = info.st_gid >= _LEAST_USER_GID or info.st_gid == _USERS_GID
    is_of_group = info.st_mode & (stat.S_IWGRP | stat.S_ISVTX) == stat.S_IWGRP
    if _is_public(info) or (is_of_users and is_of_group):
        raise UntrustedPathError(
            f"others than root can replace what lies in {shown} (mode "
            f"{stat.S_IMODE(info.st_mode):o}); run: chmod go-w {shown}, or chmod +t {shown}"
        )


def _is_public(info: os.stat_result) -> bool:
    """Return whether all users may replace what lies in a directory."""
    return info.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH


def _trusted_owners() -> frozenset[int]:
    return frozenset({0, os.geteuid()}) | _owners_outside()


@functools.cache
def _owners_outside() -> frozenset[int]:
    """Return the uid with which the kernel shows owners that this user namespace doesn't have, see
    user_namespaces(7). Empty if the namespace has all."""
    try:
        with open("/proc/self/uid_map", encoding="ascii") as lines:
            mapped = [tuple(map(int, line.split())) for line in lines]
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as text:
            overflow = int(text.read())
    except (OSError, ValueError):
        return frozenset()
    if sum(count for _, _, count in mapped) >= 0xFFFF_FFFF:
        return frozenset()
    is_mapped = any(first <= overflow < first + count for first, _, count in mapped)
    return frozenset() if is_mapped else frozenset({overflow})
