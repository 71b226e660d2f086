"""Finds the members of the shared tier: from a list, a file, or a DNS name, read again from time to
time."""

import socket
from pathlib import Path
from typing import NamedTuple

import trio

from cachefs.config.shared_option import parse_members, split_dns
from cachefs.errors import reason_of

_MOST_FILE_BYTES = 1 << 20


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
            return await _of_addresses(parse_members(text, option))
        return await _of_addresses(parse_members(option, "--shared"))
    except OSError as error:
        return Found(None, f"the members can't be read from {option}: {reason_of(error)}")
    except ValueError as error:
        return Found(None, str(error))


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MOST_FILE_BYTES).decode("utf-8", "replace")


async def _of_name(name: str, port: int) -> Found:
    """All addresses of a DNS name are members, as a headless service of Kubernetes has them."""
    hosts = await _resolve(name, port)
    return Found(tuple(FoundMember(_join(host, port), host, port) for host in hosts))


async def _of_addresses(addresses: list[tuple[str, int]]) -> Found:
    members, problems = [], []
    for name, port in addresses:
        host = None
        try:
            host = (await _resolve(name, port))[0]
        except OSError as error:
            problems.append(f"{name}: {reason_of(error)}")
        members.append(FoundMember(_join(name, port), host, port))
    return Found(tuple(members), "; ".join(problems[:3]) or None)


async def _resolve(name: str, port: int) -> list[str]:
    """Return the IP addresses of a name, sorted. Raises `OSError`."""
    found = await trio.socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return sorted({str(sockaddr[0]) for *_, sockaddr in found})


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
