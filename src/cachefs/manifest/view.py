"""The view that a mount has of its source through a manifest."""

import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import trio

from cachefs.config import MountConfig
from cachefs.db import DamagedDatabaseError
from cachefs.errors import CacheDirError, UsageError
from cachefs.format.paths import ManifestPaths
from cachefs.load.paths import PathReader
from cachefs.manifest.fetch import digest_of, local_copy
from cachefs.manifest.files import Listed, read_manifest
from cachefs.manifest.origin import ManifestOrigin, UnlistedOrigin
from cachefs.manifest.table import ManifestTable, build
from cachefs.origin.base import Origin
from cachefs.origin.options import OriginOptions

log = logging.getLogger(__name__)

_SAMPLES = 3
_WITH_ETAGS = ("s3://", "oss://")
_BARE_ETAG = re.compile(r"[0-9A-Fa-f]{32}(-[0-9]+)?")


class ManifestView:
    """One mounted manifest: its file, its table and its origin wrappers. `build` comes before
    `origin` and `run`. The constructor, `build` and `close` block."""

    def __init__(self, file: Path, config: MountConfig) -> None:
        """Raises `CachefsError` for a file that cannot be read, or does not begin as a manifest."""
        assert config.manifest is not None
        self._name = config.manifest
        self._file = file
        self._path_of: Callable[[str], str] = PathReader(str(config.mountpoint), config.source).path
        self._has_etags = config.source.startswith(_WITH_ETAGS)
        self._digest = digest_of(file, self._name, config.source, str(config.mountpoint))
        self._samples = [item.path for item in islice(self._listed(), _SAMPLES)]
        if not self._samples:
            raise UsageError(f"the manifest {self._name} names no file; nothing would be mounted")
        self._table: ManifestTable | None = None
        self.namespace: Path = Path()
        """Path of the inode table of this view; valid after `build`."""

    def _listed(self) -> Iterator[Listed]:
        listed = read_manifest(self._file, self._name, self._path_of)
        return map(with_quotes, listed) if self._has_etags else listed

    def unlisted(self, inner: Origin) -> UnlistedOrigin:
        """Return the wrapper that sends the requests to `inner`, without LISTs."""
        return UnlistedOrigin(inner, self._samples)

    def build(self, manifests: Path, needs_owners: bool) -> None:
        """Build the table in the directory `manifests`. A complete table that is already there is
        used as it is; a damaged one is built again. Raises `CachefsError`."""
        paths = ManifestPaths(manifests, self._digest)
        try:
            table = _open_existing(paths)
            if table is not None and table.counts.unknown:
                table.db.abandon()
                table = None  # attributes requested from the origin are valid for one mount only
            if table is None:
                counts = build(paths, self._listed(), needs_owners)
                log.info(
                    "the manifest %s names %d files, %d of them without size, time and version; "
                    "%d can't be shown",
                    self._name,
                    counts.files,
                    counts.unknown,
                    counts.skipped,
                )
                table = ManifestTable.open(paths.table)
        except OSError as error:
            raise CacheDirError(f"can't keep the manifest in {manifests}: {error}") from error
        self._table = table
        self.namespace = paths.namespace
        if "://" in self._name:
            self._file.unlink(missing_ok=True)  # it is a local copy, which may be large

    def origin(self, resilient: Origin) -> ManifestOrigin:
        """Return the origin for the namespace, which wraps `resilient`. Call it after `build`."""
        assert self._table is not None
        return ManifestOrigin(resilient, self._table)

    async def run(self) -> None:
        """Commit changes of the table and release its memory pages. Never returns."""
        assert self._table is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._table.db.commit_loop)
            nursery.start_soon(self._table.db.residency.keep_small)

    def close(self) -> None:
        if self._table is not None:
            self._table.db.close()


def _open_existing(paths: ManifestPaths) -> ManifestTable | None:
    """Open the table of an earlier mount; None if there is none, or a damaged one."""
    if not paths.root.exists():
        return None
    try:
        return ManifestTable.open(paths.table)
    except DamagedDatabaseError as error:
        log.warning(
            "%s can't be used (%s): it is rebuilt from the manifest", paths.table, error.why
        )
        return None


def with_quotes(listed: Listed) -> Listed:
    """Return the file with a quoted version, if that is an ETag without quotes. The origin's ETags
    have quotes; inventories and many tools remove them."""
    meta = listed.meta
    if meta is None or not _BARE_ETAG.fullmatch(meta.version):
        return listed
    return Listed(listed.path, replace(meta, version=f'"{meta.version}"'))


@asynccontextmanager
async def open_view(
    config: MountConfig, options: OriginOptions
) -> AsyncIterator[ManifestView | None]:
    """Yield the view for the manifest in `config`; None if there is none. Raises `CachefsError`."""
    if config.manifest is None:
        yield None
        return
    async with local_copy(config.manifest, config.source, options) as file:
        view = await trio.to_thread.run_sync(ManifestView, file, config)
        try:
            yield view
        finally:
            view.close()
