"""Disks for tests: one that fails, dawdles or hangs, and one whose unsynced writes can be lost.

Give one to `CacheDirectory.open(..., disk=...)`.
"""

import errno
import os
import pickle
import random
import shutil
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import xxhash

from cachefs.cache_dir.disk import Disk

Kind = Literal["read", "write", "create", "open", "sync", "unlink"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""What may block, and is called from worker threads."""


class _Fault:
    """What befalls the operations of one kind."""

    def __init__(self) -> None:
        self.error = 0
        self.probability = 1.0
        self.delay_s = 0.0
        self.released = threading.Event()
        self.released.set()


class FaultyDisk(Disk):
    """Faults can be switched at any time from any thread, and add up: an operation first hangs,
    then takes longer, then fails. A write that fails has written a part. Leaving the `with` block
    heals the disk, so that no thread hangs for ever.
    """

    def __init__(self, seed: int = 0) -> None:
        self.calls: Counter[str] = Counter()
        """How often each kind of operation was called, `read_nowait` included."""
        self.failures: Counter[str] = Counter()
        """How many of them failed by order."""
        self.hanging = 0
        """How many hang just now."""
        self.cold = False
        """`read_nowait` finds nothing in memory (EAGAIN)."""
        self.free_bytes: int | None = None
        """What `free_and_total_bytes` is to say; None for the truth."""
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._faults: dict[str, _Fault] = {kind: _Fault() for kind in KINDS}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()

    # -- orders: without kinds they hold for all -----------------------------------------------

    def fail(self, error: int, *kinds: Kind, probability: float = 1.0) -> None:
        """Raise this errno, each time or with some probability."""
        for kind in kinds or KINDS:
            self._faults[kind].error = error
            self._faults[kind].probability = probability

    def delay(self, delay_s: float, *kinds: Kind) -> None:
        """Take that much longer, asleep in the thread."""
        for kind in kinds or KINDS:
            self._faults[kind].delay_s = delay_s

    def hang(self, *kinds: Kind) -> None:
        """Don't come back before `heal`."""
        for kind in kinds or KINDS:
            self._faults[kind].released.clear()

    def heal(self, *kinds: Kind) -> None:
        """Take back all orders, and let what hangs go on, as if nothing had been."""
        for kind in kinds or KINDS:
            released = self._faults[kind].released
            self._faults[kind] = _Fault()
            released.set()
        if not kinds:
            self.cold = False
            self.free_bytes = None

    def _suffer(self, kind: Kind) -> OSError | None:
        """The error to raise, if any."""
        with self._lock:
            fault = self._faults[kind]
            self.calls[kind] += 1
            hangs = not fault.released.is_set()
            self.hanging += hangs
        if hangs:
            fault.released.wait()
            with self._lock:
                self.hanging -= 1
                fault = self._faults[kind]
        if fault.delay_s:
            time.sleep(fault.delay_s)
        with self._lock:
            if not fault.error or self._random.random() >= fault.probability:
                return None
            self.failures[kind] += 1
        return OSError(fault.error, os.strerror(fault.error))

    def _face(self, kind: Kind) -> None:
        error = self._suffer(kind)
        if error is not None:
            raise error

    # -- operations ----------------------------------------------------------------------------

    def read_nowait(self, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        self.calls["read_nowait"] += 1
        if self.cold:
            raise BlockingIOError(errno.EAGAIN, "nothing in memory, by order of the test")
        return os.preadv(fd, buffers, offset, flags)

    def open(self, path: Path) -> int:
        self._face("open")
        return super().open(path)

    def create(self, path: Path, size_bytes: int) -> int:
        self._face("create")
        return super().create(path, size_bytes)

    def read(self, fd: int, length: int, offset: int) -> bytes:
        self._face("read")
        return super().read(fd, length, offset)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        error = self._suffer("write")
        if error is not None:
            with self._lock:
                part = self._random.randrange(len(data) or 1)
            super().write(fd, data[:part], offset)
            raise error
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._face("sync")
        super().sync(fd)

    def unlink(self, path: Path) -> None:
        self._face("unlink")
        super().unlink(path)

    def free_and_total_bytes(self, path: Path) -> tuple[int, int]:
        free, total = super().free_and_total_bytes(path)
        return (free if self.free_bytes is None else self.free_bytes), total


# -- the power cut ------------------------------------------------------------------------------

_FRAME = struct.Struct("<IQ")
"""Length and xxh3_64 of the pickled record that follows."""


class Record(NamedTuple):
    """One change, written to the undo file before it is made (`create` and `sync`: after)."""

    kind: Literal["write", "create", "unlink", "sync"]
    path: str
    offset: int = 0
    size_bytes: int = 0
    """Of the file, before a write."""
    old: bytes = b""
    """What a write is going to replace."""
    grave: str = ""
    """Where an unlinked file is kept."""


class UndoDisk(Disk):
    """Notes how to undo each change, for `undo` to play a power cut after a SIGKILL.

    Writes are made and noted in pieces (ends aligned to `piece_bytes`), each of which may be lost
    alone. An undo file may be gone on with after a SIGKILL. It should lie on tmpfs, and grows with
    every byte that is written. Unlinked files are kept beside it.
    """

    def __init__(self, undo_file: Path, piece_bytes: int = 64 << 10) -> None:
        self._piece_bytes = piece_bytes
        self._graves = _graves_of(undo_file)
        self._graves.mkdir(exist_ok=True)
        self._lock = threading.Lock()
        """Held over noting and changing, so that the order of both is the same."""
        self._path_of: dict[int, str] = {}
        """By descriptor, of files that have not been unlinked. (Closing isn't seen; the number
        comes back with the next `open`.)"""
        self._undo_fd = os.open(undo_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        whole = sum(_FRAME.size + length for length, _ in _frames(undo_file.read_bytes()))
        os.ftruncate(self._undo_fd, whole)
        os.lseek(self._undo_fd, whole, os.SEEK_SET)

    def close(self) -> None:
        os.close(self._undo_fd)

    def _note(self, *fields: Any) -> None:
        payload = pickle.dumps(tuple(Record(*fields)))
        frame = memoryview(_FRAME.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload)
        while frame:
            frame = frame[os.write(self._undo_fd, frame) :]

    def open(self, path: Path) -> int:
        with self._lock:
            fd = super().open(path)
            self._path_of[fd] = str(path)
            return fd

    def create(self, path: Path, size_bytes: int) -> int:
        with self._lock:
            fd = super().create(path, size_bytes)
            self._path_of[fd] = str(path)
            self._note("create", str(path))
            return fd

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        rest = memoryview(data)
        with self._lock:
            while rest:
                piece = rest[: self._piece_bytes - offset % self._piece_bytes]
                if fd in self._path_of:
                    old = os.pread(fd, len(piece), offset)
                    size_bytes = os.fstat(fd).st_size
                    self._note("write", self._path_of[fd], offset, size_bytes, old)
                super().write(fd, piece, offset)
                offset += len(piece)
                rest = rest[len(piece) :]

    def sync(self, fd: int) -> None:
        with self._lock:
            super().sync(fd)
            if fd in self._path_of:
                self._note("sync", self._path_of[fd])

    def unlink(self, path: Path) -> None:
        with self._lock:
            if path.exists():
                grave = self._graves / f"{os.lseek(self._undo_fd, 0, os.SEEK_CUR)}"
                grave.unlink(missing_ok=True)
                _link_or_copy(path, grave)
                self._note("unlink", str(path), 0, 0, b"", str(grave))
            super().unlink(path)
            self._path_of = {fd: of for fd, of in self._path_of.items() if of != str(path)}


def read_undo_file(undo_file: Path) -> list[Record]:
    """Oldest first; a torn last one is left out."""
    return [Record(*pickle.loads(payload)) for _, payload in _frames(undo_file.read_bytes())]


def undo(
    undo_file: Path,
    keep: Callable[[int], bool],
    vanish: Callable[[int], bool] = lambda _: True,
) -> int:
    """Revert the noted changes that `keep(index)` denies, newest first; returns how many.

    To be called when the process that made them is dead. What was synced is kept unasked. A
    reverted creation leaves no file, or an empty one if `vanish(index)` denies it. At the end the
    undo file and the unlinked files are removed.
    """
    if not undo_file.exists():
        return 0
    reverted = 0
    other_file: set[str] = set()
    """Paths at which there now is another file, or none: older records mean one that is gone."""
    synced: set[str] = set()
    for index, record in reversed(list(enumerate(read_undo_file(undo_file)))):
        path = record.path
        if record.kind == "unlink":
            if _same_file(path, record.grave):
                continue  # killed before it was made
            synced.discard(path)
            if keep(index) or Path(path).exists():
                other_file.add(path)
            else:
                other_file.discard(path)
                _link_or_copy(Path(record.grave), Path(path))
                reverted += 1
        elif path in other_file:
            if record.kind == "create":
                other_file.remove(path)
        elif record.kind == "sync":
            synced.add(path)
        elif path in synced:
            if record.kind == "create":
                synced.remove(path)
        elif not keep(index):
            _revert(record, vanish(index))
            reverted += 1
    undo_file.unlink()
    shutil.rmtree(_graves_of(undo_file))
    return reverted


def _revert(record: Record, vanish: bool) -> None:
    path = Path(record.path)
    if not path.exists():
        return
    if record.kind == "create":
        if vanish:
            path.unlink()
        else:
            os.truncate(path, 0)
        return
    with path.open("r+b") as file:
        file.seek(record.offset)
        file.write(record.old)
        file.truncate(record.size_bytes)


def _frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, position)
        payload = data[position + _FRAME.size : position + _FRAME.size + length]
        if len(payload) < length or xxhash.xxh3_64_intdigest(payload) != checksum:
            return
        yield length, payload
        position += _FRAME.size + length


def _graves_of(undo_file: Path) -> Path:
    return undo_file.with_name(undo_file.name + ".unlinked")


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _same_file(path: str, grave: str) -> bool:
    return os.path.exists(path) and os.path.samefile(path, grave)
