"""Directories of an object store: one is there while a key begins with its path and a slash. An
empty one has a marker, an empty object whose key ends with the slash."""

from collections.abc import Callable

import trio

from cachefs.errors import CachefsError, ConflictError, NotADirError, NotEmptyError
from cachefs.origin.s3.lister import PageRequest, S3Lister
from cachefs.origin.s3.listing import keys_in, parse_page
from cachefs.origin.s3.writing import messages
from cachefs.origin.s3.writing.sender import Sender
from cachefs.origin.writable import ABSENT

_TYPE = {"content-type": "application/x-directory"}


class Markers:
    """Makes and removes the markers below one prefix. `checked_key` returns the key of a path."""

    def __init__(
        self,
        sender: Sender,
        lister: S3Lister,
        checked_key: Callable[[str], str],
        subject: Callable[[str], str],
    ) -> None:
        self._sender = sender
        self._lister = lister
        self._key = checked_key
        self._subject = subject
        self._is_oss = sender.target.scheme == "oss"

    async def make(self, path: str, headers: dict[str, str]) -> None:
        """Make the marker of a directory. Succeeds if the directory exists. Raises
        `NotADirError`."""
        key = self._key(path)
        found = await self._sender.head(key)
        if found is not None:
            if messages.described(found).size_bytes or not await self._keys_below(path):
                raise NotADirError(f"{self._subject(path)} is an object, not a directory")
            return
        await self._sender.send("PUT", f"{key}/", "", headers | _TYPE)

    async def make_new(self, path: str, headers: dict[str, str], *, checks: bool) -> None:
        """Make the marker of a directory that does not exist. `headers` have the id of the write.
        `checks`: the store itself checks that an object is absent.

        Raises `ConflictError` if there is a directory or an object, unless this write has made it.
        """
        key = self._key(path)
        is_object, below = await self._look(path)
        if not is_object and not below:
            conditions = messages.condition_headers(ABSENT, self._is_oss) if checks else {}
            try:
                await self._sender.send("PUT", f"{key}/", "", headers | conditions | _TYPE)
                return
            except ConflictError:
                below = {f"{key}/"}
        if not is_object and f"{key}/" in below:
            marker = await self._sender.head(f"{key}/")
            if marker is not None and messages.write_id_of(marker) == messages.write_id_of(headers):
                return
        raise ConflictError(f"{self._subject(path)} exists already")

    async def _look(self, path: str) -> tuple[bool, set[str]]:
        """Return whether the path is an object, and the result of `_keys_below`. Both are asked for
        at the same time."""
        found: list[bool] = []
        below: set[str] = set()
        failures: list[CachefsError] = []

        async def head() -> None:
            try:
                found.append(await self._sender.head(self._key(path)) is not None)
            except CachefsError as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(head)
            try:
                below = await self._keys_below(path)
            except CachefsError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return found[0], below

    async def remove(self, path: str) -> None:
        """Remove the marker of a directory without entries. Raises `NotEmptyError`,
        `NotADirError`."""
        marker = self._key(path) + "/"
        keys = await self._keys_below(path)
        if keys - {marker}:
            raise NotEmptyError(f"{self._subject(path)}: the directory has entries")
        if keys:
            await self._sender.send("DELETE", marker)
        elif await self._sender.head(self._key(path)) is not None:
            raise NotADirError(f"{self._subject(path)} is an object, not a directory")

    async def _keys_below(self, path: str) -> set[str]:
        """Return one or two of the keys and prefixes below a directory, its marker included."""
        request = PageRequest(self._key(path) + "/", "/", max_keys=2)
        body = await self._lister.fetch(request)

        def shown() -> set[str]:
            last_key = parse_page(body, request.prefix).last_key
            return keys_in(body) | ({last_key} if last_key else set())

        return await self._sender.in_thread(shown)
