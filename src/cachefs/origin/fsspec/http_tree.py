"""Directories of a web server, read from its index pages.

fsspec sends names without quoting, so `?` begins a query and `%2e%2e` is another directory. It
finds links by expressions whose time grows with the cube of the page. It returns them as they are
written, without sizes, and reports every failure as an absent file. This module quotes the names
that it sends and unquotes those that it receives, requests size and version of each listed file,
distinguishes failures, and limits the length of an answer.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, unquote

import aiohttp
import yarl
from fsspec.implementations.http import HTTPFileSystem

from cachefs.errors import BadDataError, OriginError, UsageError
from cachefs.log import warn_once
from cachefs.origin.fsspec import index_page
from cachefs.origin.fsspec.errors import from_fsspec
from cachefs.origin.options import OriginOptions
from cachefs.origin.proxies import proxy_for
from cachefs.origin.status import is_definite

log = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
"""The longest answer. Reads request at most 8 MiB; an index page of 500,000 names is shorter."""

_PIECE_BYTES = 64 << 10
_UNQUOTED = "/-_.~!$&'()*+,;=:@"
_AT_A_TIME = 16
_ABSENT = (404, 410)
_PARTIAL = 206
_REDIRECTS = (301, 302, 303, 307, 308)
_HTML = "text/html"
_MOST_NAMES = 500_000
_MOST_LINKS = 4 * _MOST_NAMES
_PAUSES_S = (0.0, 0.2, 0.6)
"""Before each try to describe a file."""
_FEW, _SHARE = 2, 20
"""If at most so many files fail, or one of so many, it is they that fail, not the server."""
_NO_NAMES = {"", ".", "..", "../"}
"""What a page says of itself and of its parent."""


class _BoundedAnswer(aiohttp.ClientResponse):
    """An answer of bounded length. aiohttp follows at most ten redirects, only to `http` and
    `https`, and sends no credentials to another host. This class refuses those that leave TLS."""

    async def start(self, connection: Any) -> "_BoundedAnswer":
        """Receive the head. Raises `OriginError` for a redirect from `https` to `http`."""
        await super().start(connection)
        location = self.headers.get("Location", "")
        if leaves_tls(self.url, self.status, location):
            self.close()
            error = OriginError(
                f"{self.url.origin()} redirects to a host without TLS, which is not followed: if "
                "the files are there, mount that address"
            )
            warn_once(log, str(self.url.origin()), "%s", error)
            raise error
        return self

    async def read(self) -> bytes:
        if self._body is None:  # an attribute of aiohttp, used as in the method replaced here
            body = bytearray()
            async for piece in self.content.iter_chunked(_PIECE_BYTES):
                body += piece
                if len(body) > MOST_BYTES:
                    self.close()
                    raise aiohttp.ClientPayloadError(f"more than {MOST_BYTES >> 20} MiB")
            self._body = bytes(body)
        return self._body


def leaves_tls(asked: yarl.URL, status: int, location: str) -> bool:
    """Whether an answer to a request over TLS redirects it to an address without TLS."""
    is_redirect = asked.scheme == "https" and status in _REDIRECTS
    return is_redirect and location.strip().lower().startswith("http:")


class _Request(aiohttp.ClientRequest):
    """A request that goes through the proxy of its host, also after a redirect."""

    def update_proxy(self, *_: Any) -> None:
        """Note the proxy. aiohttp calls this for each request. Raises `OriginError`."""
        try:
            found = proxy_for(str(self.url))
        except UsageError as error:
            raise OriginError(str(error)) from None
        if found is None:
            super().update_proxy(None, None, None)
            return
        headers = {"Proxy-Authorization": found.authorization} if found.authorization else {}
        if self.is_ssl():  # only the CONNECT, because the rest is for the server
            super().update_proxy(yarl.URL(found.address), None, headers)
        else:
            super().update_proxy(yarl.URL(found.address), None, None)
            self.headers.update(headers)


class HttpTree(HTTPFileSystem):  # type: ignore[misc]
    """A file system whose paths are the root's URL followed by unquoted names."""

    protocol = ("http", "https")

    def __init__(self, root: str, options: OriginOptions, **settings: Any) -> None:
        timeout = aiohttp.ClientTimeout(
            total=options.total_timeout_s,
            sock_connect=options.connect_timeout_s,
            sock_read=options.idle_timeout_s,
        )
        proxy_for(root)  # refuses a variable that can't be used
        client = {
            "request_class": _Request,
            "response_class": _BoundedAnswer,
            "timeout": timeout,
        }
        super().__init__(encoded=True, client_kwargs=client, **settings)
        self._plain_root = root.rstrip("/")
        self._quoted_root = str(yarl.URL(root)).rstrip("/")

    def _quoted(self, path: str) -> str:
        below = path.removeprefix(self._plain_root)
        return self._quoted_root + quote(below, safe=_UNQUOTED, errors="surrogateescape")

    async def _ls_real(self, url: str, detail: bool = True, **_: Any) -> list[Any]:
        start = self._quoted(url).rstrip("/") + "/"
        names = set[str]()
        for number, link in enumerate(await self._links(start), 1):
            if len(names) > _MOST_NAMES or number > _MOST_LINKS:
                raise BadDataError(f"{url}: its index page has more than {_MOST_NAMES:,} names")
            # Links with a query usually sort the page.
            if link.startswith(start) and not set("?#") & set(link):
                names.add(unquote(link.removeprefix(start), errors="surrogateescape"))
        names -= _NO_NAMES
        paths = [f"{url.rstrip('/')}/{name}" for name in sorted(names)]
        if not detail:
            return paths
        return await self._described_all(paths)

    async def _described_all(self, paths: list[str]) -> list[dict[str, Any]]:
        """Return the `info` of linked paths, without those that don't exist, and those that the
        server does not tell of: one bad file must not hide the others. If many fail, or all, it is
        the server that fails, and the first failure is raised."""
        turns = asyncio.Semaphore(_AT_A_TIME)
        found = await asyncio.gather(*(self._described(path, turns) for path in paths))
        named = zip(paths, found, strict=True)
        failed = [(path, why) for path, why in named if isinstance(why, Exception)]
        infos = [info for info in found if isinstance(info, dict)]
        files = sum(info["type"] == "file" for info in infos)
        for path, why in failed:
            if len(failed) > min(files, _FEW + files // _SHARE):
                raise why
            warn_once(log, path, "%r is not shown: %s", path, from_fsspec(path, why))
        return infos

    async def _links(self, url: str) -> Iterable[str]:
        """Return the absolute links of an index page, which are parsed one by one; of an answer
        that is no HTML none."""
        session = await self.set_session()
        async with session.get(self.encode_url(url)) as answer:
            self._raise_not_found_for_status(answer, url)
            kind = answer.headers.get("Content-Type", _HTML).partition(";")[0].strip().lower()
            if kind != _HTML:
                return ()
            body = await answer.read()
        host = url[: url.index("/", url.index("://") + 3)]
        links = index_page.links_in(body.decode(errors="surrogateescape"))
        return (_absolute(link, url, host) for link in links)

    async def _described(
        self, path: str, turns: asyncio.Semaphore
    ) -> dict[str, Any] | Exception | None:
        """Return the `info` of a linked path, None if it does not exist or the server refuses to
        tell of it, or why all tries have failed."""
        if path.endswith("/"):
            return {"name": path, "size": None, "type": "directory"}
        failure: Exception | None = None
        for pause_s in _PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                async with turns:
                    return await self._info(path)
            except FileNotFoundError:
                return None
            except aiohttp.ClientResponseError as error:
                if is_definite(error.status):
                    said = f"the server says HTTP {error.status}"
                    warn_once(log, path, "%r is not shown: %s", path, said)
                    return None
                failure = error
            except OriginError as error:  # of what the server has answered
                warn_once(log, path, "%r is not shown: %s", path, error)
                return None
            except TimeoutError as error:  # another try would take as long
                return error
            except (aiohttp.ClientError, OSError) as error:
                failure = error
        return failure

    async def _cat_file(self, url: str, start: int = 0, end: int = 0, **_: Any) -> bytes:
        """Return the bytes from `start` to before `end`. Raises `BadDataError` if the server sends
        a part and does not say that it is this one."""
        if start >= end:
            return b""
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        session = await self.set_session()
        async with session.get(self.encode_url(self._quoted(url)), headers=headers) as answer:
            self._raise_not_found_for_status(answer, url)
            data: bytes = await answer.read()
            told = answer.headers.get("Content-Range", "")
        if answer.status != _PARTIAL:
            return data[start:end]  # the server ignores ranges and has sent the whole file
        if not told.startswith(f"bytes {start}-{end - 1}/"):
            raise BadDataError(f"{url}: the server sent another part than the one that was asked")
        return data

    async def _info(self, url: str, **kwargs: Any) -> dict[str, Any]:
        try:
            info: dict[str, Any] = await super()._info(self._quoted(url), **kwargs)
        except FileNotFoundError as error:
            why = error.__cause__
            if why is None or getattr(why, "status", None) in _ABSENT:
                raise
            raise why from None
        info["name"] = url
        if info["url"].endswith("/"):  # servers redirect a request for a directory to this
            return info | {"type": "directory", "size": None}
        modified = info.get("Last-Modified")
        if modified:
            with contextlib.suppress(ValueError):
                info["LastModified"] = parsedate_to_datetime(modified)
        if not info.get("ETag") and "LastModified" not in info:
            raise BadDataError(f"{url} has neither an ETag nor a time, so it is no file")
        return info


def _absolute(link: str, url: str, host: str) -> str:
    """Return a link of the page `url`, which ends with a slash. `host` is its scheme and host."""
    if link.startswith(("http://", "https://")):
        return link
    return host + link if link.startswith("/") else url + link.removeprefix("./")
