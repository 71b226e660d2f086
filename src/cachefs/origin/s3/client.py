"""S3, OSS and compatible stores.

A path is a key below the mounted prefix. An object's version is its ETag. Every GET of a strong
ETag sends it as If-Match. The ETag of the answer is compared too, because a server may ignore the
header and send other bytes.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import trio

from cachefs.errors import (
    AccessDeniedError,
    BadDataError,
    CredentialsError,
    NotADirError,
    NotFoundError,
    ObjectChangedError,
    OriginError,
)
from cachefs.origin.base import Learned, Origin, OriginCounters
from cachefs.origin.body import Body
from cachefs.origin.early_call import EarlyTask
from cachefs.origin.http.wire import Wire
from cachefs.origin.names import Pages, is_key_name
from cachefs.origin.options import CHECK_DEADLINE_S, LISTING_PATIENCE_S, OriginOptions
from cachefs.origin.s3 import digest, objects
from cachefs.origin.s3 import errors as s3_errors
from cachefs.origin.s3.bucket_reader import BucketReader, threads
from cachefs.origin.s3.config import S3Target, check_ca_file, new_session, resolve_target
from cachefs.origin.s3.credential_files import choose_source
from cachefs.origin.s3.credentials import BotocoreSource, CredentialProvider
from cachefs.origin.s3.lister import PageRequest, S3Lister
from cachefs.origin.s3.listing import next_token, parse_page
from cachefs.origin.s3.loop_credentials import LoopCredentials
from cachefs.origin.s3.oss import oss_credential_provider, resolve_oss
from cachefs.origin.s3.pages import EMPTY_PAGES, PagedListing, TreeShapes
from cachefs.origin.s3.versions import Versions, is_strong, is_version, version_by_time
from cachefs.origin.s3.writing.sender import Sender
from cachefs.origin.s3.writing.writer import S3Writer
from cachefs.types import READER_TURN, Buffer, Entry, ObjectMeta, Reply, Turn

T = TypeVar("T")

log = logging.getLogger(__name__)

_KEY_MAX_BYTES = 1024
_REST_S = 10.0
"""After a failed read of many, for so long objects are read one by one."""
_MOST_IN_VAIN = 8
"""After so many quick reads in a row without bytes, too: some servers leave out what is expected of
each answer, and then each object would be asked for twice."""
_LITTLE_S = 0.1
_SMALL_BYTES = 256 << 10
"""Up to this size the request costs more than the bytes. Comparing the bytes with their MD5 takes
at most 0.5 ms on the loop."""


def open_s3(location: str, options: OriginOptions) -> "ObjectStoreOrigin":
    """Return the origin for `BUCKET[/PREFIX]`. Sends no request. Raises `UsageError`."""
    session = new_session(options.profile)
    target = resolve_target(location, options, session)
    source = choose_source(options, lambda _: BotocoreSource(partial(new_session, options.profile)))
    return ObjectStoreOrigin(target, CredentialProvider(source), options)


def open_oss(location: str, options: OriginOptions) -> "ObjectStoreOrigin":
    """Do the same as `open_s3` for OSS."""
    return ObjectStoreOrigin(
        resolve_oss(location, options), oss_credential_provider(options), options
    )


class ObjectStoreOrigin(Origin):
    """The origin for one prefix of one bucket. It owns the connections of all its readers."""

    def __init__(
        self, target: S3Target, provider: CredentialProvider, options: OriginOptions
    ) -> None:
        self.url = target.url
        self.identity = target.identity
        self.counters = OriginCounters()
        self._target = target
        self._provider = provider
        self._options = options
        self._verifies = options.verify_origin == "auto"
        self.shapes = TreeShapes()
        self.learned = Learned()
        self.versions = Versions(target.endpoint, self.learned)
        check_ca_file(target)
        self._wire = Wire(threads(), options.max_threads)
        credentials = LoopCredentials(provider)
        self._reader = BucketReader(target, self._wire, credentials, options)
        self._lister = S3Lister(self._reader)
        self._rests_until = float("-inf")
        """Until then, loads read one object at a time, and `begin_read` begins none."""
        self._in_vain = 0
        """The latest quick reads that brought no bytes."""
        writes = BucketReader(target, self._wire, credentials, options)
        self._sender = Sender(writes, options, self.counters, self._lister)
        self._writer = S3Writer(
            self._sender, self._lister, self.versions, self.checked_key, self._subject
        )

    @property
    def writer(self) -> S3Writer:
        """See `Origin.writer`."""
        return self._writer

    async def check(self) -> None:
        """See `Origin.check`. Costs one LIST of one key."""
        target = self._target
        with trio.move_on_after(CHECK_DEADLINE_S) as scope:
            if not await self._has_keys(target.prefix) and target.prefix:
                log.warning(
                    "there is nothing under %s at %s; an empty directory is shown until there is",
                    target.url,
                    target.endpoint,
                )
        if scope.cancelled_caught:
            self.counters.errors += 1
            if self._provider.are_missing:
                raise CredentialsError(
                    f"{target.url} can't be read: nothing has given credentials in time: "
                    f"{self._provider.advice}"
                )
            raise s3_errors.unreachable(target, target.url)

    async def stat(self, path: str) -> ObjectMeta | None:
        """See `Origin.stat`. Costs one HEAD, and for anything but a non-empty object one more LIST
        of one key."""
        if not path:
            return None
        below = self.checked_key(path) + "/"
        try:
            meta = await self._head(path)
        except NotFoundError as error:
            if await self._has_keys(below):
                return None
            raise error from None
        except AccessDeniedError as error:
            await self._explain_denial(path, error)
            return None
        if not meta.size_bytes and await self._has_keys(below):
            return None
        return meta

    async def stat_and_read(self, path: str) -> tuple[ObjectMeta | None, Buffer | None]:
        """See `Origin.stat_and_read`. Sends one GET of at most `_SMALL_BYTES` instead of a HEAD and
        drops the bytes of larger objects. In all other cases it does what `stat` does."""
        if not path:
            return None, None
        key = self.checked_key(path)
        self.counters.gets += 1
        try:
            found = await objects.look_up(self._reader, key, _SMALL_BYTES)
        except NotFoundError as error:
            if await self._has_keys(key + "/"):
                return None, None
            raise error from None
        except OriginError:
            self.counters.errors += 1
            raise
        self._move()
        if found is None or not found.meta.size_bytes:
            return await self.stat(path), None
        self.counters.get_bytes += len(found.data)
        meta = self.versions.told(found.meta)
        md5 = self._md5_of(meta)
        is_whole = len(found.data) == meta.size_bytes
        return meta, found.data if is_whole and md5 in (None, found.md5) else None

    async def _explain_denial(self, path: str, error: AccessDeniedError) -> None:
        """Return if a denied HEAD was for a directory. Raises `NotFoundError` if there is no
        such key (see `S3Lister.has_key`), and else `error`. Policies often allow to list a
        directory and to read only below it."""
        key = self.checked_key(path)
        try:
            if await self._has_keys(key + "/"):
                return
            self.counters.lists += 1
            is_there = await self._counted(self._lister.has_key(key))
        except AccessDeniedError:
            raise error from None
        if is_there:
            raise error
        raise NotFoundError(f"{self._subject(path)} does not exist: no listing shows it")

    async def stat_unlisted(self, path: str) -> ObjectMeta | None:
        """See `Origin.stat_unlisted`. Costs one HEAD."""
        return await self._head(path) if path else None

    def list_dir(self, path: str, below: dict[str, list[Entry]] | None = None) -> Pages:
        """See `Origin.list_dir`. Costs one LIST per 1,000 keys; the next page is in flight while
        the caller uses this one. For `below` see `PagedListing`."""
        return Pages(PagedListing(self, path, below).next_page)

    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        """See `Origin.read`. Costs one GET."""
        return await self.read_body(path, meta, offset, length, None)

    async def read_body(
        self, path: str, meta: ObjectMeta, offset: int, length: int, body: Body | None
    ) -> Buffer:
        """See `Origin.read_body`. If the object has another ETag than it was listed with, one HEAD
        and perhaps one LIST show whether it has changed, or the store just tells two ETags."""
        meta = self.versions.told(meta)
        try:
            return await self._read_version(path, meta, offset, length, body)
        except ObjectChangedError:
            if not await self._has_two_e_tags(path, meta):
                raise
        self.versions.tell_by_time()
        meta = self.versions.told(meta)
        return await self._read_version(path, meta, offset, length, body)

    async def _has_two_e_tags(self, path: str, meta: ObjectMeta) -> bool:
        """Whether the store tells one ETag of an object in listings, and another one in the object
        itself. `meta` is what was listed."""
        key = self.checked_key(path)
        parent = key[: len(key) - len(path.rpartition("/")[2])]
        try:
            found = await self.stat_unlisted(path)
            if found is None or version_by_time(found) != version_by_time(meta):
                return False
            body = await self.fetch_page(self.start_page(PageRequest(key, "/", max_keys=1)))
            page = await trio.to_thread.run_sync(parse_page, body, parent)
        except OriginError:
            return False
        is_listed = page.entries[:1] == [Entry(key.removeprefix(parent), meta)]
        return is_listed and not is_version(meta.version, found)

    async def _read_version(
        self, path: str, meta: ObjectMeta, offset: int, length: int, body: Body | None
    ) -> Buffer:
        key = self.checked_key(path)
        is_whole = (offset, length) == (0, meta.size_bytes)
        md5 = self._md5_of(meta) if is_whole else None
        self.counters.gets += 1
        got = await self._counted(objects.get(self._reader, key, meta, offset, length, md5, body))
        if got.version != meta.version:
            raise ObjectChangedError(f"{self._subject(path)} has changed since it was listed")
        if got.data is None:
            self.counters.errors += 1
            raise BadDataError(
                f"{self._subject(path)}: got {got.size_bytes} bytes instead of {length}"
            )
        self.counters.get_bytes += length
        if md5 is not None and not got.is_as_told:
            if body is not None:
                # If this call is cancelled before the cause is known, nobody may use the bytes.
                body.reject()
            await self._explain_mismatch(path, key, md5)
        return got.data

    def _md5_of(self, meta: ObjectMeta) -> bytes | None:
        """Return the MD5 to compare a whole object with, or None."""
        return digest.md5_in(meta.version, self._target.bucket) if self._verifies else None

    def begin_read(
        self,
        path: str,
        meta: ObjectMeta,
        on_read: Callable[[memoryview | None], None],
        reply: Reply | None = None,
    ) -> bool:
        """See `Origin.begin_read`. Costs one GET."""
        if not is_strong(meta.version) or self.versions.are_by_time or not self.reads_many:
            return False

        def take(data: memoryview | None, first_byte_s: float) -> None:
            if data is not None:
                self.counters.get_bytes += data.nbytes
                self.quickest_s = min(self.quickest_s or first_byte_s, first_byte_s)
            self._note_quick_read(data is not None)
            on_read(data)

        try:
            key = self.checked_key(path)
        except NotFoundError:
            return False
        md5 = self._md5_of(meta)
        if not objects.begin_get(self._reader, key, meta, md5, take, self._rest, reply):
            return False
        self.counters.gets += 1
        return True

    @property
    def sends(self) -> bool:
        """See `Origin.sends`."""
        return True

    def send(
        self, parts: Sequence[memoryview], reply: Reply, on_sent: Callable[[bool], None]
    ) -> bool:
        """See `Origin.send`."""
        try:
            self._wire.reply(parts, reply, lambda transfer: on_sent(transfer.is_replied))
        except OSError:
            return False
        return True

    def _note_quick_read(self, has_bytes: bool) -> None:
        self._in_vain = 0 if has_bytes else self._in_vain + 1
        if self._in_vain >= _MOST_IN_VAIN:
            self._in_vain = 0
            self._rest()

    def _rest(self) -> None:
        self._rests_until = trio.current_time() + _REST_S

    @property
    def reads_many(self) -> bool:
        """See `Origin.reads_many`."""
        return trio.current_time() >= self._rests_until

    async def read_many(
        self,
        wanted: Sequence[tuple[str, ObjectMeta]],
        at_a_time: int,
        stopped: Callable[[], bool],
        turn: Turn = READER_TURN,
    ) -> list[memoryview | None]:
        """See `Origin.read_many`. Costs one GET per object."""
        if not all(is_strong(meta.version) for _, meta in wanted):
            return [None] * len(wanted)
        asked = 0

        def ends() -> bool:
            nonlocal asked
            if stopped() or not self.reads_many:
                return True
            asked += 1
            return False

        def fail() -> None:
            self._rest()
            # The other answers have had enough time already.
            scope.deadline = min(scope.deadline, trio.current_time() + _LITTLE_S)

        items = [(self.checked_key(path), meta) for path, meta in wanted]
        found: list[tuple[memoryview, float] | None] = [None] * len(wanted)
        with trio.CancelScope() as scope:
            try:
                await objects.get_many(self._reader, items, at_a_time, ends, fail, found)
            except OriginError:  # `read` will report the cause
                fail()
        self.counters.gets += asked
        come = [each for each in found if each is not None]
        self.counters.get_bytes += sum(len(data) for data, _ in come)
        for _, first_byte_s in come:
            self.quickest_s = min(self.quickest_s or first_byte_s, first_byte_s)
        datas = [None if each is None else each[0] for each in found]
        md5s = [self._md5_of(meta) for _, meta in wanted]
        await trio.to_thread.run_sync(_drop_damaged, datas, md5s)
        return datas

    async def _explain_mismatch(self, path: str, key: str, md5: bytes) -> None:
        """Raise `BadDataError` unless a HEAD shows that the ETag is no MD5. In that case stop all
        comparing, because encryption usually covers a whole bucket."""
        self.counters.heads += 1
        headers = (await self._counted(self._reader.send("HEAD", key))).headers
        if digest.is_no_md5(headers, md5):
            self._verifies = False
            log.info("ETags in %s are no MD5s: what is read is not compared with them", self.url)
            return
        self.counters.errors += 1
        raise BadDataError(
            f"{self._subject(path)}: the bytes are not those of its ETag (if this store's ETags "
            "are no MD5s: --verify-origin off)"
        )

    async def aclose(self) -> None:
        """Close all connections."""
        self._wire.close()
        await trio.lowlevel.checkpoint()

    def _subject(self, path: str) -> str:
        return self._target.subject(path)

    def checked_key(self, path: str) -> str:
        """Return the key of `path`. Raises `NotFoundError`, without a request, if no such key can
        exist."""
        key = self._target.prefix + path
        fits = all(is_key_name(part) for part in path.split("/"))
        if not fits or len(key.encode("utf-8")) > _KEY_MAX_BYTES:
            raise NotFoundError(f"{self._subject(path)!r} can't be a key")
        return key

    def dir_prefix(self, path: str) -> str:
        """Return the prefix of all keys below a directory. Raises as `checked_key`."""
        return self.checked_key(path) + "/" if path else self._target.prefix

    async def _head(self, path: str) -> ObjectMeta:
        key = self.checked_key(path)
        self.counters.heads += 1
        return self.versions.told(await self._counted(objects.head(self._reader, key)))

    async def _counted(self, call: Awaitable[T]) -> T:
        """Return the result of `call`. Count its error, unless the store has just answered that the
        object is absent or has changed."""
        try:
            found = await call
        except (NotFoundError, ObjectChangedError):
            raise
        except OriginError:
            self.counters.errors += 1
            raise
        self._move()
        return found

    def _move(self) -> None:
        """If an answer has shown that the bucket is in another region, send all requests there."""
        target, self._reader.moved = self._reader.moved, None
        if target is None or target.region == self._target.region:
            return
        log.info("bucket %s is in region %s", target.bucket, target.region)
        self._target = self._reader.target = self._sender.target = target

    async def _has_keys(self, prefix: str) -> bool:
        """Whether any key begins with `prefix`. Costs one LIST of one key, and more only if the
        first pages have no key."""
        request = PageRequest(prefix, "/", max_keys=1)  # some policies allow no other form
        for _ in range(EMPTY_PAGES):
            body = await self.fetch_page(self.start_page(request))
            # A server may send more than one key; a long page would block the loop.
            parse = partial(parse_page, body, prefix)
            is_long = len(body) > _SMALL_BYTES
            page = await trio.to_thread.run_sync(parse) if is_long else parse()
            token = next_token(body)
            if page.keys or token in (None, request.token):
                return page.keys > 0
            request = request._replace(token=token)
        raise BadDataError(f"the listing of {prefix or '/'} has only pages without a key")

    def start_page(self, request: PageRequest) -> EarlyTask[bytes]:
        """Send one LIST now."""
        self.counters.lists += 1
        return EarlyTask(partial(self._lister.fetch, request, LISTING_PATIENCE_S))

    async def fetch_page(self, started: EarlyTask[bytes]) -> bytes:
        """Wait for the answer to a LIST and return it. Raises `OriginError`."""
        try:
            page = await started.get()
        except NotFoundError:
            raise
        except OriginError:
            self.counters.errors += 1
            raise
        self._move()
        return page

    async def no_such_dir(self, path: str) -> OriginError:
        """Return the error that explains a listing without any key. Costs one HEAD."""
        try:
            await self._head(path)
        except NotFoundError as error:
            return error
        except AccessDeniedError:
            return NotFoundError(f"{self._subject(path)} does not exist: no listing shows it")
        return NotADirError(f"{self._subject(path)} is an object, not a directory")


def _drop_damaged(found: list[memoryview | None], md5s: list[bytes | None]) -> None:
    """Replace objects by None that don't have the MD5 that is wanted. Many are hashed together,
    which the engine can't do while it receives them."""
    comparable = {
        number: data
        for number, (data, md5) in enumerate(zip(found, md5s, strict=True))
        if data is not None and md5 is not None
    }
    digests = digest.md5_of_each(list(comparable.values()))
    for number, md5 in zip(comparable, digests, strict=True):
        if md5 != md5s[number]:
            found[number] = None
