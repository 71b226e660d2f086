"""Builds a mount from its configuration, serves it, and closes everything at the end."""

import logging
from collections.abc import Callable

import trio

from cachefs.config import MountConfig
from cachefs.daemon.crash_check import check_databases
from cachefs.daemon.mount import RunningMount
from cachefs.daemon.parts import Opened
from cachefs.daemon.process import bound_malloc_arenas, calm_garbage_collector, single_error
from cachefs.daemon.settings import origin_options, resilience
from cachefs.daemon.tiers import (
    close_all,
    home_of,
    namespace_path,
    open_tiers,
    warn_of_sizes,
)
from cachefs.db import database_exists
from cachefs.errors import OriginUnavailableError, UsageError
from cachefs.loop_clock import LoopClock
from cachefs.manifest.view import open_view
from cachefs.mounts import prepare_mountpoint, spare_path
from cachefs.origin.host_names import HostNames
from cachefs.origin.open_origin import open_origin
from cachefs.origin.resilience import ResilientOrigin
from cachefs.supervisor.link import ALIVE_INTERVAL_S, Link
from cachefs.supervisor.open_files import raise_file_limit
from cachefs.systemd_notify import NOBODY, ServiceManager
from cachefs.types import DataPath, DataPathName

log = logging.getLogger(__name__)

_SHUTDOWN_S = 20.0
_PYTHON = DataPath(DataPathName.PYTHON)


def run(
    config: MountConfig,
    on_ready: Callable[[], None],
    manager: ServiceManager = NOBODY,
    data_path: DataPath = _PYTHON,
    link: Link | None = None,
    has_crashed: bool = False,
) -> None:
    """Mount and serve until unmounted, SIGTERM or SIGINT. Blocks.

    `on_ready` is called on the loop when the kernel's first request has been answered. `manager`
    receives watchdog signals and the end. With a `link`, the supervisor mounts and unmounts. With
    `has_crashed`, the databases are checked first (see `crash_check`).
    Raises `CachefsError` for every error that a user can fix.
    """
    raise_file_limit()
    calm_garbage_collector()
    bound_malloc_arenas()
    with single_error():
        trio.run(_run, config, on_ready, manager, data_path, link, has_crashed, clock=LoopClock())


async def _run(
    config: MountConfig,
    on_ready: Callable[[], None],
    manager: ServiceManager,
    data_path: DataPath,
    link: Link | None,
    has_crashed: bool,
) -> None:
    trio.socket.set_custom_hostname_resolver(HostNames())
    if link is None:
        await trio.to_thread.run_sync(prepare_mountpoint, config.mountpoint, config.nonempty)
        await _serve(config, on_ready, manager, data_path, None, has_crashed)
        return
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_give_signs_of_life, link)
        await _serve(config, on_ready, manager, data_path, link, has_crashed)
        nursery.cancel_scope.cancel()


async def _give_signs_of_life(link: Link) -> None:
    while True:
        link.alive()
        await trio.sleep(ALIVE_INTERVAL_S)


async def _serve(
    config: MountConfig,
    on_ready: Callable[[], None],
    manager: ServiceManager,
    data_path: DataPath,
    link: Link | None,
    has_crashed: bool,
) -> None:
    options = origin_options(config)
    async with open_view(config, options) as view:
        inner = open_origin(config.source, options)
        origin = ResilientOrigin(view.unlisted(inner) if view else inner, resilience(config))
        try:
            # Readers wait for a daemon that replaces another, and the origin was checked before.
            failure = None if data_path.restarts else await _check(origin, config)
            if not config.read_only and origin.writer is None:
                raise UsageError(f"{origin.url} can't be written by cachefs; leave out --rw")
            tolerant = bool(data_path.restarts)
            tiers = open_tiers(origin.identity, *config.tiers, tolerant=tolerant)
            try:
                directories = [tier.paths for tier in tiers]
                await trio.to_thread.run_sync(check_databases, directories, has_crashed)
                home = home_of(config, tiers, spare_path(config.mountpoint))
                if not data_path.restarts:
                    await trio.to_thread.run_sync(warn_of_sizes, config)
                if view is not None:
                    await trio.to_thread.run_sync(view.build, home.manifests, origin.tells_owners)
                opened = Opened(config, origin, tiers, home, failure, view, data_path, link)
                await RunningMount(opened, manager).serve(on_ready)
            finally:
                close_all(tiers)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _SHUTDOWN_S):
                await origin.aclose()


async def _check(origin: ResilientOrigin, config: MountConfig) -> OriginUnavailableError | None:
    """Check the origin (`Origin.check`).

    If the origin is unavailable, but the cache has names of it that may be shown, returns the
    error instead of raising it. Returns None if the check succeeds.
    """
    try:
        await origin.check()
    except OriginUnavailableError as error:
        is_known = config.manifest is not None or database_exists(namespace_path(config))
        if not config.stale_if_error or not is_known:
            raise
        log.warning("%s; what is known and cached of it is mounted all the same", error)
        return error
    return None
