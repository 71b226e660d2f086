"""The spool: all staged files of one writable mount."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import trio

from cachefs.errors import SpoolError
from cachefs.format.spool_frame import HEADER_BYTES, JournalHeader, encode_header, seed_of
from cachefs.format.spool_record import Answered, Begin, Record
from cachefs.staging.content import SpoolParts, StagedContent, spool_errors
from cachefs.staging.directory import SpoolDirectory
from cachefs.staging.disk import SpoolDisk
from cachefs.staging.journal import SpoolJournal
from cachefs.staging.space import SpoolSpace
from cachefs.staging.spool_files import SpoolFiles
from cachefs.staging.staged_file import StagedFile
from cachefs.types import ObjectMeta


class Spool:
    """The staged files of one writable mount. `Spool.open` makes it. Loop thread only.

    `run` must run while the spool is used: it removes the bytes of files that have ended. Methods
    that are not coroutines are bounded like those of `StagedFile`."""

    def __init__(
        self, directory: SpoolDirectory, journal: SpoolJournal, disk: SpoolDisk, limit_bytes: int
    ) -> None:
        self._directory = directory
        self._journal = journal
        self.space = SpoolSpace(directory.paths.root, limit_bytes, disk)
        self._spool_files = SpoolFiles(directory.paths, disk)
        self._parts = SpoolParts(self._spool_files, journal, self.space, self._on_end)
        self._files: dict[int, StagedFile] = {}
        self._of_ino: dict[int, StagedFile] = {}
        self._next_number = 1
        self._ended: list[int] = []
        """Numbers of files whose bytes are to be removed."""
        self._work = trio.lowlevel.ParkingLot()

    @classmethod
    async def open(
        cls,
        root: str | Path,
        source: str,
        limit_bytes: int,
        connection: bytes = bytes(16),
        disk: SpoolDisk | None = None,
    ) -> "Spool":
        """Open or create the spool of one source (`Origin.identity`), in worker threads.

        `connection` are 16 bytes that are the same as long as the kernel keeps the mount: answers
        to requests of another connection are forgotten. Raises `SpoolError`."""
        disk = disk or SpoolDisk()
        directory = await trio.to_thread.run_sync(SpoolDirectory.open, Path(root), source, disk)
        header = JournalHeader(directory.identity.uuid, bytes(16), connection)
        fd = disk.create(directory.paths.journal)
        disk.write(fd, encode_header(header), 0)
        journal = SpoolJournal(
            directory.paths.journal, fd, seed_of(header.uuid), HEADER_BYTES, disk
        )
        return cls(directory, journal, disk, limit_bytes)

    @property
    def files(self) -> Mapping[int, StagedFile]:
        """Every staged file by its number, also those that wait for a user."""
        return MappingProxyType(self._files)

    def file_of(self, ino: int) -> StagedFile | None:
        """Return the staged file that is the content of an inode now; None for a clean inode."""
        file = self._of_ino.get(ino)
        return file if file is not None and file.is_attached else None

    def begin(
        self, ino: int, path: str, base: ObjectMeta | None, answering: int | None = None
    ) -> StagedFile:
        """Begin to stage the content of an inode that is clean, or new.

        `base` is the version that a change of part of a file is based on; None for a new file, and
        for one that is replaced as a whole. Raises `SpoolFullError` or `SpoolError`."""
        if self.file_of(ino) is not None:
            raise SpoolError(f"{path}: inode {ino} is staged already")
        number = self._next_number
        self._next_number += 1
        size_bytes = 0 if base is None else base.size_bytes
        tracks = int(base is not None)
        record = Begin(number, ino, 1, size_bytes, size_bytes, tracks, path, base)
        answer: tuple[Record, ...] = () if answering is None else (Answered(answering, 0),)
        with spool_errors(path):
            self._spool_files.create(number)
            try:
                self._journal.append(number, record, *answer)
            except OSError:
                self._remove_later(number)
                raise
        file = StagedFile(self._parts, number, ino, path, base)
        self._files[number] = self._of_ino[ino] = file
        return file

    # -- space -------------------------------------------------------------------------------------

    def has_room(self, more_bytes: int) -> bool:
        """Whether `more_bytes` can be written at once, before the caller's next await."""
        return self.space.has_room(more_bytes)

    async def reserve(self, more_bytes: int, timeout_s: float) -> None:
        """Wait until `more_bytes` can be written; the caller must write before its next await.
        Raises `SpoolFullError` after `timeout_s`."""
        await self.space.reserve(more_bytes, timeout_s)

    # -- answers -----------------------------------------------------------------------------------

    def note_answer(self, unique: int, errno: int) -> None:
        """Record the answer to a request that is not idempotent, before it is sent. Raises
        `SpoolError`. Where a change has a parameter `answering`, use that: it is one write."""
        with spool_errors("the journal"):
            self._journal.append(0, Answered(unique, errno))

    def answer_to(self, unique: int) -> int | None:
        """Return the errno of the answer that an earlier daemon gave to a request that the kernel
        sends again; None if the request must be handled."""
        return self._journal.answers.get(unique)

    # -- life --------------------------------------------------------------------------------------

    async def run(self, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Remove the bytes of ended files, until cancelled."""
        task_status.started()
        while True:
            if not self._ended:
                await self._work.park()
            await self._remove_ended()

    async def close(self) -> None:
        """Sync the journal, close all files and unlock the directory. The staged files stay."""
        with trio.CancelScope(shield=True):
            await self._remove_ended()
            try:
                with spool_errors("the journal"):
                    await self._journal.sync()
            finally:
                self._spool_files.close_all()
                self._journal.close()
                self._directory.close()

    async def _remove_ended(self) -> None:
        while self._ended:
            number = self._ended[-1]
            await trio.to_thread.run_sync(self._spool_files.remove_slowly, number)
            self._ended.remove(number)

    def _on_end(self, file: StagedContent) -> None:
        del self._files[file.number]
        if self._of_ino.get(file.ino) is file:
            del self._of_ino[file.ino]
        self._remove_later(file.number)

    def _remove_later(self, number: int) -> None:
        self._spool_files.close(number)
        self._ended.append(number)
        self._work.unpark_all()
