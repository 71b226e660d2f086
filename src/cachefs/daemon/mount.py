"""Builds the objects of one mount, runs its tasks, and closes everything in order."""

import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache.publisher import Publisher
from cachefs.config import MountConfig
from cachefs.control.api import Handler, Route
from cachefs.control.mount_state import MountState
from cachefs.control.routes.cache import CacheRoutes
from cachefs.control.routes.load import LoadRoutes
from cachefs.control.routes.metadata import MetadataRoutes
from cachefs.control.routes.profile import ProfileRoutes
from cachefs.control.routes.set import SetVerb
from cachefs.control.routes.tier import TierRoutes
from cachefs.daemon.changes import Changes, access_log_in
from cachefs.daemon.memory_limit import bounded_buffer
from cachefs.daemon.relayed import Relayed
from cachefs.daemon.settings import resilience
from cachefs.daemon.tiers import open_names, open_tiers
from cachefs.errors import CachefsError, OriginError, OriginUnavailableError
from cachefs.format.paths import TierPaths
from cachefs.fuse import session
from cachefs.fuse.access_log import AccessLog
from cachefs.fuse.attrs import AttrBuilder, Ownership
from cachefs.fuse.hint_requests import HintRequests
from cachefs.fuse.observers import RequestObservers
from cachefs.fuse.operations import Operations
from cachefs.fuse.uid_limits import UidLimits
from cachefs.fuse.xattrs import Xattrs
from cachefs.load.job import JobContext
from cachefs.load.job_files import JobFiles
from cachefs.load.jobs import Jobs
from cachefs.load.paths import PathReader
from cachefs.log import is_debugging, set_debugging
from cachefs.manifest.view import ManifestView
from cachefs.mounts import socket_path
from cachefs.namespace.namespace import Namespace, Ttls
from cachefs.namespace.reader import Readers
from cachefs.origin.resilience import ResilientOrigin
from cachefs.prefetch.look_ups import LookUpReads
from cachefs.prefetch.prefetch import Prefetch
from cachefs.supervisor.link import Link
from cachefs.systemd_notify import ServiceManager
from cachefs.tiers.tier import Tier
from cachefs.types import DataPath

log = logging.getLogger(__name__)

_TTLS = {
    "attr_ttl": "attr_s",
    "entry_ttl": "entry_s",
    "negative_ttl": "negative_s",
    "list_ttl": "list_s",
    "stale_if_error": "stale_if_error_s",
}
"""Option name -> attribute of `Ttls`."""


class Mount:
    """One mount. It owns the objects that live exactly as long as the mount.

    Tiers that are added or removed at run time are also added to or removed from the list `tiers`,
    so that the caller can close them.
    """

    def __init__(
        self,
        config: MountConfig,
        origin: ResilientOrigin,
        tiers: list[Tier],
        home: TierPaths,
        manager: ServiceManager,
        failure: OriginUnavailableError | None,
        view: ManifestView | None,
        data_path: DataPath,
        link: Link | None,
    ) -> None:
        """Opens the names' database and the cache's indexes. Raises `CacheDirError`.

        `home` is the directory with the names. `failure` is the origin's error if it can't be
        reached. `view` is the view of the manifest, if there is one. With a `link`, the supervisor
        mounts.
        """
        self._link = link
        self._initialised = trio.Event()
        self._relayed = None if link is None else Relayed(link)
        self._config = config
        self._view = view
        self._failure = failure
        self._origin = origin
        self._manager = manager
        # Open the namespace first: this can fail because its directory has a newer format.
        self._jobs_directory = home.jobs
        names = home.namespace if view is None else view.namespace
        self._db = open_names(names)
        self._buffer_bytes = bounded_buffer(config.buffer_size)
        self._cache = BlockCache(
            origin,
            tiers,
            config.cache_eviction,
            self._buffer_bytes,
            verify_full=config.verify == "full",
            scrub_interval_s=config.scrub_interval,
            patience_s=resilience(config).deadline_s,
            tolerant=bool(data_path.restarts),
        )
        self._look_up_reads = LookUpReads(self._cache)
        users = None if self._relayed is None else self._relayed.table
        self._limits = UidLimits(config.limit_uid, users, session.bound_reads)
        self._observers = RequestObservers()
        self._access_log = AccessLog(self._observers)
        self._set_verb = SetVerb(origin, self._limits, self._access_log, config.mountpoint)
        self._state = MountState(
            config, origin, self._cache, self._limits, self._set_verb, data_path
        )
        self._tier_routes = TierRoutes(
            self._cache, config, partial(open_tiers, origin.identity), tiers, home.root
        )

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Mount, serve until unmounted or until a signal, then write pending data.

        `on_ready` is called on the loop when the kernel's first request has been answered.
        """
        try:
            async with trio.open_nursery() as nursery:
                try:
                    # A signal ends the serving; the cache still stores the fetched blocks.
                    with trio.CancelScope() as serving:
                        nursery.start_soon(self._stop_on_signal, serving)
                        await self._serve(nursery, on_ready)
                finally:
                    await self._cache.aclose()
                nursery.cancel_scope.cancel()
        finally:
            self._db.close()

    async def _serve(self, nursery: trio.Nursery, on_ready: Callable[[], None]) -> None:
        await nursery.start(self._origin.run)
        await nursery.start(self._cache.run)
        namespace = await self._open_namespace(nursery)
        nursery.start_soon(self._db.commit_loop)
        nursery.start_soon(self._db.residency.keep_small)
        nursery.start_soon(self._db.residency.keep_warm)
        if self._view is not None:
            nursery.start_soon(self._view.run)
        nursery.start_soon(self._access_log.run)
        handlers = {**self._state.handlers(), **self._tier_routes.handlers()}
        handlers |= self._set_verb.handlers()
        jobs = self._state.jobs = self._jobs(namespace)
        handlers |= LoadRoutes(jobs).handlers()
        routes = CacheRoutes(
            namespace, self._cache, session.invalidate_entry, session.invalidate_attributes
        )
        handlers |= routes.handlers()
        metadata = MetadataRoutes(namespace, self._db, self._origin, self._config.manifest)
        handlers |= metadata.handlers()
        handlers |= ProfileRoutes(namespace, self._origin, self._observers).handlers()
        # A separate nursery, cancelled first: no tier is added or removed while the cache closes.
        async with trio.open_nursery() as control:
            prefetch = self._prefetch(namespace, control)
            self._let_change(namespace, prefetch.readers)
            await control.start(jobs.run)
            if self._link is not None:
                handlers = Changes(self._config, self._link).heard_in(handlers)
                await self._switch_access_log_on(access_log_in(self._link.changes))
            if self._state.data_path.restarts:
                control.start_soon(self._serve_others_later, handlers)
            else:
                await control.start(self._serve_others, handlers)
            await self._serve_kernel(namespace, prefetch, on_ready)
            control.cancel_scope.cancel()

    def _let_change(self, namespace: Namespace, readers: Readers) -> None:
        for name, attribute in _TTLS.items():
            self._let_change_ttl(name, attribute, namespace)
        self._set_verb.add_attribute("readahead", readers)
        self._set_verb.add("debug", is_debugging, set_debugging)

    def _let_change_ttl(self, name: str, attribute: str, namespace: Namespace) -> None:
        def put(value: float) -> None:
            namespace.ttls = replace(namespace.ttls, **{attribute: value})

        self._set_verb.add(name, lambda: getattr(namespace.ttls, attribute), put)

    async def _switch_access_log_on(self, file: Path | None) -> None:
        """Restore the access log of the previous daemon; a failure is only logged."""
        try:
            if file is not None:
                await self._access_log.switch(file)
        except CachefsError as error:
            log.warning("%s", error)

    async def _stop_on_signal(self, serving: trio.CancelScope) -> None:
        what = "unmounting" if self._link is None else "ending"
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("%s: %s", signal.Signals(number).name, what)
                serving.cancel()

    async def _serve_others_later(self, handlers: dict[Route, Handler]) -> None:
        """Like `_serve_others`, but after a restart: the readers that wait are served first."""
        await self._initialised.wait()
        await self._serve_others(handlers)

    async def _serve_others(
        self,
        handlers: dict[Route, Handler],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve the control socket and the metrics. Started when clients can connect."""
        serve_control, serve_metrics = await trio.to_thread.run_sync(_load_servers)
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_control, socket_path(self._config.mountpoint), handlers)
            await nursery.start(serve_metrics, self._state)
            task_status.started()

    def _jobs(self, namespace: Namespace) -> Jobs:
        config = self._config
        context = JobContext(
            namespace,
            self._cache,
            self._origin,
            JobFiles(self._jobs_directory),
            PathReader(str(config.mountpoint), self._origin.url),
            self._buffer_bytes // 2,
        )
        return Jobs(context)

    def _prefetch(self, namespace: Namespace, nursery: trio.Nursery) -> Prefetch:
        return Prefetch(
            namespace,
            self._cache,
            nursery,
            self._look_up_reads,
            lambda: not self._origin.is_down and not self._origin.queued,
            self._config.readahead,
            in_order=self._config.prefetch == "order",
        )

    async def _serve_kernel(
        self, namespace: Namespace, prefetch: Prefetch, on_ready: Callable[[], None]
    ) -> None:
        readers = prefetch.readers
        publisher = None if self._relayed is None else self._relayed.publisher(self._cache, readers)
        if self._relayed is not None and publisher is not None:
            self._relayed.yield_to(self._observers)
            self._state.relay = self._relayed.stats(publisher, self._state.requests)
        hints = HintRequests(prefetch.hints)
        operations = self._operations(namespace, readers, publisher, hints)
        device = self._mount(operations)
        try:
            async with trio.open_nursery() as nursery:
                if publisher is not None:
                    nursery.start_soon(publisher.run)
                nursery.start_soon(self._announce, device, on_ready)
                nursery.start_soon(self._manager.feed_watchdog)
                await session.serve()
                nursery.cancel_scope.cancel()
        finally:
            self._state.mounted = False
            self._manager.stopping()
            session.unmount()

    def _mount(self, operations: Operations) -> str:
        """Mount, and return the device of the mount in the mount table."""
        place, source = self._config.mountpoint, self._origin.url
        if self._link is None:
            return session.mount(operations, place, source, self._config.allow_other)
        sockets = self._link.mount(place, source, self._config.allow_other)
        session.connect(operations, sockets.requests_fd, sockets.device_fd, sockets.takes_notices)
        return sockets.device

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
            on_unbound=session.invalidate_entry,
            on_changed=session.invalidate_attributes,
            give_way=self._cache.give_way,
            # /run is usually in memory, so the disk can't delay the loop here.
            wal_stem=socket_path(config.mountpoint).with_suffix(".journal"),
            is_successor=bool(self._state.data_path.restarts),
            look_up_policy=None if config.prefetch == "off" else self._look_up_reads,
        )
        if self._failure is not None:
            namespace.begin_outage(self._failure)
        elif self._state.data_path.restarts:
            nursery.start_soon(_observe_root_later, namespace)
        else:
            await namespace.observe_root()
        self._state.namespace = namespace
        if not self._state.data_path.restarts:
            # After a restart the kernel may still have files open whose names are gone.
            namespace.table.purge_unnamed()
        # The reservation of inode numbers must be on disk before any of them is used.
        await self._db.commit()
        return namespace

    def _operations(
        self,
        namespace: Namespace,
        readers: Readers,
        publisher: Publisher | None,
        hints: HintRequests,
    ) -> Operations:
        config = self._config
        ownership = Ownership(config.uid, config.gid, config.file_mode, config.dir_mode)
        return Operations(
            namespace,
            readers,
            Xattrs(namespace, self._cache),
            AttrBuilder(ownership),
            self._initialised.set,
            self._limits,
            self._state.requests,
            self._observers,
            publisher,
            hints,
        )

    async def _announce(self, device: str, on_ready: Callable[[], None]) -> None:
        await self._initialised.wait()
        self._state.mounted = True
        await trio.to_thread.run_sync(session.tune, device)
        verb = "serving" if self._state.data_path.restarts else "mounted on"
        log.info("%s %s", verb, self._config.mountpoint)
        on_ready()


async def _observe_root_later(namespace: Namespace) -> None:
    """Look up the root in the background: the previous daemon has done it, and readers wait."""
    try:
        await namespace.observe_root()
    except OriginUnavailableError as error:
        namespace.begin_outage(error)
    except OriginError as error:
        log.warning("can't look at the root: %s", error)


def _load_servers() -> tuple[Callable[..., Awaitable[None]], Callable[..., Awaitable[None]]]:
    """Import the servers of the control socket and the metrics.

    They are a third of all imports. Blocks.
    """
    from cachefs.control.metrics_server import serve_metrics
    from cachefs.control.server import serve

    return serve, serve_metrics
