"""Parse the paths and patterns of a load job."""

import fnmatch
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from cachefs.config.source_url import with_own_scheme
from cachefs.errors import UsageError
from cachefs.origin.names import is_encodable

_LINE_BYTES = 1 << 16


class Line(NamedTuple):
    """A path of a list: as `written`, for messages, and as `path` relative to the mount's root."""

    written: str
    path: str


class PathReader:
    """Parses paths of one mount: below the mountpoint, below the source, or relative."""

    def __init__(self, mountpoint: str, source_url: str) -> None:
        self._prefixes = (mountpoint.rstrip("/") + "/", source_url.rstrip("/") + "/")

    def line(self, raw: bytes) -> Line | None:
        """Parse a line that is a path or a JSON object with a `path`. Return None for an empty
        line. Raises `UsageError`."""
        raw = raw.rstrip(b"\r\n")
        if not raw:
            return None
        if len(raw) > _LINE_BYTES:
            raise UsageError(f"a line of {len(raw)} bytes is no path")
        written = _path_of_json(raw) if raw.startswith(b"{") else os.fsdecode(raw)
        return Line(written, self.path(written))

    def path(self, written: str) -> str:
        """Return the path relative to the mount's root. Raises `UsageError` if the path is not
        below it, has a `..` or a zero byte, or cannot be encoded."""
        path = with_own_scheme(written) if "://" in written else written
        for prefix in self._prefixes:
            if (path + "/") == prefix:
                return ""
            if path.startswith(prefix):
                path = path[len(prefix) :]
                break
        else:
            if path.startswith("/") or "://" in path:
                raise UsageError(f"{written} is not below {self._prefixes[0].rstrip('/')}")
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if ".." in parts or "\0" in path:
            raise UsageError(f"{written!r}: a path must not contain .. or zero bytes")
        if not is_encodable(path):
            raise UsageError(f"{written!r} is no path: it is not valid Unicode")
        return "/".join(parts)


def _path_of_json(raw: bytes) -> str:
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{raw[:80]!r} is no JSON: {error}") from None
    path = fields.get("path") if isinstance(fields, dict) else None
    if not isinstance(path, str):
        raise UsageError(f'{raw[:80]!r} has no "path"')
    return path


def path_filter(include: Sequence[str], exclude: Sequence[str]) -> Callable[[str], bool] | None:
    """Return a function that tells whether a path is wanted; None if all paths are.

    Patterns are shell patterns, except that `*` matches `/` too. A pattern without `/` is compared
    with the last part of a path. Without `include`, all paths are included. `exclude` wins.
    """
    if not include and not exclude:
        return None
    included, excluded = _matcher(include), _matcher(exclude)

    def wanted(path: str) -> bool:
        return (not include or included(path)) and not excluded(path)

    return wanted


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    by_name = _any_of(pattern for pattern in patterns if "/" not in pattern)
    by_path = _any_of(pattern.lstrip("/") for pattern in patterns if "/" in pattern)

    def matches(path: str) -> bool:
        return bool(by_name.match(path.rpartition("/")[2]) or by_path.match(path))

    return matches


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    expressions = [fnmatch.translate(pattern) for pattern in patterns]
    return re.compile("|".join(expressions) if expressions else r"(?!)")
