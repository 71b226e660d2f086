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
from cachefs.origin.names import Pages, is_key_name
from cachefs.origin.options import CHECK_DEADLINE_S, LISTING_PATIENCE_S, OriginOptions
from cachefs.origin.s3 import digest, objects
from cachefs.origin.s3 import errors as s3_errors
from cachefs.origin.s3.bucket_reader import BucketReader
from cachefs.origin.s3.config import S3Target, check_ca_file, new_session, resolve_target
from cachefs.origin.s3.credential_files import choose_source
from cachefs.origin.s3.credentials import BotocoreSource, CredentialProvider
from cachefs.origin.s3.fast_path import wire as s3_wire
from cachefs.origin.s3.fast_path.direct_reader import DirectReader
from cachefs.origin.s3.fast_path.loop_reader import LoopReader
from cachefs.origin.s3.fast_path.small_reader import address_of
from cachefs.origin.s3.fast_path.tls import TlsConnector
from cachefs.origin.s3.fast_path.wire import Wanted
from cachefs.origin.s3.lister import PageRequest, S3Lister
from cachefs.origin.s3.listing import next_token, parse_page
from cachefs.origin.s3.loop_credentials import LoopCredentials
from cachefs.origin.s3.oss import oss_credential_provider, resolve_oss
from cachefs.origin.s3.pages import EMPTY_PAGES, PagedListing, TreeShapes
from cachefs.origin.s3.versions import Versions, is_strong, is_version, version_by_time
from cachefs.origin.s3.writing.sender import Sender
from cachefs.origin.s3.writing.writer import S3Writer
from cachefs.types import READER_TURN, Buffer, Entry, ObjectMeta, Turn
from cachefs.workers import Workers

T = TypeVar("T")

log = logging.getLogger(__name__)

_KEY_MAX_BYTES = 1024
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
        self._workers: Workers | None = None
        self.shapes = TreeShapes()
        self.learned = Learned()
        self.versions = Versions(target.endpoint, self.learned)
        check_ca_file(target)
        tls = None
        if target.base_url.startswith("https://"):
            tls = TlsConnector(*address_of(target), target.ca_file)
        self._reader = BucketReader(target, LoopCredentials(provider), options)
        self._lister = S3Lister(self._reader)
        self._direct = DirectReader(target, provider, options, tls)
        self._on_loop = LoopReader(target, provider, options, tls)
        self._sender = Sender(target, provider, options, tls, self.counters, self._lister)
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
        if not path or not self._on_loop.is_usable:
            return await self.stat(path), None
        key = self.checked_key(path)
        self.counters.gets += 1
        try:
            found = await self._on_loop.look_up(key, _SMALL_BYTES, self._subject(path))
        except NotFoundError as error:
            if await self._has_keys(key + "/"):
                return None, None
            raise error from None
        except OriginError:
            self.counters.errors += 1
            raise
        meta = None if found is None else s3_wire.described(found.headers)
        if found is None or meta is None or not meta.size_bytes:
            return await self.stat(path), None
        data = found.data
        self.counters.get_bytes += len(data)
        meta = self.versions.told(meta)
        md5 = self._md5_of(meta)
        is_whole = len(data) == meta.size_bytes
        if not is_whole or (md5 is not None and not digest.has_md5(data, md5)):
            return meta, None
        return meta, memoryview(data)

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
        """See `Origin.read`. Costs one GET. At most `_SMALL_BYTES` are read on the loop,
        more in a worker thread."""
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
        is_small = length <= _SMALL_BYTES
        if is_small and body is None and self._on_loop.is_usable:
            small = await self._read_small(path, key, meta, offset, length)
            if small is not None:
                return small
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

    async def _read_small(
        self, path: str, key: str, meta: ObjectMeta, offset: int, length: int
    ) -> memoryview | None:
        """Return a whole small object or a small part of an object, or None if it can't be read on
        the loop. Raises `OriginError`."""
        if not is_strong(meta.version):
            return None
        self.counters.gets += 1
        is_whole = length == meta.size_bytes
        md5 = self._md5_of(meta) if is_whole else None
        part = None if is_whole else range(offset, offset + length)
        wanted = Wanted(key, meta.version, meta.size_bytes, md5, part)
        try:
            found = await self._on_loop.get(wanted, self._subject(path))
        except (NotFoundError, ObjectChangedError):
            raise
        except OriginError:
            self.counters.errors += 1
            raise
        if found is None:
            return None
        self.counters.get_bytes += len(found.data)
        if not found.is_as_told and md5 is not None:
            await self._explain_mismatch(path, key, md5)
        return found.data

    def _md5_of(self, meta: ObjectMeta) -> bytes | None:
        """Return the MD5 to compare a whole object with, or None."""
        return digest.md5_in(meta.version, self._target.bucket) if self._verifies else None

    @property
    def reads_many(self) -> bool:
        """See `Origin.reads_many`."""
        return self._direct.is_usable

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
        items = [
            Wanted(self.checked_key(path), meta.version, meta.size_bytes, self._md5_of(meta))
            for path, meta in wanted
        ]
        given_up = False
        try:
            found, requests, first_s = await self._in_thread(
                lambda: self._direct.get(items, at_a_time, stopped, lambda: given_up)
            )
        finally:
            given_up = True
        if first_s is not None:
            self.quickest_s = min(self.quickest_s or first_s, first_s)
        self.counters.gets += requests
        self.counters.get_bytes += sum(len(data) for data in found if data is not None)
        return found

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
        self._reader.close()
        self._direct.close()
        self._on_loop.close()
        self._writer.close()
        if self._workers is not None:
            self._workers.stop()
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

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """Run a blocking call in a worker thread. Raises `OriginError`."""

        def work() -> T:
            self._provider.current()  # renews the credentials, or fails with a clear error
            return call()

        if self._workers is None:
            self._workers = Workers(self._options.max_threads, "origin")
        return await self._counted(self._workers.run_abandonable(work))

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
        tls = None
        if target.base_url.startswith("https://"):
            tls = TlsConnector(*address_of(target), target.ca_file)
        old = self._direct, self._on_loop
        self._target = self._reader.target = target
        self._direct = DirectReader(target, self._provider, self._options, tls)
        self._on_loop = LoopReader(target, self._provider, self._options, tls)
        self._sender.move_to(target, tls)
        for reader in old:
            reader.close()

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
