"""The files of the demo: those of this Python installation, and two large ones."""

import hashlib
import os
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SKIPPED = {"__pycache__", "site-packages", "dist-packages"}
"""Directories below the roots that are left out: compiled files, and packages that are roots
themselves or belong to another Python."""
_SMALL_BYTES = 1 << 20
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file and its key in the bucket."""

    key: str
    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Dataset:
    """All files of the demo. `small` are the non-empty ones of up to 1 MiB."""

    files: list[SourceFile]

    @property
    def bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def small(self) -> list[SourceFile]:
        return [file for file in self.files if 0 < file.size_bytes <= _SMALL_BYTES]


def collect(large_files: list[Path]) -> Dataset:
    """Return the standard library, the site-packages of this environment, and `large_files`."""
    paths = sysconfig.get_paths()
    roots = {"stdlib": paths["stdlib"], "site-packages": paths["purelib"]}
    files = [file for name, root in roots.items() for file in _walk(name, Path(root))]
    files += [SourceFile(f"large/{path.name}", path, path.stat().st_size) for path in large_files]
    return Dataset(files)


def make_large_files(directory: Path, count: int, size_bytes: int) -> list[Path]:
    """Write `count` files of random bytes and return their paths. The bytes are the same in every
    run, and no two blocks of a file are equal."""
    directory.mkdir()
    noise = random.Random(0).randbytes(_PIECE_BYTES)
    found = []
    for number in range(count):
        path = directory / f"checkpoint-{number}.bin"
        with path.open("wb") as file:
            for piece in range(size_bytes // _PIECE_BYTES):
                turn = (number * 7919 + piece * 104_729 + 1) % _PIECE_BYTES
                file.write(noise[turn:] + noise[:turn])
        found.append(path)
    return found


def sha256_of(path: Path) -> bytes:
    """Return the SHA-256 digest of the content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _walk(name: str, root: Path) -> Iterator[SourceFile]:
    for directory, names, files in os.walk(root):
        names[:] = [entry for entry in names if entry not in _SKIPPED]
        for entry in files:
            path = Path(directory, entry)
            if path.is_file():
                yield SourceFile(f"{name}/{path.relative_to(root)}", path, path.stat().st_size)
