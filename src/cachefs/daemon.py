"""The composition root: builds the objects of one mount, runs them, takes them down in order."""

import gc
import logging
import os
import resource
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.config import MountConfig, TierConfig, user_mem_home
from cachefs.control import server as control_server
from cachefs.control.cache_routes import CacheRoutes
from cachefs.control.load_verbs import LoadVerbs
from cachefs.control.metadata_verbs import MetadataVerbs
from cachefs.control.metrics_server import serve_metrics
from cachefs.control.mount_state import MountState
from cachefs.control.profile_verb import ProfileVerb
from cachefs.control.set_verb import SetVerb
from cachefs.control.tier_verbs import TierVerbs
from cachefs.db import Database, database_exists
from cachefs.errors import CacheDirError, CachefsError, OriginUnavailableError
from cachefs.format import inode_record
from cachefs.format.paths import TierPaths
from cachefs.fuse import session
from cachefs.fuse.access_log import AccessLog
from cachefs.fuse.attrs import AttrBuilder, Ownership
from cachefs.fuse.operations import Operations
from cachefs.fuse.uid_limits import UidLimits
from cachefs.fuse.watchers import Watchers
from cachefs.fuse.xattrs import Xattrs
from cachefs.load.job import Surroundings
from cachefs.load.jobs import Jobs
from cachefs.load.journal import Journal
from cachefs.load.paths import PathReader
from cachefs.manifest.view import ManifestView, open_view
from cachefs.mounts import prepare_mountpoint, socket_path
from cachefs.namespace.namespace import Namespace, Ttls
from cachefs.namespace.reader import Readers
from cachefs.origin.open_origin import open_origin
from cachefs.origin.options import OriginOptions
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.systemd_notify import NOBODY, ServiceManager
from cachefs.tiers.tier import Tier
from cachefs.types import Medium

log = logging.getLogger(__name__)

_SHUTDOWN_S = 20.0
_NAMESPACE_MAP_BYTES = 1 << 38
_MOST_THREADS = 4096
"""For requests to the origin. `ResilientOrigin` says how many are wanted at a time; a silent server
holds threads that nobody waits for any more, and they must not be missing elsewhere."""
_LARGE_BODY_S = 10.0
"""What the largest body may take on top of everything else."""
_OPEN_FILES = 1 << 17
"""One descriptor a slab: 64 MiB times this is 8 TiB of cache."""


def run(
    config: MountConfig, on_ready: Callable[[], None], manager: ServiceManager = NOBODY
) -> None:
    """Mount and serve until unmounted, SIGTERM or SIGINT. `on_ready` is called, on the loop,
    when the kernel's first request has been answered. `manager` hears that the loop turns, and of
    the end.

    Raises `CachefsError` for everything that a user can mend. Blocks.
    """
    _raise_file_limit()
    _calm_garbage_collector()
    with _single_error():
        trio.run(_run, config, on_ready, manager)


async def _run(config: MountConfig, on_ready: Callable[[], None], manager: ServiceManager) -> None:
    mountpoint = str(config.mountpoint)
    await trio.to_thread.run_sync(prepare_mountpoint, config.mountpoint, config.nonempty)
    options = _origin_options(config)
    async with open_view(config, options) as view:
        inner = open_origin(config.source, options)
        origin = ResilientOrigin(view.unlisted(inner) if view else inner, _resilience(config))
        try:
            failure = await _check(origin, config)
            tiers = _open_tiers(origin.identity, *config.tiers)
            try:
                if view is not None:
                    manifests = _namespace_tier(tiers).paths.manifests
                    await trio.to_thread.run_sync(view.build, manifests, origin.tells_owners)
                mount = _Mount(config, origin, tiers, manager, failure, view)
                await mount.serve(mountpoint, on_ready)
            finally:
                _close_all(tiers)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _SHUTDOWN_S):
                await origin.aclose()


async def _check(origin: ResilientOrigin, config: MountConfig) -> OriginUnavailableError | None:
    """See `Origin.check`; but an origin that is away is no error where the cache knows names of
    it which may be shown. Returns what it is away with."""
    try:
        await origin.check()
    except OriginUnavailableError as error:
        is_known = config.manifest is not None or database_exists(_namespace_path(config))
        if not config.stale_if_error or not is_known:
            raise
        log.warning("%s; what is known and cached of it is mounted all the same", error)
        return error
    return None


class _Mount:
    """One mount: what has to live exactly as long as it. `tiers` is kept up to date with those that
    come and go at run time."""

    def __init__(
        self,
        config: MountConfig,
        origin: ResilientOrigin,
        tiers: list[Tier],
        manager: ServiceManager,
        failure: OriginUnavailableError | None,
        view: ManifestView | None,
    ) -> None:
        """`failure` is what the origin is away with; `view` is of a manifest."""
        self._config = config
        self._view = view
        self._failure = failure
        self._origin = origin
        self._manager = manager
        # The namespace first: it is the one that may find its directory to be of a newer format.
        home = _namespace_tier(tiers)
        self._jobs_directory = home.paths.jobs
        names = home.paths.namespace if view is None else view.namespace
        self._db = Database.open(str(names), inode_record.TABLES, _NAMESPACE_MAP_BYTES)
        self._cache = BlockCache(
            origin,
            tiers,
            config.cache_eviction,
            config.buffer_size,
            verify_full=config.verify == "full",
            scrub_interval_s=config.scrub_interval,
            patience_s=_resilience(config).patience_s,
        )
        self._limits = UidLimits(config.limit_uid)
        self._watchers: Watchers = []
        self._access_log = AccessLog(self._watchers)
        self._set_verb = SetVerb(origin, self._limits, self._access_log, config.mountpoint)
        self._state = MountState(config, origin, self._cache, self._limits, self._set_verb)
        self._tier_verbs = TierVerbs(
            self._cache, config, partial(_open_tiers, origin.identity), tiers, home
        )

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
        await nursery.start(self._origin.run)
        await nursery.start(self._cache.run)
        namespace = await self._open_namespace(nursery)
        nursery.start_soon(self._db.commit_loop)
        nursery.start_soon(self._db.keep_small)
        if self._view is not None:
            nursery.start_soon(self._view.run)
        nursery.start_soon(self._access_log.run)
        handlers = {**self._state.handlers(), **self._tier_verbs.handlers()}
        handlers |= self._set_verb.handlers()
        jobs = self._state.jobs = self._jobs(namespace)
        handlers |= LoadVerbs(jobs).handlers()
        routes = CacheRoutes(
            namespace, self._cache, session.forget_entry, session.forget_attributes
        )
        handlers |= routes.handlers()
        metadata = MetadataVerbs(namespace, self._db, self._origin, self._config.manifest)
        handlers |= metadata.handlers()
        handlers |= ProfileVerb(namespace, self._origin, self._watchers).handlers()
        # Its own nursery: no tier is added or removed any more while the cache is being closed.
        async with trio.open_nursery() as control:
            await control.start(jobs.run)
            socket = socket_path(Path(mountpoint))
            await control.start(control_server.serve, socket, handlers)
            await control.start(serve_metrics, self._state)
            await self._serve_kernel(namespace, mountpoint, on_ready)
            control.cancel_scope.cancel()

    def _jobs(self, namespace: Namespace) -> Jobs:
        config = self._config
        around = Surroundings(
            namespace,
            self._cache,
            self._origin,
            Journal(self._jobs_directory),
            PathReader(str(config.mountpoint), self._origin.url),
            config.buffer_size // 2,
        )
        return Jobs(around)

    async def _serve_kernel(
        self, namespace: Namespace, mountpoint: str, on_ready: Callable[[], None]
    ) -> None:
        initialised = trio.Event()
        operations = self._operations(namespace, initialised.set)
        session.mount(operations, mountpoint, self._origin.url, self._config.allow_other)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._announce, mountpoint, initialised, on_ready)
                nursery.start_soon(self._manager.feed_watchdog)
                await session.serve()
                nursery.cancel_scope.cancel()
        finally:
            self._state.mounted = False
            self._manager.stopping()
            session.unmount()

    async def _open_namespace(self, nursery: trio.Nursery) -> Namespace:
        config = self._config
        ttls = Ttls(
            config.attr_ttl,
            config.entry_ttl,
            config.negative_ttl,
            config.list_ttl,
            config.stale_if_error,
        )
        namespace = Namespace(
            self._db,
            self._view.origin(self._origin) if self._view else self._origin,
            nursery,
            ttls,
            on_unbound=session.forget_entry,
            on_changed=session.forget_attributes,
        )
        if self._failure is None:
            await namespace.observe_root()
        else:
            namespace.begin_outage(self._failure)
        self._state.namespace = namespace
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
            self._limits,
            self._state.requests,
            self._watchers,
        )

    async def _announce(
        self, mountpoint: str, initialised: trio.Event, on_ready: Callable[[], None]
    ) -> None:
        await initialised.wait()
        self._state.mounted = True
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
        max_downloads=_MOST_THREADS,
        connect_timeout_s=config.request_timeout,
        idle_timeout_s=config.request_timeout,
        request_timeout_s=config.read_timeout + _LARGE_BODY_S,
        hdfs_driver=config.hdfs_driver,
        oss_driver=config.oss_driver,
        credentials_dir=config.credentials_dir,
        verify_origin=config.verify_origin,
    )


def _resilience(config: MountConfig) -> Resilience:
    return Resilience(
        read_timeout_s=config.read_timeout,
        request_timeout_s=config.request_timeout,
        max_downloads=config.max_downloads,
        download_limit=config.download_limit or None,
        hedge=config.hedge,
    )


def _open_tiers(source_identity: str, *wanted: TierConfig) -> list[Tier]:
    """All directories, in the order given, or none. Blocks. Raises `CacheDirError`."""
    tiers: list[Tier] = []
    try:
        for config in wanted:
            for path, quota_bytes in zip(config.paths, config.quotas, strict=True):
                if path.is_relative_to(user_mem_home()):
                    _make_private(user_mem_home())
                tiers.append(_open_tier(source_identity, config, path, quota_bytes))
    except BaseException:
        _close_all(tiers)
        raise
    return tiers


def _open_tier(source_identity: str, config: TierConfig, path: Path, quota_bytes: int) -> Tier:
    return Tier.open(
        path,
        quota_bytes=quota_bytes,
        source_identity=source_identity,
        high=config.high,
        low=config.low,
        free_space_ratio=config.free_space_ratio,
        keep_ratio=config.pin_limit,
        medium=config.medium,
    )


def _close_all(tiers: list[Tier]) -> None:
    for tier in tiers:
        tier.close()


def _make_private(home: Path) -> None:
    """`home` lies in a directory where all users may write: somebody else's must not be used."""
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        found = home.lstat()
    except OSError as error:
        raise CacheDirError(f"can't create {home}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise CacheDirError(
            f"{home} is not a directory that only uid {os.geteuid()} may write to; remove it, or "
            "name another with --mem-dir"
        )


def _namespace_path(config: MountConfig) -> Path:
    """Where `_namespace_tier` will have it."""
    homes = [tier for tier in config.tiers if tier.medium is not Medium.MEM] or config.tiers
    return TierPaths(homes[0].paths[0]).namespace


def _namespace_tier(tiers: list[Tier]) -> Tier:
    """Where names and attributes are kept: on a disk if there is one."""
    return next((tier for tier in tiers if tier.medium is not Medium.MEM), tiers[0])


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
