"""`cachefs mount` mounts a source: its options, and its help by groups."""

from typing import Any

import click

from cachefs.cli.mounting.mount_words import parse_mount_words
from cachefs.cli.mounting.start import given, mount_config, start
from cachefs.config import FieldInfo, Flag, Group, MountConfig, flags
from cachefs.errors import UsageError
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
    field = MountConfig.fields[name]
    default = _shown_default(name, field, flag)
    text = field.description
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
            help="Read options from a TOML file, which has their names with underscores. "
            "Options on the command line win. The file may also name SOURCE and "
            "MOUNTPOINT. Its [[tier]] tables describe cache tiers one by one (see the "
            "README).",
        ),
        click.Option(
            ["-d", "--background"], is_flag=True, help="Go to the background. This is the default."
        ),
        click.Option(
            ["-o", "words"],
            metavar="WORD[,WORD...]",
            multiple=True,
            help="Options in the form of mount(8), such as allow_other,cache_size=100GiB. The word "
            "writable means --rw.",
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
    if {fields.get("read_only"), options.get("read_only")} == {True, False}:
        raise UsageError("-o says ro or writable, and the option the opposite; leave one out")
    fields |= {name: value for name, value in options.items() if value not in (None, ())}
    if background and fields.get("foreground"):
        raise UsageError("-d and -f contradict each other; leave one out")
    config = mount_config(source, mountpoint, fields, config_file)
    start(config, given(source, fields, config_file))


command = _MountCommand(
    "mount",
    params=_params(),
    callback=_mount,
    help="""Mount SOURCE, such as s3://bucket/prefix or file:///dir, on the directory MOUNTPOINT.

    The command ends when the mount answers. A daemon serves the mount until `cachefs umount
    MOUNTPOINT`.

    SIZE is bytes or has a unit: 512, 300MiB, 1.5TiB. TIME is seconds or has a unit: 600, 10m, 1h.
    "indefinite" means for ever. RATIO is 0.1 or 10%. The defaults are in brackets.

    Credentials come from the usual variables and files (AWS_ACCESS_KEY_ID, ...,
    ~/.aws/credentials), never from options.
    """,
)
