"""Ask members of the shared tier what they are, and say what is wrong with them.

Only commands use this module: it waits for the network. Whatever listens at an address may answer
with anything, so each answer is bounded in bytes and time, and nothing of it is shown unchecked.

`stats extstore` is not asked, because it ends a memcached before 1.6.10 that has no extstore
(memcached#783). `stats` has all sizes that are needed.
"""

import queue
import re
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cachefs.errors import reason_of
from cachefs.foreign_numbers import whole_number
from cachefs.shared.wire import shown
from cachefs.types import BLOCK_BYTES
from cachefs.units import format_bytes

LEAST_ITEM_BYTES = BLOCK_BYTES + 64
"""The longest value that must fit, without memcached's own header."""
LEAST_CONNECTIONS = 1024
"""memcached's own default. A node opens up to eight connections to a member."""
OLDEST = (1, 6, 10)
"""The first version with the final meta protocol: `ms KEY SIZE`, answered by `HD`."""
OLDEST_GOOD = (1, 6, 17)
"""Before it, sets of values of 1 MiB often fail when the memory is full (memcached#924)."""
MOST_ITEM_AGE_S = 5
"""Blocks that stay in memory for longer fill it in a burst, and are dropped instead of written."""

_MOST_ANSWER_BYTES = 1 << 16
_PIECE_BYTES = 1 << 12
_PAGE_BYTES = 1 << 20
_THREADS = 32
_NEARLY_ALL = 0.9
_FLAGS = "docs/SHARED_TIER.md has the flags"

_VERSION = re.compile(rb"VERSION (\d{1,4})\.(\d{1,4})\.(\d{1,6})[\w.+~-]{0,40}\r\n")
_STAT = re.compile(rb"STAT ([\w:.]{1,80}) ([^\r\n]{0,200})\r\n")


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a member has said of itself, None where it has not, and what is wrong with it.

    The disk is extstore's file. `items` are all names that memory has, and `disk_items` those whose
    bytes are on the disk. `evictions` counts items that memory had no room for, and
    `disk_evictions` those that were dropped from the disk because it was full, which is normal.
    """

    host: str
    port: int
    problems: list[str]
    version: str | None = None
    uptime_s: int | None = None
    memory_used_bytes: int | None = None
    memory_limit_bytes: int | None = None
    disk_used_bytes: int | None = None
    disk_limit_bytes: int | None = None
    items: int | None = None
    disk_items: int | None = None
    evictions: int | None = None
    disk_evictions: int | None = None
    connections: int | None = None
    connections_max: int | None = None
    item_size_max_bytes: int | None = None


def inspect(host: str, port: int, timeout_s: float) -> Inspection:
    """Inspect one member. Takes at most twice `timeout_s`, and the time to find the address of a
    name. Raises nothing: what goes wrong is a problem of the member."""
    try:
        sock = socket.create_connection((host, port), timeout_s)
    except TimeoutError:
        problem = f"it does not accept a connection within {timeout_s:g} s"
    except OSError as error:
        problem = f"it can't be reached ({reason_of(error)})"
    except UnicodeError:
        problem = "its name is no name of a machine"
    else:
        with sock:
            return inspect_on(sock, host, port, timeout_s)
    return Inspection(host, port, [f"{problem}: start it, or correct the list of members"])


def inspect_on(sock: socket.socket, host: str, port: int, timeout_s: float) -> Inspection:
    """Inspect the member at the other end of a new connection, as `inspect`."""
    found = Inspection(host, port, [])
    conversation = _Conversation(sock, timeout_s)
    try:
        return _inspected(found, conversation)
    except _WrongAnswerError as error:
        problem = str(error)
    except TimeoutError:
        problem = f"it does not answer within {timeout_s:g} s: start it again"
        if not conversation.has_answered:
            problem += ", or correct the address if another service is on this port"
    except OSError as error:
        problem = f"the connection to it has failed ({reason_of(error)})"
    return replace(found, problems=[problem])


def inspect_all(members: Iterable[tuple[str, int]], timeout_s: float) -> list[Inspection]:
    """Inspect members, many at a time, and return the results in the order of `members`.

    Takes at most three times `timeout_s` for each `_THREADS` members, even if a name server is
    silent.
    """
    places = list(members)
    results = [
        Inspection(host, port, ["its name was not found in time: see to the name server"])
        for host, port in places
    ]
    work: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(places)):
        work.put(number)

    def run() -> None:
        while True:
            try:
                number = work.get_nowait()
            except queue.Empty:
                return
            results[number] = inspect(*places[number], timeout_s)

    # Daemon threads, because nothing ends a thread that waits for a name server.
    threads = [threading.Thread(target=run, daemon=True) for _ in places[:_THREADS]]
    for thread in threads:
        thread.start()
    rounds = -(-len(places) // _THREADS)
    deadline = time.monotonic() + 3 * timeout_s * rounds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return list(results)


class _WrongAnswerError(Exception):
    """The answer is not memcached's. The text is the problem."""


class _Conversation:
    """One connection, with a deadline for all that happens on it."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self.has_answered = False
        self._sock = sock
        self._deadline = time.monotonic() + timeout_s

    def ask(self, command: bytes, end: bytes) -> bytes:
        """Return the answer, which ends with the line `end`, or with the only line if `end` is
        empty. Raises `OSError` and `_WrongAnswerError`."""
        self._limit()
        self._sock.sendall(command + b"\r\n")
        answer = bytearray()
        while True:
            if _is_refusal(answer) or _is_all(answer, end):
                return bytes(answer)
            if len(answer) > _MOST_ANSWER_BYTES:
                raise _WrongAnswerError(_foreign(bytes(answer)))
            try:
                piece = self._receive()
            except TimeoutError:
                if end or not answer:
                    raise
                raise _WrongAnswerError(_foreign(bytes(answer))) from None
            if not piece and not answer:
                raise _WrongAnswerError(
                    "it closes the connection without an answer: another service is on this port, "
                    "or memcached demands TLS (-Z) or a password (-S), which cachefs does not use"
                )
            if not piece:
                raise _WrongAnswerError(_foreign(bytes(answer)))
            answer += piece

    def _receive(self) -> bytes:
        self._limit()
        try:
            piece = self._sock.recv(_PIECE_BYTES)
        except ConnectionError:
            piece = b""
        self.has_answered = self.has_answered or bool(piece)
        return piece

    def _limit(self) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)


def _is_all(answer: bytes | bytearray, end: bytes) -> bool:
    if not end:
        return b"\n" in answer
    return answer == end or answer.endswith(b"\n" + end)


def _is_refusal(answer: bytes | bytearray) -> bool:
    return answer.startswith((b"ERROR", b"CLIENT_ERROR", b"SERVER_ERROR")) and b"\n" in answer


def _foreign(answer: bytes) -> str:
    """Return the problem of a member whose answer is not memcached's."""
    if b"unauthenticated" in answer[:80]:
        return "it demands a password, which cachefs does not send: start it without -Y and -S"
    if answer.startswith(b"ERROR Too many open connections"):
        return "it has as many connections as it allows: start it with a larger -c"
    line = answer.splitlines()[0] if answer else b""
    return f"it is no memcached: it says {shown(line)}; correct the address"


def _inspected(found: Inspection, conversation: _Conversation) -> Inspection:
    answer = conversation.ask(b"version", b"")
    match = _VERSION.fullmatch(answer)
    if match is None:
        raise _WrongAnswerError(_foreign(answer))
    version = (int(match[1]), int(match[2]), int(match[3]))
    found = replace(found, version=answer.split()[1].decode("ascii"))
    if version < OLDEST:
        return replace(found, problems=[_too_old(found.version)])
    stats = _stats(conversation, b"stats")
    settings = _stats(conversation, b"stats settings")
    answer = conversation.ask(b"mn", b"")
    if answer != b"MN\r\n":
        raise _WrongAnswerError(_foreign(answer))
    found = _with_sizes(found, stats, settings)
    return replace(found, problems=_problems(found, version, stats, settings))


def _too_old(version: str | None) -> str:
    return (
        f"its version {version} is too old: install memcached "
        f"{'.'.join(map(str, OLDEST_GOOD))} or a later one"
    )


def _stats(conversation: _Conversation, command: bytes) -> dict[str, str]:
    """Return what a command `stats` answers. Raises `OSError` and `_WrongAnswerError`."""
    answer = conversation.ask(command, b"END\r\n")
    lines = answer.removesuffix(b"END\r\n")
    if lines == answer or _STAT.sub(b"", lines):
        raise _WrongAnswerError(_foreign(_STAT.sub(b"", lines)))
    return {
        name.decode("ascii", "replace"): value.decode("ascii", "replace")
        for name, value in _STAT.findall(lines)
    }


def _number(stats: dict[str, str], name: str) -> int | None:
    return whole_number(stats.get(name, ""))


def _memory_used_bytes(stats: dict[str, str]) -> int | None:
    """With extstore, `bytes` includes what is on the disk; all memory is in pages then."""
    limit_bytes, pages = (
        _number(stats, name) for name in ("limit_maxbytes", "slab_global_page_pool")
    )
    if limit_bytes is None or pages is None or not _number(stats, "extstore_limit_maxbytes"):
        return _number(stats, "bytes")
    return max(0, limit_bytes - pages * _PAGE_BYTES)


def _with_sizes(found: Inspection, stats: dict[str, str], settings: dict[str, str]) -> Inspection:
    return replace(
        found,
        uptime_s=_number(stats, "uptime"),
        memory_used_bytes=_memory_used_bytes(stats),
        memory_limit_bytes=_number(stats, "limit_maxbytes"),
        disk_used_bytes=_number(stats, "extstore_bytes_used"),
        disk_limit_bytes=_number(stats, "extstore_limit_maxbytes"),
        items=_number(stats, "curr_items"),
        disk_items=_number(stats, "extstore_objects_used"),
        evictions=_number(stats, "evictions"),
        disk_evictions=_number(stats, "extstore_objects_evicted"),
        connections=_number(stats, "curr_connections"),
        connections_max=_number(stats, "max_connections"),
        item_size_max_bytes=_number(settings, "item_size_max"),
    )


def _problems(
    found: Inspection,
    version: tuple[int, int, int],
    stats: dict[str, str],
    settings: dict[str, str],
) -> list[str]:
    problems = []
    if version < OLDEST_GOOD:
        problems.append(
            f"its version {found.version} often refuses blocks of 1 MiB when its memory is full: "
            f"install memcached {'.'.join(map(str, OLDEST_GOOD))} or a later one"
        )
    if not found.disk_limit_bytes:
        problems.append(
            "it has no extstore, so blocks are only in memory: start it with -o ext_path=FILE:SIZE"
        )
    else:
        problems += _problems_of_the_disk(found, settings)
    largest = found.item_size_max_bytes
    if largest is not None and largest < LEAST_ITEM_BYTES:
        problems.append(
            f"it refuses values above {format_bytes(largest)}, but blocks have up to 1 MiB: "
            "start it with -I 2m"
        )
    if settings.get("evictions") == "off":
        problems.append("it refuses new blocks when it is full: start it without -M")
    return problems + _problems_of_connections(found, stats)


def _problems_of_the_disk(found: Inspection, settings: dict[str, str]) -> list[str]:
    problems = []
    age_s = _number(settings, "ext_item_age")
    if age_s is not None and age_s > MOST_ITEM_AGE_S:
        problems.append(
            "it keeps blocks in memory until that is full, and then drops some before they are "
            "on the disk: start it with -o ext_item_age=0"
        )
    if found.evictions:
        problems.append(
            f"it has dropped {found.evictions} items from memory since its start, because memory "
            f"is too small for their names or for a burst: start it with a larger -m; {_FLAGS}"
        )
    return problems


def _problems_of_connections(found: Inspection, stats: dict[str, str]) -> list[str]:
    most, now = found.connections_max, found.connections
    problems = []
    if most is not None and most < LEAST_CONNECTIONS:
        problems.append(
            f"it allows only {most} connections, and a node opens up to eight: start it with "
            f"-c {4 * LEAST_CONNECTIONS}"
        )
    refused = _number(stats, "rejected_connections") or _number(stats, "listen_disabled_num")
    if refused:
        problems.append(
            f"it has refused {refused} connections above its limit since its start: "
            "start it with a larger -c"
        )
    elif most is not None and now is not None and now > _NEARLY_ALL * most:
        problems.append(f"it has {now} connections of at most {most}: start it with a larger -c")
    return problems
