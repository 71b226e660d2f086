"""Building blocks of `MountConfig`: the names of options and the checks of their values.

Every check takes a value from a command line (text) or a TOML file (text, numbers, booleans,
lists). It raises `ValueError` with a text that shows the value and the expected form.
"""

import hashlib
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from cachefs import units
from cachefs.config.record import Check, CheckOfWords
from cachefs.config.source_url import refuse_secrets
from cachefs.errors import UsageError
from cachefs.types import Medium

_NUMBER_BITS = 1000
"""The most bits of a whole number; larger numbers don't fit into a float."""


class Group(Enum):
    """Sections of `cachefs mount --help`, in this order."""

    CACHE = "Cache"
    METADATA = "Metadata"
    SHARED = "Shared tier"
    READING = "Reading"
    ORIGIN = "Origin"
    ACCESS = "Access"
    PROCESS = "Process"


@dataclass(frozen=True)
class Flag:
    """The command-line form of a field.

    A declaration gives what differs from the usual form; `config.flags` fills in the rest: the
    name made from the field's, the words of a `Literal` as `metavar`, and the group of the section.
    Without `metavar` it is a switch without a value. A name may have the negative form after a
    slash: `--x/--no-x`. `live` options can change while mounted (`cachefs set`,
    `cachefs reload`). `shown_default` is the help text for a default that depends on the machine.
    `multiple` allows the option several times.
    """

    metavar: str | None = None
    names: tuple[str, ...] = ()
    live: bool = False
    shown_default: str | None = None
    multiple: bool = False
    group: Group = Group.PROCESS

    @property
    def option(self) -> str:
        """The long name of the option in errors, such as `--cache-size`."""
        return next(name for name in self.names if name.startswith("--")).partition("/")[0]

    @property
    def key(self) -> str:
        """The name in a TOML file, such as `cache_size`."""
        return self.option.removeprefix("--").replace("-", "_")


def show(value: object) -> str:
    """Return a value as an error shows it: short, on one line, and encodable."""
    try:
        text = f'"{value}"' if isinstance(value, str) else str(value)
    except ValueError:  # Python refuses to print numbers of more than 4,300 digits
        text = "a number of thousands of digits"
    text = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    return text if len(text) <= 80 else f"{text[:76]}..."


def _refuse(value: object, wanted: str) -> ValueError:
    return ValueError(f"{show(value)} is not {wanted}")


def _parsed(parse: Callable[[str], float], value: object, wanted: str) -> float:
    """Return parsed text, or a number unchanged. Raises `ValueError` for everything else."""
    if isinstance(value, str):
        try:
            return parse(value)
        except UsageError as error:
            raise ValueError(str(error)) from error
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (isinstance(value, int) and value.bit_length() > _NUMBER_BITS):
        raise _refuse(value, wanted)
    number: int | float = value  # type: ignore[assignment]
    if math.isnan(number):
        raise _refuse(value, wanted)
    return number


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return the advice about an unknown word: a similar known word, or `otherwise`."""
    import difflib

    close = difflib.get_close_matches(word.lower().replace("-", "_"), list(known), n=1)
    return f'did you mean "{close[0]}"?' if close else otherwise


def check_size(value: object) -> int:
    """Return a number of bytes. Raises `ValueError`."""
    wanted = f"a size; write {units.SIZE_FORMS}"
    size_bytes = _parsed(units.parse_size, value, wanted)
    if not isinstance(size_bytes, int) or not 0 <= size_bytes < units.SIZE_LIMIT_BYTES:
        raise _refuse(value, wanted)
    return size_bytes


def size(least: int = 0, *, or_zero: bool = False) -> Check:
    """Make a check for a number of bytes of at least `least`; `or_zero` also allows 0."""

    def check(value: object) -> int:
        size_bytes = check_size(value)
        if size_bytes < least and not (or_zero and size_bytes == 0):
            raise ValueError(
                f"{show(value)} is too small; the least is {units.format_bytes(least)}"
                f"{', or 0 for none' if or_zero else ''}"
            )
        return size_bytes

    return Check(check)


def duration(least_s: float, most_s: float, wanted: str) -> Check:
    """Make a check for seconds from `least_s` to `most_s`, both included; `wanted` says so."""

    def check(value: object) -> float:
        seconds = _check_duration(value)
        if not least_s <= seconds <= most_s:
            raise ValueError(wanted)
        return seconds

    return Check(check)


def _check_duration(value: object) -> float:
    wanted = f"a duration; write {units.DURATION_FORMS}"
    seconds = float(_parsed(units.parse_duration, value, wanted))
    if seconds < 0:
        raise _refuse(value, wanted)
    return seconds


def check_ratio(value: object) -> float:
    """Return a number from 0 to 1. Raises `ValueError`."""
    wanted = f"a ratio; write {units.RATIO_FORMS}"
    ratio = float(_parsed(units.parse_ratio, value, wanted))
    if not 0 <= ratio <= 1:
        raise _refuse(value, wanted)
    return ratio


def count(least: int, most: int) -> Check:
    """Make a check for a whole number from `least` to `most`, both included."""
    return Check(_whole_number(least, most))


def optional_count(least: int, most: int) -> Check:
    """Make the same check for a field that may be None."""
    check = _whole_number(least, most)
    return Check(lambda value: None if value is None else check(value))


def _whole_number(least: int, most: int) -> Callable[[object], int]:
    wanted = f"a whole number from {least} to {most}"

    def check(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\d{1,12}", value.strip(), re.ASCII):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise _refuse(value, wanted)
        return value

    return check


def _check_mode(value: object) -> int:
    wanted = 'a file mode; write three octal digits in quotes, such as "644"'
    mode = _parsed(units.parse_mode, value, wanted)
    if not isinstance(mode, int) or not 0 <= mode <= 0o777:
        raise _refuse(value, wanted)
    return mode


def _check_switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(value, "a switch; write true or false, without quotes")
    return value


def _check_choice(value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise _refuse(value, f"one of {', '.join(allowed)}")
    return value


_LEAST_RATE = 64 << 10
_MOST_UID = 2**32 - 2
_LIMIT_FORM = 'UID=SIZE, such as "1000=50MiB/s"'


def _check_rate(value: object) -> int:
    """Return bytes per second, 0 for no limit. Raises `ValueError`."""
    if isinstance(value, str):
        value = value.strip().removesuffix("/s")
    bytes_per_s = check_size(value)
    if 0 < bytes_per_s < _LEAST_RATE:
        raise ValueError(
            f"{show(value)} is too slow; the least is {units.format_bytes(_LEAST_RATE)} per "
            "second, or 0 for no limit"
        )
    return bytes_per_s


def _check_limits(value: object) -> dict[int, int]:
    """Return bytes per second by uid, from a table or from one or several texts `UID=SIZE`."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        pairs = []
        for text in list(value) if isinstance(value, list | tuple) else [value]:
            if not isinstance(text, str) or "=" not in text:
                raise _refuse(text, f"a limit of a user; write {_LIMIT_FORM}")
            who, _, rate = text.partition("=")
            pairs.append((who, rate))
    limits: dict[int, int] = {}
    for who, rate in pairs:
        uid = _UID(who)
        if uid in limits:
            raise ValueError(f"uid {uid} is given twice")
        limits[uid] = _check_rate(rate)
    return limits


def _check_medium(value: object) -> Medium:
    if isinstance(value, Medium):
        return value
    if not isinstance(value, str) or value.upper() not in Medium.__members__:
        raise _refuse(value, f"one of {', '.join(Medium.__members__)}")
    return Medium[value.upper()]


def check_text(value: object) -> str:
    """Return a text that can be shown. Raises `ValueError`."""
    if not isinstance(value, str) or not value or not value.isprintable():
        raise _refuse(value, "a text of at least one printable character")
    return value


def _check_optional_text(value: object) -> str | None:
    return None if value is None else check_text(value)


def _matching(pattern: str, wanted: str) -> Callable[[object], str | None]:
    """Make a check for an optional text that has this form."""

    def check(value: object) -> str | None:
        if value is None:
            return None
        if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
            raise _refuse(value, wanted)
        return value

    return check


_check_storage_class = _matching(
    r"[\w.-]{1,64}", "the name of a storage class, such as STANDARD_IA"
)
_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")
_MOST_TAGS = 10
_TAG = re.compile(r"[\w +\-=.:/@]*")
"""The characters of keys and values that all services of AWS allow."""


def check_readable_class(value: object) -> str | None:
    """Return the name of a storage class whose objects can be read at once. Raises `ValueError`."""
    name = _check_storage_class(value)
    if name in _ARCHIVES:
        raise ValueError(f"{show(name)} is an archive: what is written there can't be read back")
    return name


def check_tags(value: object) -> str | None:
    """Return a list of tags in the form of a query. Raises `ValueError`."""
    if value is None:
        return None
    wanted = f"a list of at most {_MOST_TAGS} tags; write KEY=VALUE&KEY=VALUE"
    text = check_text(value)
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=True, errors="strict")
    except ValueError:
        raise _refuse(value, wanted) from None
    if len(pairs) > _MOST_TAGS or len(dict(pairs)) < len(pairs):
        raise _refuse(value, wanted)
    for key, content in pairs:
        is_short = 0 < len(key) <= 128 and len(content) <= 256
        if not is_short or not _TAG.fullmatch(key) or not _TAG.fullmatch(content):
            raise _refuse(value, wanted + ", of letters, digits, spaces and + - = . _ : / @")
    return text


def _check_texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise _refuse(value, "a list of texts")
    return tuple(value)


def absolute_path(value: object) -> Path:
    """Return an absolute path with `~` expanded. Does not resolve links. Raises `ValueError`."""
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise _refuse(value, "a path")
    try:
        os.fsencode(value)
        return Path(os.path.abspath(Path(value).expanduser()))
    except (RuntimeError, UnicodeEncodeError):  # ~ of an unknown user; a lone surrogate
        raise _refuse(value, "a path that is known here") from None


def _check_optional_path(value: object) -> Path | None:
    return None if value is None else absolute_path(value)


def _check_file_or_url(value: object) -> str | None:
    """Return a URL unchanged, and anything else as an absolute path."""
    if value is None:
        return None
    if isinstance(value, str) and "://" in value:
        refuse_secrets(value)
        return check_text(value)
    return str(absolute_path(value))


def _paths(separators: str) -> Check:
    """Make a check for a list of paths, or text with one of the separators between them. No path
    may occur twice."""

    def check(value: object) -> tuple[Path, ...]:
        parts: list[Any] = [value]
        if isinstance(value, str):
            parts = [part.strip() for part in re.split(f"[{separators}]", value)]
        elif isinstance(value, list | tuple):
            parts = list(value)
        paths = tuple(absolute_path(part) for part in parts)
        if not paths:
            raise _refuse(value, "a list of directories; name at least one")
        if len(set(paths)) < len(paths):
            raise ValueError(f"{show(value)} names a directory twice")
        return paths

    return Check(check)


_UID = _whole_number(0, _MOST_UID)
MAX_DOWNLOADS = count(1, 4096)
RATE = Check(_check_rate)
LIMITS = Check(_check_limits)
DURATION = Check(_check_duration)
RATIO = Check(check_ratio)
CHOICE = CheckOfWords(_check_choice)
MODE = Check(_check_mode)
SWITCH = Check(_check_switch)
TEXT = Check(_check_optional_text)
TOKEN = Check(_matching(r"[!-~]{1,2048}", "an id; write it without spaces"))
STORAGE_CLASS = Check(check_readable_class)
TAGS = Check(check_tags)
TEXTS = Check(_check_texts)
PATH = Check(absolute_path)
OPTIONAL_PATH = Check(_check_optional_path)
FILE_OR_URL = Check(_check_file_or_url)
PATHS = _paths(":")
TIER_PATHS = _paths(":,")
MEDIUM = Check(_check_medium)


def user_cache_home() -> Path:
    """Return the default directory for caches on disk, of root or of the user."""
    if os.geteuid() == 0:
        return Path("/var/cache/cachefs")
    return Path("~/.cache/cachefs").expanduser()


_SHARED_MEMORY = Path("/dev/shm")


def user_mem_home() -> Path:
    """Return the default directory for this user's caches in memory. It belongs to this user or
    does not exist yet.

    Any user may create the usual name in /dev/shm first; then the result is a random name."""
    uid = os.geteuid()
    home = _SHARED_MEMORY / f"cachefs-{uid}"
    others = [path for path in sorted(_SHARED_MEMORY.glob(f"{home.name}-*")) if _is_of(path, uid)]
    if _is_of(home, uid) or not os.path.lexists(home):
        return home
    return others[0] if others else home.with_name(f"{home.name}-{secrets.token_hex(8)}")


def _is_of(path: Path, uid: int) -> bool:
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == uid


def cache_id(source: str, endpoint: str | None) -> str:
    """Return a readable directory name for the cache of one source, different for each source."""
    digest = hashlib.sha256(f"{endpoint or ''}\0{source.rstrip('/')}".encode()).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", source).strip("-.")[:40]
    return f"{readable}-{digest[:8]}"


def default_cache_dirs(data: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the default, from the fields checked so far."""
    return (user_cache_home() / _cache_id_of(data),)


def default_mem_dir(data: Mapping[str, Any]) -> Path:
    """Return the default directory in memory for the same source."""
    return user_mem_home() / _cache_id_of(data)


def _cache_id_of(data: Mapping[str, Any]) -> str:
    """Return the same id for the same store, whether its endpoint comes from an option or from
    the environment."""
    source, endpoint = data["source"], data["endpoint"]
    if endpoint is None and source.startswith("s3://"):
        ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
        names = () if ignored else ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        endpoint = next(filter(None, map(os.environ.get, names)), None)
    return cache_id(source, endpoint)
