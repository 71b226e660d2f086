"""The spool's journal: one file to which each change is appended before it is acknowledged.

An append is one write(2) without a sync, so the record survives the end of this process. It
survives a power cut only after `StagedFile.sync`. Bytes: docs/formats/spool.md.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import trio

from cachefs.format.spool_frame import encode_record
from cachefs.format.spool_record import Answered, Record
from cachefs.staging.answers import Answers
from cachefs.staging.disk import SpoolDisk


class Copy(Protocol):
    """The new journal while the present one is written anew (`compaction.py`)."""

    def note(self, number: int, records: tuple[Record, ...]) -> None:
        """Receive the records of an append, before they are written. Raises `OSError`."""
        ...

    def fds(self) -> list[int]:
        """Return the descriptors of files that already get each append."""
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
        self.answers = Answers()
        """The answers that the journal has."""
        self._disk = disk or SpoolDisk()
        self._is_broken = False
        self._replacements = 0

    def append(self, number: int, *records: Record) -> None:
        """Append the records of one change to the file `number` (0: of none) with one write.

        Raises `OSError`, and then the journal has none of them."""
        data = self.encode(records, self.size_bytes)
        if self._is_broken:
            raise OSError(errno.EIO, "an incomplete record could not be removed", str(self.path))
        try:
            if self.copy is not None:
                self.copy.note(number, records)
            self._disk.write(self.fd, data, self.size_bytes)
        except OSError:
            self._remove_the_incomplete()
            raise
        self.size_bytes += len(data)
        for record in records:
            if type(record) is Answered:
                self.answers.note(*record)

    def encode(self, records: tuple[Record, ...], offset: int) -> bytes:
        """Return the bytes of records that will stand at `offset` of a journal of this spool."""
        data = b""
        for record in records:
            data += encode_record(record, self.seed, offset + len(data))
        return data

    def replace(self, fd: int, size_bytes: int) -> int:
        """Go on with another file under the same path. Returns the former descriptor."""
        former, self.fd, self.size_bytes = self.fd, fd, size_bytes
        self.copy = None
        self._replacements += 1
        return former

    async def sync(self) -> None:
        """Make what was appended before the call durable, in a worker thread. Raises `OSError`."""
        while True:
            replacements = self._replacements
            fds = [self.fd] if self.copy is None else [self.fd, *self.copy.fds()]
            copies = [os.dup(fd) for fd in fds]
            with trio.CancelScope(shield=True):  # the thread closes the descriptors
                await trio.to_thread.run_sync(self._sync_and_close, copies)
            if replacements == self._replacements:
                return

    def _sync_and_close(self, fds: list[int]) -> None:
        try:
            for fd in fds:
                self._disk.sync(fd)
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            os.close(self.fd)

    def _remove_the_incomplete(self) -> None:
        try:
            self._disk.truncate(self.fd, self.size_bytes)
        except OSError:
            self._is_broken = True
