"""Shared parts of the commands on cached paths: find the mount, ask its daemon, print failures."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import click

from cachefs.cli import debug_option, json_option
from cachefs.cli.output.text import say
from cachefs.control.api import Route
from cachefs.control.client import stream
from cachefs.mounts import locate, socket_path

_REQUEST_BYTES = 512 << 10
"""The most bytes of paths in one request; the daemon accepts requests of twice that size."""

_Command = TypeVar("_Command", bound=Callable[..., Any])


def path_options(function: _Command) -> _Command:
    """Add the argument PATH... and the options that all these commands have."""
    for option in (
        debug_option,
        json_option,
        click.option(
            "-m", "--mount", "mountpoint", metavar="MOUNTPOINT", help="The mount of the paths."
        ),
        click.argument("paths", nargs=-1, required=True, metavar="PATH..."),
    ):
        function = option(function)
    return function


class PathRequest:
    """A request about paths to the daemon of the mount that contains them."""

    def __init__(self, paths: Sequence[str], mountpoint: str | None) -> None:
        """Raises `CachefsError` if the paths lie in no mount, or in several."""
        self.paths = list(paths)
        place, self._inner = locate(paths, mountpoint)
        self._socket: Path = socket_path(place)
        self.failed = False
        """True if the request failed for one of the paths; the failure was printed."""

    def ask(self, route: Route, **arguments: object) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each line of the answer with the path that it is about, as the user wrote it (""
        if it is about all). Prints failures. Raises `CachefsError`."""
        for first, inner in _pieces(self._inner):
            lines = stream(self._socket, route, {"paths": inner, **arguments})
            with closing(lines):
                for line in lines:
                    number = line.pop("number", None)
                    path = "" if number is None else self.paths[first + number]
                    if "failure" in line:
                        self._tell(path, line)
                    else:
                        yield path, line

    def sums(self, route: Route, **arguments: object) -> dict[str, int]:
        """Return the sums at the end of the answer, added up over all requests."""
        sums: dict[str, int] = {}
        for _, line in self.ask(route, **arguments):
            for name, value in line.items():
                sums[name] = sums.get(name, 0) + value
        return sums

    def _tell(self, path: str, line: dict[str, Any]) -> None:
        self.failed = True
        place = joined(path, line.get("path", ""))
        say(f"cachefs: {place}: {line['failure']}", err=True)


def joined(path: str, below: str) -> str:
    """Return the path of `below` under `path`, which the user wrote."""
    return f"{path.rstrip('/')}/{below}" if below else path


def counted(number: int, one: str, many: str = "") -> str:
    """Return the number with its noun, such as "1 block" or "2 blocks"."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def _pieces(inner: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield as many paths as one request can carry, with the index of the first."""
    first, size_bytes = 0, 0
    for number, path in enumerate(inner):
        size_bytes += len(json.dumps(path)) + 2
        if size_bytes > _REQUEST_BYTES and number > first:
            yield first, inner[first:number]
            first, size_bytes = number, len(json.dumps(path)) + 2
    yield first, inner[first:]
