"""The composition root: builds the objects of one mount, runs them, takes them down in order."""

import gc
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from cachefs import __version__
from cachefs.cache.block_cache import BlockCache
from cachefs.config import MountConfig
from cachefs.control import server as control_server
from cachefs.control.report import CacheStatus, StatusReport
from cachefs.db import Database
from cachefs.errors import CachefsError
from cachefs.format import inode_record
from cachefs.fuse import session
from cachefs.fuse.attrs import AttrBuilder, Ownership
from cachefs.fuse.operations import Operations
from cachefs.fuse.xattrs import Xattrs
from cachefs.mounts import prepare_mountpoint, socket_path
from cachefs.namespace.namespace import Namespace, Ttls
from cachefs.namespace.reader import Readers
from cachefs.origin.base import Origin
from cachefs.origin.open_origin import open_origin
from cachefs.origin.options import OriginOptions
from cachefs.tiers.tier import Tier

log = logging.getLogger(__name__)

_SHUTDOWN_S = 20.0
_NAMESPACE_MAP_BYTES = 1 << 38
_OPEN_FILES = 1 << 17
"""One descriptor a slab: 64 MiB times this is 8 TiB of cache."""


def run(config: MountConfig, on_ready: Callable[[], None]) -> None:
    """Mount and serve until unmounted, SIGTERM or SIGINT. `on_ready` is called, on the loop,
    when the kernel's first request has been answered.

    Raises `CachefsError` for everything that a user can mend. Blocks.
    """
    _raise_file_limit()
    _calm_garbage_collector()
    with _single_error():
        trio.run(_run, config, on_ready)


async def _run(config: MountConfig, on_ready: Callable[[], None]) -> None:
    mountpoint = str(config.mountpoint)
    await trio.to_thread.run_sync(prepare_mountpoint, config.mountpoint, config.nonempty)
    origin = open_origin(config.source, _origin_options(config))
    try:
        await origin.check()
        tiers = _open_tiers(config, origin)
        try:
            mount = _Mount(config, origin, tiers)
            await mount.serve(mountpoint, on_ready)
        finally:
            for tier in tiers:
                tier.close()
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _SHUTDOWN_S):
            await origin.aclose()


class _Mount:
    """One mount: what has to live exactly as long as it."""

    def __init__(self, config: MountConfig, origin: Origin, tiers: list[Tier]) -> None:
        self._config = config
        self._origin = origin
        self._started_at = time.time()
        # The namespace first: it is the one that may find its directory to be of a newer format.
        self._db = Database.open(
            str(tiers[0].paths.namespace), inode_record.TABLES, _NAMESPACE_MAP_BYTES
        )
        self._cache = BlockCache(origin, tiers, config.cache_eviction, config.buffer_size)

    async def serve(self, mountpoint: str, on_ready: Callable[[], None]) -> None:
        """Mount, answer until unmounted, write what is pending."""
        try:
            async with trio.open_nursery() as nursery:
                try:
                    # A signal ends the serving; the cache still stores what was fetched.
                    with trio.CancelScope() as serving:
                        nursery.start_soon(_stop_on_signal, serving)
                        await self._serve(nursery, mountpoint, on_ready)
                finally:
                    await self._cache.aclose()
                nursery.cancel_scope.cancel()
        finally:
            self._db.close()

    async def _serve(
        self, nursery: trio.Nursery, mountpoint: str, on_ready: Callable[[], None]
    ) -> None:
        await nursery.start(self._cache.run)
        namespace = await self._open_namespace(nursery)
        nursery.start_soon(self._db.commit_loop)
        await nursery.start(control_server.serve, socket_path(Path(mountpoint)), self.status)
        await self._serve_kernel(namespace, mountpoint, on_ready)

    async def _serve_kernel(
        self, namespace: Namespace, mountpoint: str, on_ready: Callable[[], None]
    ) -> None:
        initialised = trio.Event()
        operations = self._operations(namespace, initialised.set)
        session.mount(operations, mountpoint, self._origin.url, self._config.allow_other)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_announce, mountpoint, initialised, on_ready)
                await session.serve()
                nursery.cancel_scope.cancel()
        finally:
            session.unmount()

    async def _open_namespace(self, nursery: trio.Nursery) -> Namespace:
        config = self._config
        ttls = Ttls(config.attr_ttl, config.entry_ttl, config.negative_ttl, config.list_ttl)
        namespace = Namespace(
            self._db, self._origin, nursery, ttls, on_unbound=session.forget_entry
        )
        namespace.table.purge_orphans()
        # Inode numbers may be handed out only when their reservation is on disk.
        await self._db.commit()
        return namespace

    def _operations(self, namespace: Namespace, on_init: Callable[[], None]) -> Operations:
        config = self._config
        ownership = Ownership(config.uid, config.gid, config.file_mode, config.dir_mode)
        return Operations(
            namespace,
            Readers(namespace, self._cache, config.readahead),
            Xattrs(namespace, self._cache),
            AttrBuilder(ownership),
            on_init,
        )

    def status(self) -> StatusReport:
        """What `cachefs status` shows. No secrets: the URL has none."""
        reads, origin = self._cache.counters, self._origin.counters
        return {
            "version": __version__,
            "mountpoint": str(self._config.mountpoint),
            "source": self._origin.url,
            "pid": os.getpid(),
            "started_at": self._started_at,
            "cache": self._cache_status(),
            "reads": {
                "hits": reads.hits,
                "misses": reads.misses,
                "hit_bytes": reads.hit_bytes,
                "fetched_bytes": reads.fetched_bytes,
            },
            "origin": {
                "gets": origin.gets,
                "heads": origin.heads,
                "lists": origin.lists,
                "get_bytes": origin.get_bytes,
                "errors": origin.errors,
            },
        }

    def _cache_status(self) -> CacheStatus:
        tiers = self._cache.status()
        return {
            "capacity_bytes": sum(tier.quota_bytes for tier in tiers),
            "used_bytes": sum(tier.cached_bytes for tier in tiers),
            "blocks": sum(tier.cached_blocks for tier in tiers),
            "dirs": [tier.path for tier in tiers],
        }


async def _announce(mountpoint: str, initialised: trio.Event, on_ready: Callable[[], None]) -> None:
    await initialised.wait()
    await trio.to_thread.run_sync(session.tune, mountpoint)
    log.info("mounted on %s", mountpoint)
    on_ready()


async def _stop_on_signal(serving: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            log.info("%s: unmounting", signal.Signals(number).name)
            serving.cancel()


def _origin_options(config: MountConfig) -> OriginOptions:
    return OriginOptions(
        endpoint=config.endpoint,
        region=config.region,
        addressing=config.addressing,
        anonymous=config.anonymous,
        profile=config.profile,
        max_downloads=config.max_downloads,
    )


def _open_tiers(config: MountConfig, origin: Origin) -> list[Tier]:
    """All or none. Raises `CacheDirError`."""
    tiers: list[Tier] = []
    try:
        for path in config.cache_dirs:
            tiers.append(
                Tier.open(
                    path,
                    quota_bytes=config.cache_size // len(config.cache_dirs),
                    source_identity=origin.identity,
                    high=config.cache_high,
                    low=config.cache_low,
                    free_space_ratio=config.free_space_ratio,
                )
            )
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return tiers


def _calm_garbage_collector() -> None:
    """Requests leave hardly any cycles behind, and each pass looks at everything that lives: look
    70 times less often. Cold small files came 1.15x faster so."""
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


def _raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def _single_error() -> Iterator[None]:
    """Nurseries raise groups; a user is told of the first expected failure in one."""
    try:
        yield
    except BaseExceptionGroup as group:
        expected, unexpected = group.split(CachefsError)
        if expected is None or unexpected is not None:
            raise
        error: BaseException = expected
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
