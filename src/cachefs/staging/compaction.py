"""Write the journal anew with the live state only, while the spool goes on."""

import os
from collections.abc import Mapping
from contextlib import suppress

import trio

from cachefs.format.paths import SpoolPaths
from cachefs.format.spool_frame import JournalHeader, encode_header
from cachefs.format.spool_record import Record
from cachefs.staging.disk import SpoolDisk
from cachefs.staging.journal import SpoolJournal
from cachefs.staging.staged_file import StagedFile

_CHUNK_BYTES = 1 << 18
"""How much is encoded in one step on the loop."""


class JournalCopy:
    """A new journal that is being written. `SpoolJournal` gives it every append.

    At first the records of an append are buffered if the file's state has been copied already;
    otherwise the change will be in the state. When everything is copied, the copy becomes direct:
    each append is written to both journals before it is acknowledged, so that either may be the
    one that the next daemon reads."""

    def __init__(
        self, journal: SpoolJournal, fd: int, header: JournalHeader, disk: SpoolDisk
    ) -> None:
        self._journal = journal
        self._disk = disk
        self._buffer = bytearray(encode_header(header))
        self._written_bytes = 0
        self.fd = fd
        self.pending: set[int] = set()
        """Numbers of files whose state is still to be copied."""
        self.is_direct = False

    @property
    def size_bytes(self) -> int:
        """The end of the last record."""
        return self._written_bytes + len(self._buffer)

    @property
    def buffered_bytes(self) -> int:
        """How much `flush` would write."""
        return len(self._buffer)

    def add(self, records: tuple[Record, ...]) -> None:
        """Buffer records."""
        self._buffer += self._journal.encode(records, self.size_bytes)

    def note(self, number: int, records: tuple[Record, ...]) -> None:
        """Receive the records of an append to the journal that has succeeded."""
        if number not in self.pending:
            self.add(records)

    def write(self, records: tuple[Record, ...]) -> None:
        """Write the records of an append, before the journal does. Raises `OSError`, and then the
        copy is as before."""
        data = self._journal.encode(records, self._written_bytes)
        try:
            self._disk.write(self.fd, data, self._written_bytes)
        except OSError:
            self._disk.truncate(self.fd, self._written_bytes)
            raise
        self._written_bytes += len(data)

    def take_back(self, size_bytes: int) -> None:
        """Remove what was written since the copy had `size_bytes`. Raises `OSError`."""
        self._written_bytes = size_bytes
        self._disk.truncate(self.fd, size_bytes)

    async def flush(self) -> None:
        """Write what is buffered, in a worker thread. Raises `OSError`."""
        data, self._buffer = self._buffer, bytearray()
        offset, self._written_bytes = self._written_bytes, self._written_bytes + len(data)
        with trio.CancelScope(shield=True):  # the data was taken out
            await trio.to_thread.run_sync(self._disk.write, self.fd, data, offset)

    def become_direct(self) -> None:
        """Write the small rest on the loop. From now on `write` gets every append."""
        self._disk.write(self.fd, self._buffer, self._written_bytes)
        self._written_bytes += len(self._buffer)
        self._buffer = bytearray()
        self.is_direct = True


async def compact(
    journal: SpoolJournal,
    paths: SpoolPaths,
    header: JournalHeader,
    files: Mapping[int, StagedFile],
    disk: SpoolDisk,
) -> None:
    """Replace the journal by one without dead records. Other tasks go on meanwhile; the loop
    encodes 256 KiB or one file at a time. Raises `OSError`, and then the journal is as before."""
    copy = JournalCopy(journal, await _create(paths, disk), header, disk)
    try:
        await _copy_states(copy, journal, files)
        copy.become_direct()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(_put_in_place, copy.fd, paths, disk)
    except OSError:
        if not _is_in_place(copy.fd, paths):
            _abandon(copy, journal, paths, disk)
            raise
    except BaseException:  # cancelled, before it was put in place
        _abandon(copy, journal, paths, disk)
        raise
    former = journal.replace(copy.fd, copy.size_bytes)
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(os.close, former)  # frees the file: not on the loop


async def _create(paths: SpoolPaths, disk: SpoolDisk) -> int:
    def create() -> int:
        disk.unlink(paths.new_journal)
        return disk.create(paths.new_journal)

    fd = -1
    with trio.CancelScope(shield=True):  # the descriptor must not be lost
        fd = await trio.to_thread.run_sync(create)
    return fd


async def _copy_states(
    copy: JournalCopy, journal: SpoolJournal, files: Mapping[int, StagedFile]
) -> None:
    """Copy the state of every file, and what is appended meanwhile."""
    copy.pending = set(files)
    journal.copy = copy
    for number in sorted(copy.pending):
        # No await between these steps: a change is either in the state or noted afterwards.
        file = files.get(number)
        copy.pending.discard(number)
        if file is not None:
            copy.add(tuple(file.records()))
        if copy.buffered_bytes > _CHUNK_BYTES:
            await copy.flush()
    await copy.flush()
    while copy.buffered_bytes > _CHUNK_BYTES:
        await copy.flush()


def _put_in_place(fd: int, paths: SpoolPaths, disk: SpoolDisk) -> None:
    disk.sync(fd)
    disk.rename(paths.new_journal, paths.journal)
    disk.sync_directory(paths.root)


def _abandon(copy: JournalCopy, journal: SpoolJournal, paths: SpoolPaths, disk: SpoolDisk) -> None:
    journal.copy = None
    os.close(copy.fd)
    with suppress(OSError):
        disk.unlink(paths.new_journal)


def _is_in_place(fd: int, paths: SpoolPaths) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), paths.journal.stat())
    except OSError:
        return False
