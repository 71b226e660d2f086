"""`S3Writer`: writes objects of S3 and OSS.

**In doubt.** The answer to a write may get lost after the write has succeeded, and the next try
then fails because of its condition. So each object has the id of the write that made it as user
metadata. Before a refusal is called a conflict, a HEAD shows whether the object is our own. For a
store that does not keep user metadata, the ETag decides, which must be the MD5 of the bytes (for an
upload in parts: the MD5 of the MD5s of the parts).

**Stores without conditions.** What `guarantees` denies is compared with a HEAD before the write.
"""

import contextlib
import html
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import trio

from cachefs.errors import (
    AccessDeniedError,
    BadDataError,
    ConflictError,
    NotFoundError,
    NotOfferedError,
    ObjectChangedError,
    OriginError,
    OriginUnavailableError,
    RefusedError,
    UploadLostError,
)
from cachefs.origin.s3 import bodies
from cachefs.origin.s3.lister import S3Lister
from cachefs.origin.s3.versions import Versions, is_strong, is_version
from cachefs.origin.s3.writing import messages, probe
from cachefs.origin.s3.writing.markers import Markers
from cachefs.origin.s3.writing.sender import DIRECTORY, Sender
from cachefs.origin.writable import (
    NO_ATTRIBUTES,
    UNCHECKED,
    Ask,
    Attributes,
    BufferContent,
    Condition,
    Content,
    Guarantees,
    PartTag,
    Upload,
    WritableOrigin,
    ask_once,
    content_of,
    new_write_id,
)
from cachefs.types import Buffer, Directory, ObjectMeta

_MOST_COPY_BYTES = 5 << 30
"""S3 copies a larger object only in parts."""
_COPY_PART_BYTES = 1 << 30
_COPIES_AT_A_TIME = 8
_MOST_DELETED = 1000
_DELETES_AT_A_TIME = 32
_LONGEST_E_TAG = 1024
_CLOCK_STEP_S = 1.5
"""Stores tell times in whole seconds."""


class S3Writer(WritableOrigin):
    """Writes below one prefix of one bucket. `checked_key` returns the key of a path. It owns
    `sender`; `lister` is the origin's."""

    checks_parts = True
    reads_copies = True

    def __init__(
        self,
        sender: Sender,
        lister: S3Lister,
        versions: Versions,
        checked_key: Callable[[str], str],
        subject: Callable[[str], str],
    ) -> None:
        self.guarantees = UNCHECKED
        self._sender = sender
        self._lister = lister
        self._versions = versions
        self._key = checked_key
        self._subject = subject
        self._is_oss = sender.target.scheme == "oss"
        self._deletes_singly = False
        """Whether the store has refused to delete several keys in one request."""
        self._single_deletes = trio.CapacityLimiter(_DELETES_AT_A_TIME)
        self._markers = Markers(sender, lister, checked_key, subject)

    @property
    def repeats_versions(self) -> bool:  # type: ignore[override]
        """See `WritableOrigin.repeats_versions`."""
        return self._versions.are_by_time

    async def check_key(self) -> str:
        """See `WritableOrigin.check_key`."""
        return await self._sender.identity()

    async def check_writable(self, path: str = "", ask: Ask = ask_once) -> Guarantees:
        """See `WritableOrigin.check_writable`. Costs about 30 requests."""
        # Other writes may be under way. They must not rely on what is only tried here.
        trial = S3Writer(self._sender, self._lister, self._versions, self._key, self._subject)
        trial.guarantees = Guarantees()
        self.guarantees = await probe.find_guarantees(trial, path, ask)
        return self.guarantees

    async def put(
        self,
        path: str,
        body: Buffer | Content,
        condition: Condition | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
        write_id: str | None = None,
    ) -> ObjectMeta:
        """See `WritableOrigin.put`. Costs one PUT."""
        key = self._key(path)
        content = content_of(body)
        write_id = write_id or new_write_id()
        e_tag = None
        if not self.guarantees.keeps_write_id:
            md5 = await self._sender.in_thread(partial(bodies.md5_of, content))
            e_tag = f'"{md5.hex()}"'
        headers, done = await self._begin(key, condition, self._puts(condition), write_id, e_tag)
        if done is not None:
            return done
        headers |= messages.metadata(attributes, write_id)
        try:
            answer = await self._sender.send("PUT", key, "", headers, content)
        except (ConflictError, NotFoundError) as error:
            return await self._own_or_raise(key, write_id, e_tag, condition, error)
        found = answer.headers.get("etag", "")
        return await self._stored(path, answer.headers, found, content.size_bytes)

    async def written_by(self, path: str, write_id: str) -> ObjectMeta | None:
        """See `WritableOrigin.written_by`. Costs one HEAD."""
        found = await self._sender.head(self._key(path))
        if found is None or messages.write_id_of(found) != write_id:
            return None
        return self._told(found)

    async def start_upload(
        self, path: str, attributes: Attributes = NO_ATTRIBUTES, write_id: str | None = None
    ) -> Upload:
        """See `WritableOrigin.start_upload`. If the answer is lost, an upload without parts remains
        at the store."""
        write_id = write_id or new_write_id()
        return await self._start(path, write_id, messages.metadata(attributes, write_id))

    async def _start(self, path: str, write_id: str, headers: dict[str, str]) -> Upload:
        query = messages.query_of(uploads="")
        answer = await self._sender.send("POST", self._key(path), query, headers)
        return Upload(path, messages.upload_id_in(answer.body), write_id)

    async def put_part(
        self, upload: Upload, number: int, offset: int, body: Buffer | Content
    ) -> PartTag:
        """See `WritableOrigin.put_part`. Costs one PUT."""
        content = content_of(body)
        query = messages.query_of(partNumber=str(number), uploadId=upload.upload_id)
        answer = await self._sender.send("PUT", self._key(upload.path), query, None, content)
        return PartTag(number, content.size_bytes, _quoted(answer.headers.get("etag", "")))

    async def copy_part(
        self, upload: Upload, number: int, offset: int, path: str, meta: ObjectMeta, length: int
    ) -> PartTag:
        """See `WritableOrigin.copy_part`. Costs one UploadPartCopy."""
        query = messages.query_of(partNumber=str(number), uploadId=upload.upload_id)
        headers = await self._source(path, meta)
        headers["x-amz-copy-source-range"] = f"bytes={offset}-{offset + length - 1}"
        try:
            answer = await self._sender.send("PUT", self._key(upload.path), query, headers)
        except ConflictError:
            raise self._changed(path) from None
        return PartTag(number, length, messages.e_tag_in(answer.body))

    async def complete(
        self,
        upload: Upload,
        parts: Sequence[PartTag],
        condition: Condition | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> ObjectMeta:
        """See `WritableOrigin.complete`. Costs one CompleteMultipartUpload."""
        key = self._key(upload.path)
        e_tag = messages.expected_e_tag(parts)
        guaranteed = self.guarantees.complete_absent
        if condition is not None and condition.version is not None:
            guaranteed = self.guarantees.complete_version
        headers, done = await self._begin(key, condition, guaranteed, upload.write_id, e_tag)
        if done is not None:
            return done
        query = messages.query_of(uploadId=upload.upload_id)
        body = BufferContent(messages.completion(parts))
        try:
            answer = await self._sender.send("POST", key, query, headers, body)
        except (ConflictError, NotFoundError) as error:
            return await self._own_or_raise(key, upload.write_id, e_tag, condition, error)
        size_bytes = sum(part.size_bytes for part in parts)
        e_tag = messages.e_tag_in(answer.body)
        return await self._stored(upload.path, answer.headers, e_tag, size_bytes)

    async def parts(self, upload: Upload) -> list[PartTag]:
        """See `WritableOrigin.parts`. Costs one request for each 1,000 parts."""
        found: dict[int, PartTag] = {}
        doubtful: set[int] = set()  # SeaweedFS lists a part that was written twice as two parts
        after: str | None = "0"
        while after is not None:
            query = messages.query_of(part_number_marker=after, uploadId=upload.upload_id)
            answer = await self._sender.send("GET", self._key(upload.path), query)
            page = messages.parts_in(answer.body)
            for part in page.parts:
                if found.setdefault(part.number, part) != part:
                    doubtful.add(part.number)
            if page.after is not None and int(page.after) <= int(after):
                raise BadDataError("the list of the parts of an upload has no end")
            after = page.after if page.parts else None
        return [found[number] for number in sorted(found.keys() - doubtful)]

    async def abort(self, upload: Upload) -> None:
        """See `WritableOrigin.abort`. Costs one request."""
        query = messages.query_of(uploadId=upload.upload_id)
        try:
            await self._sender.send("DELETE", self._key(upload.path), query)
        except NotFoundError:
            return

    async def abort_started(self, upload: Upload, began_s: float, ended_s: float) -> None:
        """See `WritableOrigin.abort_started`. Costs one LIST of uploads, and two requests if there
        is one. No list shows metadata, so the time decides."""
        key = self._key(upload.path)
        answer = await self._sender.send("GET", "", messages.query_of(prefix=key, uploads=""))
        now_s = messages.seconds_of(answer.headers.get("date"))
        found = [
            upload_id
            for upload_id, began_at_s in messages.uploads_in(answer.body, key)
            if ended_s - _CLOCK_STEP_S <= now_s - began_at_s <= began_s + _CLOCK_STEP_S
        ]
        if len(found) != 1:
            return
        known = upload._replace(upload_id=found[0])
        with contextlib.suppress(NotFoundError):
            if not await self.parts(known):  # another machine has begun to send it
                await self.abort(known)

    async def copy(
        self,
        path: str,
        meta: ObjectMeta,
        target: str,
        condition: Condition | None = None,
        write_id: str | None = None,
    ) -> ObjectMeta:
        """See `WritableOrigin.copy`. Costs one CopyObject, and one HEAD more with a condition.
        Above 5 GiB it costs a request per GiB."""
        write_id = write_id or new_write_id()
        if meta.size_bytes <= _MOST_COPY_BYTES:
            try:
                return await self._copy_whole(path, meta, target, condition, write_id)
            except RefusedError:  # the store may allow smaller copies only
                if meta.size_bytes <= _COPY_PART_BYTES:
                    raise
        return await self._copy_in_parts(path, meta, target, condition, write_id)

    async def _copy_whole(
        self,
        path: str,
        meta: ObjectMeta,
        target: str,
        condition: Condition | None,
        write_id: str,
    ) -> ObjectMeta:
        key = self._key(target)
        guaranteed = self.guarantees.copy_absent
        if condition is not None and condition.version is not None:
            guaranteed = self.guarantees.copy_version
        headers, done = await self._begin(key, condition, guaranteed, write_id, None)
        if done is not None:
            return done
        headers |= await self._source(path, meta)
        if condition is not None:
            headers |= await self._metadata_of(path, meta, write_id)
            headers["x-amz-metadata-directive"] = "REPLACE"
        try:
            answer = await self._sender.send("PUT", key, "", headers)
        except ConflictError as error:
            await self._metadata_of(path, meta, write_id)  # or is it the source that has changed?
            return await self._own_or_raise(key, write_id, None, condition, error)
        e_tag = messages.e_tag_in(answer.body)
        return await self._stored(target, answer.headers, e_tag, meta.size_bytes)

    async def _copy_in_parts(
        self,
        path: str,
        meta: ObjectMeta,
        target: str,
        condition: Condition | None,
        write_id: str,
    ) -> ObjectMeta:
        upload = await self._start(target, write_id, await self._metadata_of(path, meta, write_id))
        tags: list[PartTag] = []
        turns = trio.CapacityLimiter(_COPIES_AT_A_TIME)
        failures: list[OriginError] = []

        async def copy_one(number: int, offset: int) -> None:
            length = min(_COPY_PART_BYTES, meta.size_bytes - offset)
            try:
                async with turns:
                    tags.append(await self.copy_part(upload, number, offset, path, meta, length))
            except OriginError as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                starts = range(0, meta.size_bytes, _COPY_PART_BYTES)
                for number, offset in enumerate(starts, 1):
                    nursery.start_soon(copy_one, number, offset)
            if failures:
                raise failures[0]
            return await self.complete(upload, tags, condition)
        except BaseException:
            with trio.move_on_after(5) as scope:
                scope.shield = True
                with contextlib.suppress(OriginError):  # the first error says more
                    await self.abort(upload)
            raise

    async def delete(self, path: str, condition: Condition | None = None) -> None:
        """See `WritableOrigin.delete`. Costs one DELETE."""
        key = self._key(path)
        headers = {}
        if condition is not None:
            is_checked = condition.version is not None and self.guarantees.delete_version
            if is_checked and not self._is_by_time(condition):
                headers = messages.condition_headers(condition, self._is_oss)
            else:
                found = await self._sender.head(key)
                if found is None:
                    return
                if not is_version(condition.version, messages.described(found)):
                    raise self._conflict(path)
        try:
            await self._sender.send("DELETE", key, "", headers)
        except NotFoundError as error:
            if isinstance(error, UploadLostError) or await self._sender.head(key) is None:
                return
            raise
        except ConflictError:
            if await self._sender.head(key) is not None:
                raise

    async def delete_many(self, paths: Sequence[str]) -> dict[str, OriginError]:
        """See `WritableOrigin.delete_many`. Costs one DeleteObjects for each 1,000 paths, or one
        DELETE for each if the store has no DeleteObjects."""
        failed: dict[str, OriginError] = {}
        by_key: dict[str, str] = {}
        for path in paths:
            try:
                by_key[self._key(path.rstrip("/")) + ("/" if path.endswith("/") else "")] = path
            except NotFoundError:
                continue  # there can be no such object
        keys = list(by_key)
        for start in range(0, len(keys), _MOST_DELETED):
            some = keys[start : start + _MOST_DELETED]
            try:
                refused = await self._delete_keys(some)
            except OriginError as error:
                if not start:
                    raise
                refused = dict.fromkeys(some, error)
            failed |= {by_key[key]: error for key, error in refused.items() if key in by_key}
        return failed

    async def _delete_keys(self, keys: Sequence[str]) -> dict[str, OriginError]:
        """Delete keys together, or one by one if the store does not do it together. Return the
        errors of those that it refuses to delete. Raises `OriginError` if none could be deleted, or
        if the deletion should be repeated."""
        if self._deletes_singly:
            return await self._delete_singly(keys)
        body = BufferContent(messages.deletion(keys))
        try:
            answer = await self._sender.send("POST", "", messages.query_of(delete=""), None, body)
            codes = messages.not_deleted(answer.body, self._is_oss)
        except (RefusedError, AccessDeniedError, NotFoundError, BadDataError) as error:
            failed = await self._delete_singly(keys)
            self._deletes_singly = isinstance(error, NotOfferedError) or not failed
            return failed
        if not codes.keys() <= set(keys):  # it writes them in another way: which ones are meant?
            return await self._delete_singly(keys)
        singly = [key for key, code in codes.items() if code != "AccessDenied"]
        return await self._delete_singly(singly) | {
            key: self._sender.failure_of_code(self._subject_of(key), code)
            for key, code in codes.items()
            if code == "AccessDenied"
        }

    async def _delete_singly(self, keys: Sequence[str]) -> dict[str, OriginError]:
        """Do `_delete_keys` with a request for each key."""
        failed: dict[str, OriginError] = {}

        async def delete(key: str) -> None:
            async with self._single_deletes:
                try:
                    await self._sender.send("DELETE", key)
                except NotFoundError:
                    return
                except OriginError as error:
                    failed[key] = error

        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(delete, key)
        for error in failed.values():
            if isinstance(error, OriginUnavailableError):
                raise error
        return failed

    async def make_directory(
        self,
        path: str,
        attributes: Attributes = NO_ATTRIBUTES,
        *,
        is_new: bool = False,
        write_id: str | None = None,
    ) -> Directory | None:
        """See `WritableOrigin.make_directory`. Costs one HEAD and one PUT; with `is_new` one LIST
        more, and one HEAD more for a directory that exists."""
        made = messages.metadata(attributes, write_id or new_write_id(), DIRECTORY)
        if is_new:
            await self._markers.make_new(path, made, checks=self.guarantees.put_absent)
        else:
            await self._markers.make(path, made)
        return None

    async def remove_directory(self, path: str) -> None:
        """See `WritableOrigin.remove_directory`. Costs one LIST and one DELETE."""
        await self._markers.remove(path)

    # -- conditions ----------------------------------------------------------------------------

    def _puts(self, condition: Condition | None) -> bool:
        """Whether the store itself checks the condition of a PUT."""
        if condition is None:
            return True
        found = self.guarantees
        return found.put_absent if condition.version is None else found.put_version

    async def _begin(
        self,
        key: str,
        condition: Condition | None,
        guaranteed: bool,
        write_id: str,
        e_tag: str | None,
    ) -> tuple[dict[str, str], ObjectMeta | None]:
        """Return the headers for a condition, or, if the store does not check it, compare first.
        The second value is the object if this write has made it already. Raises `ConflictError`."""
        if condition is None or (guaranteed and not self._is_by_time(condition)):
            return messages.condition_headers(condition, self._is_oss), None
        found = await self._sender.head(key)
        if found is None:
            if condition.version is None:
                return {}, None
            raise self._conflict_at(key)
        if self._is_own(found, write_id, e_tag):
            return {}, self._told(found)
        meta = messages.described(found)
        if not is_version(condition.version, meta):
            raise self._conflict_at(key)
        present = Condition(meta.version) if guaranteed and is_strong(meta.version) else None
        return messages.condition_headers(present, self._is_oss), None

    @staticmethod
    def _is_by_time(condition: Condition) -> bool:
        """Whether no header can hold the version of a condition, which consists of time and
        size."""
        return condition.version is not None and not is_strong(condition.version)

    async def _own_or_raise(
        self,
        key: str,
        write_id: str,
        e_tag: str | None,
        condition: Condition | None,
        error: ConflictError | NotFoundError,
    ) -> ObjectMeta:
        """Return the object if this write has made it, though the store has refused a try."""
        found = await self._sender.head(key)
        if found is not None and self._is_own(found, write_id, e_tag):
            return self._told(found)
        is_upload_gone = isinstance(error, UploadLostError)
        if isinstance(error, NotFoundError) and condition is not None and not is_upload_gone:
            raise self._conflict_at(key) from None  # the version that it is based on is gone
        raise error

    def _is_own(self, headers: dict[str, str], write_id: str, e_tag: str | None) -> bool:
        if self.guarantees.keeps_write_id:
            return messages.write_id_of(headers) == write_id
        return messages.is_same_e_tag(headers.get("etag"), e_tag)

    async def _source(self, path: str, meta: ObjectMeta) -> dict[str, str]:
        """Return the headers that name the source of a copy. Costs a HEAD for a version that
        consists of time and size. Raises `ObjectChangedError`, `NotFoundError`."""
        version = meta.version
        if not is_strong(version):
            found = await self._sender.head(self._key(path))
            if found is None:
                raise NotFoundError(f"{self._subject(path)} does not exist")
            version = messages.described(found).version
            if not is_version(meta.version, messages.described(found)):
                raise self._changed(path)
        return messages.copy_source(self._sender.target.bucket, self._key(path), version)

    async def _metadata_of(self, path: str, meta: ObjectMeta, write_id: str) -> dict[str, str]:
        """Return the headers that give a copy of the version `meta` its metadata. Raises
        `ObjectChangedError`, `NotFoundError`."""
        found = await self._sender.head(self._key(path))
        if found is None:
            raise NotFoundError(f"{self._subject(path)} does not exist")
        if not is_version(meta.version, messages.described(found)):
            raise self._changed(path)
        return messages.metadata_again(found, write_id)

    async def metadata_of(self, path: str, meta: ObjectMeta) -> Attributes:
        """See `WritableOrigin.metadata_of`. Costs one HEAD."""
        found = await self._metadata_of(path, meta, "")
        return Attributes(headers=tuple(found.items()))

    async def _described(self, path: str) -> ObjectMeta:
        found = await self._sender.head(self._key(path))
        if found is None:
            raise NotFoundError(f"{self._subject(path)} does not exist")
        return self._told(found)

    async def _stored(
        self, path: str, headers: Mapping[str, str], e_tag: str, size_bytes: int
    ) -> ObjectMeta:
        """Return the metadata of what was written, of which `headers` and `e_tag` are the answer.
        Costs a HEAD if the version consists of the time, which is not in the answer."""
        if not e_tag or self._versions.are_by_time:
            return await self._described(path)
        return messages.written(headers, e_tag, size_bytes)

    def _told(self, found: Mapping[str, str]) -> ObjectMeta:
        return self._versions.told(messages.described(found))

    async def described(self, path: str) -> dict[str, str] | None:
        """Return the headers of the object at `path`, or None."""
        return await self._sender.head(self._key(path))

    async def abort_all(self, path: str) -> None:
        """Drop all uploads of one path. Costs one LIST of uploads, and one request for each."""
        key = self._key(path)
        answer = await self._sender.send("GET", "", messages.query_of(prefix=key, uploads=""))
        for upload_id, _ in messages.uploads_in(answer.body, key):
            await self.abort(Upload(path, upload_id, ""))

    def _changed(self, path: str) -> ObjectChangedError:
        return ObjectChangedError(f"{self._subject(path)} has changed since it was listed")

    def _conflict(self, path: str) -> ConflictError:
        return ConflictError(f"{self._subject(path)} has been changed, made or deleted meanwhile")

    def _conflict_at(self, key: str) -> ConflictError:
        return self._conflict(self._path_of(key))

    def _path_of(self, key: str) -> str:
        return key.removeprefix(self._sender.target.prefix)

    def _subject_of(self, key: str) -> str:
        return self._subject(self._path_of(key))


def _quoted(e_tag: str) -> str:
    if len(e_tag) > _LONGEST_E_TAG:
        raise BadDataError("the answer to a write has an ETag that is too long")
    return e_tag if e_tag.endswith('"') else f'"{html.unescape(e_tag)}"'
