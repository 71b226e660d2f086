"""Converts inodes to the attributes that the kernel receives."""

import math
import os
import stat
from dataclasses import dataclass

import pyfuse3

from cachefs.format.inode_record import KIND_DIR, Inode
from cachefs.namespace.clock import coarse_ns
from cachefs.types import MOST_MODE, UNKNOWN_ID

_FOREVER_S = float(10 * 365 * 86_400)
"""Sent to the kernel for an infinite TTL, which the protocol can't express."""
_FILE, _FILE_MODE = stat.S_IFREG, 0o644
_DIR, _DIR_MODE = stat.S_IFDIR, 0o755


@dataclass(frozen=True, slots=True)
class Ownership:
    """Owner and modes of everything in a mount.

    None means the origin's value. If the origin has none, the owner is the user that mounts, and
    the modes are 644 (files) and 755 (directories). With `keeps_modes`, the modes here let the
    group and others read or write nothing that the origin's mode forbids: a user's chmod must hold.
    """

    uid: int | None = None
    gid: int | None = None
    file_mode: int | None = None
    dir_mode: int | None = None
    keeps_modes: bool = False


class AttrBuilder:
    """Builds `EntryAttributes`.

    `st_nlink` is always 1, for directories too: find and similar programs treat 1 as "unknown".
    """

    def __init__(self, ownership: Ownership) -> None:
        uid, gid = ownership.uid, ownership.gid
        file_mode, dir_mode = ownership.file_mode, ownership.dir_mode
        self._uid = os.getuid() if uid is None else uid
        self._gid = os.getgid() if gid is None else gid
        self._file_mode = _FILE | (_FILE_MODE if file_mode is None else file_mode)
        self._dir_mode = _DIR | (_DIR_MODE if dir_mode is None else dir_mode)
        # Greatest values that are taken from the origin, so that `fill` needs one comparison
        # each. With -1, no value is taken.
        self._uid_most = UNKNOWN_ID - 1 if uid is None else -1
        self._gid_most = UNKNOWN_ID - 1 if gid is None else -1
        keeps = ownership.keeps_modes
        self._file_mode_most = MOST_MODE if keeps or file_mode is None else -1
        self._dir_mode_most = MOST_MODE if keeps or dir_mode is None else -1
        modes = range(MOST_MODE + 1)
        self._files = [_FILE | (m if file_mode is None else _within(m, file_mode)) for m in modes]
        self._dirs = [_DIR | (m if dir_mode is None else _within(m, dir_mode)) for m in modes]

    def template(self) -> pyfuse3.EntryAttributes:
        """Return attributes with the fields that all inodes share; `fill` sets the others."""
        attributes = pyfuse3.EntryAttributes()
        attributes.st_nlink = 1
        return attributes

    def fill(
        self,
        into: pyfuse3.EntryAttributes,
        ino: int,
        kind: int,
        size_bytes: int,
        mtime_ns: int,
        uid: int,
        gid: int,
        mode: int,
    ) -> None:
        """Set the fields that differ between inodes. Hot path: called once per directory entry."""
        into.st_ino = ino
        if kind == KIND_DIR:
            into.st_mode = self._dir_mode if mode > self._dir_mode_most else self._dirs[mode]
        else:
            into.st_mode = self._file_mode if mode > self._file_mode_most else self._files[mode]
        into.st_uid = self._uid if uid > self._uid_most else uid
        into.st_gid = self._gid if gid > self._gid_most else gid
        into.st_size = size_bytes
        into.st_blocks = (size_bytes + 511) >> 9
        into.st_atime_ns = into.st_mtime_ns = into.st_ctime_ns = mtime_ns
        if kind == KIND_DIR:
            self.set_directory_times(into, mtime_ns)

    def set_directory_times(self, into: pyfuse3.EntryAttributes, mtime_ns: int) -> None:
        """Set the timestamps of a directory. Only the mtime has the nanoseconds from which the
        kernel learns that it must read the directory again."""
        into.st_mtime_ns = mtime_ns
        into.st_atime_ns = into.st_ctime_ns = coarse_ns(mtime_ns)

    def build(
        self, inode: Inode, mtime_ns: int, attr_ttl_s: float, entry_ttl_s: float = 0.0
    ) -> pyfuse3.EntryAttributes:
        """Return the attributes of an inode, valid in the kernel for the two TTLs.

        `mtime_ns` is the time to show. For a directory it may differ from the inode's.
        """
        attributes = self.template()
        self.fill(attributes, inode.ino, inode.kind, inode.size_bytes, mtime_ns, *inode.posix)
        attributes.attr_timeout = kernel_timeout_s(attr_ttl_s)
        attributes.entry_timeout = kernel_timeout_s(entry_ttl_s)
        return attributes

    def negative(self, ttl_s: float) -> pyfuse3.EntryAttributes:
        """Return the reply (inode 0) that makes the kernel cache the absence of a name."""
        attributes = pyfuse3.EntryAttributes()
        attributes.st_ino = 0
        attributes.entry_timeout = kernel_timeout_s(ttl_s)
        return attributes


def _within(own: int, option: int) -> int:
    """Return the mode of an option without what the group and others may not do by the file's own
    mode. To execute is allowed with reading."""
    readable = own & 0o044
    return option & (0o1700 | own & 0o066 | readable >> 2)


def kernel_timeout_s(ttl_s: float) -> float:
    """Return a TTL in the form that the kernel accepts: an infinite one becomes ten years."""
    return _FOREVER_S if math.isinf(ttl_s) else ttl_s
