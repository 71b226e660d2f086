"""Writes to directories of this machine (`file://`): hidden temporary files that get their names.

A file is written in full beside its place, under a name that listings leave out, and synced. Then
it gets its name in one step: with link(2) if nothing may be there, else with rename(2). So no
reader sees a mix, and what has been acknowledged survives a power cut.

The kernel has no rename that depends on a version. So the version is compared just before, under a
lock (flock) of the directory. The lock excludes other mounts of cachefs on this machine, but not
other programs.
"""

import contextlib
import errno
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import trio

from cachefs.errors import (
    AccessDeniedError,
    ConflictError,
    NotADirError,
    NotEmptyError,
    NotFoundError,
    OriginError,
    OriginFullError,
    OriginUnavailableError,
    QuotaError,
    reason_of,
)
from cachefs.origin.fsspec.local_files import Describe, LocalFiles, hidden_digits
from cachefs.origin.fsspec.local_identity import acting_as, can_act
from cachefs.origin.fsspec.local_steps import Refused, Task
from cachefs.origin.fsspec.local_tree import ConfinedFileSystem, is_hidden
from cachefs.origin.names import is_name
from cachefs.origin.on_behalf import present_caller
from cachefs.origin.writable import (
    NO_ATTRIBUTES,
    Ask,
    Attributes,
    Condition,
    Content,
    Guarantees,
    PartTag,
    Upload,
    WritableOrigin,
    WriteCounters,
    WriteKind,
    ask_once,
    content_of,
    new_write_id,
)
from cachefs.types import Buffer, Directory, ObjectMeta

log = logging.getLogger(__name__)

T = TypeVar("T")

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ETXTBSY)
_FULL = {errno.ENOSPC: OriginFullError, errno.EDQUOT: QuotaError}
_DEFINITE = (errno.EFBIG, errno.EXDEV, errno.ENAMETOOLONG)


class LocalWriter(WritableOrigin):
    """Writes below one directory. `subject` names a path in messages, `describe` gives the version
    of a file from its `info`."""

    acts_for_callers = True
    can_rename = True
    keeps_attributes = True
    leaves_rest = True
    repeats_versions = True

    def __init__(
        self,
        fs: ConfinedFileSystem,
        root: str,
        describe: Describe,
        subject: Callable[[str], str],
        limiter: trio.CapacityLimiter,
        counters: WriteCounters,
    ) -> None:
        # Nothing in the kernel makes a version part of a rename.
        self.guarantees = Guarantees(
            put_version=False, complete_version=False, copy_version=False, delete_version=False
        )
        self._tree = LocalFiles(fs, root, describe)
        self._subject = subject
        self._limiter = limiter
        self._counters = counters

    def can_have(self, path: str) -> bool:
        """See `WritableOrigin.can_have`."""
        return all(is_name(name) and not is_hidden(name) for name in path.split("/"))

    async def set_attributes(
        self, path: str, attributes: Attributes, version: str | None = None
    ) -> ObjectMeta | None:
        """See `WritableOrigin.set_attributes`."""
        return await self._call(path, partial(self._tree.set_attributes, path, attributes, version))

    async def check_writable(self, path: str = "", ask: Ask = ask_once) -> Guarantees:
        """See `WritableOrigin.check_writable`."""
        if os.geteuid() == 0 and not await trio.to_thread.run_sync(can_act):
            log.warning(
                "changes of other users than root may be refused: to make them with the rights of "
                "each user, cachefs needs CAP_SETUID, CAP_SETGID, CAP_CHOWN and CAP_FOWNER"
            )
        keeps_ids, links = await self._call(path, partial(self._tree.probe, path))
        self.guarantees = Guarantees(
            put_absent=links,
            put_version=False,
            complete_absent=links,
            complete_version=False,
            copy_absent=links,
            copy_version=False,
            delete_version=False,
            keeps_write_id=keeps_ids,
        )
        return self.guarantees

    async def put(
        self,
        path: str,
        body: Buffer | Content,
        condition: Condition | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
        write_id: str | None = None,
    ) -> ObjectMeta:
        """See `WritableOrigin.put`."""
        upload = _new_upload(path, write_id)
        content = content_of(body)
        put = partial(self._tree.put, upload, content, condition, attributes)
        meta = await self._call(path, put, "puts")
        self._counters.sent_bytes += content.size_bytes
        return meta

    async def written_by(self, path: str, write_id: str) -> ObjectMeta | None:
        """See `WritableOrigin.written_by`."""
        return await self._call(path, partial(self._tree.written_by, path, write_id))

    async def start_upload(
        self, path: str, attributes: Attributes = NO_ATTRIBUTES, write_id: str | None = None
    ) -> Upload:
        """See `WritableOrigin.start_upload`."""
        upload = _new_upload(path, write_id)
        await self._call(path, partial(self._tree.start, upload, attributes), "uploads")
        return upload

    async def put_part(
        self, upload: Upload, number: int, offset: int, body: Buffer | Content
    ) -> PartTag:
        """See `WritableOrigin.put_part`. Parts may not overlap."""
        content = content_of(body)
        put = partial(self._tree.put_part, upload, number, offset, content)
        tag = await self._call(upload.path, put, "parts")
        self._counters.sent_bytes += content.size_bytes
        return tag

    async def copy_part(
        self, upload: Upload, number: int, offset: int, path: str, meta: ObjectMeta, length: int
    ) -> PartTag:
        """See `WritableOrigin.copy_part`."""
        _check(self._subject, path)
        return await self._call(
            upload.path,
            partial(self._tree.copy_part, upload, number, offset, path, meta, length),
            "copies",
        )

    async def complete(
        self,
        upload: Upload,
        parts: Sequence[PartTag],
        condition: Condition | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> ObjectMeta:
        """See `WritableOrigin.complete`."""
        size_bytes = sum(part.size_bytes for part in parts)
        complete = partial(self._tree.complete, upload, size_bytes, condition, attributes)
        return await self._call(upload.path, complete, "uploads")

    async def parts(self, upload: Upload) -> list[PartTag]:
        """See `WritableOrigin.parts`."""
        return await self._call(upload.path, partial(self._tree.parts, upload), "uploads")

    async def abort(self, upload: Upload) -> None:
        """See `WritableOrigin.abort`."""
        with contextlib.suppress(NotFoundError):
            await self._call(upload.path, partial(self._tree.abort, upload), "uploads")

    async def abort_started(self, upload: Upload, began_s: float, ended_s: float) -> None:
        """See `WritableOrigin.abort_started`. The write id decides, not the time."""
        await self.remove_rest(upload.path, upload.write_id)

    async def remove_rest(self, path: str, write_id: str) -> None:
        """See `WritableOrigin.remove_rest`."""
        with contextlib.suppress(NotFoundError, NotADirError):
            await self._call(path, partial(self._tree.remove_rest, path, write_id))

    async def copy(
        self,
        path: str,
        meta: ObjectMeta,
        target: str,
        condition: Condition | None = None,
        write_id: str | None = None,
    ) -> ObjectMeta:
        """See `WritableOrigin.copy`."""
        _check(self._subject, path)
        upload = _new_upload(target, write_id)
        copy = partial(self._tree.copy, path, meta, upload, condition)
        return await self._call(target, copy, "copies")

    async def rename(self, path: str, target: str, condition: Condition | None = None) -> None:
        """See `WritableOrigin.rename`."""
        _check(self._subject, target)
        await self._call(path, partial(self._tree.rename, path, target, condition), "copies")

    async def delete(self, path: str, condition: Condition | None = None) -> None:
        """See `WritableOrigin.delete`."""
        with contextlib.suppress(NotFoundError):
            await self._call(path, partial(self._tree.delete, path, condition), "deletes")

    async def delete_many(self, paths: Sequence[str]) -> dict[str, OriginError]:
        """See `WritableOrigin.delete_many`."""
        failed = {}
        for path in paths:
            try:
                if path.endswith("/"):
                    await self.remove_directory(path.rstrip("/"))
                else:
                    await self.delete(path)
            except OriginError as error:
                failed[path] = error
        return failed

    async def make_directory(
        self,
        path: str,
        attributes: Attributes = NO_ATTRIBUTES,
        *,
        is_new: bool = False,
        write_id: str | None = None,
    ) -> Directory | None:
        """See `WritableOrigin.make_directory`."""
        known = (write_id or new_write_id()) if is_new else None
        make = partial(self._tree.make_directory, path, attributes, known)
        return await self._call(path, make, "puts")

    def close(self) -> None:
        """Close what is open of uploads in parts."""
        self._tree.close()

    async def remove_directory(self, path: str) -> None:
        """See `WritableOrigin.remove_directory`."""
        with contextlib.suppress(NotFoundError):
            await self._call(path, partial(self._tree.remove_directory, path), "deletes")

    async def _call(self, path: str, work: Callable[[Task], T], kind: WriteKind | None = None) -> T:
        """Run `work` in a worker thread with the identity of the present caller, and count it as
        `kind`. Raises `OriginError`. If this task is cancelled, the thread gives up before its next
        step."""
        _check(self._subject, path)
        task = Task()

        def work_as_caller() -> T:
            with acting_as(present_caller()):
                return work(task)

        if kind is not None:
            self._counters.count(kind)
        try:
            return await trio.to_thread.run_sync(
                work_as_caller, limiter=self._limiter, abandon_on_cancel=True
            )
        except OSError as error:
            failure = _from_os(self._subject(path), error)
            self._counters.errors += not isinstance(failure, NotFoundError)
            raise failure from None
        except Refused as refused:
            raise refused.kind(f"{self._subject(path)} {refused}") from None
        finally:
            task.given_up = True


def _new_upload(path: str, write_id: str | None) -> Upload:
    known = write_id or new_write_id()
    return Upload(path, hidden_digits(known) + secrets.token_hex(8), known)


def _check(subject: Callable[[str], str], path: str) -> None:
    parts = path.split("/") if path else []
    if not all(is_name(part) for part in parts) or any(is_hidden(part) for part in parts):
        raise NotFoundError(f"{subject(path)!r} can't be a name")


def _from_os(subject: str, error: OSError) -> OriginError:
    """Return the exception for an error of the system."""
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"{subject} does not exist")
    if isinstance(error, NotADirectoryError):
        return NotADirError(f"{subject}: a part of the path is a file")
    why = reason_of(OSError(error.errno, error.strerror))
    if error.errno in _DENIED:
        return AccessDeniedError(f"{subject} can't be written ({why}): check its owner and mode")
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return NotEmptyError(f"{subject}: the directory has entries")
    if error.errno == errno.EISDIR:
        return ConflictError(f"{subject} is a directory")
    if error.errno in _FULL:
        return _FULL[error.errno](f"{subject} can't be written ({why}): free some space there")
    kind = OriginError if error.errno in _DEFINITE else OriginUnavailableError
    return kind(f"{subject} can't be written ({why})")
