"""Runs the tasks of one mount, and ends them in order. `daemon/parts.py` builds its objects."""

import logging
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from cachefs.control.api import REPORT_ROUTES, Handler, Route
from cachefs.control.mount_state import MountState
from cachefs.control.serving import serve_commands, serve_metrics
from cachefs.daemon.learned import keep_learned
from cachefs.daemon.live_changes import access_log_in
from cachefs.daemon.parts import Opened, Parts, build, build_base, build_namespace
from cachefs.daemon.passthrough import never_passes_through
from cachefs.daemon.process import return_freed_memory
from cachefs.daemon.spool_place import choose_spool, note_spool, noted_spool
from cachefs.daemon.writing import check_writable, keep_guarantees, take_over_guarantees
from cachefs.errors import CachefsError, OriginError, OriginUnavailableError, SpoolError
from cachefs.fuse import session
from cachefs.fuse.access_log import AccessLog
from cachefs.fuse.operations import Operations
from cachefs.mounts import report_path, socket_path
from cachefs.namespace.namespace import Namespace
from cachefs.staging.spool import Spool
from cachefs.systemd_notify import ServiceManager
from cachefs.writes.background import BackgroundSends
from cachefs.writes.unsent.report import UnsentFiles
from cachefs.writes.unsent.slow_sends import SlowSends

log = logging.getLogger(__name__)

_LAST_SENDS_S = 15.0
"""How long the end of a writable mount tries to send what is left; the supervisor waits longer."""


class RunningMount:
    """One mount. It owns the objects that live exactly as long as the mount."""

    def __init__(self, opened: Opened, manager: ServiceManager) -> None:
        """Opens the names' database and the cache's indexes. Raises `CacheDirError`."""
        self._opened = opened
        self._config = opened.config
        self._link = opened.link
        self._is_successor = bool(opened.data_path.restarts)
        self._manager = manager
        self._base = build_base(opened)
        self._spool: Spool | None = None
        self._sends: BackgroundSends | None = None
        self._unsent: UnsentFiles | None = None

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
                    if self._sends is not None:
                        with trio.CancelScope(shield=True), trio.move_on_after(_LAST_SENDS_S):
                            await self._sends.finish()
                    if self._unsent is not None:
                        self._unsent.log_rest()
                    await self._base.cache.aclose()
                    if self._spool is not None:
                        await self._spool.close()
                nursery.cancel_scope.cancel()
        finally:
            self._base.db.close()

    async def _serve(self, nursery: trio.Nursery, on_ready: Callable[[], None]) -> None:
        opened, base = self._opened, self._base
        await nursery.start(opened.origin.run)
        await nursery.start(base.cache.shared.run)
        await nursery.start(base.cache.run)
        if opened.origin.learned is not None:
            keep_learned(base.db, opened.origin.learned)
        namespace = build_namespace(opened, base, nursery)
        if not (self._config.read_only or self._is_successor) and opened.origin.writer is not None:
            await check_writable(base.db, opened.origin.writer)
        await self._open(namespace, nursery)
        nursery.start_soon(base.db.commit_loop)
        nursery.start_soon(base.db.residency.keep_small)
        nursery.start_soon(base.db.residency.keep_warm)
        nursery.start_soon(return_freed_memory)
        if opened.view is not None:
            nursery.start_soon(opened.view.run)
        # A separate nursery, cancelled first: no tier is added or removed while the cache closes.
        async with trio.open_nursery() as control:
            spool = await self._open_spool(nursery)
            parts = build(opened, base, namespace, control, spool)
            nursery.start_soon(parts.access_log.run)
            await control.start(parts.jobs.run)
            if self._link is not None:
                await _switch_on(parts.access_log, access_log_in(self._link.changes))
            if self._is_successor:
                control.start_soon(self._serve_others_later, parts)
            else:
                await control.start(self._serve_others, parts.handlers, parts.state)
            if parts.writers is not None:
                self._sends, self._unsent = parts.writers.background, parts.state.unsent
                control.start_soon(self._sends.run)
                if (writer := opened.origin.writer) is not None:
                    keep = take_over_guarantees if self._is_successor else keep_guarantees
                    keep(base.db, writer)
            if self._unsent is not None:
                control.start_soon(SlowSends(self._unsent).run)
            await self._serve_kernel(parts, on_ready)
            control.cancel_scope.cancel()

    async def _open_spool(self, nursery: trio.Nursery) -> Spool | None:
        """Open the spool of a writable mount. Raises `SpoolError`.

        Return None for a read-only mount, and if the spool of the daemon before this one can't be
        opened: its unsent changes are there, and new ones must not be based on older contents."""
        if self._config.read_only:
            return None
        opened, source, db = self._opened, self._opened.origin.identity, self._base.db
        noted = noted_spool(db) if self._is_successor else None
        choose = partial(choose_spool, opened.home, opened.tiers, source, noted)
        try:
            if opened.has_spare_home:
                raise SpoolError("the disk of the names is gone, so it is not known where it is")
            root = await trio.to_thread.run_sync(choose)
            self._spool = await Spool.open(root, source, self._config.spool_size)
        except (SpoolError, OSError) as error:
            if not self._is_successor:
                raise
            log.error("all changes are refused, as the spool can't be used: %s", error)
            return None
        note_spool(db, root)
        await nursery.start(self._spool.run)
        return self._spool

    async def _open(self, namespace: Namespace, nursery: trio.Nursery) -> None:
        """Prepare the names for the first request."""
        if self._opened.failure is not None:
            namespace.outage.begin(self._opened.failure)
        elif self._is_successor:
            nursery.start_soon(_observe_root_later, namespace)
        else:
            await namespace.observe_root()
        if not self._is_successor:
            # After a restart the kernel may still have files open whose names are gone.
            namespace.table.purge_unnamed()
        # The reservation of inode numbers must be on disk before any of them is used.
        if not await self._base.db.commit():
            log.warning(
                "the namespace can't be written: names that are not known yet give EIO until it "
                "can; free some space on the disk of %s",
                self._opened.home.root,
            )

    async def _stop_on_signal(self, serving: trio.CancelScope) -> None:
        what = "unmounting" if self._link is None else "ending"
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("%s: %s", signal.Signals(number).name, what)
                serving.cancel()

    async def _serve_others_later(self, parts: Parts) -> None:
        """Like `_serve_others`, but after a restart: the readers that wait are served first."""
        await parts.initialised.wait()
        await self._serve_others(parts.handlers, parts.state)

    async def _serve_others(
        self,
        handlers: dict[Route, Handler],
        state: MountState,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve the control socket and the metrics. Started when clients can connect."""
        async with trio.open_nursery() as nursery:
            place = self._config.mountpoint
            await nursery.start(serve_commands, socket_path(place), handlers)
            reports = {route: handlers[route] for route in REPORT_ROUTES}
            await nursery.start(serve_commands, report_path(place), reports)
            await nursery.start(serve_metrics, state, handlers)
            task_status.started()

    async def _serve_kernel(self, parts: Parts, on_ready: Callable[[], None]) -> None:
        device = self._mount(parts.operations)
        try:
            async with trio.open_nursery() as nursery:
                if parts.publisher is not None:
                    nursery.start_soon(parts.publisher.run)
                nursery.start_soon(self._announce, parts, device, on_ready)
                nursery.start_soon(self._manager.feed_watchdog)
                await session.serve()
                nursery.cancel_scope.cancel()
        finally:
            parts.state.mounted = False
            self._manager.stopping()
            session.unmount()

    def _mount(self, operations: Operations) -> str:
        """Mount, and return the device of the mount in the mount table."""
        place, source = self._config.mountpoint, self._opened.origin.url
        writable = not self._config.read_only
        if writable:
            session.accept_writes()
        if self._link is None:
            return session.mount(operations, place, source, self._config.allow_other, writable)
        passthrough = never_passes_through(self._config) is None
        if passthrough:
            session.pass_through()
        sockets = self._link.mount(place, source, self._config.allow_other, writable, passthrough)
        session.connect(operations, sockets.requests_fd, sockets.device_fd, sockets.takes_notices)
        return sockets.device

    async def _announce(self, parts: Parts, device: str, on_ready: Callable[[], None]) -> None:
        await parts.initialised.wait()
        await trio.to_thread.run_sync(session.tune, device, self._config.kernel_readahead)
        verb = "serving" if self._is_successor else "mounted on"
        log.info("%s %s", verb, self._config.mountpoint)
        # No await in between: when a client sees that it is mounted, the supervisor was told.
        on_ready()
        parts.state.mounted = True


async def _switch_on(access_log: AccessLog, file: Path | None) -> None:
    """Restore the access log of the previous daemon; a failure is only logged."""
    try:
        if file is not None:
            await access_log.switch(file)
    except CachefsError as error:
        log.warning("%s", error)


async def _observe_root_later(namespace: Namespace) -> None:
    """Look up the root in the background: the previous daemon has done it, and readers wait."""
    try:
        await namespace.observe_root()
    except OriginUnavailableError as error:
        namespace.outage.begin(error)
    except OriginError as error:
        log.warning("can't look at the root: %s", error)
