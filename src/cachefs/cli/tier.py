"""`cachefs tier` shows and changes the cache tiers of a running mount."""

from collections.abc import Callable
from typing import Any

import click

from cachefs.cli import debug_option
from cachefs.cli.mounts.one_mount import the_mount
from cachefs.cli.output.text import say
from cachefs.control import api
from cachefs.control.api import Route
from cachefs.control.client import TIMEOUT_S, ask
from cachefs.errors import CachefsError, UsageError
from cachefs.mounts import socket_path
from cachefs.types import Medium
from cachefs.units import format_bytes, parse_ratio, parse_size

CHANGE_TIMEOUT_S = 120.0
"""The limit for a change: a slow disk may have to finish pending writes first."""

_KEEP = "until the mount ends; to keep it so, change the mount's options or [[tier]] too"


def _parsed(parse: Callable[[str], float]) -> Callable[..., float | None]:
    """Make a click callback from a parser in `units` for text with a unit."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
        try:
            return None if value is None else parse(value)
        except UsageError as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return convert


_size, _ratio = _parsed(parse_size), _parsed(parse_ratio)


@click.group("tier")
def command() -> None:
    """Show or change the cache tiers of a running mount.

    A tier is a directory with a medium and a quota. Changes last until the mount ends; the next
    mount takes its tiers from the options and [[tier]] tables (cachefs mount --help).
    """


@command.command("list", short_help="Show quota, health and activity of each tier.")
@click.argument("mountpoint")
@debug_option
def list_tiers(mountpoint: str) -> None:
    """Show the tiers of MOUNTPOINT: quota, health, and activity since the mount began."""
    report = _ask(mountpoint, api.STATUS, {}, TIMEOUT_S)
    from cachefs.cli.views.tables import stdout_console
    from cachefs.cli.views.tiers import print_tiers

    print_tiers(stdout_console(), report)


@command.command("resize", short_help="Change the quota of a tier.")
@click.argument("mountpoint")
@click.argument("path")
@click.argument("size", callback=_size)
@debug_option
def resize(mountpoint: str, path: str, size: int) -> None:
    """Give the tier at PATH a quota of SIZE, such as 50GiB. The daemon evicts data over the quota
    in the background, to a slower tier if there is one."""
    reply = _ask(mountpoint, api.TIER_RESIZE, {"path": _absolute(path), "quota_bytes": size})
    before, after = (format_bytes(reply[when]["quota_bytes"]) for when in ("before", "after"))
    say(f"{_absolute(path)}: the quota was {before} and is {after} {_KEEP}")


@command.command("add", short_help="Add a directory.")
@click.argument("mountpoint")
@click.argument("path")
@click.option(
    "--size",
    callback=_size,
    required=True,
    metavar="SIZE",
    help="The most bytes that the tier may use.",
)
@click.option(
    "--medium",
    type=click.Choice(list(Medium.__members__), case_sensitive=False),
    default=Medium.SSD.name,
    show_default=True,
    metavar="MEM|SSD|HDD",
    help="The medium of the tier. MEM is a directory on a tmpfs.",
)
@click.option(
    "--high",
    callback=_ratio,
    metavar="RATIO",
    help="Begin eviction above this share of the quota. [the mount's]",
)
@click.option(
    "--low",
    callback=_ratio,
    metavar="RATIO",
    help="End eviction below this share of the quota. [the mount's]",
)
@click.option(
    "--free-space-ratio",
    callback=_ratio,
    metavar="RATIO",
    help="Leave this share of the file system free. [the mount's]",
)
@click.option(
    "--pin-limit",
    callback=_ratio,
    metavar="RATIO",
    help="Let at most this share of the tier be pinned. [the mount's]",
)
@debug_option
def add(mountpoint: str, path: str, size: int, medium: str, **ratios: float | None) -> None:
    """Add the directory PATH, new or a former tier of the same source, to the cache."""
    arguments = {"medium": medium, "path": _absolute(path), "quota_bytes": size}
    arguments |= {name: ratio for name, ratio in ratios.items() if ratio is not None}
    after = _ask(mountpoint, api.TIER_ADD, arguments)["after"]
    held = f", with {after['cached_blocks']} blocks" if after["cached_blocks"] else ""
    quota = format_bytes(after["quota_bytes"])
    say(f"{after['path']}: added as {after['medium']} tier of {quota}{held}, {_KEEP}")


@command.command("remove", short_help="Take a tier out of the cache.")
@click.argument("mountpoint")
@click.argument("path")
@debug_option
def remove(mountpoint: str, path: str) -> None:
    """Take the tier at PATH out of the cache. Its directory stays on the disk."""
    before = _ask(mountpoint, api.TIER_REMOVE, {"path": _absolute(path)})["before"]
    say(f"{before['path']}: taken out of the cache {_KEEP}; its directory is left there")


def _ask(
    mountpoint: str,
    route: Route,
    arguments: dict[str, object],
    timeout_s: float = CHANGE_TIMEOUT_S,
) -> dict[str, Any]:
    """Send a request to the daemon and return its answer. Raises `CachefsError`."""
    place = the_mount(mountpoint)
    try:
        return ask(socket_path(place), route, arguments, timeout_s)
    except CachefsError as error:
        raise CachefsError(f"{place}: {error}") from error


def _absolute(path: str) -> str:
    """Return an absolute path, because the daemon has another working directory."""
    from cachefs.config import absolute_path

    try:
        return str(absolute_path(path))
    except ValueError as error:
        raise UsageError(f"PATH: {error}") from error
