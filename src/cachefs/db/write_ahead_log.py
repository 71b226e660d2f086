"""The write-ahead log: changes that must survive this process although they are not committed yet.

A mount may outlive its daemon (the relay path). The kernel then still caches the answers of the
last second before the daemon was killed, and the next daemon must give the same answers. So changes
are appended to a file before the kernel receives an answer that depends on them. Nothing is synced:
written data survives the process. It may not survive a power cut, but that ends the mount, too.

Changes are numbered, and each commit stores the number of the last change in it. There are two
files, so that one can be emptied while the other grows. Both belong to one database: its `identity`
is the seed of every checksum.

File format: docs/formats/namespace.md.
"""

import errno
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

log = logging.getLogger(__name__)

BATCH = Struct("<QIIQ")
"""Number of the first change, count of changes, their size in bytes, and the xxh3_64 of these bytes
(the seed is the database's identity)."""
CHANGE = Struct("<BHI")
"""Table, length of the key, length of the value or `DELETED`. Key and value follow."""
DELETED = 0xFFFFFFFF

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
_WRITE_BYTES = 1 << 20
_MOST_BYTES = 256 << 20
"""A file that is larger gets no more changes. It only becomes so large if commits keep failing."""

_POSITION = Struct("<QQ")


class LoggedChange(NamedTuple):
    """One change to the table with this number. A `value` of None deletes the row."""

    table: int
    key: bytes
    value: bytes | None


class LogPosition(NamedTuple):
    """Which database a write-ahead log belongs to, and how much of the log is committed there. The
    database has it in one of its rows."""

    identity: int
    """A random number that identifies the database; 0 in a database without the row."""
    number: int
    """The number of the last committed change."""

    def pack(self) -> bytes:
        return _POSITION.pack(*self)

    @classmethod
    def unpack(cls, row: bytes | None) -> "LogPosition":
        if row is None or len(row) != _POSITION.size:
            return cls(0, 0)
        return cls(*_POSITION.unpack(row))


def log_paths(stem: Path) -> list[Path]:
    """Return the paths of the log's two files: `stem` with the endings `.0` and `.1`."""
    return [stem.with_name(f"{stem.name}.{number}") for number in range(2)]


class WriteAheadLog:
    """The write-ahead log of one database, which owns it. It is used on the loop thread only.

    A write takes a few microseconds. On a tmpfs it always does; on a disk the kernel may make the
    writer wait when too many dirty pages are pending.
    """

    def __init__(
        self, stem: Path, position: LogPosition, changes: Iterable[LoggedChange] = ()
    ) -> None:
        """Begin a new log with `changes`, which are not committed yet.

        The new files replace the old ones atomically, as these may be the only place where
        `changes` are stored. Numbers continue after `position.number`. Raises `OSError`; if it does
        before the rename, the old files are unchanged."""
        self._identity = position.identity
        self._paths = log_paths(stem)
        new = stem.with_name(stem.name + ".new")
        self._fds = [os.open(new, _FLAGS, 0o600)]
        self._last_numbers = [0, 0]
        """The number of the last change in each file; 0 for an empty file."""
        self._sizes = [0, 0]
        self._current = 0
        self._number = position.number
        self._buffer = bytearray()
        self._count = 0
        self._is_broken = False
        self._gap_number = 0
        """The number that was left out of the log when a write failed: changes from there on are
        only in memory. 0 again once a commit with this number or a later one has succeeded."""
        try:
            for change in changes:
                self.note(*change)
            self.write_ahead()
            if not self.is_whole:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            new.rename(self._paths[0])
            self._fds.append(os.open(self._paths[1], _FLAGS, 0o600))
        except OSError:
            os.close(self._fds[0])
            new.unlink(missing_ok=True)
            raise

    @property
    def is_whole(self) -> bool:
        """Whether all changes before the last `write_ahead` survive the end of this process."""
        return self._gap_number == 0

    def note(self, table: int, key: bytes, value: bytes | None) -> None:
        """Buffer one change until `write_ahead` writes it; None deletes the row."""
        if self._is_broken:
            return
        self._buffer += CHANGE.pack(table, len(key), DELETED if value is None else len(value))
        self._buffer += key
        if value is not None:
            self._buffer += value
        self._count += 1
        if len(self._buffer) > _WRITE_BYTES:
            self.write_ahead()

    def write_ahead(self) -> None:
        """Write the buffered changes, so that they survive the end of this process. A failure is
        logged, and `is_whole` is False then."""
        if not self._count:
            return
        buffer, count = self._buffer, self._count
        self._buffer, self._count = bytearray(), 0
        checksum = xxh3_64_intdigest(buffer, self._identity)
        head = BATCH.pack(self._number + 1, count, len(buffer), checksum)
        current = self._current
        try:
            if self._sizes[current] > _MOST_BYTES:
                raise OSError("nothing could be committed for too long")
            written = os.writev(self._fds[current], (head, buffer))
            if written != len(head) + len(buffer):
                os.ftruncate(self._fds[current], self._sizes[current])
                raise OSError("no space left")
        except OSError as error:
            log.warning(
                "can't write %s: %s; if the daemon dies now, files that were found last are stale",
                self._paths[current],
                error,
            )
            self._break()
            return
        self._number += count
        self._last_numbers[current] = self._number
        self._sizes[current] += written

    def _break(self) -> None:
        """Stop noting changes until the next commit. One number is left out, so that a reader of
        the log detects that changes are missing."""
        self._is_broken = True
        self._number += 1
        self._gap_number = self._number

    def begin_commit(self) -> int:
        """Call this just before all pending changes are committed. Return the number to store in
        the same commit."""
        self.write_ahead()
        self._is_broken = False
        if not self._sizes[1 - self._current]:
            self._current = 1 - self._current
        return self._number

    def end_commit(self, number: int) -> None:
        """Call this when the commit with this number has succeeded. Empties the files whose
        changes are all committed."""
        if number >= self._gap_number:
            self._gap_number = 0
        for index, fd in enumerate(self._fds):
            if self._sizes[index] and self._last_numbers[index] <= number:
                os.ftruncate(fd, 0)
                self._sizes[index] = 0

    def close(self, is_committed: bool) -> None:
        """Close the files, and delete them if all their changes are committed."""
        for path, fd in zip(self._paths, self._fds, strict=True):
            os.close(fd)
            if is_committed:
                path.unlink(missing_ok=True)


def read_write_ahead_log(stem: Path, position: LogPosition) -> list[LoggedChange]:
    """Return the changes that an earlier process left after `position`, in order.

    Stops at the first damaged batch of a file and at the first missing number. Raises `OSError`.
    """
    batches: list[tuple[int, list[LoggedChange]]] = []
    for path in log_paths(stem):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        batches += _batches(data, position.identity)
    changes: list[LoggedChange] = []
    number = position.number
    for first, batch in sorted(batches):
        if first > number + 1:
            break
        changes += batch[number + 1 - first :]
        number = max(number, first + len(batch) - 1)
    return changes


def _batches(data: bytes, identity: int) -> Iterator[tuple[int, list[LoggedChange]]]:
    position = 0
    while position + BATCH.size <= len(data):
        first, count, size_bytes, checksum = BATCH.unpack_from(data, position)
        position += BATCH.size
        payload = data[position : position + size_bytes]
        if len(payload) != size_bytes or xxh3_64_intdigest(payload, identity) != checksum:
            return
        position += size_bytes
        changes = list(_changes(payload))
        if len(changes) != count:
            return
        yield first, changes


def _changes(payload: bytes) -> Iterator[LoggedChange]:
    position = 0
    while position < len(payload):
        table, key_bytes, value_bytes = CHANGE.unpack_from(payload, position)
        position += CHANGE.size
        key = payload[position : position + key_bytes]
        position += key_bytes
        if value_bytes == DELETED:
            yield LoggedChange(table, key, None)
            continue
        yield LoggedChange(table, key, payload[position : position + value_bytes])
        position += value_bytes
