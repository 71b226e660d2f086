"""HDFS through hdfs-native: no JVM, no libhdfs.

A version is the modification time and the length; the library doesn't tell the file id. HDFS has
no conditional reads, so `read` asks for the version again after the bytes have arrived: the
version asked for existed before the read began, and if it is still there when the read has ended,
it was there all the time. The library checks the CRCs of everything that a DataNode sends.

The library's blocking client is called in worker threads. It waits for a NameNode for ever, so
whoever waits here goes on after a deadline and leaves the thread behind until the connection
breaks or answers; each NameNode has its own threads. (The asyncio client could be cancelled. But
its threads wake Python with locks of their own held, and to free it waits for them with the
interpreter's lock held: with 0.14.7 one in 1,000 stopped the whole process for good.)
"""

import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeVar

import trio
from hdfs_native import Client, FileStatus

from cachefs.errors import (
    BadDataError,
    NotADirError,
    NotFoundError,
    ObjectChangedError,
    OriginError,
    OriginUnavailableError,
    UsageError,
)
from cachefs.origin.base import Origin, OriginCounters
from cachefs.origin.hdfs_config import HdfsTarget, NameNode, resolve_target
from cachefs.origin.hdfs_errors import from_hdfs_native, is_of_the_namenode
from cachefs.origin.local_ids import named_posix
from cachefs.origin.names import Pages, is_name, join
from cachefs.origin.options import CHECK_DEADLINE_S, OriginOptions
from cachefs.origin.prefetch import Prefetch
from cachefs.types import Buffer, Entry, Found, ObjectMeta
from cachefs.workers import Workers

T = TypeVar("T")

_PAGE_ENTRIES = 1000
"""As many as a NameNode sends at once (dfs.ls.limit), unless the site has changed it."""

_LISTERS_MAX = 32
"""Threads that may be waiting for a NameNode's listing at one time, those given up included."""

_SLOWEST_BYTES_PER_S = 1 << 20
"""A body that comes more slowly is given up."""

_NS_PER_MS = 1_000_000


def open_hdfs(location: str, options: OriginOptions) -> "HdfsOrigin":
    """The origin for `HOST:PORT/DIR` or `NAMESERVICE/DIR`; sends no request. Raises
    `UsageError`."""
    target = resolve_target(location, options)
    return HdfsOrigin(target, options)


class _Server:
    """One NameNode: the client for it, made when it is needed, and the threads that call it."""

    def __init__(self, endpoint: str, namenode: NameNode, threads: int) -> None:
        self.address = namenode.address
        self._endpoint = endpoint
        self._config = namenode.config
        self._threads = threads
        self._client: Client | None = None
        self._workers: Workers | None = None

    @property
    def client(self) -> Client:
        if self._client is None:
            try:
                self._client = Client(self._endpoint, self._config)
            except (RuntimeError, ValueError) as error:
                raise UsageError(
                    f"hdfs-native can't open {self._endpoint} ({type(error).__name__}): check the "
                    "address and HADOOP_CONF_DIR"
                ) from None
        return self._client

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """`function(client, *args)` in a thread. A cancelled caller goes on at once."""
        if self._workers is None:
            self._workers = Workers(self._threads, "hdfs")
        return await self._workers.run_abandonable(function, self.client, *args)

    def close(self) -> None:
        self._client = None
        if self._workers is not None:
            self._workers.stop()


class HdfsOrigin(Origin):
    """One directory of one HDFS."""

    tells_owners = True

    def __init__(self, target: HdfsTarget, options: OriginOptions) -> None:
        self.url = target.url
        self.identity = target.url
        self.counters = OriginCounters()
        self._root = target.root
        self._timeout_s = options.request_timeout_s
        # With another NameNode to try, less patience with each.
        alone = len(target.namenodes) == 1
        self._attempt_s = options.request_timeout_s if alone else options.connect_timeout_s
        self._servers = [
            _Server(target.endpoint, namenode, options.max_downloads)
            for namenode in target.namenodes
        ]
        self._active = 0
        self._listers = threading.BoundedSemaphore(_LISTERS_MAX)

    async def check(self) -> None:
        """One request; see `Origin.check`."""
        with trio.move_on_after(CHECK_DEADLINE_S) as scope:
            if not (await self._status("")).isdir:
                raise NotADirError(f"{self.url} is a file, not a directory")
        if scope.cancelled_caught:
            self.counters.errors += 1
            raise self._mute(self.url)

    async def stat(self, path: str) -> Found:
        """One request; see `Origin.stat`."""
        full = self._full(path)
        self.counters.heads += 1
        return await self._call(path, _stat, full)

    def list_dir(self, path: str, below: dict[str, list[Entry]] | None = None) -> Pages:
        """One request, and one more per 1,000 entries; the next page is under way while this one
        is used."""
        return Pages(_Listing(self, path).next_page)

    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        """The block locations, the bytes, then the version once more."""
        full = self._full(path)
        self.counters.gets += 1
        self.counters.heads += 1
        body_s = length / _SLOWEST_BYTES_PER_S
        found = await self._call(path, _read, full, meta.size_bytes, offset, length, extra_s=body_s)
        data, failure, status = found
        self.counters.get_bytes += len(data or b"")
        if status.isdir or _version(status) != meta.version:
            raise ObjectChangedError(f"{self._subject(path)} has changed since it was listed")
        if failure is not None:
            self.counters.errors += 1
            raise from_hdfs_native(self._subject(path), failure)
        if data is None or len(data) != length:
            self.counters.errors += 1
            raise BadDataError(
                f"{self._subject(path)}: got {len(data or b'')} bytes instead of {length}"
            )
        return data

    async def aclose(self) -> None:
        """Drop the connections; what is under way ends unheard."""
        for server in self._servers:
            server.close()
        await trio.lowlevel.checkpoint()

    def _subject(self, path: str) -> str:
        return join(self.url.rstrip("/"), path)

    def _full(self, path: str) -> str:
        """The absolute path. Raises `NotFoundError`, without a request, if none can be so."""
        if path and not all(is_name(part) for part in path.split("/")):
            raise NotFoundError(f"{self._subject(path)!r} can't be a name")
        return f"{self._root}/{path}" if path else self._root or "/"

    def _mute(self, subject: str) -> OriginError:
        addresses = " and ".join(server.address for server in self._servers)
        return OriginUnavailableError(
            f"{subject} can't be read: no answer from {addresses}; check the address and the "
            "network"
        )

    async def _status(self, path: str) -> FileStatus:
        full = self._full(path)
        self.counters.heads += 1
        return await self._call(path, _get_file_info, full)

    async def _call(
        self, path: str, function: Callable[..., T], *args: Any, extra_s: float = 0.0
    ) -> T:
        """`function(client, *args)` with the client of the active NameNode, or of the first other
        one that answers; that one is active from then on. Raises `OriginError`.

        `extra_s` is what more than the NameNodes' answers may take."""
        failure: OriginError | None = None
        first = self._active
        with trio.move_on_after(self._timeout_s + extra_s):
            for step in range(len(self._servers)):
                index = (first + step) % len(self._servers)
                try:
                    with trio.fail_after(self._attempt_s + extra_s):
                        result = await self._servers[index].run(function, *args)
                    self._active = index
                    return result
                except trio.TooSlowError:
                    failure = None
                except trio.Cancelled:
                    # Somebody with less patience gave up: his next try begins with another one.
                    if self._active == index:
                        self._active = (index + 1) % len(self._servers)
                    raise
                except (KeyboardInterrupt, SystemExit, UsageError):
                    raise
                except BaseException as error:  # a panic in Rust is no Exception
                    failure = from_hdfs_native(self._subject(path), error)
                    if not is_of_the_namenode(error):
                        break
        if not isinstance(failure, NotFoundError):
            self.counters.errors += 1
        raise failure or self._mute(self._subject(path))

    async def start_listing(self, path: str) -> Iterator[FileStatus]:
        """The iterator over the directory at `path`, from the NameNode that is active now. Raises
        as `list_dir` does."""
        status = await self._status(path)
        if not status.isdir:
            raise NotADirError(f"{self._subject(path)} is a file, not a directory")
        return self._servers[self._active].client.list_status(self._full(path))

    def start_page(self, path: str, statuses: Iterator[FileStatus]) -> Prefetch[list[Entry]]:
        """Begin to read the next page in a thread."""
        if not self._listers.acquire(blocking=False):
            self.counters.errors += 1
            raise self._mute(self._subject(path))
        self.counters.lists += 1

        def work() -> list[Entry]:
            try:
                return _entries(statuses)
            finally:
                self._listers.release()

        return Prefetch(work)

    async def finish_page(self, path: str, started: Prefetch[list[Entry]]) -> list[Entry]:
        """The entries of a page, fewer than `_PAGE_ENTRIES` at the end."""
        try:
            with trio.fail_after(self._timeout_s):
                entries = await started.get()
        except trio.TooSlowError:
            self.counters.errors += 1
            raise self._mute(self._subject(path)) from None
        except (trio.Cancelled, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self.counters.errors += 1
            raise from_hdfs_native(self._subject(path), error) from None
        return entries


class _Listing:
    """The state of one `list_dir`. After a failure it begins anew, behind what was given already:
    a NameNode lists by name."""

    def __init__(self, origin: HdfsOrigin, path: str) -> None:
        self._origin = origin
        self._path = path
        self._given_up_to: bytes = b""
        self._statuses: Iterator[FileStatus] | None = None
        self._started: Prefetch[list[Entry]] | None = None

    async def next_page(self) -> list[Entry] | None:
        """The entries of the next page that has any, or None at the end."""
        try:
            return await self._next_page()
        except BaseException:
            self._statuses = self._started = None
            raise

    async def _next_page(self) -> list[Entry] | None:
        if self._statuses is None:
            self._statuses = await self._origin.start_listing(self._path)
            self._start(self._statuses)
        while self._started is not None:
            started, self._started = self._started, None
            page = await self._origin.finish_page(self._path, started)
            if len(page) == _PAGE_ENTRIES:
                self._start(self._statuses)
            new = [entry for entry in page if _name_bytes(entry) > self._given_up_to]
            entries = [entry for entry in new if is_name(entry.name)]
            if skipped := [entry.name for entry in new if not is_name(entry.name)]:
                self._origin.counters.skip(self._path, skipped[0], len(skipped))
            if entries:
                self._given_up_to = _name_bytes(entries[-1])
                return entries
        return None

    def _start(self, statuses: Iterator[FileStatus]) -> None:
        self._started = self._origin.start_page(self._path, statuses)


def _name_bytes(entry: Entry) -> bytes:
    return entry.name.encode("utf-8", "surrogateescape")


def _get_file_info(client: Client, full: str) -> FileStatus:
    return client.get_file_info(full)


def _stat(client: Client, full: str) -> Found:
    return _found(client.get_file_info(full))


def _read(
    client: Client, full: str, size: int, offset: int, length: int
) -> tuple[bytes | None, Exception | None, FileStatus]:
    """The bytes, or what went wrong with them, and the file's status afterwards. Raises what the
    status fails with: so a NameNode that has gone makes the whole fail."""
    data: bytes | None = None
    failure: Exception | None = None
    try:
        reader = client.read(full)
        if len(reader) == size:  # the library panics at a range past the end
            data = reader.read_range(offset, length)
    except Exception as error:
        failure = error
    return data, failure, client.get_file_info(full)


def _entries(statuses: Iterator[FileStatus]) -> list[Entry]:
    return [
        Entry(status.path.rpartition("/")[2], _found(status))
        for status in islice(statuses, _PAGE_ENTRIES)
    ]


def _found(status: FileStatus) -> Found:
    """Only in a worker thread: names of users are looked up."""
    posix = named_posix(status.owner, status.group, status.permission)
    if status.isdir:
        return posix
    mtime_ns = status.modification_time * _NS_PER_MS
    return ObjectMeta(status.length, mtime_ns, _version(status), posix)


def _version(status: FileStatus) -> str:
    return f"{status.modification_time}-{status.length}"
