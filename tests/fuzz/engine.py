"""Targets, their corpora, and mutations of these that are the same each time.

A target is a module of `tests.fuzz.targets` with a function `fuzz(data)`. It returns for everything
that is handled as it should be, refused input included; what it raises is a bug. Its corpus are
the files of `corpus/NAME`.
"""

import importlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
TARGETS = sorted(
    path.stem for path in (HERE / "targets").glob("*.py") if not path.stem.startswith("_")
)
_MOST_BYTES = 1 << 16
_TELLING = (b"\0", b"\xff", b"-1", b"0", b"/", b"..", b"%", b"\r\n", b"[" * 3000, b'{"a":' * 3000,
            b"9" * 30, b"1e999", b"null", b"\\ud800", b"\xed\xa0\x80", b"&#0;", b"\x7f\xff\xff\xff",
            b"\xff" * 8, b"\0" * 8)  # fmt: skip


def load(name: str) -> Callable[[bytes], None]:
    """The function of a target."""
    function: Callable[[bytes], None] = importlib.import_module(f"tests.fuzz.targets.{name}").fuzz
    return function


def relay_sources() -> list[Path]:
    """What the fuzzer of the relay is made of."""
    relay = HERE.parents[1] / "src/cachefs/fuse/relay"
    included = {"relay.c", "forwarding.c"}  # tests/fuzz/relay.c uses their static functions
    python = {"module.c", "python_relay.c", "python_table.c", "session.c"}
    others = sorted(path for path in relay.glob("*.c") if path.name not in included | python)
    return [HERE / "relay.c", *others]


_OF_PYTHON = ("module.c", "python_md5.c")


def http_sources() -> list[Path]:
    """What the fuzzer of the HTTP engine is made of."""
    home = HERE.parents[1] / "src/cachefs/origin/http"
    others = sorted(path for path in home.glob("*.c") if path.name not in _OF_PYTHON)
    return [HERE / "http_engine.c", *others]


COMPILED = {"relay": (relay_sources, []), "http_engine": (http_sources, ["-lcurl"])}
"""The targets in C: their sources, and the libraries that they need."""


def corpus(name: str) -> list[bytes]:
    """In the order of the files' names."""
    return [path.read_bytes() for path in sorted((HERE / "corpus" / name).iterdir())]


def mutations(seeds: list[bytes], count: int, seed: object) -> Iterator[bytes]:
    """`count` variants of the seeds, the same for the same `seed`."""
    chance = random.Random(str(seed))
    for _ in range(count):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.choice((1, 1, 2, 4))):
            _mutate(data, seeds, chance)
        yield bytes(data[:_MOST_BYTES])


def _mutate(data: bytearray, seeds: list[bytes], chance: random.Random) -> None:
    at = chance.randrange(len(data) + 1)
    length = chance.choice((1, 1, 2, 4, 8, 32))
    match chance.randrange(6):
        case 0:
            data[at : at + 1] = chance.randbytes(1)
        case 1:
            del data[at : at + length]
        case 2:
            data[at:at] = data[at : at + 4 * length]
        case 3:
            data[at : at + chance.choice((0, length))] = chance.choice(_TELLING)
        case 4:
            other = chance.choice(seeds)
            start = chance.randrange(len(other) + 1)
            data[at : at + length] = other[start : start + 4 * length]
        case _:
            if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
