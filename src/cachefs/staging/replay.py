"""Read a spool's journal: what the staged files were when it was last written.

Nothing in it is believed without its checksum. Where a record is damaged, records may be missing,
so all files that were staged then are held.
"""

from dataclasses import dataclass, field

from cachefs.errors import SpoolError
from cachefs.format.spool_frame import (
    HEADER_BYTES,
    JOURNAL_FORMAT,
    CutRecordError,
    Frame,
    JournalHeader,
    decode_header,
    frame_at,
    next_frame_offset,
    seed_of,
)
from cachefs.format.spool_record import (
    NONE_REFUSED,
    REQUIRED,
    Attributes,
    BadRecordError,
    Begin,
    Changed,
    Completing,
    Done,
    Dropped,
    Exclusive,
    Expected,
    Extent,
    Freed,
    PartDone,
    PartsStale,
    Ranges,
    Rebased,
    Record,
    Refused,
    Renamed,
    Sealed,
    SentFor,
    Starting,
    StateChanged,
    Synced,
    Truncate,
    UploadEnded,
    UploadStarted,
    decode_payload,
)
from cachefs.staging.extents import Extents
from cachefs.staging.file_state import FileState, Part, Start, UploadProgress
from cachefs.types import NO_POSIX, Caller, ObjectMeta, Posix

DAMAGED = "a part of the spool's journal is damaged, so changes may be missing"
_STATES = {state.value: state for state in FileState if state is not FileState.ENDED}


@dataclass(slots=True)
class ReplayedFile:
    """A staged file as the journal describes it. The fields are those of `StagedFile`;
    `attributes` is the last record of that kind."""

    number: int
    ino: int
    path: str
    generation: int
    size_bytes: int
    base: ObjectMeta | None
    base_bytes: int
    extents: Extents | None
    attributes: Attributes | None = None
    posix: Posix = NO_POSIX
    is_sealed: bool = False
    synced: Synced | None = None
    upload: UploadProgress | None = None
    state: FileState = FileState.OPEN
    reason: str = ""
    is_exclusive: bool = False
    start: Start | None = None
    expected_version: str | None = None
    caller: Caller | None = None
    refused_at: int | None = None
    freed_bytes: int = 0

    def hold(self, reason: str) -> None:
        """Set the state HELD, if the file doesn't wait for a user already."""
        if self.state not in (FileState.CONFLICT, FileState.HELD):
            self.state, self.reason = FileState.HELD, reason


@dataclass(slots=True)
class Replay:
    """What a journal says. `valid_bytes` is the end of the last record that was taken;
    `ignored_bytes` is what was passed over."""

    header: JournalHeader | None = None
    files: dict[int, ReplayedFile] = field(default_factory=dict)
    valid_bytes: int = HEADER_BYTES
    ignored_bytes: int = 0
    is_damaged: bool = False

    def damage(self) -> None:
        """Note that records may be missing here: hold all files."""
        self.is_damaged = True
        for file in self.files.values():
            file.hold(DAMAGED)


def replay_journal(data: bytes, uuid: bytes, boot_id: bytes) -> Replay:
    """Return what the journal `data` of the spool `uuid` says; `boot_id` is that of the running
    system. Raises `SpoolError` if a newer cachefs has written it."""
    replay = Replay()
    seed = seed_of(uuid)
    try:
        version, header = decode_header(data)
        if version != JOURNAL_FORMAT:
            raise SpoolError(f"the spool's journal has format {version}: use a newer cachefs")
        if header.uuid != uuid:
            raise BadRecordError("the journal belongs to another spool")
        replay.header = header
    except BadRecordError:
        replay.is_damaged = True
    survived = replay.header is not None and replay.header.boot_id == boot_id
    synced: int | None = 0  # the first synced record behind the last damaged place
    offset = HEADER_BYTES
    while offset < len(data):
        try:
            frame = frame_at(data, seed, offset)
            _take(replay, frame)
            offset = replay.valid_bytes = frame.end
            continue
        except CutRecordError:
            is_cut = True
        except BadRecordError:
            is_cut = False
        found = next_frame_offset(data, seed, offset + 1)
        if not survived and found is not None and synced is not None and synced < found:
            synced = _next_synced(data, seed, found)
        if found is None or not (survived or synced is not None):
            # The end of the journal. A killed process leaves the beginning of a record, and a
            # power cut anything behind the last sync.
            replay.ignored_bytes += len(data) - offset
            if survived and not is_cut:
                replay.damage()
            break
        replay.ignored_bytes += found - offset
        replay.damage()
        offset = found
    if replay.header is None:
        replay.damage()
    return replay


def _next_synced(data: bytes, seed: int, start: int) -> int | None:
    """Return the offset of the first record of a sync at `start` or behind it, None without one:
    all records before it were on the disk, so a damaged one is no effect of a power cut."""
    offset: int | None = start
    while offset is not None:
        frame = frame_at(data, seed, offset)
        try:
            if isinstance(decode_payload(frame.kind, frame.payload), Synced):
                return offset
        except BadRecordError:
            pass
        offset = next_frame_offset(data, seed, frame.end)
    return None


def _take(replay: Replay, frame: Frame) -> None:
    """Apply one record. Raises `BadRecordError` if it contradicts the records before it."""
    record = decode_payload(frame.kind, frame.payload)
    match record:
        case None:
            if frame.flags & REQUIRED:
                raise SpoolError(
                    f"the spool's journal has records of a newer cachefs (kind {frame.kind}): "
                    "use that version"
                )
        case Begin():
            if record.number in replay.files:
                raise BadRecordError("a file begins twice")
            replay.files[record.number] = _begun(record)
        case _:
            file = replay.files.get(record.number)
            if file is not None:
                if isinstance(record, Done | Dropped):
                    del replay.files[record.number]
                else:
                    _apply(file, record)
            elif not replay.is_damaged:
                raise BadRecordError("a record of no file")


def _begun(record: Begin) -> ReplayedFile:
    return ReplayedFile(
        record.number,
        record.ino,
        record.path,
        record.generation,
        record.size_bytes,
        record.base,
        record.base_bytes,
        Extents() if record.tracks_extents else None,
        expected_version=None if record.base is None else record.base.version,
    )


def _apply(file: ReplayedFile, record: Record) -> None:
    match record:
        case Extent() | Truncate() | Ranges():
            _apply_to_content(file, record)
        case Attributes():
            file.attributes, file.posix = record, record.posix
            if file.upload is not None and not file.freed_bytes:
                file.upload.note_other_attributes(file.generation)
        case Renamed():
            file.path = record.path
            if file.upload is not None and not file.freed_bytes:
                file.upload.note_other_attributes(file.generation)
        case Changed():
            file.generation = max(file.generation, record.generation)
            file.is_sealed, file.synced = False, None
        case Sealed():
            file.generation = max(file.generation, record.generation)
            file.is_sealed = True
        case Synced():
            file.generation = max(file.generation, record.generation)
            file.synced = record
        case UploadStarted():
            file.upload = UploadProgress(record.upload_id, record.write_id, record.path)
            file.start = None
            if not record.upload_id and file.is_sealed:
                file.upload.asked_generation = file.generation
        case Starting(_, at_ns, write_id, path):
            file.start = Start(path, write_id, at_ns) if at_ns else None
        case Exclusive():
            file.is_exclusive = bool(record.is_exclusive)
        case Expected():
            file.expected_version = record.version
        case SentFor(_, uid, gid, capabilities, groups):
            file.caller = Caller(uid, gid, groups, capabilities)
        case Refused(_, offset):
            file.refused_at = None if offset == NONE_REFUSED else offset
        case Freed(_, end_bytes):
            if file.extents is not None:
                raise BadRecordError("bytes without extents were freed")
            file.freed_bytes = end_bytes
        case PartDone() | PartsStale() | Completing() | UploadEnded():
            _apply_to_upload(file, record)
        case Rebased():
            file.upload, file.expected_version = None, record.meta.version
            if file.extents is not None:
                file.base, file.base_bytes = record.meta, record.base_bytes
        case StateChanged():
            if record.state not in _STATES:
                raise BadRecordError("an impossible state")
            file.state, file.reason = _STATES[record.state], record.reason
        case _:
            raise BadRecordError("an impossible record")


def _apply_to_content(file: ReplayedFile, record: Extent | Truncate | Ranges) -> None:
    if file.extents is None:
        raise BadRecordError("extents of a file that has none")
    match record:
        case Extent():
            end = record.offset + record.length
            file.extents.add(record.offset, end)
            file.size_bytes = max(file.size_bytes, end)
            file.generation = max(file.generation, record.generation)
            file.is_sealed, file.synced = False, None
        case Truncate():
            file.extents.cut(record.size_bytes)
            file.size_bytes = record.size_bytes
            file.base_bytes = min(file.base_bytes, record.size_bytes)
            file.generation = max(file.generation, record.generation)
            file.is_sealed, file.synced = False, None
        case Ranges():
            for begin, end in zip(record.bounds[::2], record.bounds[1::2], strict=True):
                file.extents.add(begin, end)
            if file.extents.end > file.size_bytes:
                raise BadRecordError("ranges behind the end of a file")


def _apply_to_upload(
    file: ReplayedFile, record: PartDone | PartsStale | Completing | UploadEnded
) -> None:
    upload = file.upload
    if upload is None:
        raise BadRecordError("a part of no upload")
    match record:
        case PartDone():
            file.generation = max(file.generation, record.generation)
            upload.finish(Part(*record[1:]))
        case PartsStale():
            for number in record.parts:
                upload.parts.pop(number, None)
                upload.changed.add(number)
        case Completing():
            file.generation = max(file.generation, record.generation)
            upload.asked_generation = record.generation
        case UploadEnded():
            file.upload = None
