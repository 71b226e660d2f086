"""Any URL that fsspec can open: `file://`, `memory://`, `webhdfs://`, `http://`, s3fs, ossfs, ...

fsspec has no conditional reads. So `read` requests the version again after the bytes have arrived.
The requested version existed before the read began; if it still exists after the read, it existed
all the time. (This check misses only a version that is replaced and then restored.) All caches of
fsspec are switched off. fsspec returns a whole directory at once, so a very large one takes memory
here that `origin/s3` does not need.
"""

import contextlib
import getpass
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import fsspec
import trio
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from cachefs.errors import (
    BadDataError,
    NotADirError,
    NotFoundError,
    ObjectChangedError,
    OriginError,
    OriginUnavailableError,
    RefusedError,
    UsageError,
)
from cachefs.foreign_numbers import whole_number
from cachefs.origin.base import Origin, OriginCounters
from cachefs.origin.fsspec.errors import from_fsspec, from_os
from cachefs.origin.fsspec.local_tree import ConfinedFileSystem
from cachefs.origin.fsspec.local_writer import LocalWriter
from cachefs.origin.local_ids import named_posix, numbered_posix
from cachefs.origin.names import Pages, chunked, is_name, resolve_twins
from cachefs.origin.options import CHECK_DEADLINE_S, OriginOptions
from cachefs.origin.proxies import proxy_for
from cachefs.types import (
    MOST_SIZE_BYTES,
    NO_POSIX,
    UNKNOWN_MODE,
    Buffer,
    Directory,
    Entry,
    Found,
    ObjectMeta,
    Posix,
)

T = TypeVar("T")

_PAGE_ENTRIES = 1000
_USERINFO = re.compile("://[^/@]*@")
_ETAG_KEYS = ("ETag", "etag", "e_tag", "md5", "checksum", "generation")
_MTIME_KEYS = ("LastModified", "mtime", "last_modified", "modified", "updated", "created")
_MTIME_MS_KEY = "modificationTime"
"""The key that WebHDFS uses; its value is in milliseconds."""
_FILE_ID_KEYS = ("ino", "fileId")
_S3_PROTOCOLS = ("s3", "s3a")
_HTTP_PROTOCOLS = ("http", "https")
_KEY_STORES = frozenset((*_S3_PROTOCOLS, "oss", "gs", "gcs", "az", "abfs", "adl", "memory"))
"""Here a listing shows each key."""
_WEBHDFS_PROTOCOLS = ("webhdfs", "webHDFS")
_PROTOCOLS_WITH_OWNERS = frozenset(("file", *_WEBHDFS_PROTOCOLS))
_POSIX_KEY = "cachefs.posix"
"""A key that cachefs adds to fsspec's `info`; its value is a `Posix`."""


def open_fsspec(url: str, options: OriginOptions) -> "FsspecOrigin":
    """Return the origin for any fsspec URL. Sends no request. Raises `UsageError`.

    Imports a protocol's libraries only for its URLs: botocore and aiohttp together take 0.2 s of
    CPU.
    """
    shown = _USERINFO.sub("://", url)
    protocol = url.partition("://")[0]
    settings: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    identity = shown.rstrip("/")
    if protocol in _S3_PROTOCOLS:
        from cachefs.origin.fsspec.s3_settings import s3_settings

        identity, s3_only = s3_settings(url.partition("://")[2], options)
        settings |= s3_only
    elif protocol in _WEBHDFS_PROTOCOLS and not _USERINFO.search(url):
        settings["user"] = _hadoop_user()
    elif protocol == "hdfs":  # hdfs-native registers itself for this protocol
        from fsspec.implementations.arrow import HadoopFileSystem

        fsspec.register_implementation(protocol, HadoopFileSystem, clobber=True)
    try:
        fs, root = fsspec.core.url_to_fs(url, **settings)
    except ImportError:
        if protocol == "hdfs":
            raise UsageError(
                "--hdfs-driver pyarrow needs pyarrow: pip install pyarrow, or leave the option out"
            ) from None
        raise UsageError(f"{protocol}:// needs {_driver_of(protocol)}") from None
    except (ValueError, TypeError, OSError) as error:
        if protocol == "hdfs" and "Unable to load" in str(error):
            raise UsageError(
                "--hdfs-driver pyarrow finds no libhdfs.so or no Java for it: set HADOOP_HOME (or "
                "ARROW_LIBHDFS_DIR), CLASSPATH and JAVA_HOME, or leave the option out for the "
                "driver that needs none of them"
            ) from None
        raise UsageError(
            f"fsspec can't open {shown} ({type(error).__name__}): check the scheme and the address"
        ) from None
    if isinstance(getattr(fs, "fs", None), LocalFileSystem):
        raise UsageError(
            f"{shown} would follow links out of its directory: write file:///DIR without {protocol}"
        )
    if isinstance(fs, LocalFileSystem):
        fs = ConfinedFileSystem(root, follows_all=options.follow_links == "all", **settings)
    if protocol in _HTTP_PROTOCOLS:
        from cachefs.origin.fsspec.http_tree import HttpTree

        fs = HttpTree(root, options, **settings)
    if protocol in _WEBHDFS_PROTOCOLS:
        _set_up(fs.session, options)
    if hasattr(fs, "retries"):
        fs.retries = 1  # s3fs counts the first try as one; `resilience` does the retries
    return FsspecOrigin(fs, root, shown, identity, options)


def _hadoop_user() -> str | None:
    """Return the user name that Hadoop's own clients send without Kerberos."""
    with contextlib.suppress(OSError, KeyError):  # the uid may have no name
        return os.environ.get("HADOOP_USER_NAME") or getpass.getuser()
    return None


def _set_up(session: Any, options: OriginOptions) -> None:
    """Give the session of `requests` timeouts and enough connections, as fsspec sets neither, and
    our own choice of a proxy, for each host that a request is redirected to."""
    from requests.adapters import HTTPAdapter

    class Adapter(HTTPAdapter):  # type: ignore[misc, unused-ignore]
        def send(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            proxy = proxy_for(request.url)
            request.headers.pop("Proxy-Authorization", None)  # the library's own choice
            kwargs["proxies"] = {} if proxy is None else {"all": proxy.url}
            kwargs["timeout"] = (options.connect_timeout_s, options.idle_timeout_s)
            return super().send(request, *args, **kwargs)

    for scheme in ("http://", "https://"):
        session.mount(scheme, Adapter(pool_maxsize=options.max_threads))


def _driver_of(protocol: str) -> str:
    """Return a text that names the missing package and how to install it."""
    known = known_implementations.get(protocol, {})
    package = str(known.get("class", "")).partition(".")[0]
    if package in ("", "fsspec"):
        why = str(known.get("err", f"see fsspec about {protocol!r}"))
        return f"a Python package that is not installed: {why}"
    return f"{package}, which is not installed: {sys.executable} -m pip install {package}"


class FsspecOrigin(Origin):
    """The origin for one directory of an fsspec file system."""

    lists_in_one_piece = True

    def __init__(self, fs: Any, root: str, url: str, identity: str, options: OriginOptions) -> None:
        self.url = url if url.endswith("://") else url.rstrip("/")
        self.identity = identity
        self.counters = OriginCounters()
        self._fs = fs
        self._root = root.rstrip("/")
        # Object stores give whole seconds in HEAD and finer times in LIST.
        self._whole_seconds = "s3" in _protocols(fs)
        self.lists_by_stat = "http" in _protocols(fs)
        self.tells_owners = not _PROTOCOLS_WITH_OWNERS.isdisjoint(_protocols(fs))
        self.may_hide = _may_hide(_protocols(fs))
        self._limiter = trio.CapacityLimiter(options.max_threads)
        self._writer = None
        if isinstance(fs, ConfinedFileSystem):
            describe = self._described
            for_writer = (fs, self._root, describe, self._subject, self._limiter)
            self._writer = LocalWriter(*for_writer, self.counters.writes)

    @property
    def writer(self) -> LocalWriter | None:
        """See `Origin.writer`. Only local directories have one."""
        return self._writer

    async def check(self) -> None:
        """See `Origin.check`. Lists the root, because object stores have no empty directories; of a
        web server only its index page, because files may be many, and one of them may fail."""
        with trio.move_on_after(CHECK_DEADLINE_S) as scope:
            if self.lists_by_stat:
                self.counters.lists += 1
                await self._call("", partial(self._fs.ls, detail=False))
                return
            async for _ in self.list_dir(""):
                break
        if scope.cancelled_caught:
            self.counters.errors += 1
            raise OriginUnavailableError(f"{self.url} does not answer")

    async def stat(self, path: str) -> Found:
        """See `Origin.stat`."""
        meta = await self.stat_unlisted(path)
        if isinstance(meta, ObjectMeta) and not meta.size_bytes and await self._has_children(path):
            return None
        return meta

    async def stat_unlisted(self, path: str) -> Found:
        """See `Origin.stat_unlisted`. Calls `info` once; some drivers LIST if a path is absent."""
        if not path and not self.tells_owners:
            return None
        self._checked(path)
        info = await self._info(path)
        if info["type"] == "directory":
            return _directory(info)
        meta = self._meta(info)
        if meta is None:
            raise NotFoundError(f"{self._subject(path)} is neither a file nor a directory")
        return meta

    def list_dir(self, path: str, below: dict[str, list[Entry]] | None = None) -> Pages:
        """See `Origin.list_dir`."""
        pages: Iterator[list[Entry]] | None = None

        async def next_page() -> list[Entry] | None:
            nonlocal pages
            if pages is None:
                self._checked(path)
                pages = chunked(await self._entries(path), _PAGE_ENTRIES)
            return next(pages, None)

        return Pages(next_page)

    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        """See `Origin.read`. After the read, one `info` verifies that the version is unchanged."""
        self._checked(path)
        self.counters.gets += 1
        failure: OriginError | None = None
        data: bytes = b""
        try:
            data = await self._call(
                path, partial(self._fs.cat_file, start=offset, end=offset + length)
            )
        except (BadDataError, OriginUnavailableError, RefusedError) as error:
            failure = error  # perhaps the file has shrunk and the range lies beyond its end
        self.counters.get_bytes += len(data)
        now = self._meta(await self._info(path))
        if now is None or now.version != meta.version:
            raise ObjectChangedError(f"{self._subject(path)} has changed since it was listed")
        if failure is not None:
            raise failure
        if len(data) != length:
            self.counters.errors += 1
            raise BadDataError(f"{self._subject(path)}: got {len(data)} bytes instead of {length}")
        return data

    async def aclose(self) -> None:
        """Drop the file system, which then closes its sessions."""
        if self._writer is not None:
            self._writer.close()
        self._fs = None
        await trio.lowlevel.checkpoint()

    def _checked(self, path: str) -> None:
        if path and not all(is_name(part) for part in path.split("/")):
            raise NotFoundError(f"{self._subject(path)!r} can't be a name")

    def _full(self, path: str) -> str:
        if path:
            return f"{self._root}/{path}"
        return self._root or str(self._fs.root_marker)

    async def _info(self, path: str) -> dict[str, Any]:
        self.counters.heads += 1
        info: dict[str, Any] = await self._call(path, partial(_info, self._fs, self.tells_owners))
        return info

    async def _has_children(self, path: str) -> bool:
        with contextlib.suppress(NotFoundError, NotADirError):
            return any(_name_below(self._full(path), info) for info in await self._ls(path))
        return False

    async def _ls(self, path: str) -> list[dict[str, Any]]:
        self.counters.lists += 1
        return await self._call(path, partial(_ls, self._fs, self.tells_owners))

    async def _entries(self, path: str) -> list[Entry]:
        full = self._full(path)
        infos = await self._ls(path)
        hidden: list[str] = []
        entries = resolve_twins(self._named(path, full, infos), hidden)
        if hidden:
            self.counters.note_unshown(path, hidden[0], len(hidden))
        if not entries and infos:
            # fsspec lists a file as a directory whose only entry is the file itself.
            own = [info for info in infos if info["name"].rstrip("/") == full.rstrip("/")]
            if len(own) == len(infos) and any(info["type"] == "file" for info in own):
                await self._refuse_file(path)
        return entries

    async def _refuse_file(self, path: str) -> None:
        # An empty object may also be the marker `path/` of an empty directory.
        info = await self._info(path)
        if info["type"] != "directory":
            raise NotADirError(f"{self._subject(path)} is an object, not a directory")

    def _named(self, path: str, full: str, infos: Iterable[dict[str, Any]]) -> Iterable[Entry]:
        for info in infos:
            name = _name_below(full, info)
            if name is None:
                continue
            is_dir = info["type"] == "directory"
            meta = _directory(info) if is_dir else self._meta(info)
            if not is_name(name) or (meta is None and not is_dir):
                leads_out = "leads_out" in info
                self.counters.note_unshown(path, str(info["name"]), leads_out=leads_out)
                continue
            yield Entry(name, meta)

    def _meta(self, info: dict[str, Any]) -> ObjectMeta | None:
        """Return None for a path without bytes to read: a directory, a socket, a broken link, and
        what can be no file, because its size or its time is impossible."""
        if info["type"] != "file":
            return None
        try:
            mtime_ns, size = _mtime_ns(info), int(info["size"] or 0)
        except (ValueError, TypeError, OverflowError):
            return None
        if not 0 <= size <= MOST_SIZE_BYTES:
            return None
        if self._whole_seconds:
            mtime_ns -= mtime_ns % 1_000_000_000
        tag = next((str(info[key]) for key in _ETAG_KEYS if info.get(key)), None)
        file_id = next((f"-{info[key]}" for key in _FILE_ID_KEYS if key in info), "")
        version = tag or f"{mtime_ns}-{size}{file_id}"
        return ObjectMeta(size, mtime_ns, version, info.get(_POSIX_KEY, NO_POSIX))

    def _described(self, info: dict[str, Any]) -> ObjectMeta | None:
        return self._meta(info | {_POSIX_KEY: _posix(info)})

    async def _call(self, path: str, function: Callable[..., T]) -> T:
        """Run `function(full path)` in a worker thread. Raises `OriginError`."""
        try:
            return await trio.to_thread.run_sync(
                function, self._full(path), limiter=self._limiter, abandon_on_cancel=True
            )
        except Exception as error:
            mapped = await self._mapped(path, error)
            if not isinstance(mapped, NotFoundError | NotADirError):
                self.counters.errors += 1
            raise mapped from None

    async def _mapped(self, path: str, error: Exception) -> OriginError:
        """Return the exception for `error`. If a local file fails, look whether its source works: a
        dead mount or a bad sector below it is no outage of the source."""
        subject = self._subject(path)
        if not isinstance(self._fs, ConfinedFileSystem) or not isinstance(error, OSError):
            return from_fsspec(subject, error)
        root_answers = bool(path) and await trio.to_thread.run_sync(
            self._fs.root_answers, limiter=self._limiter, abandon_on_cancel=True
        )
        return from_os(subject, error, root_answers)


def _may_hide(protocols: tuple[str, ...]) -> re.Pattern[bytes] | None:
    """Return what `Origin.may_hide` is. An index page of a web server links to what its author
    wants: Apache leaves out README*, for example. File systems have directories of snapshots that
    are in no listing: .snapshot, .zfs, .snap, ~snapshot, .ckpt, ..."""
    if not _KEY_STORES.isdisjoint(protocols):
        return None
    if not set(_HTTP_PROTOCOLS).isdisjoint(protocols):
        return re.compile(rb".+", re.DOTALL)
    if not set(_WEBHDFS_PROTOCOLS).isdisjoint(protocols) or "hdfs" in protocols:
        return re.compile(rb"\.snapshot|\.reserved")
    return re.compile(rb"[.~].*", re.DOTALL)


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _info(fs: Any, with_owners: bool, full: str) -> dict[str, Any]:
    """Return `fs.info`. Runs in a worker thread, because it may look up user names."""
    info: dict[str, Any] = fs.info(full)
    return info | {_POSIX_KEY: _posix(info)} if with_owners else info


def _ls(fs: Any, with_owners: bool, full: str) -> list[dict[str, Any]]:
    """Return `fs.ls`, also in a worker thread. A link gets the `info` of its target."""
    infos: list[dict[str, Any]] = fs.ls(full, detail=True)
    for index, info in enumerate(infos):
        if info.get("islink"):
            with contextlib.suppress(OSError):  # a broken link keeps its own info
                infos[index] = fs.info(info["name"])
    if with_owners:
        for info in infos:
            info[_POSIX_KEY] = _posix(info)
    return infos


def _posix(info: dict[str, Any]) -> Posix:
    if "permission" in info:  # WebHDFS
        mode = whole_number(info["permission"], 8)
        posix = named_posix(info["owner"], info["group"], mode or 0)
        return posix._replace(mode=UNKNOWN_MODE) if mode is None else posix
    return numbered_posix(info["uid"], info["gid"], info["mode"])


def _directory(info: dict[str, Any]) -> Directory | None:
    posix: Posix | None = info.get(_POSIX_KEY)
    return None if posix is None else Directory(posix, info.get("place", ""))


def _name_below(full: str, info: dict[str, Any]) -> str | None:
    """Return the entry's name, or None for the directory's own marker."""
    prefix = full.rstrip("/") + "/"
    name: str = info["name"]
    if name.rstrip("/") + "/" == prefix and info.get("type") != "directory":
        return None
    below = name.removeprefix(prefix) if name.startswith(prefix) else name.rpartition("/")[2]
    if not below and name == full:
        return None
    return below.removesuffix("/") if info.get("type") == "directory" else below


def _mtime_ns(info: dict[str, Any]) -> int:
    if _MTIME_MS_KEY in info:
        return int(info[_MTIME_MS_KEY]) * 1_000_000
    value = next((info[key] for key in _MTIME_KEYS if info.get(key) is not None), 0)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return 0
    if isinstance(value, datetime):
        aware = value if value.tzinfo else value.replace(tzinfo=UTC)
        since = aware - datetime(1970, 1, 1, tzinfo=UTC)
        return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1000
    # A float of seconds is exact to microseconds; some file systems give both forms.
    return round(value * 1_000_000) * 1000
