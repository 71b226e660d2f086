"""Serve a mount in this process, or start a daemon that does."""

import faulthandler
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cachefs import log, systemd_notify
from cachefs.cli.mounting.background import MANIFEST_TIMEOUT_S, START_TIMEOUT_S, OnReady, launch
from cachefs.cli.mounts.one_mount import mountpoint_or_configured
from cachefs.config import MountConfig, load_mount_config, to_json, view_key
from cachefs.daemon.log_setup import log_file_of, set_up_log
from cachefs.errors import MountError, RelayUnusableError
from cachefs.mounts import (
    RuntimeFile,
    canonical,
    checked_mountpoint,
    default_log_file,
    refuse_overlaps,
)
from cachefs.systemd_notify import NOBODY, ServiceManager
from cachefs.types import DataPath, DataPathName

_logger = logging.getLogger(__name__)


def given(
    source: str | None, fields: Mapping[str, object], config_file: str | None
) -> dict[str, Any]:
    """Return the command line of a mount for `cachefs reload`, with the working directory, because
    reload may run in another one."""
    file = None if config_file is None else os.path.abspath(config_file)
    return {"source": source, "fields": dict(fields), "file": file, "directory": _cwd()}


def _cwd() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "/"


def start(config: MountConfig, given: Mapping[str, Any]) -> None:
    """Serve the mount in the foreground until it ends, or start a daemon and return once it
    answers.

    Raises `CachefsError` or `UsageError` if the mount fails.
    """
    manager = systemd_notify.take_over()  # a daemon in the background must not inherit it
    caches = [path for tier in config.tiers for path in tier.paths]
    refuse_overlaps(config.source, config.mountpoint, caches)
    why_python = _why_python(config)
    given = {**given, "config": json.loads(to_json(config))}
    if config.foreground:
        set_up_log(config)
        status = f"serving {config.source} on {config.mountpoint}"
        _serve(config, given, why_python, _ignore, manager, status)
        return
    log_file = log.open_log_file(config.log_file or default_log_file(config.mountpoint))

    def serve(on_ready: OnReady) -> None:
        set_up_log(config)
        _serve(config, given, why_python, on_ready)

    patience_s = START_TIMEOUT_S if config.manifest is None else MANIFEST_TIMEOUT_S
    launch(serve, config.mountpoint, log_file, patience_s)


def _ignore(warnings: Sequence[str] = ()) -> None:
    """Do nothing: in the foreground the user sees the warnings in the output."""


def _why_python(config: MountConfig) -> str | None:
    """Return why the relay does not answer the kernel, or None if it does.

    Raises `MountError` if `config` requires the relay and it is not possible.
    """
    if config.data_path == "python":
        return "asked for with --data-path python"
    from cachefs.fuse import relay

    reason = relay.why_not()
    if reason is not None and config.data_path == "relay":
        raise _not_possible(reason)
    return reason


def _not_possible(reason: str) -> MountError:
    return MountError(
        f"--data-path relay is not possible here: {reason}; mend that, or leave the option out"
    )


def mount_config(
    source: str | None,
    mountpoint: str | None,
    fields: Mapping[str, object],
    config_file: str | None,
) -> MountConfig:
    """Return the configuration, with the mountpoint as the kernel's mount table writes it.

    Raises `UsageError`.
    """
    file = None if config_file is None else Path(config_file)
    mountpoint = mountpoint_or_configured(mountpoint, config_file)
    place = None if mountpoint is None else str(canonical(checked_mountpoint(mountpoint)))
    return load_mount_config(source, place, fields, file)


def _serve(
    config: MountConfig,
    given: Mapping[str, Any],
    why_python: str | None,
    on_ready: OnReady,
    manager: ServiceManager = NOBODY,
    status: str = "",
) -> None:
    """Run the daemon, or its supervisor, until the unmount. Claims the mountpoint before the heavy
    imports, because the claim is cheap."""
    faulthandler.enable()  # systemd's watchdog ends a stuck process with SIGABRT: print the stack
    if why_python is None:
        try:
            _supervise(config, given, on_ready, manager, status)
            return
        except RelayUnusableError as error:
            if config.data_path == "relay":
                raise _not_possible(str(error)) from error
            why_python = str(error)
    if config.keeper is not None:
        _logger.warning("--keeper has no effect without the relay: %s", why_python)
    with RuntimeFile(config.mountpoint, config.source, log_file_of(config), given=given) as claim:
        from cachefs.daemon.run import run

        def tell() -> None:
            claim.note_device()
            manager.ready(status)
            on_ready()

        path = DataPath(DataPathName.PYTHON, why_python)
        run(config, tell, manager, path)


def _supervise(
    config: MountConfig,
    given: Mapping[str, Any],
    on_ready: OnReady,
    manager: ServiceManager,
    status: str,
) -> None:
    from cachefs.supervisor.supervisor import Supervisor
    from cachefs.supervisor.task import Task, daemon_command

    log_file = log_file_of(config)
    where = "what it wrote above" if log_file is None else str(log_file)
    task = Task(
        config.mountpoint,
        config.nonempty,
        to_json(config),
        daemon_command(),
        status,
        where,
        config.keeper,
        view_key(config),
    )
    with RuntimeFile(
        config.mountpoint, config.source, log_file, supervised=True, given=given
    ) as claim:

        def tell(warnings: Sequence[str] = ()) -> None:
            claim.note_device()
            on_ready(warnings)

        Supervisor(task, tell, manager, claim.note_failed_upgrade).run()
