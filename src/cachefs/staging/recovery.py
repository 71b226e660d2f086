"""Open a spool after a daemon that ended in any way: compare the journal with the spool files.

Everything here blocks: a worker thread calls it.
"""

import logging
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import NamedTuple

from cachefs.format.paths import SpoolPaths, spool_number_of
from cachefs.format.spool_frame import JournalHeader, encode_header, encode_record, seed_of
from cachefs.format.spool_record import Record
from cachefs.staging.disk import SpoolDisk
from cachefs.staging.file_state import FileState
from cachefs.staging.replay import Replay, ReplayedFile, replay_journal

log = logging.getLogger(__name__)

UNNAMED = "the spool's journal has nothing about it"
NOT_CLOSED = "it was not closed before the system ended"
NOT_SYNCED = "it was closed and not synced before the system ended, so bytes may be missing"
NOT_AS_SYNCED = "it was changed after the last sync, before the system ended"
TOO_SHORT = "its spool file is shorter than what was written"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CHUNK_BYTES = 1 << 20


def boot_id() -> bytes:
    """Return 16 bytes that name the running system, from its start to its end."""
    return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))


@dataclass(slots=True)
class RecoveryReport:
    """What a start found in a spool. `lost` are the paths of files whose bytes are gone."""

    ignored_bytes: int = 0
    """Of the journal, because they were incomplete or damaged."""
    is_damaged: bool = False
    lost: list[str] = field(default_factory=list)
    removed: int = 0
    """Spool files of files that had ended."""
    held: int = 0
    """Files that wait for a user."""


class FoundFile(NamedTuple):
    """A staged file with the status of its spool file."""

    file: ReplayedFile
    status: os.stat_result


class Look(NamedTuple):
    """What a spool has: its journal, every staged file whose bytes exist, the paths of those whose
    bytes are gone (`lost`), and the numbers of spool files that no record needs (`ended`)."""

    replay: Replay
    found: list[FoundFile]
    lost: list[str]
    ended: list[int]


def look(paths: SpoolPaths, uuid: bytes) -> Look:
    """Compare the journal with the spool files, and change nothing. Raises `OSError` and
    `SpoolError`."""
    running = boot_id()
    statuses = _statuses(paths)
    try:
        replay = replay_journal(paths.journal.read_bytes(), uuid, running)
    except FileNotFoundError:
        replay = Replay(is_damaged=bool(statuses))
    survived = replay.header is not None and replay.header.boot_id == running
    found, lost = [], []
    for number, file in replay.files.items():
        status = statuses.pop(number, None)
        if status is None:
            lost.append(file.path)
            continue
        _check(file, status, survived)
        found.append(FoundFile(file, status))
    if not replay.is_damaged:
        return Look(replay, found, lost, list(statuses))
    for number, status in statuses.items():
        found.append(FoundFile(_unnamed(number, status.st_size), status))
    return Look(replay, found, lost, [])


def recover(
    paths: SpoolPaths, uuid: bytes, disk: SpoolDisk
) -> tuple[Replay, list[FoundFile], RecoveryReport]:
    """Return what the journal says, every staged file whose bytes exist, and a report.

    Removes the bytes of files that have ended. Raises `OSError` and `SpoolError`."""
    replay, found, lost, ended = look(paths, uuid)
    report = RecoveryReport(replay.ignored_bytes, replay.is_damaged, lost, len(ended))
    for number in ended:
        disk.unlink(paths.file(number))
    report.held = sum(each.file.state is FileState.HELD for each in found)
    _log(paths, found, report)
    return replay, found, report


def _statuses(paths: SpoolPaths) -> dict[int, os.stat_result]:
    """Return the status of each spool file, by number."""
    found = {}
    for name in os.listdir(paths.files):
        number = spool_number_of(name)
        if number is None:
            continue
        with suppress(FileNotFoundError):
            status = paths.file(number).lstat()
            if stat.S_ISREG(status.st_mode):
                found[number] = status
    return found


def _check(file: ReplayedFile, status: os.stat_result, survived: bool) -> None:
    """Compare a file with its spool file, and hold it if its content is not certain. `survived`
    says that the system still runs in which the journal was written."""
    if file.extents is None:
        file.size_bytes = status.st_size
        if not file.size_bytes:
            file.freed_bytes = 0  # it was truncated
    elif file.extents.end > status.st_size:
        file.hold(TOO_SHORT)
    if survived:
        return
    as_now = (status.st_size, status.st_mtime_ns)
    if not file.is_sealed:
        file.hold(NOT_CLOSED)
    elif file.synced is None:
        file.hold(NOT_SYNCED)
    elif (file.synced.spool_bytes, file.synced.spool_mtime_ns) != as_now:
        file.hold(NOT_AS_SYNCED)


def _unnamed(number: int, size_bytes: int) -> ReplayedFile:
    """Return a file of which only the bytes are known."""
    file = ReplayedFile(number, 0, "", 1, size_bytes, None, 0, None)
    file.hold(UNNAMED)
    return file


def _log(paths: SpoolPaths, found: list[FoundFile], report: RecoveryReport) -> None:
    if report.is_damaged:
        log.warning(
            "spool %s: its journal is damaged (%d bytes ignored; a copy is %s): %d files are held "
            "and not uploaded",
            paths.root,
            report.ignored_bytes,
            paths.bad_journal.name,
            report.held,
        )
    elif report.held:
        one = next(each.file for each in found if each.file.state is FileState.HELD)
        log.warning(
            "spool %s: %d files are held and not uploaded, such as %r: %s",
            paths.root,
            report.held,
            one.path,
            one.reason,
        )
    if report.lost:
        log.error(
            "spool %s: the bytes of %d files that were not at the origin yet are gone, such as %r",
            paths.root,
            len(report.lost),
            report.lost[0],
        )


def begin_journal(
    paths: SpoolPaths,
    header: JournalHeader,
    replay: Replay,
    states: Iterable[list[Record]],
    disk: SpoolDisk,
) -> tuple[int, int]:
    """Write a new journal with the `states`, and put it in the place of the old one, which `replay`
    has read. Return its descriptor and its size. Raises `OSError`.

    The rename is the commit point. A damaged journal is kept as `journal.bad`. If the disk is full,
    and the system has not restarted since, the old journal is used further."""
    try:
        return _replace_journal(paths, header, replay, states, disk)
    except OSError as error:
        if error.errno not in (ENOSPC, EDQUOT) or replay.header != header or replay.is_damaged:
            raise
        log.warning("spool %s: the disk is full, so its journal is not rewritten", paths.root)
    fd = disk.open(paths.journal)
    try:
        disk.truncate(fd, replay.valid_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd, replay.valid_bytes


def _replace_journal(
    paths: SpoolPaths,
    header: JournalHeader,
    replay: Replay,
    states: Iterable[list[Record]],
    disk: SpoolDisk,
) -> tuple[int, int]:
    disk.unlink(paths.new_journal)
    fd = disk.create(paths.new_journal)
    try:
        size_bytes = _write_records(fd, header, states, disk)
        disk.sync(fd)
        if replay.is_damaged and paths.journal.exists():
            disk.unlink(paths.bad_journal)
            os.link(paths.journal, paths.bad_journal)
        disk.rename(paths.new_journal, paths.journal)
        disk.sync_directory(paths.root)
    except BaseException:
        os.close(fd)
        disk.unlink(paths.new_journal)
        raise
    return fd, size_bytes


def _write_records(
    fd: int, header: JournalHeader, states: Iterable[list[Record]], disk: SpoolDisk
) -> int:
    """Write header and states. Return the size in bytes."""
    seed = seed_of(header.uuid)
    buffer = bytearray(encode_header(header))
    written = 0
    for records in states:
        for record in records:
            buffer += encode_record(record, seed, written + len(buffer))
        if len(buffer) > _CHUNK_BYTES:
            disk.write(fd, buffer, written)
            written += len(buffer)
            buffer = bytearray()
    disk.write(fd, buffer, written)
    return written + len(buffer)
