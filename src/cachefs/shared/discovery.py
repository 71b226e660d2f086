"""Finds the members of the shared tier: from a list, a file, or a DNS name, read again from time to
time."""

import socket
from pathlib import Path
from typing import NamedTuple

import trio

from cachefs.config.fields import show
from cachefs.config.shared_option import parse_members, split_dns
from cachefs.errors import reason_of
from cachefs.trusted_path import read_file

_MOST_FILE_BYTES = 1 << 20
_AT_A_TIME = 16
"""Names that are resolved in parallel."""


class FoundMember(NamedTuple):
    """A member as it was found: what it is called on every node, and its IP address and port.
    `host` is None if its name can't be resolved now."""

    address: str
    host: str | None
    port: int


class Found(NamedTuple):
    """The members. `members` is None if the file or the DNS name can't be read now. `problem` is
    what was wrong, None if nothing was."""

    members: tuple[FoundMember, ...] | None
    problem: str | None = None


NOBODY = Found(())


async def find_members(option: str) -> Found:
    """Return the members that `--shared` names now."""
    try:
        if (dns := split_dns(option)) is not None:
            return await _of_name(*dns)
        if option.startswith("/"):
            text = await trio.to_thread.run_sync(_read, Path(option), abandon_on_cancel=True)
            addresses = parse_members(text, option)
            if not addresses:  # perhaps it is being written
                return Found(None, f"{option} names no members")
            return await _of_addresses(addresses)
        return await _of_addresses(parse_members(option, "--shared"))
    except OSError as error:
        return Found(None, f"the members can't be read from {option}: {reason_of(error)}")
    except ValueError as error:
        return Found(None, str(error))


def _read(path: Path) -> str:
    """Return the text of a file. Raises `OSError`."""
    return read_file(path, _MOST_FILE_BYTES).decode("utf-8", "replace")


async def _of_name(name: str, port: int) -> Found:
    """All addresses of a DNS name are members, as a headless service of Kubernetes has them."""
    hosts = await _resolve(name, port)
    return Found(tuple(FoundMember(_join(host, port), host, port) for host in hosts))


async def _of_addresses(addresses: list[tuple[str, int]]) -> Found:
    hosts: dict[tuple[str, int], str] = {}
    problems: list[str] = []
    limiter = trio.CapacityLimiter(_AT_A_TIME)

    async def resolve(name: str, port: int) -> None:
        async with limiter:
            try:
                hosts[name, port] = (await _resolve(name, port))[0]
            except (OSError, ValueError) as error:  # ValueError: it can't be a name
                reason = reason_of(error) if isinstance(error, OSError) else "it is no host name"
                problems.append(f"{show(name)}: {reason}")

    async with trio.open_nursery() as nursery:
        for address in addresses:
            nursery.start_soon(resolve, *address)
    members = tuple(
        FoundMember(_join(name, port), hosts.get((name, port)), port) for name, port in addresses
    )
    return Found(members, "; ".join(sorted(problems)[:3]) or None)


async def _resolve(name: str, port: int) -> list[str]:
    """Return the IP addresses of a name, sorted, those of IPv6 only if there are no others. Raises
    `OSError`, and `ValueError` for what can't be a name."""
    found = await trio.socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = sorted({str(sockaddr[0]) for *_, sockaddr in found})
    return [host for host in hosts if ":" not in host] or hosts


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
