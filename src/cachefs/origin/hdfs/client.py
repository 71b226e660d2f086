"""HDFS through hdfs-native: no JVM, no libhdfs.

A version is the modification time and the length, because the library does not return the file id.
HDFS has no conditional reads, so `read` requests the version again after the bytes have arrived.
The requested version existed before the read began; if it still exists after the read, it existed
all the time. The library checks the CRCs of all data that a DataNode sends.

Worker threads call the library's blocking client. It waits for a NameNode without a timeout, so the
caller continues after a deadline and abandons the thread until the connection breaks or answers.
Each NameNode has its own threads. (The asyncio client could be cancelled. But its threads hold
their own locks while they wake Python, and freeing it waits for these threads while it holds the
interpreter's lock: with 0.14.7 one in 1,000 deadlocked the whole process.)
"""

import re
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
from cachefs.origin.early_call import EarlyCall
from cachefs.origin.hdfs.config import HdfsTarget, NameNode, resolve_target
from cachefs.origin.hdfs.errors import from_hdfs_native, is_of_the_namenode
from cachefs.origin.local_ids import named_posix
from cachefs.origin.names import Pages, is_name
from cachefs.origin.options import CHECK_DEADLINE_S, OriginOptions
from cachefs.types import (
    MOST_SIZE_BYTES,
    Buffer,
    Directory,
    Entry,
    Found,
    ObjectMeta,
)
from cachefs.workers import Workers

T = TypeVar("T")

_PAGE_ENTRIES = 1000
"""The default number of entries that a NameNode sends at once (dfs.ls.limit)."""

_LISTERS_MAX = 32
"""The most threads that wait for a NameNode's listing at a time, including abandoned ones."""

_SLOWEST_BYTES_PER_S = 1 << 20
"""A read of a slower body times out."""

_NS_PER_MS = 1_000_000


def open_hdfs(location: str, options: OriginOptions) -> "HdfsOrigin":
    """Return the origin for `HOST:PORT/DIR` or `NAMESERVICE/DIR`. Sends no request. Raises
    `UsageError`."""
    target = resolve_target(location, options)
    return HdfsOrigin(target, options)


class _Server:
    """One NameNode. It owns the client, which it creates at the first use, and the worker threads
    that call the client."""

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
        """Run `function(client, *args)` in a thread. A cancelled caller does not wait for it."""
        if self._workers is None:
            self._workers = Workers(self._threads, "hdfs")
        return await self._workers.run_abandonable(function, self.client, *args)

    def close(self) -> None:
        self._client = None
        if self._workers is not None:
            self._workers.stop()


class HdfsOrigin(Origin):
    """The origin for one directory of one HDFS."""

    tells_owners = True
    may_hide = re.compile(rb"\.snapshot|\.reserved")
    """See the documents of Hadoop, HdfsSnapshots and TransparentEncryption."""

    def __init__(self, target: HdfsTarget, options: OriginOptions) -> None:
        self.url = target.url
        self.identity = target.url
        self.counters = OriginCounters()
        self._root = target.root
        self._timeout_s = options.total_timeout_s
        # With several NameNodes, each attempt is shorter, so that there is time for another one.
        alone = len(target.namenodes) == 1
        self._attempt_s = options.total_timeout_s if alone else options.connect_timeout_s
        self._servers = [
            _Server(target.endpoint, namenode, options.max_threads) for namenode in target.namenodes
        ]
        self._active = 0
        self._listers = threading.BoundedSemaphore(_LISTERS_MAX)

    async def check(self) -> None:
        """See `Origin.check`. Costs one request."""
        with trio.move_on_after(CHECK_DEADLINE_S) as scope:
            if not (await self._status("")).isdir:
                raise NotADirError(f"{self.url} is a file, not a directory")
        if scope.cancelled_caught:
            self.counters.errors += 1
            raise self._mute(self.url)

    async def stat(self, path: str) -> Found:
        """See `Origin.stat`. Costs one request."""
        full = self._full(path)
        self.counters.heads += 1
        return await self._call(path, _stat, full)

    def list_dir(self, path: str, below: dict[str, list[Entry]] | None = None) -> Pages:
        """See `Origin.list_dir`. Costs one request, and one more per 1,000 entries. The next page
        is in flight while the caller uses this one."""
        return Pages(_Listing(self, path).next_page)

    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        """See `Origin.read`. Requests the block locations, the bytes, and finally the version."""
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
        """Drop the connections. The results of calls in flight are ignored."""
        for server in self._servers:
            server.close()
        await trio.lowlevel.checkpoint()

    def _full(self, path: str) -> str:
        """Return the absolute path. Raises `NotFoundError`, without a request, if no such path can
        exist."""
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
        """Run `function(client, *args)` with the client of the active NameNode, or of the first
        other one that answers, which then becomes the active one. Raises `OriginError`.

        `extra_s` is additional time for anything besides the NameNodes' answers."""
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
                    # The caller's timeout was shorter. The next call begins with another NameNode.
                    if self._active == index:
                        self._active = (index + 1) % len(self._servers)
                    raise
                except (KeyboardInterrupt, SystemExit, UsageError):
                    raise
                except BaseException as error:  # a Rust panic is no Exception
                    failure = from_hdfs_native(self._subject(path), error)
                    if not is_of_the_namenode(error):
                        break
        if not isinstance(failure, NotFoundError):
            self.counters.errors += 1
        raise failure or self._mute(self._subject(path))

    async def start_listing(self, path: str) -> Iterator[FileStatus]:
        """Return the iterator over the directory at `path`, from the NameNode that is active now.
        Raises as `list_dir`."""
        status = await self._status(path)
        if not status.isdir:
            raise NotADirError(f"{self._subject(path)} is a file, not a directory")
        return self._servers[self._active].client.list_status(self._full(path))

    def start_page(self, path: str, statuses: Iterator[FileStatus]) -> EarlyCall[list[Entry]]:
        """Start to read the next page in a thread."""
        if not self._listers.acquire(blocking=False):
            self.counters.errors += 1
            raise self._mute(self._subject(path))
        self.counters.lists += 1

        def work() -> list[Entry]:
            try:
                return _entries(statuses)
            finally:
                self._listers.release()

        return EarlyCall(work)

    async def finish_page(self, path: str, started: EarlyCall[list[Entry]]) -> list[Entry]:
        """Wait for a page and return its entries: fewer than `_PAGE_ENTRIES` on the last page."""
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
    """The state of one `list_dir`. After a failure it lists again from the beginning and skips the
    entries that it has already returned, because a NameNode lists in order of names."""

    def __init__(self, origin: HdfsOrigin, path: str) -> None:
        self._origin = origin
        self._path = path
        self._given_up_to: bytes = b""
        self._statuses: Iterator[FileStatus] | None = None
        self._started: EarlyCall[list[Entry]] | None = None

    async def next_page(self) -> list[Entry] | None:
        """Return the entries of the next page that has any, or None at the end."""
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
            entries = [entry for entry in new if _can_be_shown(entry)]
            if unshown := [entry.name for entry in new if not _can_be_shown(entry)]:
                self._origin.counters.note_unshown(self._path, unshown[0], len(unshown))
            if entries:
                self._given_up_to = _name_bytes(entries[-1])
                return entries
        return None

    def _start(self, statuses: Iterator[FileStatus]) -> None:
        self._started = self._origin.start_page(self._path, statuses)


def _can_be_shown(entry: Entry) -> bool:
    meta = entry.meta
    has_size = not isinstance(meta, ObjectMeta) or meta.size_bytes <= MOST_SIZE_BYTES
    return is_name(entry.name) and has_size


def _name_bytes(entry: Entry) -> bytes:
    return entry.name.encode("utf-8", "surrogateescape")


def _get_file_info(client: Client, full: str) -> FileStatus:
    return client.get_file_info(full)


def _stat(client: Client, full: str) -> Found:
    return _found(client.get_file_info(full))


def _read(
    client: Client, full: str, size: int, offset: int, length: int
) -> tuple[bytes | None, Exception | None, FileStatus]:
    """Return the bytes, or the exception that reading them raised, and the file's status after
    that. Raises if the status fails, so that `_call` can try another NameNode."""
    data: bytes | None = None
    failure: Exception | None = None
    try:
        reader = client.read(full)
        if len(reader) == size:  # the library panics if a range exceeds the file
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
    """Convert a status. Must run in a worker thread, because it looks up user names."""
    posix = named_posix(status.owner, status.group, status.permission)
    if status.isdir:
        return Directory(posix)
    mtime_ns = status.modification_time * _NS_PER_MS
    return ObjectMeta(status.length, mtime_ns, _version(status), posix)


def _version(status: FileStatus) -> str:
    return f"{status.modification_time}-{status.length}"
