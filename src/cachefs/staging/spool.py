"""The spool: all staged files of one writable mount."""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import trio

from cachefs.errors import SpoolError
from cachefs.format.spool_frame import JournalHeader, seed_of
from cachefs.format.spool_record import Begin, Exclusive, Expected, Record
from cachefs.staging.compaction import compact
from cachefs.staging.content import SpoolParts, StagedContent, spool_errors
from cachefs.staging.directory import SpoolDirectory
from cachefs.staging.disk import SpoolDisk
from cachefs.staging.journal import SpoolJournal, compact_above
from cachefs.staging.recovery import FoundFile, RecoveryReport, begin_journal, boot_id, recover
from cachefs.staging.space import SpoolSpace
from cachefs.staging.spool_files import SpoolFiles
from cachefs.staging.staged_file import StagedFile
from cachefs.types import ObjectMeta

log = logging.getLogger(__name__)

_GATHER_S = 0.05
"""How long ended files wait for others, because each removal by a thread costs two wake-ups."""
_SYNCED_TOGETHER = 64
"""How many files one call of a worker thread syncs at the end."""


class Spool:
    """The staged files of one writable mount. `Spool.open` makes it. Loop thread only.

    `run` must run while the spool is used. Methods
    that are not coroutines are bounded like those of `StagedFile`."""

    def __init__(
        self,
        directory: SpoolDirectory,
        header: JournalHeader,
        journal: SpoolJournal,
        disk: SpoolDisk,
        limit_bytes: int,
    ) -> None:
        self._directory = directory
        self._header = header
        self._journal = journal
        self._disk = disk
        self.space = SpoolSpace(directory.paths.root, limit_bytes, disk)
        self.report = RecoveryReport()
        """What the start found."""
        self._spool_files = SpoolFiles(directory.paths, disk)
        self._parts = SpoolParts(
            self._spool_files, journal, self.space, self._on_end, self._on_discard
        )
        self._files: dict[int, StagedFile] = {}
        self._of_ino: dict[int, StagedFile] = {}
        self._next_number = 1
        self._ended: list[int] = []
        """Numbers of files whose bytes are to be removed."""
        self._journal_is_large = False
        self._work = trio.lowlevel.ParkingLot()
        journal.on_large = self._on_large_journal

    @classmethod
    async def open(
        cls,
        root: str | Path,
        source: str,
        limit_bytes: int,
        disk: SpoolDisk | None = None,
    ) -> "Spool":
        """Open or create the spool of one source (`Origin.identity`), and restore what an earlier
        daemon left there. All of it runs in a worker thread. Raises `SpoolError`."""
        open_now = partial(cls._open, Path(root), source, limit_bytes, disk)
        spools: list[Spool] = []
        with trio.CancelScope(shield=True):  # the locks must not be lost
            spools.append(await trio.to_thread.run_sync(open_now))
        return spools[0]

    @classmethod
    def _open(cls, root: Path, source: str, limit_bytes: int, disk: SpoolDisk | None) -> "Spool":
        disk = disk or SpoolDisk()
        directory = SpoolDirectory.open(root, source, disk)
        try:
            with spool_errors(str(root)):
                paths, uuid = directory.paths, directory.identity.uuid
                header = JournalHeader(uuid, boot_id())
                replay, found, report = recover(paths, uuid, disk)
                journal = SpoolJournal(paths.journal, -1, seed_of(uuid), 0, disk)
                spool = cls(directory, header, journal, disk, limit_bytes)
                spool.report = report
                for each in found:
                    spool._restore(each)
                states = (file.records() for file in spool._files.values())
                journal.replace(*begin_journal(paths, header, replay, states, disk))
        except BaseException:
            directory.close()
            raise
        return spool

    def _restore(self, found: FoundFile) -> None:
        """Make a staged file of what the journal and the disk say."""
        state, status = found
        if self.file_of(state.ino) is not None:
            state.hold("the spool's journal has another file for its inode")
        file = StagedFile(self._parts, state.number, state.ino, state.path, state.base)
        file.generation, file.size_bytes = state.generation, state.size_bytes
        file.base_bytes = state.base_bytes
        file.posix, file.is_sealed, file.synced = state.posix, state.is_sealed, state.synced
        file.upload, file.state, file.reason = state.upload, state.state, state.reason
        file.is_exclusive, file.expected_version = state.is_exclusive, state.expected_version
        file.start, file.caller = state.start, state.caller
        file.refused_at, file.freed_bytes = state.refused_at, state.freed_bytes
        file.end_unanswered_start()
        attributes = state.attributes
        if attributes is not None and attributes.spool_mtime_ns == status.st_mtime_ns:
            file.mtime_ns = attributes.mtime_ns
        elif state.extents is None or state.generation > 1:
            file.mtime_ns = status.st_mtime_ns
        stored_bytes = min(512 * status.st_blocks, status.st_size)
        if state.extents is not None:
            stored_bytes = state.extents.total_bytes
        file.restore(state.extents, stored_bytes, status.st_mtime_ns)
        self._files[file.number] = file
        if file.is_attached:
            self._of_ino[file.ino] = file
        self._next_number = max(self._next_number, file.number + 1)

    @property
    def files(self) -> Mapping[int, StagedFile]:
        """Every staged file by its number, also those that wait for a user."""
        return MappingProxyType(self._files)

    def file_path(self, number: int) -> Path:
        """Return the path of the spool file with this number."""
        return self._directory.paths.file(number)

    def file_of(self, ino: int) -> StagedFile | None:
        """Return the staged file that is the content of an inode now; None for a clean inode."""
        file = self._of_ino.get(ino)
        return file if file is not None and file.is_attached else None

    def begin(
        self,
        ino: int,
        path: str,
        base: ObjectMeta | None,
        *,
        is_exclusive: bool = False,
        expected_version: str | None = None,
    ) -> StagedFile:
        """Begin to stage the content of an inode that is clean, or new.

        `base` is the version that a change of part of a file is based on; None for a new file, and
        for one that is replaced as a whole. `expected_version` is the version that the origin has
        of the name, "" for none. With `is_exclusive` the file may be published only if the origin
        has that one. Raises `SpoolFullError` or `SpoolError`."""
        if self.file_of(ino) is not None:
            raise SpoolError(f"{path}: inode {ino} is staged already")
        number = self._next_number
        self._next_number += 1
        size_bytes = 0 if base is None else base.size_bytes
        tracks = int(base is not None)
        record = Begin(number, ino, 1, size_bytes, size_bytes, tracks, path, base)
        more: list[Record] = []
        if is_exclusive:
            more.append(Exclusive(number, 1))
        if base is None and expected_version:
            more.append(Expected(number, expected_version))
        with spool_errors(path):
            self._spool_files.create(number)
            try:
                mtime_ns = self._spool_files.status(number).st_mtime_ns
                self._journal.append(number, record, *more)
            except OSError:
                self._remove_later(number)
                raise
        file = StagedFile(self._parts, number, ino, path, base)
        file.note_begun(mtime_ns)
        file.is_exclusive = is_exclusive
        if base is None:
            file.expected_version = expected_version
        self._files[number] = self._of_ino[ino] = file
        return file

    # -- life --------------------------------------------------------------------------------------

    async def run(self, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Remove the bytes of ended files, and write the journal anew when it has many dead
        records, until cancelled."""
        task_status.started()
        while True:
            if not self._ended and not self._journal_is_large:
                await self._work.park()
                await trio.sleep(_GATHER_S)
            await self._remove_ended()
            if self._journal_is_large:
                self._journal_is_large = False
                await self._compact()

    async def close(self, sync_s: float = 20.0) -> None:
        """Sync all files for at most `sync_s`, close them and unlock the directory. The staged
        files stay for the next start, those that were synced also for one after a reboot. `run`
        must have ended. A failure is logged."""
        with trio.CancelScope(shield=True):
            try:
                await self._remove_ended()
                with trio.move_on_after(sync_s):
                    await self._sync_all()
            except (OSError, SpoolError) as error:
                log.warning("spool %s: can't sync it: %s", self._directory.paths.root, error)
            finally:
                self._spool_files.close_all()
                self._journal.close()
                self._directory.close()

    async def _sync_all(self) -> None:
        """Sync the files that are not synced, and then the journal. Raises `OSError` and
        `SpoolError`."""
        files = [file for file in self._files.values() if not file.is_synced]
        for first in range(0, len(files), _SYNCED_TOGETHER):
            some = files[first : first + _SYNCED_TOGETHER]
            sync = partial(self._spool_files.sync_all_slowly, [file.number for file in some])
            generations = [file.generation for file in some]
            statuses = await trio.to_thread.run_sync(sync)
            for file, generation, status in zip(some, generations, statuses, strict=True):
                file.note_synced(generation, status)
        await self._journal.sync()

    async def _remove_ended(self) -> None:
        while self._ended:
            numbers = tuple(self._ended)
            try:
                await trio.to_thread.run_sync(self._spool_files.remove_slowly, numbers)
            except OSError as error:
                log.warning("can't remove files of the spool: %s", error)
            # The next start removes what is still there.
            self._ended = [number for number in self._ended if number not in numbers]

    async def _compact(self) -> None:
        """Write the journal anew. After a failure it grows on, and is tried again later."""
        paths = self._directory.paths
        try:
            await compact(self._journal, paths, self._header, self._files, self._disk)
        except OSError as error:
            log.warning("can't rewrite the spool's journal: %s", error)
            self._journal.compact_above_bytes = compact_above(self._journal.size_bytes)

    def _on_large_journal(self) -> None:
        self._journal_is_large = True
        self._work.unpark_all()

    def _on_end(self, file: StagedContent) -> None:
        del self._files[file.number]
        if self._of_ino.get(file.ino) is file:
            del self._of_ino[file.ino]

    def _on_discard(self, file: StagedContent) -> None:
        self._remove_later(file.number)

    def _remove_later(self, number: int) -> None:
        self._spool_files.close(number)
        self._ended.append(number)
        self._work.unpark_all()
