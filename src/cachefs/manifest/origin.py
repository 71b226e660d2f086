"""The two wrappers around the origin of a mount with a manifest.

The namespace calls `ManifestOrigin`, which gives names, sizes and versions from the manifest. That
calls `ResilientOrigin`, which calls `UnlistedOrigin`. `UnlistedOrigin` sends the requests to the
real origin, and never a LIST. Identity and paths are those of the real origin, so that the mount
shares cached blocks with mounts that have no manifest, or another one.
"""

import logging
from collections.abc import Sequence

import trio

from cachefs.errors import (
    NotADirError,
    NotFoundError,
    ObjectChangedError,
    OriginError,
    OriginUnavailableError,
)
from cachefs.format.manifest_record import Directory, ManifestRow
from cachefs.manifest.table import ManifestTable, is_unknown
from cachefs.origin.base import Origin
from cachefs.origin.body import Body
from cachefs.origin.names import Pages, join
from cachefs.origin.options import CHECK_DEADLINE_S
from cachefs.origin.wrapping import WrappingOrigin
from cachefs.types import Buffer, Entry, Found, ObjectMeta

log = logging.getLogger(__name__)

_PAGE_ENTRIES = 1000
_ASKED_AT_A_TIME = 64
_SAID_AGAIN_S = 60.0


class ManifestOrigin(WrappingOrigin):
    """An origin that answers from the manifest's table. It sends a request to `inner` only for
    attributes that the manifest lacks. The table stores those of a file, so that each file needs
    one such request per mount."""

    def __init__(self, inner: Origin, table: ManifestTable) -> None:
        super().__init__(inner)
        self.lists_by_stat = True
        self.may_hide = None
        self._table = table

    async def stat(self, path: str) -> Found:
        """See `Origin.stat`. A path that is not in the manifest costs no request."""
        return await self._complete(path, self._row(path))

    def _row(self, path: str) -> ManifestRow:
        try:
            return self._table.find(path)
        except KeyError:
            raise NotFoundError(f"{join(self.url, path)} is not in the manifest") from None

    def list_dir(self, path: str, below: dict[str, list[Entry]] | None = None) -> Pages:
        """See `Origin.list_dir`. If the manifest lacks attributes of a file, this sends a request
        for it, and leaves the file out if the origin does not have it."""
        after: bytes | None = None

        async def next_page() -> list[Entry] | None:
            nonlocal after
            await trio.lowlevel.checkpoint()
            row = self._row(path)
            if not isinstance(row, Directory):
                raise NotADirError(f"{join(self.url, path)} is an object, not a directory")
            children = self._table.children(row.number, after, _PAGE_ENTRIES)
            if not children:
                return None
            page = await self._page(path, children)
            after = children[-1][0]
            return page

        return Pages(next_page)

    async def _page(self, path: str, children: Sequence[tuple[bytes, ManifestRow]]) -> list[Entry]:
        found: list[Entry | None] = [None] * len(children)
        wanted: list[int] = []
        for number, (raw_name, row) in enumerate(children):
            name = raw_name.decode("utf-8", "surrogateescape")
            if not isinstance(row, Directory) and not is_unknown(row, self.tells_owners):
                found[number] = Entry(name, row)
            elif isinstance(row, Directory) and not self.tells_owners:
                found[number] = Entry(name, None)
            else:
                wanted.append(number)
        failures: list[OriginError] = []

        async def ask() -> None:
            while wanted and not failures:
                number = wanted.pop()
                name = children[number][0].decode("utf-8", "surrogateescape")
                below = f"{path}/{name}" if path else name
                try:
                    found[number] = Entry(name, await self._complete(below, children[number][1]))
                except NotFoundError:
                    pass
                except OriginError as error:
                    failures.append(error)

        if wanted:
            async with trio.open_nursery() as nursery:
                for _ in range(min(len(wanted), _ASKED_AT_A_TIME)):
                    nursery.start_soon(ask)
        if failures:
            raise failures[0]
        return [entry for entry in found if entry is not None]

    async def _complete(self, path: str, row: ManifestRow) -> Found:
        """Return the attributes of a path from its row, and request from `inner` those that the row
        lacks."""
        if isinstance(row, Directory):
            if not self.tells_owners:
                return None
            found = await self._inner.stat(path)
            if isinstance(found, ObjectMeta):
                raise NotFoundError(
                    f"{join(self.url, path)} is a file, and a directory by the manifest"
                )
            return found
        if not is_unknown(row, self.tells_owners):
            return row
        found = await self._inner.stat(path)
        if not isinstance(found, ObjectMeta):
            raise NotFoundError(
                f"{join(self.url, path)} is a directory, and a file by the manifest"
            )
        return self._table.freeze_file(path, found)

    async def aclose(self) -> None:
        """Do nothing, because this object does not own `inner`."""
        await trio.lowlevel.checkpoint()


class UnlistedOrigin(WrappingOrigin):
    """An origin that never sends a LIST to `inner`, and owns `inner`. `samples` are some paths of
    the manifest; `check` looks for them. An object that `read_many` could not read is read again
    with `read`, which logs that it has changed."""

    def __init__(self, inner: Origin, samples: Sequence[str]) -> None:
        super().__init__(inner)
        self._samples = samples
        self._changed_count = 0
        self._said_at = float("-inf")

    async def check(self) -> None:
        """Look up the samples until one is found; see `Origin.check`. Raises `NotFoundError` if
        none is there."""
        with trio.move_on_after(CHECK_DEADLINE_S) as scope:
            for path in self._samples:
                try:
                    await self._inner.stat_unlisted(path)
                    return
                except NotFoundError:
                    continue
        if scope.cancelled_caught:
            self.counters.errors += 1
            raise OriginUnavailableError(f"{self.url} does not answer")
        raise NotFoundError(
            f"nothing of what the manifest names was found below {self.url}, such as "
            f"{', '.join(self._samples)}; is it a manifest of this source?"
        )

    async def stat(self, path: str) -> Found:
        """Return `Origin.stat_unlisted` of `inner`. The root costs no request unless it has an
        owner."""
        if not path and not self.tells_owners:
            return None
        return await self._inner.stat_unlisted(path)

    def list_dir(self, path: str, below: dict[str, list[Entry]] | None = None) -> Pages:
        """Raise `AssertionError`: a mount with a manifest must never send a LIST."""
        raise AssertionError("a LIST, on a mount with a manifest")

    async def read(self, path: str, meta: ObjectMeta, offset: int, length: int) -> Buffer:
        """See `Origin.read`; `inner` does it. Logs a warning, at most once a minute, if the origin
        no longer has the version of the manifest."""
        return await self.read_body(path, meta, offset, length, None)

    async def read_body(
        self, path: str, meta: ObjectMeta, offset: int, length: int, body: Body | None
    ) -> Buffer:
        """See `Origin.read_body`; otherwise as `read`."""
        try:
            return await self._inner.read_body(path, meta, offset, length, body)
        except (ObjectChangedError, NotFoundError) as error:
            self._note_changed(path, error)
            raise

    def _note_changed(self, path: str, error: OriginError) -> None:
        self._changed_count += 1
        now = trio.current_time()
        if now - self._said_at >= _SAID_AGAIN_S:
            self._said_at = now
            log.warning(
                "%s: the origin no longer has the version that the manifest froze (%s); what is "
                "not cached of it can't be read. %d such reads so far; a new manifest mends it",
                path,
                error,
                self._changed_count,
            )
