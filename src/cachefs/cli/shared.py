"""`cachefs shared` shows the shared tier of a mount, and checks its members."""

import json
from dataclasses import asdict
from typing import Any

import click

from cachefs.cli import debug_option, json_option
from cachefs.cli.mounts.one_mount import the_mount
from cachefs.cli.output.text import say
from cachefs.control import api
from cachefs.control.client import TIMEOUT_S, ask
from cachefs.errors import CachefsError, UsageError
from cachefs.mounts import socket_path
from cachefs.shared.inspection import Inspection, inspect_all

MEMBER_TIMEOUT_S = 3.0
"""How long a member may take to answer."""

_HOW = "mount with --shared HOST:PORT, or use cachefs set MOUNTPOINT shared=HOST:PORT"


@click.group("shared")
def command() -> None:
    """Show or check the tier that nodes share.

    The shared tier is a set of memcached servers with extstore (cachefs mount --shared). The nodes
    keep blocks in it, so that the origin sees each block about once.
    """


@command.command("status", short_help="Show the shared tier of a mount, and its members.")
@click.argument("mountpoint")
@json_option
@debug_option
def status(mountpoint: str, as_json: bool) -> None:
    """Show the shared tier of MOUNTPOINT: its members, their share, hits, latency, memory and disk.

    Hits are those of this mount since it began. Memory and disk are what the members say now.
    """
    report = _report(mountpoint)
    shared = report.get("shared")
    if shared is None and not as_json:
        say(f"{mountpoint} has no shared tier; {_HOW}")
        return
    servers = _inspect_members(shared)
    if as_json:
        members = [asdict(server) for server in servers.values()]
        click.echo(json.dumps({"shared": shared, "servers": members}, indent=2))
        return
    from cachefs.cli.views.shared import print_shared
    from cachefs.cli.views.tables import stdout_console

    print_shared(stdout_console(), report, servers)


@command.command("check", short_help="Check the members and print what is wrong.")
@click.argument("target", metavar="MOUNTPOINT|HOST:PORT[,HOST:PORT...]")
@json_option
@debug_option
def check(target: str, as_json: bool) -> int:
    """Ask the members of a mount, or those that are given, and print a line for each thing that is
    wrong.

    The exit code is 1 if anything is.
    """
    members = _addresses(target)
    problems: list[str] = []
    if members is None:
        shared = _report(target).get("shared")
        if shared is None:
            raise CachefsError(f"{target} has no shared tier; {_HOW}")
        if shared.get("problem"):
            problems.append(str(shared["problem"]))
        servers = list(_inspect_members(shared).values())
        if not servers and not problems:
            problems.append(f"there are no members in {shared.get('from', '--shared')}")
    else:
        servers = inspect_all(members, MEMBER_TIMEOUT_S)
    for server in servers:
        where = _address(server)
        problems += [f"{where}: {problem}" for problem in server.problems]
    if as_json:
        listed = [asdict(server) for server in servers]
        click.echo(json.dumps({"problems": problems, "servers": listed}, indent=2))
    else:
        from cachefs.cli.views.shared import all_well, on_one_line

        for problem in problems:
            say(on_one_line(problem))
        if not problems:
            say(all_well(servers))
    return int(bool(problems))


def _report(mountpoint: str) -> dict[str, Any]:
    """Return the status report of a mount. Raises `CachefsError`."""
    place = the_mount(mountpoint)
    try:
        return ask(socket_path(place), api.STATUS, {}, TIMEOUT_S)
    except CachefsError as error:
        raise CachefsError(f"{place}: {error}") from error


def _inspect_members(shared: dict[str, Any] | None) -> dict[str, Inspection]:
    """Inspect the members in a status report, and return the results by address."""
    from cachefs.config import split_address

    found = [] if shared is None else [str(member["address"]) for member in shared["members"]]
    try:
        places = [split_address(address) for address in found]
    except ValueError as error:
        raise CachefsError(f"the daemon did not answer as it should: {error}") from None
    return dict(zip(found, inspect_all(places, MEMBER_TIMEOUT_S), strict=True))


def _addresses(target: str) -> list[tuple[str, int]] | None:
    """Parse addresses; None if `target` must be a mountpoint. Raises `UsageError`."""
    from cachefs.config.shared_option import parse_members

    if "/" in target or ":" not in target:
        return None
    try:
        return parse_members(target, "the list")
    except ValueError as error:
        raise UsageError(f"{error}, or the path of a mountpoint") from None


def _address(server: Inspection) -> str:
    from cachefs.config import join_address

    return join_address(server.host, server.port)
