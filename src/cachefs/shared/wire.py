"""The commands of memcached's meta protocol that the shared tier uses, and their answers.

Source: doc/protocol.txt of memcached 1.6, "Meta Commands". Before 1.6.10 `ms` had another form.
"""

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from cachefs.foreign_numbers import whole_number
from cachefs.format.shared_value import KEY_BYTES
from cachefs.types import BLOCK_BYTES

LEASE_S = 4
"""How long a member lets others wait for the node that has the lease."""
LINE_BYTES = 1024
"""The longest line of an answer that is accepted."""
MOST_VALUE_BYTES = BLOCK_BYTES + LINE_BYTES
"""The longest value of an answer that is read; it may be one that we have not stored."""


class ProtocolError(Exception):
    """The answer is none of memcached's meta protocol."""


class Answer(Enum):
    """What a member says of one block."""

    HIT = "hit"
    """It has the block, and the value is verified."""
    LEASED = "leased"
    """It does not have the block, and gives the lease to us: we fetch and store it."""
    HELD = "held"
    """It does not have the block yet, and another node has the lease."""
    MISSED = "missed"
    """It can't say, or has not answered: perhaps it has given us the lease."""
    LEFT_OUT = "left out"
    """It was not asked: the shared tier does not keep this block, or the member is away."""
    DROPPED = "dropped"
    """It had the block on its disk and has dropped it. The next question gets the lease."""
    BAD = "bad"
    """Its value is not verified."""


class Head(NamedTuple):
    """The first line of the answer to a question for a block.

    `value_bytes` is None if no value follows.
    """

    answer: Answer
    value_bytes: int | None


def ask(key: bytes) -> bytes:
    """Return the command that asks for a block, and for its lease if it is missing."""
    return b"mg %b v N%d\r\n" % (key, LEASE_S)


def lease(key: bytes) -> bytes:
    """Return the command that asks for the lease, but not for the block."""
    return b"mg %b N%d\r\n" % (key, LEASE_S)


def peek(key: bytes) -> bytes:
    """Return the command that asks only for the size of a value."""
    return b"mg %b s\r\n" % key


PROBE = b"mg cachefs-probe s\r\n"
"""A command that any member answers."""


STATS = b"stats\r\n"
MOST_STATS = 1000
"""The most lines of the answer to it that are read; memcached 1.6.18 sends some 120."""


def read_stats(lines: Iterable[bytes]) -> dict[bytes, int]:
    """Parse the lines of the answer to `STATS`, without their ends and without the last one."""
    found = {}
    for line in lines:
        words = line.split(b" ")
        number = whole_number(words[-1])
        if len(words) == 3 and words[0] == b"STAT" and number is not None:
            found[words[1]] = number
    return found


def store(key: bytes, value_bytes: int) -> bytes:
    """Return the first line of the command that stores a value, without a time limit."""
    return b"ms %b %d T0\r\n" % (key, value_bytes)


def delete(key: bytes) -> bytes:
    """Return the command that deletes a value."""
    return b"md %b\r\n" % key


def read_head(line: bytes) -> Head:
    """Parse the first line of the answer to `ask`, `lease` or `peek`, without its end. Raises
    `ProtocolError`.

    A HIT without a value (`lease`, `peek`) has not been verified.
    """
    words = line.split(b" ")
    code = words[0]
    if code == b"VA":
        value_bytes = _number(words[1] if len(words) > 1 else b"")
        answer = _lease_answer(words[2:], value_bytes == 0)
        return Head(answer, value_bytes)
    if code == b"HD":
        sizes = [_number(word[1:]) for word in words[1:] if word[:1] == b"s"]
        return Head(_lease_answer(words[1:], sizes == [0]), None)
    if code == b"EN":
        return Head(Answer.DROPPED, None)
    if code == b"SERVER_ERROR":
        return Head(Answer.MISSED, None)
    raise ProtocolError(f"it is no memcached of version 1.6.10 or later: it said {shown(line)}")


def _lease_answer(flags: list[bytes], is_empty: bool) -> Answer:
    if b"W" in flags:
        return Answer.LEASED
    if b"Z" in flags:
        return Answer.HELD
    return Answer.MISSED if is_empty else Answer.HIT


def _number(word: bytes) -> int:
    number = whole_number(word)
    if number is None:
        raise ProtocolError(f"it said {shown(word)} in the place of a size")
    if number > MOST_VALUE_BYTES:
        raise ProtocolError(f"it has a value of {number} bytes, which is more than a block")
    return number


def is_done(line: bytes) -> bool:
    """Return whether a store or a delete has been done, false if it was refused. Raises
    `ProtocolError`."""
    code = line.split(b" ")[0]
    if code == b"HD":
        return True
    if code in (b"NS", b"NF", b"EX", b"SERVER_ERROR"):
        return False
    raise ProtocolError(f"it is no memcached of version 1.6.10 or later: it said {shown(line)}")


def shown(line: bytes) -> str:
    """Return foreign text as a message may show it."""
    text = line[:60].decode("ascii", "replace")
    return '"' + "".join(mark if mark.isprintable() else "?" for mark in text) + '"'


assert len(ask(b"k" * KEY_BYTES)) < 256
