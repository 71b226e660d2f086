"""Sends the content of files to the origin: in one PUT, or as the parts of an upload.

The bytes may change while they are sent. So the content that counts is the one at the moment when
nothing is left to read: when the whole body of a PUT is in memory, or when the origin has every
part. A part that changes while it is sent is broken off and sent again. So no object is ever a mix,
and writers wait only after a sending has been overtaken `_FREE_TURNS` times.

The upload and its parts are in the spool's journal, so the next daemon continues an upload. That
needs a store that compares the tags of the parts when it completes an upload (`checks_parts`);
elsewhere each sending begins anew.
"""

import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import NamedTuple

import trio

from cachefs.errors import (
    AccessDeniedError,
    CachefsError,
    ConflictError,
    NotFoundError,
    NotOfferedError,
    ObjectChangedError,
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
    PartsLostError,
    RefusedError,
    UploadLostError,
)
from cachefs.namespace.namespace import Namespace
from cachefs.origin.on_behalf import acting_for
from cachefs.origin.writable import (
    MOST_PARTS,
    MOST_PUT_BYTES,
    Attributes,
    BufferContent,
    Condition,
    PartTag,
    Upload,
    WritableOrigin,
    is_of_this_process,
    new_write_id,
    part_bytes,
)
from cachefs.staging.extents import Source
from cachefs.staging.file_state import Start, UploadProgress
from cachefs.staging.staged_file import StagedFile
from cachefs.types import (
    UNKNOWN_ID,
    UNKNOWN_MODE,
    Caller,
    ObjectMeta,
    Posix,
)
from cachefs.writes.sending.contents import LoopContent, PartChangedError, PartContent
from cachefs.writes.sending.timeouts import MovingContent, SendTimeouts
from cachefs.writes.written_file import WrittenFile

log = logging.getLogger(__name__)

_PARTS_AT_A_TIME = 4
"""Of one file. Their bytes are read piece by piece from the spool file."""
_PARTS_OF_LONE_FILE = 8
"""The same while the parts of no other file are sent: a far store takes only so much on each
connection. With 16, some stores of one machine stalled."""
_BODIES_AT_A_TIME = 8
"""How many bodies of PUTs may be in memory at a time, each of up to 16 MiB."""
_SMALL_BYTES = 256 << 10
"""Bodies of at most this size do not count for `_BODIES_AT_A_TIME`."""
_MOST_COPIES = 1000
"""Of parts of an upload, up to a size of 625 GiB."""
_FREE_TURNS = 3
_MOST_LOST = 2
"""How many uploads may vanish at the origin before a sending fails."""
_MOST_FAILED_LISTS = 2
"""How many sendings may fail because the parts can't be listed. The next one begins anew."""
_ABORT_S = 10.0


class PartRange(NamedTuple):
    """A part that an upload needs, and its place in the content."""

    number: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The offset behind it."""
        return self.offset + self.length


ReadContent = Callable[[int, int], Awaitable[bytes]]
"""Returns the bytes of a range of the content: offset and length, both inside the content."""
Describe = Callable[[], Attributes]
"""Returns the attributes of a file as they are now."""


class Sender:
    """Sends files to the writable origin of one mount. The caller holds the file's lock."""

    def __init__(self, writer: WritableOrigin, timeouts: SendTimeouts | None = None) -> None:
        self._writer = writer
        self.timeouts = timeouts or SendTimeouts()
        self._bodies = trio.CapacityLimiter(_BODIES_AT_A_TIME)
        self._in_parts_count = 0
        """How many files are sent in parts now."""
        self._copies_parts = True
        """Whether the store may copy a range of an object to a part."""
        self._unaborted: list[UploadProgress] = []
        """Uploads that could not be dropped yet."""

    @property
    def can_send_ahead(self) -> bool:
        """Whether parts of a file may be sent while it is written."""
        return self._writer.checks_parts

    @property
    def keeps_attributes(self) -> bool:
        """See `WritableOrigin.keeps_attributes`."""
        return self._writer.keeps_attributes

    def destination_of(self, namespace: Namespace, file: WrittenFile) -> tuple[str, Describe]:
        """Return the path and the attributes with which a file is sent."""

        def describe() -> Attributes:
            inode = namespace.inode(file.ino)
            if not self.keeps_attributes:
                return attributes_of(inode.posix, inode.mtime_ns)
            is_renamed = not inode.version and bool(file.staged.expected_version)
            stated = attributes_of(file.staged.posix, inode.mtime_ns)
            return replace(stated, is_renamed=is_renamed)

        return namespace.table.path(namespace.inode(file.ino)), describe

    def acting_for(self, staged: StagedFile, posix: Posix) -> AbstractContextManager[None]:
        """Send a new file with the rights of the process that created it, and another with those of
        the process that closed it. If that is not known (only mapped pages were written, or an
        earlier cachefs has not recorded it), the rights are those of the file's owner, without
        supplementary groups."""
        caller = staged.caller
        if caller is None and self._writer.acts_for_callers and posix.uid != UNKNOWN_ID:
            caller = Caller(posix.uid, posix.gid)
        return acting_for(caller)

    @property
    def repeats_versions(self) -> bool:
        """Whether other bytes may get the version of earlier ones."""
        return self._writer.repeats_versions

    async def earlier_result(self, file: WrittenFile, path: str) -> ObjectMeta | None:
        """Return the object at `path` if an earlier sending of the file has made it although it
        failed, or its daemon was killed. `StagedFile.finish` says whether it has the present
        content. Raises the origin's error."""
        known = file.staged.upload
        if known is not None:
            await self._remove_rest(known)
        if known is None or known.path != path:
            return None
        if file.was_asked_for_present:
            file.begin_sending()
        elif known.upload_id and not known.asked_generation:
            return None  # it was not asked for
        return await self._writer.written_by(path, known.write_id)

    async def send(self, file: WrittenFile, path: str, describe: Describe) -> ObjectMeta:
        """Write the object at `path`, and return its new version. It has the content that the file
        had at some moment of this call; `StagedFile.finish` says whether that is the present one.

        Raises `ConflictError` if the origin has another version than the one that was changed, or
        the origin's error. An upload then stays open, except after a conflict or at an origin that
        can't continue it."""
        lost = 0
        try:
            for turn in itertools.count(1):
                # What the spool does not have any more can't be sent in a second upload.
                file.keeps_writers_out = turn > _FREE_TURNS or file.staged.freed_bytes > 0
                await file.rest()
                try:
                    send = self._put if file.is_small else self._send_in_parts
                    meta = await send(file, path, describe)
                except _SendAnewError as error:
                    lost += 1
                    if lost > _MOST_LOST:
                        raise OriginError(str(error)) from None
                    continue
                if meta is not None:
                    return meta
        except BaseException as error:
            known = file.staged.upload
            if known is not None and known.upload_id:
                if isinstance(error, ConflictError | ObjectChangedError):
                    if not file.staged.freed_bytes:
                        await self.drop_upload(file.staged)
                elif not self._writer.checks_parts:
                    with trio.CancelScope(shield=True):
                        await self._abort(known)  # its id stays known, for the next try
            raise
        raise AssertionError("the loop has no end")

    async def send_kept(
        self,
        staged: StagedFile,
        read: ReadContent,
        condition: Condition | None,
    ) -> ObjectMeta:
        """Write the object of a file that waits for a user, whose content does not change. Raises
        `ConflictError` if the condition is false, or the origin's error."""
        with self.acting_for(staged, staged.posix):
            return await self._send_kept(staged, read, condition)

    async def _send_kept(
        self, staged: StagedFile, read: ReadContent, condition: Condition | None
    ) -> ObjectMeta:
        path, size_bytes, write_id = staged.path, staged.size_bytes, new_write_id()
        attributes = attributes_of(staged.posix, staged.mtime_ns)
        if staged.freed_bytes:
            return await self._continue_kept(staged, read, condition, attributes)
        await self.drop_upload(staged)
        if size_bytes <= MOST_PUT_BYTES:
            body = await read(0, size_bytes) if size_bytes else b""
            staged.start_upload("", write_id, path)
            return await self._writer.put(path, body, condition, attributes, write_id)
        upload = await self._start(staged, path, attributes, write_id)
        try:
            tags = []
            for number, offset, length in _ranges(size_bytes, part_bytes(size_bytes)):
                content = LoopContent(read, offset, length)
                tags.append(await self._writer.put_part(upload, number, offset, content))
            return await self._writer.complete(upload, tags, condition, attributes)
        except BaseException:
            await self.drop_upload(staged)
            raise

    async def _continue_kept(
        self,
        staged: StagedFile,
        read: ReadContent,
        condition: Condition | None,
        attributes: Attributes,
    ) -> ObjectMeta:
        """Complete the upload that has bytes which the spool does not have any more."""
        known = staged.upload
        if known is None or not self._can_continue(known, staged, staged.path):
            _check_complete(staged)
        known = _progress(staged)
        upload = Upload(known.path, known.upload_id, known.write_id)
        try:
            await self._compare_parts(staged, upload)
            for part in missing_parts(staged):
                if part.offset < staged.freed_bytes:
                    _check_complete(staged)
                content = LoopContent(read, part.offset, part.length)
                tag = await self._writer.put_part(upload, part.number, part.offset, content)
                staged.finish_part(staged.begin_part(*part), tag.tag)
            return await self._writer.complete(upload, _tags(staged), condition, attributes)
        except UploadLostError:
            _check_complete(staged)
            raise

    async def _put(self, file: WrittenFile, path: str, describe: Describe) -> ObjectMeta | None:
        """Send the content in one PUT. Return None if it has changed while it was read."""
        staged = file.staged
        if file.has_open_upload:
            await self.drop_upload(staged)
        generation, size_bytes = staged.generation, staged.size_bytes
        async with self._bodies if size_bytes > _SMALL_BYTES else nullcontext():
            body = await file.read(0, size_bytes)
            if not file.is_still(generation):
                return None
            # A write whose answer was lost is recognised by its id, but only with this content.
            earlier = staged.upload
            is_same = file.was_asked_for_present and earlier is not None and earlier.path == path
            write_id = earlier.write_id if earlier is not None and is_same else new_write_id()
            file.begin_sending()
            staged.start_upload("", write_id, path)
            content = MovingContent(BufferContent(body), self.timeouts.note_moved)
            meta = await self._writer.put(path, content, file.condition, describe(), write_id)
            self.timeouts.note_moved()
            return meta

    # -- parts -------------------------------------------------------------------------------------

    async def _send_in_parts(
        self, file: WrittenFile, path: str, describe: Describe
    ) -> ObjectMeta | None:
        """Send the parts that the origin does not have, and complete the upload. Return None if a
        part has changed meanwhile."""
        staged = file.staged
        staged.seal()
        upload = await self._open_upload(file, path, describe)
        try:
            with trio.CancelScope() as file.sending_parts:
                await self._send_parts(file, upload, missing_parts(staged))
            if file.sending_parts.cancelled_caught:
                raise BrokenOffError(f"{path}: its name or its attributes change")
            if not file.is_at_rest or missing_parts(staged):
                return None
            # No await from here on until the request is sent: this is the content.
            file.begin_sending()
            staged.note_completing()
            meta = await self._writer.complete(upload, _tags(staged), file.condition, describe())
            self.timeouts.note_moved()
            return meta
        except NotFoundError as error:
            await self._drop_lost(staged, error)
            raise _SendAnewError(str(error)) from None
        finally:
            file.sending_parts = None

    async def send_ahead(
        self, file: WrittenFile, path: str, describe: Describe, written_bytes: int
    ) -> None:
        """Send the full parts that lie before `written_bytes`, except those that were changed after
        they were sent. Raises the origin's error."""
        staged = file.staged
        upload = await self._open_upload(file, path, describe)
        changed, full_bytes = _progress(staged).changed, _part_bytes(staged)
        full = [
            each
            for each in missing_parts(staged)
            if each.end <= written_bytes
            and each.length == full_bytes
            and each.number not in changed
        ]
        try:
            await self._send_parts(file, upload, full)
        except NotFoundError as error:
            await self._drop_lost(staged, error)  # the next sending begins another one
            raise

    async def _open_upload(self, file: WrittenFile, path: str, describe: Describe) -> Upload:
        """Return the upload of the file. Begin one if there is none that can be continued."""
        staged = file.staged
        known = staged.upload
        if known is not None and self._can_continue(known, staged, path):
            upload = Upload(known.path, known.upload_id, known.write_id)
            if file.knows_parts or await self._has_parts(file, upload):
                file.knows_parts = True
                return upload
        _check_complete(staged)
        await self.drop_upload(staged)
        # A write whose answer was lost is recognised by its id, but only with this content.
        is_same = known is not None and known.path == path
        if known is not None and is_same and known.asked_generation == staged.generation:
            write_id = known.write_id
        else:
            write_id = new_write_id()
        upload = await self._start(staged, path, describe(), write_id)
        file.knows_parts = True
        return upload

    async def _start(
        self, staged: StagedFile, path: str, attributes: Attributes, write_id: str
    ) -> Upload:
        """Begin an upload. If the answer is lost, or this daemon is killed before it is recorded,
        `drop_upload` looks for the upload at the origin."""
        staged.note_starting(write_id, path)
        try:
            upload = await self._writer.start_upload(path, attributes, write_id)
        except BaseException:
            staged.end_unanswered_start()
            raise
        self.timeouts.note_moved()
        staged.start_upload(upload.upload_id, write_id, path)
        return upload

    def _can_continue(self, known: UploadProgress, staged: StagedFile, path: str) -> bool:
        """Return whether an upload may get the present content. If the origin may have completed it
        with another content already, its id would say that the present one is stored."""
        return (
            self._writer.checks_parts
            and bool(known.upload_id)
            and known.path == path
            and known.asked_generation in (0, staged.generation)
            and (staged.freed_bytes > 0 or _has_equal_parts(known, _part_bytes(staged)))
        )

    async def _has_parts(self, file: WrittenFile, upload: Upload) -> bool:
        """Do `_compare_parts`. If the origin does not answer that again and again, the upload can't
        be continued, unless the spool has not all bytes: some stores only fail lists."""
        try:
            return await self._compare_parts(file.staged, upload)
        except OriginUnavailableError:
            file.failed_lists += 1
            if file.staged.freed_bytes or file.failed_lists < _MOST_FAILED_LISTS:
                raise
            return False

    async def _compare_parts(self, staged: StagedFile, upload: Upload) -> bool:
        """Ask the origin which parts it has of an upload of an earlier daemon, and forget others.
        Return whether the upload can be continued. If the origin can't or may not say which parts
        it has, that is so only if the spool has not all bytes; the origin compares the parts again
        when it completes the upload. Raises `OriginUnavailableError`."""
        try:
            found = {part.number: part for part in await self._writer.parts(upload)}
        except NotFoundError as error:
            if staged.freed_bytes and not isinstance(error, UploadLostError):
                raise
            # Completed, perhaps: then the next request for it finds its object.
            return _progress(staged).asked_generation > 0
        except OriginUnavailableError:
            raise
        except OriginError as error:
            if staged.freed_bytes:
                return True
            log.info("%s is sent again: the store does not list its parts: %s", upload.path, error)
            return False
        known = _progress(staged).parts.values()
        wrong = [
            part.number
            for part in known
            if part.offset >= staged.freed_bytes
            and (
                (tag := found.get(part.number)) is None
                or (tag.size_bytes, tag.tag) != (part.length, part.tag)
            )
        ]
        staged.forget_parts(tuple(wrong))
        return True

    async def _send_parts(
        self, file: WrittenFile, upload: Upload, wanted: Sequence[PartRange]
    ) -> None:
        """Send parts, some in parallel. One that changes meanwhile stays missing."""
        waiting = iter(wanted)
        failures: list[CachefsError] = []

        async def send_some() -> None:
            for each in waiting:
                if each.offset < file.staged.freed_bytes:
                    _check_complete(file.staged)
                if each.end > file.staged.size_bytes:
                    return  # it was truncated meanwhile
                try:
                    await self._send_part(file, upload, each)
                except PartChangedError:
                    continue
                except CachefsError as error:
                    failures.append(error)
                    nursery.cancel_scope.cancel()

        is_lone = self._in_parts_count == 0
        at_a_time = _PARTS_OF_LONE_FILE if is_lone else _PARTS_AT_A_TIME
        self._in_parts_count += 1
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(min(at_a_time, len(wanted))):
                    nursery.start_soon(send_some)
        finally:
            self._in_parts_count -= 1
        if failures:
            raise failures[0]

    async def _send_part(self, file: WrittenFile, upload: Upload, wanted: PartRange) -> None:
        staged, (number, offset, length) = file.staged, wanted
        part = staged.begin_part(number, offset, length)
        pieces = staged.pieces(offset, length)
        base = staged.base if self._copies_parts else None
        tag = None
        if base is not None and len(pieces) == 1 and pieces[0].source is Source.BASE:
            copy = self._writer.copy_part
            try:
                tag = await copy(upload, number, offset, upload.path, base, length)
            except (RefusedError, AccessDeniedError, NotFoundError) as error:
                # Some stores call a request that they don't have a missing object.
                self._copies_parts = not isinstance(error, NotOfferedError)
                if wanted.end > staged.size_bytes:
                    raise PartChangedError("the file was truncated meanwhile") from None
                part = staged.begin_part(number, offset, length)
        if tag is None:
            content = MovingContent(PartContent(file, part), self.timeouts.note_moved)
            tag = await self._writer.put_part(upload, number, offset, content)
        self.timeouts.note_moved()
        staged.finish_part(part, tag.tag)

    # -- dropping ----------------------------------------------------------------------------------

    async def drop_upload(self, staged: StagedFile) -> None:
        """Drop the file's upload and its parts. If the origin can't be asked, `abort_rest` tries it
        again."""
        if staged.start is not None:
            await self._abort_started(staged, staged.start)
        known = staged.upload
        if known is None:
            return
        if known.upload_id:
            await self._abort(known)
        else:
            with suppress(OriginError):
                await self._remove_rest(known)
        if staged.upload is known:
            staged.end_upload()

    async def _drop_lost(self, staged: StagedFile, error: NotFoundError) -> None:
        """Drop an upload that the origin does not find. But one with bytes that the spool does not
        have stays as it is, because a user may still complete it. Raises `PartsLostError` if it is
        certain that it can't be completed now, and `error` if it is not."""
        if staged.freed_bytes:
            if isinstance(error, UploadLostError):
                _check_complete(staged)
            raise error
        await self.drop_upload(staged)

    async def _remove_rest(self, known: UploadProgress) -> None:
        """Remove what a killed daemon has left of a sending. Raises the origin's error."""
        if self._writer.leaves_rest and not is_of_this_process(known.write_id):
            await self._writer.remove_rest(known.path, known.write_id)

    async def _abort_started(self, staged: StagedFile, start: Start) -> None:
        """Drop the upload of a start whose answer is not known. If the origin can't be asked now,
        the next call tries it again."""
        now_ns = time.time_ns()
        ended_s = (now_ns - (start.ended_ns or now_ns)) / 1e9
        began_s = max(ended_s, (now_ns - start.began_ns) / 1e9)
        upload = Upload(start.path, "", start.write_id)
        with trio.move_on_after(_ABORT_S):
            try:
                await self._writer.abort_started(upload, began_s, ended_s)
            except (OriginUnavailableError, OriginBusyError):
                return
            except OriginError as error:
                log.info("%s: an upload may be left at the source: %s", start.path, error)
            if staged.start is start:
                staged.forget_start()

    async def abort_rest(self) -> None:
        """Try again to drop the uploads that could not be dropped."""
        waiting, self._unaborted = self._unaborted, []
        for known in waiting:
            await self._abort(known)

    async def abort(self, path: str, upload_id: str, write_id: str) -> None:
        """Drop an upload in parts, as `drop_upload` does."""
        await self._abort(UploadProgress(upload_id, write_id, path))

    async def _abort(self, known: UploadProgress) -> None:
        try:
            with trio.move_on_after(_ABORT_S), suppress(OriginError):
                await self._writer.abort(Upload(known.path, known.upload_id, known.write_id))
                return
        except trio.Cancelled:
            self._unaborted.append(known)
            raise
        self._unaborted.append(known)


class BrokenOffError(CachefsError):
    """A sending was broken off before the origin was asked to store anything."""


class _SendAnewError(Exception):
    """The origin does not have the upload any more."""


def _progress(staged: StagedFile) -> UploadProgress:
    assert staged.upload is not None
    return staged.upload


def _check_complete(staged: StagedFile) -> None:
    """Raise `PartsLostError` if the spool does not have all bytes any more."""
    if staged.freed_bytes:
        raise PartsLostError(
            f"{staged.path}: its first {staged.freed_bytes} bytes were sent and had no room in the "
            "spool, and the source has no upload with them any more; give the spool more room with "
            "--spool-size"
        )


def _tags(staged: StagedFile) -> list[PartTag]:
    """Return what completes the upload, which has all parts."""
    parts = _progress(staged).parts
    ranges = _ranges_of(staged)
    return [PartTag(each.number, each.length, parts[each.number].tag) for each in ranges]


def sent_in_order_bytes(staged: StagedFile, written_bytes: int) -> int:
    """Return up to where the origin has full parts without a gap, which end before
    `written_bytes`."""
    upload, end = staged.upload, 0
    if upload is None or not upload.upload_id or upload.asked_generation:
        return 0
    full_bytes = _part_bytes(staged)
    for each in _ranges_of(staged):
        part = upload.parts.get(each.number)
        if part is None or part[1:3] != each[1:]:
            break
        if each.length != full_bytes and each.offset >= staged.freed_bytes:
            break
        if each.end > written_bytes:
            break
        end = each.end
    return end


def _part_bytes(staged: StagedFile) -> int:
    """Return the size of the parts of a file as it is now. The store copies most of the parts of a
    file that has a base, and a few large copies are quicker than many small ones. Parts whose bytes
    the spool does not have any more keep their size. So the others get larger before all numbers
    are used, or such a file could not grow much beyond 78 GiB."""
    freed = _freed_parts(staged)
    if freed:
        return part_bytes(staged.size_bytes - freed[-1].end, (MOST_PARTS - len(freed)) // 2)
    return part_bytes(staged.size_bytes, MOST_PARTS if staged.base is None else _MOST_COPIES)


def _freed_parts(staged: StagedFile) -> list[PartRange]:
    """Return the parts at the origin with bytes that the spool does not have any more."""
    found: list[PartRange] = []
    if staged.freed_bytes and staged.upload is not None:
        end, parts = 0, staged.upload.parts
        while (
            end < staged.freed_bytes
            and (part := parts.get(len(found) + 1)) is not None
            and part.offset == end
        ):
            found.append(PartRange(part.number, part.offset, part.length))
            end = found[-1].end
    return found


def _ranges(
    size_bytes: int, part_size_bytes: int, first: Sequence[PartRange] = ()
) -> list[PartRange]:
    """Return the parts of a content, which begins with the parts `first`. Raises `OriginError` if
    it needs too many."""
    begin = first[-1].end if first else 0
    most_bytes = begin + part_size_bytes * (MOST_PARTS - len(first))
    if size_bytes > most_bytes:
        raise OriginError(f"an object can have at most {most_bytes} bytes")
    return [
        *first,
        *(
            PartRange(number, offset, min(part_size_bytes, size_bytes - offset))
            for number, offset in enumerate(
                range(begin, size_bytes, part_size_bytes), len(first) + 1
            )
        ),
    ]


def _has_equal_parts(known: UploadProgress, size_bytes: int) -> bool:
    """Whether the parts of an upload are those of a content with parts of this size."""
    return all(part.offset == (part.number - 1) * size_bytes for part in known.parts.values())


def _ranges_of(staged: StagedFile) -> list[PartRange]:
    return _ranges(staged.size_bytes, _part_bytes(staged), _freed_parts(staged))


def missing_parts(staged: StagedFile) -> list[PartRange]:
    """Return the parts of the present content that the origin does not have."""
    parts = {} if staged.upload is None else staged.upload.parts
    return [
        each
        for each in _ranges_of(staged)
        if (part := parts.get(each.number)) is None or part[1:3] != each[1:]
    ]


def full_part_after(size_bytes: int) -> int:
    """Return the size at which a new file of `size_bytes` has one full part more."""
    size = part_bytes(size_bytes + 1)
    return (size_bytes // size + 1) * size


def attributes_of(posix: Posix, mtime_ns: int | None = None) -> Attributes:
    """Return the attributes that travel with an object."""
    uid, gid, mode = posix
    return Attributes(
        None if mode == UNKNOWN_MODE else mode,
        None if uid == UNKNOWN_ID else uid,
        None if gid == UNKNOWN_ID else gid,
        mtime_ns,
    )
