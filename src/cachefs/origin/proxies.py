"""Decides whether a request goes through a proxy, for all requests to a source.

The environment says it, as for curl and Go: `http_proxy` and `https_proxy` by the scheme of the
address, else `all_proxy`; `no_proxy` names what is asked without a proxy. Capitals count where the
small form is not set. Libraries differ in what they read of `no_proxy`, so each is told the
decision of `proxy_for`.
"""

import base64
import os
import re
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import quote, unquote, urlsplit

from cachefs.errors import UsageError

_PORTS = {"http": 80, "https": 443}
_WITH_PORT = re.compile(r"(\[[^\]]*\]|[^:\[\]]*):(\d{1,5})")


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy. Neither `repr` nor `address` contains its password."""

    address: str
    """Scheme, host and port."""
    user: str | None = field(default=None, repr=False)
    password: str = field(default="", repr=False)

    @property
    def url(self) -> str:
        """The address with user and password, for libraries that take it so. Never show it."""
        if self.user is None:
            return self.address
        scheme, _, host = self.address.partition("://")
        return f"{scheme}://{quote(self.user, '')}:{quote(self.password, '')}@{host}"

    @property
    def authorization(self) -> str | None:
        """The header Proxy-Authorization, or None."""
        if self.user is None:
            return None
        pair = f"{self.user}:{self.password}".encode()
        return f"Basic {base64.b64encode(pair).decode()}"


def proxy_for(url: str) -> Proxy | None:
    """Return the proxy for requests to the host of `url`, or None. Raises `UsageError` for a
    variable that names no proxy which cachefs can use."""
    place = urlsplit(url)
    names = [f"{place.scheme}_proxy", "all_proxy"]
    found = next(((name, value) for name in names if (value := _variable(name))), None)
    if found is None:
        return None
    host, port = (place.hostname or "").rstrip("."), place.port or _PORTS.get(place.scheme, 0)
    if _is_excepted(host, port, _variable("no_proxy")):
        return None
    return _parsed(*found)


def _variable(name: str) -> str:
    """Return a variable of the environment by its small name; empty if it is not set. The small
    form counts even if it is empty."""
    return os.environ.get(name, os.environ.get(name.upper(), "")).strip()


def _parsed(name: str, value: str) -> Proxy:
    try:
        place = urlsplit(value if "://" in value else f"http://{value}")
        host, port = place.hostname, place.port
    except ValueError:
        host, port, place = None, None, urlsplit("")
    if place.scheme not in _PORTS or not host or not place.netloc.isprintable():
        raise UsageError(
            f"the variable {name} names no proxy that cachefs can use: write http://HOST:PORT, or "
            "name the host of the source in no_proxy"
        )
    host = f"[{host}]" if ":" in host else host
    address = f"{place.scheme}://{host}:{port or _PORTS[place.scheme]}"
    user = None if place.username is None else unquote(place.username)
    return Proxy(address, user, unquote(place.password or ""))


def _is_excepted(host: str, port: int, no_proxy: str) -> bool:
    """Whether an entry of `no_proxy` stands for a host: `*`, a name with all names below it, an
    address, or a network such as 10.0.0.0/8. A port after it restricts the entry."""
    literal = _address(host)
    return any(
        _stands_for(entry, host.lower(), port, literal)
        for entry in re.split(r"[,\s]+", no_proxy.lower())
        if entry
    )


def _stands_for(
    entry: str, host: str, port: int, literal: IPv4Address | IPv6Address | None
) -> bool:
    if entry == "*":
        return True
    with_port = _WITH_PORT.fullmatch(entry)
    if with_port is not None:
        if int(with_port[2]) != port:
            return False
        entry = with_port[1]
    entry = entry.strip("[]")
    if literal is not None:
        try:
            return literal in ip_network(entry, strict=False)
        except ValueError:
            return False
    name = entry.removeprefix("*").strip(".")
    return bool(name) and (host == name or host.endswith(f".{name}"))


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found
