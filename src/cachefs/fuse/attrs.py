"""Inodes to the attributes that the kernel is given."""

import math
import stat
from dataclasses import dataclass

import pyfuse3

from cachefs.format.inode_record import KIND_DIR, Inode

_FOREVER_S = float(10 * 365 * 86_400)
"""What the kernel is told for an indefinite TTL: it has no word for "for ever"."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """Owner and modes of everything in a mount whose origin knows none."""

    uid: int
    gid: int
    file_mode: int
    dir_mode: int


class AttrBuilder:
    """Builds `EntryAttributes`: nlink 1 and sizes as they are, no link count of directories
    (find and friends take 1 for "unknown")."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._file_mode = stat.S_IFREG | ownership.file_mode
        self._dir_mode = stat.S_IFDIR | ownership.dir_mode

    def template(self) -> pyfuse3.EntryAttributes:
        """Attributes with all that is equal for every inode, to be filled in by `fill`."""
        attributes = pyfuse3.EntryAttributes()
        attributes.st_uid = self._ownership.uid
        attributes.st_gid = self._ownership.gid
        attributes.st_nlink = 1
        return attributes

    def fill(
        self, into: pyfuse3.EntryAttributes, ino: int, kind: int, size_bytes: int, mtime_ns: int
    ) -> None:
        """Everything that differs between inodes. Hot: once per directory entry."""
        into.st_ino = ino
        into.st_mode = self._dir_mode if kind == KIND_DIR else self._file_mode
        into.st_size = size_bytes
        into.st_blocks = (size_bytes + 511) >> 9
        into.st_atime_ns = into.st_mtime_ns = into.st_ctime_ns = mtime_ns

    def build(
        self, inode: Inode, attr_ttl_s: float, entry_ttl_s: float = 0.0
    ) -> pyfuse3.EntryAttributes:
        attributes = self.template()
        self.fill(attributes, inode.ino, inode.kind, inode.size_bytes, inode.mtime_ns)
        attributes.attr_timeout = kernel_timeout_s(attr_ttl_s)
        attributes.entry_timeout = kernel_timeout_s(entry_ttl_s)
        return attributes

    def negative(self, ttl_s: float) -> pyfuse3.EntryAttributes:
        """A reply that makes the kernel remember that a name doesn't exist (inode 0)."""
        attributes = pyfuse3.EntryAttributes()
        attributes.st_ino = 0
        attributes.entry_timeout = kernel_timeout_s(ttl_s)
        return attributes


def kernel_timeout_s(ttl_s: float) -> float:
    return _FOREVER_S if math.isinf(ttl_s) else ttl_s
