"""Builds the objects of one mount. `daemon/mount.py` runs and ends them."""

import logging
from functools import partial
from typing import NamedTuple

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.publisher import Publisher
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.config import MountConfig
from cachefs.control.api import Handler, Route
from cachefs.control.mount_state import MountState
from cachefs.control.routes.cache import CacheRoutes
from cachefs.control.routes.load import LoadRoutes
from cachefs.control.routes.metadata import MetadataRoutes
from cachefs.control.routes.names import NamesRoutes
from cachefs.control.routes.profile import ProfileRoutes
from cachefs.control.routes.set import SetRoutes, live_options
from cachefs.control.routes.tier import TierRoutes
from cachefs.control.routes.writes import WritesRoutes
from cachefs.daemon.live_changes import LiveChanges
from cachefs.daemon.memory_limit import bounded_buffer
from cachefs.daemon.passthrough import Passthrough, object_slabs_from_bytes
from cachefs.daemon.relayed import Relayed
from cachefs.daemon.settings import shared_secret
from cachefs.daemon.tiers import open_names, open_tiers
from cachefs.daemon.writing import build_writers
from cachefs.db import Database
from cachefs.errors import OriginUnavailableError, UsageError
from cachefs.format.paths import TierPaths
from cachefs.fuse import session
from cachefs.fuse.access_log import AccessLog
from cachefs.fuse.attrs import AttrBuilder, Ownership
from cachefs.fuse.hint_requests import HintRequests
from cachefs.fuse.observers import RequestObservers
from cachefs.fuse.operations import Operations
from cachefs.fuse.relay.stats import RelayStats
from cachefs.fuse.uid_limits import UidLimits
from cachefs.fuse.writing import RefusingOperations, Writers, WritingOperations
from cachefs.fuse.xattrs import Xattrs
from cachefs.load.job import JobContext
from cachefs.load.job_files import JobFiles
from cachefs.load.jobs import Jobs
from cachefs.load.paths import PathReader
from cachefs.load.throttle import LoadThrottle
from cachefs.manifest.view import ManifestView
from cachefs.metrics import Requests
from cachefs.mounts import socket_path, spare_path
from cachefs.namespace.namespace import Namespace, Ttls
from cachefs.origin.resilience import ResilientOrigin
from cachefs.prefetch.look_ups import LookUpReads
from cachefs.prefetch.prefetch import Prefetch
from cachefs.shared.tier import SharedTier
from cachefs.staging.spool import Spool
from cachefs.supervisor.link import Link
from cachefs.types import DataPath

log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """What a mount is built from. `daemon/run.py` opens it, and closes it after the mount."""

    config: MountConfig
    origin: ResilientOrigin
    tiers: list[CacheDirectory]
    """Tiers that are added or removed while mounted are also added to or removed from this list."""
    home: TierPaths
    """The directory with the names."""
    failure: OriginUnavailableError | None
    """The origin's error, if it can't be reached."""
    view: ManifestView | None
    data_path: DataPath
    link: Link | None
    """The connection to the supervisor, which then mounts."""

    @property
    def has_spare_home(self) -> bool:
        """Whether the disk of the names is gone, and `home` is a directory in memory instead."""
        return self.home.root == spare_path(self.config.mountpoint)


class Base(NamedTuple):
    """The objects that must exist before any task of the mount runs."""

    relayed: Relayed | None
    db: Database
    buffer_bytes: int
    cache: BlockCache
    look_up_reads: LookUpReads
    limits: UidLimits


class Parts(NamedTuple):
    """The objects of a mount that `daemon/mount.py` starts and serves."""

    access_log: AccessLog
    jobs: Jobs
    state: MountState
    handlers: dict[Route, Handler]
    publisher: Publisher | None
    operations: Operations
    writers: Writers | None
    """Of a writable mount."""
    initialised: trio.Event
    """Set when the kernel has sent its first request."""


def build_base(opened: Opened) -> Base:
    """Open the names' database and the cache's indexes. Raises `CacheDirError`, and `UsageError`
    for a file that can't be read."""
    config, data_path = opened.config, opened.data_path
    relayed = None if opened.link is None else Relayed(opened.link)
    # Open the namespace first: this can fail because its directory has a newer format.
    db = open_names(opened.home.namespace if opened.view is None else opened.view.namespace)
    buffer_bytes = bounded_buffer(config.buffer_size)
    cache = BlockCache(
        opened.origin,
        opened.tiers,
        config.cache_eviction,
        buffer_bytes,
        verify_full=config.verify == "full",
        scrub_interval_s=config.scrub_interval,
        patience_s=0.95 * config.read_timeout,  # after the origin's deadline: that error says why
        tolerant=bool(data_path.restarts),
        shared=_shared_tier(opened),
        object_slabs_from_bytes=None if opened.link is None else object_slabs_from_bytes(config),
    )
    users = None if relayed is None else relayed.table
    limits = UidLimits(config.limit_uid, users, session.bound_reads)
    return Base(relayed, db, buffer_bytes, cache, LookUpReads(cache), limits)


def _shared_tier(opened: Opened) -> SharedTier:
    """Return the shared tier. A daemon that replaces another does without it rather than end, if
    the secret can't be read. Raises `UsageError`."""
    config, secret, obstacle = opened.config, b"", None
    writer = None if config.read_only else opened.origin.writer
    if writer is not None and writer.repeats_versions:
        obstacle = "it is not used, as a version may get other bytes in a writable mount of file://"
    try:
        secret = shared_secret(config)
    except UsageError as error:
        if not opened.data_path.restarts:
            raise
        log.error("%s; the mount goes on without the shared tier", error)
        obstacle = str(error)
    shared = SharedTier(opened.origin.identity, secret, config.shared_timeout, obstacle)
    shared.demand.limit_bytes = config.shared_size
    shared.members.use(config.shared)
    return shared


def build_namespace(opened: Opened, base: Base, nursery: trio.Nursery) -> Namespace:
    """Return the names of the mount. Their background tasks run in `nursery`."""
    config, origin, view = opened.config, opened.origin, opened.view
    ttls = Ttls(
        config.attr_ttl,
        config.entry_ttl,
        config.negative_ttl,
        config.list_ttl,
        config.stale_if_error,
    )
    return Namespace(
        base.db,
        origin if view is None else view.origin(origin),
        nursery,
        ttls,
        on_unbound=session.invalidate_entry,
        on_changed=session.invalidate_attributes,
        give_way=base.cache.give_way,
        # /run is usually in memory, so the disk can't delay the loop here. A spare home is there,
        # too, and leaves the log of the real one alone until its disk is back.
        wal_stem=None
        if opened.has_spare_home
        else socket_path(config.mountpoint).with_suffix(".journal"),
        is_successor=bool(opened.data_path.restarts),
        look_up_policy=base.look_up_reads,
    )


def build(
    opened: Opened, base: Base, namespace: Namespace, nursery: trio.Nursery, spool: Spool | None
) -> Parts:
    """Return everything else. Fetches ahead of readers run in `nursery`. A writable mount has a
    `spool`; without it all changes are refused.

    Behind the relay, and for a writable mount, the rows that `namespace` has written must be
    committed before this call (`Namespace.keep_log`).
    """
    config, origin, link = opened.config, opened.origin, opened.link
    relayed, cache, limits = base.relayed, base.cache, base.limits
    requests, observers, initialised = Requests(), RequestObservers(), trio.Event()
    access_log = AccessLog(observers)
    jobs = _jobs(opened, base, namespace)
    prefetch = _prefetch(opened, base, namespace, nursery)
    readers = prefetch.readers

    publisher = relay_stats = None
    if relayed is not None:
        publisher = relayed.publisher(cache, readers)
        readers.publish_ahead = publisher.publish_ahead
        relay_stats = RelayStats(relayed.table, publisher, requests)

    table = None if relayed is None else relayed.table
    passthrough = Passthrough(config, table, limits, observers)
    observers.on_change = passthrough.observe
    limits.on_change = passthrough.update

    writers = unsent = None
    if spool is not None:
        is_successor = bool(opened.data_path.restarts)
        writers, unsent = build_writers(
            config,
            origin,
            cache,
            namespace,
            readers,
            spool,
            base.db,
            relayed,
            publisher,
            is_successor,
            nursery,
        )

    options = live_options(origin, limits, namespace, prefetch, cache.shared)
    set_routes = SetRoutes(options, access_log, config.mountpoint)
    state = MountState(
        config,
        origin,
        cache,
        limits,
        set_routes,
        opened.data_path,
        requests,
        namespace,
        jobs,
        relay_stats,
        passthrough.report,
        None if unsent is None else unsent.files,
    )
    open_more = partial(open_tiers, origin.identity)
    cache_routes = CacheRoutes(
        namespace,
        cache,
        session.invalidate_entry,
        session.invalidate_attributes,
        session.names_dropped,
        lambda: origin.is_down,
        None if unsent is None else unsent.files,
    )
    routes = (
        state,
        TierRoutes(cache, config, open_more, opened.tiers, opened.home.root),
        set_routes,
        LoadRoutes(jobs),
        cache_routes,
        NamesRoutes(namespace, cache),
        WritesRoutes(unsent, cache_routes.refresh),
        MetadataRoutes(namespace, base.db, origin, config.manifest),
        ProfileRoutes(namespace, origin, observers),
    )
    handlers = {route: handler for each in routes for route, handler in each.handlers().items()}
    if link is not None:
        handlers = LiveChanges(config, link).recorded(handlers)

    ownership = Ownership(
        config.uid,
        config.gid,
        config.file_mode,
        config.dir_mode,
        keeps_modes=not config.read_only,
    )
    for_operations = (
        namespace,
        readers,
        Xattrs(namespace, cache),
        AttrBuilder(ownership),
        initialised.set,
        limits,
        requests,
        observers,
        publisher,
        HintRequests(prefetch.hints),
    )
    if writers is not None:
        operations: Operations = WritingOperations(*for_operations, writers=writers)
    elif config.read_only:
        operations = Operations(*for_operations)
    else:
        operations = RefusingOperations(*for_operations)
    return Parts(access_log, jobs, state, handlers, publisher, operations, writers, initialised)


def _jobs(opened: Opened, base: Base, namespace: Namespace) -> Jobs:
    context = JobContext(
        namespace,
        base.cache,
        opened.origin,
        JobFiles(opened.home.jobs),
        PathReader(str(opened.config.mountpoint), opened.origin.url),
        base.buffer_bytes // 2,
    )
    return Jobs(context)


def _prefetch(opened: Opened, base: Base, namespace: Namespace, nursery: trio.Nursery) -> Prefetch:
    config, origin = opened.config, opened.origin
    return Prefetch(
        namespace,
        base.cache,
        nursery,
        base.look_up_reads,
        lambda: not origin.is_down and not origin.queued,
        LoadThrottle(base.cache, origin, base.buffer_bytes // 2),
        config.readahead,
        config.prefetch,
    )
