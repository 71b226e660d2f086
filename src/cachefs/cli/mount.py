"""`cachefs mount` starts a daemon from a command line."""

import faulthandler
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from pydantic.fields import FieldInfo

from cachefs import log, systemd_notify
from cachefs.cli.mounting.background import MANIFEST_TIMEOUT_S, START_TIMEOUT_S, OnReady, launch
from cachefs.cli.mounting.mount_words import parse_mount_words
from cachefs.cli.mounts.one_mount import mountpoint_or_configured
from cachefs.config import (
    Flag,
    Group,
    MountConfig,
    flags,
    load_mount_config,
    to_json,
)
from cachefs.daemon.log_setup import log_file_of, set_up_log
from cachefs.errors import MountError, RelayUnusableError, UsageError
from cachefs.mounts import RuntimeFile, canonical, checked_mountpoint, default_log_file
from cachefs.systemd_notify import NOBODY, ServiceManager
from cachefs.types import DataPath, DataPathName
from cachefs.units import format_bytes, format_duration


class _MountCommand(click.Command):
    """The `mount` command. Its help shows the options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        by_field = flags()
        sections: dict[str, list[tuple[str, str]]] = {group.value: [] for group in Group}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                flag = by_field.get(param.name or "")
                sections[(flag.group if flag else Group.PROCESS).value].append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _shown_default(name: str, field: FieldInfo, flag: Flag) -> str | None:
    """Return the default as a user would type it."""
    value = field.default
    if flag.shown_default is not None or isinstance(value, bool):
        return flag.shown_default
    if flag.metavar == "TIME":
        return format_duration(value)
    if name.endswith("_mode"):
        return f"{value:o}"
    if flag.metavar == "SIZE":
        return format_bytes(value).replace(" ", "") if value else "0"
    return str(value)


def _option(name: str, flag: Flag) -> click.Option:
    field = MountConfig.model_fields[name]
    default = _shown_default(name, field, flag)
    text = field.description or ""
    return click.Option(
        [*flag.names, name],
        metavar=flag.metavar,
        is_flag=flag.metavar is None,
        multiple=flag.multiple,
        default=None,
        help=text if default is None else f"{text} [{default}]",
    )


def _params() -> list[click.Parameter]:
    return [
        click.Argument(["source"], required=False),
        click.Argument(["mountpoint"], required=False),
        *(_option(name, flag) for name, flag in flags().items()),
        click.Option(
            ["-c", "--config", "config_file"],
            metavar="FILE",
            help="Read options from a TOML file, named as here with underscores; the command "
            "line wins. SOURCE and MOUNTPOINT may stand there too. Its [[tier]] tables describe "
            "cache tiers one by one (see the README).",
        ),
        click.Option(
            ["-d", "--background"], is_flag=True, help="Go to the background; done anyhow."
        ),
        click.Option(
            ["-o", "words"],
            metavar="WORD[,WORD...]",
            multiple=True,
            help="Options as mount(8) writes them: allow_other,cache_size=100GiB,attr_timeout=60.",
        ),
    ]


def _mount(
    source: str | None,
    mountpoint: str | None,
    config_file: str | None,
    background: bool,
    words: tuple[str, ...],
    **options: Any,
) -> None:
    fields = parse_mount_words(",".join(words))
    fields |= {name: value for name, value in options.items() if value not in (None, ())}
    if background and fields.get("foreground"):
        raise UsageError("-d and -f contradict each other; leave one out")
    start(load(source, mountpoint, fields, config_file), given(source, fields, config_file))


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


def start(config: MountConfig, given: Mapping[str, Any] | None = None) -> None:
    """Serve the mount in the foreground until it ends, or start a daemon and return once it
    answers.

    Raises `CachefsError` or `UsageError` if the mount fails.
    """
    manager = systemd_notify.take_over()  # a daemon in the background must not inherit it
    why_python = _why_python(config)
    given = {**(given or {}), "config": json.loads(to_json(config))}
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


def load(
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
        config.mountpoint, config.nonempty, to_json(config), daemon_command(), status, where
    )
    with RuntimeFile(
        config.mountpoint, config.source, log_file, supervised=True, given=given
    ) as claim:

        def tell(warnings: Sequence[str] = ()) -> None:
            claim.note_device()
            on_ready(warnings)

        Supervisor(task, tell, manager, claim.note_failed_upgrade).run()


command = _MountCommand(
    "mount",
    params=_params(),
    callback=_mount,
    help="""Mount SOURCE, such as s3://bucket/prefix or file:///dir, on the directory MOUNTPOINT.

    Returns once the mount answers; a daemon serves it until `cachefs umount MOUNTPOINT`.

    SIZE is bytes or has a unit: 512, 300MiB, 1.5TiB. TIME is seconds or has a unit: 600, 10m,
    1h; "indefinite" is for ever. RATIO is 0.1 or 10%. Defaults stand in brackets.

    Credentials come from the usual variables and files (AWS_ACCESS_KEY_ID, ...,
    ~/.aws/credentials), never from options.
    """,
)
