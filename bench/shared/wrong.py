"""Measure that reads have the right bytes, whatever the members of the shared tier have."""

import contextlib
import secrets
import socket
from collections.abc import Callable, Iterator
from urllib.parse import unquote_to_bytes

from bench.case import shuffled
from bench.report import Row
from bench.shared.lab import Lab
from tests.servers.memcached import Memcached

_CASE = "right bytes, whatever the members have"
_TINY = ["-m", "8", "-I", "2m"]
"""A member with 8 MiB of memory and no disk."""
_NODES = 2
_REFUSED_BAR = 0.95
"""On a busy machine a value may come too late, and then it is not even looked at."""


def wrong(lab: Lab, prefix: str, names: list[str]) -> list[Row]:
    """Read files after the values in the members were changed; with another secret; and with
    members that are full, or are no memcached."""
    lab.bench.say("shared: wrong bytes, another secret, full, no memcached")
    some = shuffled(names, 1100)[: len(names) // 2]
    return [
        *_changed(lab, prefix, names, some, "a byte of each value flipped", _flip),
        *_changed(lab, prefix, names, some, "values exchanged", _exchange),
        *_other_secret(lab, prefix, names, some),
        *_full(lab, prefix, names),
        *_no_memcached(lab, prefix, some),
    ]


def _changed(
    lab: Lab,
    prefix: str,
    names: list[str],
    some: list[str],
    what: str,
    change: Callable[[Memcached], int],
) -> list[Row]:
    """Change all values; the next node must refuse them."""
    lab.fill(prefix, len(names))
    changed = sum(change(member) for member in lab.members)
    with lab.node(prefix) as mount:
        (found,) = lab.read_timed(prefix, [mount], [some])
        report = mount.status()["shared"]
    return [
        _bad_row(what, found.bad),
        Row(_CASE, f"{what}: refused values", "of read", report["bad_values"] / len(some),
            bar=f">= {_REFUSED_BAR:g}", passed=changed == len(names)
            and report["bad_values"] >= _REFUSED_BAR * len(some)),
    ]  # fmt: skip


def _other_secret(lab: Lab, prefix: str, names: list[str], some: list[str]) -> list[Row]:
    lab.fill(prefix, len(names))
    path = lab.bench.directory / "secret"
    path.write_text(secrets.token_hex(16))
    path.chmod(0o600)
    options = [*lab.shared, "--shared-secret-file", str(path)]
    with lab.node(prefix, shared=options) as mount:
        (found,) = lab.read_timed(prefix, [mount], [some])
        hits = mount.status()["shared"]["hits"]
    return [
        _bad_row("another secret", found.bad),
        Row(_CASE, "another secret: hits", "", hits, bar="= 0", passed=hits == 0),
    ]


def _full(lab: Lab, prefix: str, names: list[str]) -> list[Row]:
    with Memcached(lab.bench.directory / "tiny", _TINY) as tiny:
        options = ["--shared", tiny.address]
        with lab.nodes(prefix, _NODES, shared=options) as mounts:
            orders = [shuffled(names, 1200 + number) for number in range(_NODES)]
            found = lab.read_timed(prefix, mounts, orders)
        stats = tiny.stats()
    return [
        _bad_row("full, 8 MiB", sum(each.bad for each in found)),
        Row(_CASE, "full: values that it dropped", "", int(stats["evictions"])),
    ]


def _no_memcached(lab: Lab, prefix: str, some: list[str]) -> list[Row]:
    rows = []
    s3 = lab.bench.server.endpoint.removeprefix("http://")
    with _mute() as mute:
        for what, address in (("an S3 server", s3), ("a mute service", mute)):
            with lab.node(prefix, shared=["--shared", address]) as mount:
                (found,) = lab.read_timed(prefix, [mount], [some])
                (member,) = mount.status()["shared"]["members"]
            lab.bench.say(f"shared: {what}: {member['problem']}")
            rows.append(_bad_row(f"{what} on the port", found.bad))
    return rows


def _bad_row(what: str, bad: int) -> Row:
    return Row(_CASE, f"{what}: bad reads", "", bad, bar="= 0", passed=not bad)


@contextlib.contextmanager
def _mute() -> Iterator[str]:
    """Yield the address of a service that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        yield "{}:{}".format(*listener.getsockname())


# -- the values of a member ----------------------------------------------------------------------


def _flip(member: Memcached) -> int:
    """Flip a byte in the middle of each value. Return how many there are."""
    values = _values(member)
    for key, value in values.items():
        middle = len(value) // 2
        changed = value[:middle] + bytes([value[middle] ^ 1]) + value[middle + 1 :]
        _store(member, key, changed)
    return len(values)


def _exchange(member: Memcached) -> int:
    """Give each key the value of another one. Return how many there are."""
    values = _values(member)
    keys = list(values)
    for key, other in zip(keys, [*keys[1:], *keys[:1]], strict=True):
        _store(member, key, values[other])
    return len(values)


def _values(member: Memcached) -> dict[bytes, bytes]:
    listed = member.ask(b"lru_crawler metadump all", b"END\r\n")
    keys = [
        unquote_to_bytes(line.split(b" ")[0].removeprefix(b"key="))
        for line in listed.split(b"\n")
        if line.startswith(b"key=")
    ]
    found = {}
    with socket.create_connection(("127.0.0.1", member.port), timeout=10) as sock:
        stream = sock.makefile("rwb")
        for key in keys:
            stream.write(b"mg %b v\r\n" % key)
            stream.flush()
            words = stream.readline().split()
            if words[0] == b"VA":
                found[key] = stream.read(int(words[1]))
                stream.readline()
    return found


def _store(member: Memcached, key: bytes, value: bytes) -> None:
    answer = member.ask(b"ms %b %d T0\r\n%b" % (key, len(value), value))
    if not answer.startswith(b"HD"):
        raise RuntimeError(f"memcached answered {answer!r}")
