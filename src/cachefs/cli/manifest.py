"""`cachefs manifest` writes lists of files with their versions, for `mount --manifest`."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cachefs.cli import debug_option
from cachefs.cli.output.text import say
from cachefs.cli.views.progress import counting
from cachefs.config import MountConfig, flags, load_mount_config
from cachefs.errors import UsageError
from cachefs.mounts import locate

_ORIGIN_FIELDS = (
    "endpoint",
    "region",
    "addressing",
    "anonymous",
    "requester_pays",
    "profile",
    "credentials_dir",
    "ca_file",
    "oss_driver",
    "follow_links",
    "hdfs_driver",
)
_NOWHERE = "/nonexistent/no-mountpoint"


@click.group("manifest")
def command() -> None:
    """Write lists of files for mount --manifest.

    A mount with a manifest shows only the files in it, with the sizes, times and versions that it
    gives, and never sends a LIST. A manifest is Parquet or JSON lines with path, size, mtime_ns
    and version, or plain text with one path per line. The mount asks the origin for a missing
    value on first need, and keeps the answer until the unmount.
    """


def _origin_options(function: Callable[..., None]) -> Callable[..., None]:
    for name in reversed(_ORIGIN_FIELDS):
        flag, field = flags()[name], MountConfig.fields[name]
        function = click.option(
            *flag.names, name, metavar=flag.metavar, is_flag=flag.metavar is None, default=None,
            help=field.description,
        )(function)  # fmt: skip
    return function


@command.command("create")
@click.argument("source")
@click.option(
    "-o", "--output", "output", metavar="FILE", required=True,
    help=
"The file to write. It is Parquet if the name ends in .parquet, else JSON "
"lines. - is the standard output.",
)  # fmt: skip
@click.option(
    "--include", metavar="GLOB", multiple=True,
    help=
"Write only files that match. A pattern without / is compared with names. * "
"also matches /.",
)  # fmt: skip
@click.option("--exclude", metavar="GLOB", multiple=True, help="Write no files that match.")
@click.option(
    "--relative-to", metavar="URL",
    help=
"The source that will be mounted, if SOURCE lies below it. The paths in the "
"manifest are relative to it.",
)  # fmt: skip
@_origin_options
@debug_option
def create(
    source: str,
    output: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    relative_to: str | None,
    **options: Any,
) -> None:
    """Write a manifest of SOURCE, a URL as for mount, or a directory of a mount.

    \b
      cachefs manifest create s3://bucket/data -o data.parquet
      cachefs manifest create s3://bucket/data/v7 --relative-to s3://bucket/data -o v7.jsonl
      cachefs manifest create /mnt/data/train -o train.jsonl --include '*.jpg'
      cachefs mount s3://bucket/data /mnt/data --manifest data.parquet
    """
    from cachefs.load.paths import path_filter
    from cachefs.manifest.writer import manifest_writer

    given = {name: value for name, value in options.items() if value}
    finder, url = _finder(source, relative_to, given)
    wanted = path_filter(include, exclude)
    began = time.monotonic()
    with manifest_writer(output, url) as writer, counting("files") as note:

        def found(path: str, meta: Any) -> None:
            if wanted is None or wanted(path):
                writer.add(path, meta)
                note(writer.count)

        finder(found)
        if not writer.count:
            raise UsageError(f"there is no such file below {source}; nothing was written")
    say(f"{writer.count:,} files in {time.monotonic() - began:.1f} s: {output}", err=True)


def _finder(
    source: str, relative_to: str | None, given: dict[str, Any]
) -> tuple[Callable[[Callable[[str, Any], None]], None], str]:
    """Return a function that reports all files, and the URL to which their paths are relative."""
    if "://" in source:
        prefix = _prefix(source, relative_to)
        config = load_mount_config(source, _NOWHERE, given)
        return lambda found: _find_in_source(config, prefix, found), relative_to or source
    if relative_to is not None or given:
        names = [flags()[name].option for name in given] or ["--relative-to"]
        raise UsageError(f"{names[0]} is for URLs; {source} is a directory of a mount")
    if not Path(source).is_dir():
        raise UsageError(f"{source} is neither a URL nor a directory of a mount")
    mountpoint, (inner,) = locate([os.path.abspath(source)])

    def find(found: Callable[[str, Any], None]) -> None:
        from cachefs.manifest.create import find_in_mount

        find_in_mount(mountpoint / inner, inner, found)

    return find, str(mountpoint)


def _prefix(source: str, relative_to: str | None) -> str:
    if relative_to is None:
        return ""
    base = relative_to.rstrip("/") + "/"
    if not (source.rstrip("/") + "/").startswith(base):
        raise UsageError(f"{source} does not lie below {relative_to}")
    return source[len(base) :].strip("/")


def _find_in_source(config: MountConfig, prefix: str, found: Callable[[str, Any], None]) -> None:
    import trio

    from cachefs.manifest.create import find_in_source
    from cachefs.origin.open_origin import open_origin
    from cachefs.origin.options import OriginOptions
    from cachefs.origin.resilience import Resilience, ResilientOrigin

    settings = {name: getattr(config, name) for name in _ORIGIN_FIELDS}

    def with_prefix(path: str, meta: Any) -> None:
        found(f"{prefix}/{path}", meta)

    async def run() -> None:
        origin = ResilientOrigin(
            open_origin(config.source, OriginOptions(**settings)),
            Resilience(read_timeout_s=60.0, request_timeout_s=20.0),
        )
        try:
            await origin.check()
            await find_in_source(origin, with_prefix if prefix else found)
        finally:
            await origin.aclose()

    trio.run(run)
