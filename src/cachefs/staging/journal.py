"""The spool's journal: one file to which each change is appended before it is acknowledged.

An append is one write(2) without a sync, so the record survives the end of this process. It
survives a power cut only after `StagedFile.sync`. Bytes: docs/formats/spool.md.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import trio

from cachefs.format.spool_frame import encode_record
from cachefs.format.spool_record import Record
from cachefs.staging.disk import SpoolDisk

_DEAD_BYTES = 8 << 20


def compact_above(live_bytes: int) -> int:
    """Return the size above which a journal that had `live_bytes` of live records is written
    anew: at most half of it, and 8 MiB, are dead records."""
    return 2 * live_bytes + _DEAD_BYTES


class Copy(Protocol):
    """The new journal while the present one is written anew (`compaction.JournalCopy`)."""

    fd: int
    is_direct: bool

    @property
    def size_bytes(self) -> int:
        """See `JournalCopy`."""
        ...

    def note(self, number: int, records: tuple[Record, ...]) -> None:
        """See `JournalCopy`."""
        ...

    def write(self, records: tuple[Record, ...]) -> None:
        """See `JournalCopy`."""
        ...

    def take_back(self, size_bytes: int) -> None:
        """See `JournalCopy`."""
        ...


class SpoolJournal:
    """The open journal of a spool. Loop thread only. An append takes tens of microseconds; the
    kernel makes the writer wait if too many dirty pages wait for the disk."""

    def __init__(
        self, path: Path, fd: int, seed: int, size_bytes: int, disk: SpoolDisk | None = None
    ) -> None:
        self.path = path
        self.fd = fd
        self.seed = seed
        self.size_bytes = size_bytes
        """The end of the last record."""
        self.copy: Copy | None = None
        self.compact_above_bytes = compact_above(size_bytes)
        """Above this size `on_large` is called after each append."""
        self.on_large: Callable[[], None] = lambda: None
        self._disk = disk or SpoolDisk()
        self._is_broken = False
        self._replacements = 0

    def append(self, number: int, *records: Record) -> None:
        """Append the records of one change to the file `number` (0: of none) with one write.

        Raises `OSError`, and then the journal has none of them."""
        if self._is_broken:
            self._repair()
        data = self.encode(records, self.size_bytes)
        copy = self.copy
        copy_bytes = 0 if copy is None else copy.size_bytes
        if copy is not None and copy.is_direct:
            copy.write(records)
        try:
            self._disk.write(self.fd, data, self.size_bytes)
        except OSError:
            self._remove_the_incomplete(copy, copy_bytes)
            raise
        self.size_bytes += len(data)
        if copy is not None and not copy.is_direct:
            copy.note(number, records)
        if self.size_bytes > self.compact_above_bytes:
            self.on_large()

    def encode(self, records: tuple[Record, ...], offset: int) -> bytearray:
        """Return the bytes of records that will stand at `offset` of a journal of this spool."""
        data = bytearray()
        for record in records:
            data += encode_record(record, self.seed, offset + len(data))
        return data

    def replace(self, fd: int, size_bytes: int) -> int:
        """Go on with another file under the same path. Returns the former descriptor."""
        former, self.fd, self.size_bytes = self.fd, fd, size_bytes
        self.compact_above_bytes = compact_above(size_bytes)
        self.copy = None
        self._replacements += 1
        return former

    async def sync(self) -> None:
        """Make what was appended before the call durable, in a worker thread. Raises `OSError`."""
        while True:
            replacements = self._replacements
            fds = [os.dup(self.fd)]
            if self.copy is not None and self.copy.is_direct:
                fds.append(os.dup(self.copy.fd))
            with trio.CancelScope(shield=True):  # the thread closes the descriptors
                await trio.to_thread.run_sync(self._sync_and_close, fds)
            if replacements == self._replacements:
                return

    def _sync_and_close(self, fds: list[int]) -> None:
        try:
            for fd in fds:
                self._disk.sync_data(fd)
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            os.close(self.fd)

    def _remove_the_incomplete(self, copy: Copy | None, copy_bytes: int) -> None:
        """Remove what a failed append has written. If that fails too, the next append tries it
        again before it writes."""
        try:
            if copy is not None and copy.is_direct:
                copy.take_back(copy_bytes)
            self._repair()
        except OSError:
            self._is_broken = True

    def _repair(self) -> None:
        self._disk.truncate(self.fd, self.size_bytes)
        self._is_broken = False
