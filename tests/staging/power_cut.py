"""A disk whose changes since the last sync may be lost, each alone."""

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachefs.staging.disk import SpoolDisk

_PIECE_BYTES = 16
"""Pieces of a write that may be lost alone. Real ones are larger; so are real files."""


@dataclass
class _File:
    """What the disk has of a file for sure, and what was done to it since."""

    durable: bytes = b""
    durable_mtime_ns: int = 0
    changes: list[tuple[int, bytes | int]] = field(default_factory=list)
    """(offset, bytes), or (-1, new size)."""

    def content(self, kept: list[tuple[int, bytes | int]]) -> bytes:
        data = bytearray(self.durable)
        for offset, change in kept:
            if isinstance(change, int):
                data[:] = data[:change].ljust(change, b"\0")
            else:
                data[:] = data.ljust(offset, b"\0")
                data[offset : offset + len(change)] = change
        return bytes(data)


class PowerCutDisk(SpoolDisk):
    """Notes all changes. `cut` makes a directory of what a power cut leaves of them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[int, _File] = {}
        """By inode number."""
        self._names: dict[str, int] = {}
        """What names stand for."""
        self._durable_names: dict[str, int] = {}

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._root))

    def create(self, path: Path) -> int:
        fd = super().create(path)
        number = os.fstat(fd).st_ino
        # An inode number may come again once its file is gone for good.
        self._durable_names = {n: i for n, i in self._durable_names.items() if i != number}
        self._files[number] = _File()
        self._names[self._name(path)] = number
        return fd

    def write(self, fd: int, data: Any, offset: int) -> None:
        super().write(fd, data, offset)
        whole, file = bytes(data), self._files[os.fstat(fd).st_ino]
        for at in range(0, len(whole), _PIECE_BYTES):
            file.changes.append((offset + at, whole[at : at + _PIECE_BYTES]))

    def truncate(self, fd: int, size_bytes: int) -> None:
        super().truncate(fd, size_bytes)
        self._files[os.fstat(fd).st_ino].changes.append((-1, size_bytes))

    def sync(self, fd: int) -> None:
        self.sync_data(fd)

    def sync_data(self, fd: int) -> None:
        status = os.fstat(fd)
        file = self._files[status.st_ino]
        count = len(file.changes)
        file.durable = file.content(file.changes[:count])
        del file.changes[:count]
        file.durable_mtime_ns = status.st_mtime_ns

    def sync_directory(self, path: Path) -> None:
        parent = self._name(path)
        for names in (self._durable_names, self._names):
            for name in list(names):
                if str(Path(name).parent) == parent:
                    if name in self._names:
                        self._durable_names[name] = self._names[name]
                    else:
                        self._durable_names.pop(name, None)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self._names[self._name(new)] = self._names.pop(self._name(old))

    def unlink(self, path: Path) -> None:
        self._names.pop(self._name(path), None)
        super().unlink(path)

    def cut(self, place: Path, chance: random.Random) -> None:
        """Make the directory `place` of what is left. Of each file the disk has some of the
        changes since its last sync; the journal ends at the first change that it does not have, or
        goes on behind it."""
        share = chance.choice((0.0, 0.5, 0.9, 1.0))
        names = dict(self._durable_names)
        names |= {name: at for name, at in self._names.items() if chance.random() < share}
        for name in self._durable_names:
            if name not in self._names and chance.random() < share:
                del names[name]
        for name, number in names.items():
            file = self._files[number]
            kept = [change for change in file.changes if chance.random() < share]
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content(kept))
            if not kept:
                os.utime(path, ns=(0, file.durable_mtime_ns))
