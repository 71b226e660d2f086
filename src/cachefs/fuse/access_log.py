"""The access log: while it is on, one line for each request that the kernel sends.

    2026-11-21T18:00:00.123456Z [uid:1000,pid:4403] lookup (/train/a.jpg): ok <0.000310>
    2026-11-21T18:00:00.123999Z [uid:1000,pid:-] read (/train/a.jpg,0,131072): hit <0.000012>

The fields are: time, user and process, operation, path (for READ with offset and size in bytes),
outcome as in docs/METRICS.md, duration in seconds. READ does not carry a pid. The log has no lines
for requests that the kernel answers from its own caches.
"""

import logging
import time
from pathlib import Path

import trio

from cachefs.errors import CachefsError
from cachefs.fuse.observers import Answered, PathOf, RequestObservers
from cachefs.trusted_path import open_file

_FLUSH_S = 0.25
_MOST_LINES = 100_000
"""Most lines that wait to be written. A disk that works at all keeps up with this many."""
_MOST_BYTES = 256 << 20
"""Above this size the file is renamed to FILE.1, which replaces an earlier FILE.1."""

_logger = logging.getLogger(__name__)


class AccessLog:
    """The access log of one mount.

    All methods run on the loop and only collect lines. A worker thread writes them.
    """

    def __init__(self, observers: RequestObservers | None = None) -> None:
        """While the log is on, `observe` is one of the `observers`."""
        self._observers = RequestObservers() if observers is None else observers
        self._is_on = False
        self._file: Path | None = None
        self._lines: list[str] = []
        self._lost = 0
        self._switched_on = trio.Event()
        self._writing = trio.Lock()

    @property
    def file(self) -> Path | None:
        """The file that the log is written to; None while the log is off."""
        return self._file if self._is_on else None

    async def switch(self, file: Path | None) -> None:
        """Append to `file` from now on, or stop if it is None.

        Raises `CachefsError` if the file can't be written.
        """
        if file is not None:
            try:
                await trio.to_thread.run_sync(_append, file, "")
            except OSError as error:
                raise CachefsError(
                    f"can't write the access log {file}: {error.strerror}"
                ) from error
        await self._flush()
        self._file = file
        self._turn(file is not None)
        if self._is_on:
            self._switched_on.set()

    def _turn(self, is_on: bool) -> None:
        if is_on and not self._is_on:
            self._observers.append(self.observe)
        elif self._is_on and not is_on:
            self._observers.remove(self.observe)
        self._is_on = is_on

    async def run(self) -> None:
        """Write collected lines every `_FLUSH_S`. On cancellation, write the rest and end."""
        try:
            while True:
                await self._switched_on.wait()
                await trio.sleep(_FLUSH_S)
                await self._flush()
                if not self._is_on:
                    self._switched_on = trio.Event()
        finally:
            await self._flush()

    def observe(self, answered: Answered, path_of: PathOf) -> None:
        """Collect the line for one request. This method is a `RequestObserver`. If a character of
        the path is not printable, the text is escaped."""
        if len(self._lines) >= _MOST_LINES:
            self._lost += 1
            return
        shown = path_of(answered.ino)
        if answered.offset is not None:
            shown += f",{answered.offset},{answered.wanted_bytes}"
        elif answered.name is not None:
            name = answered.name.decode("utf-8", "surrogateescape")
            is_child = answered.operation == "lookup"
            shown = f"{shown.rstrip('/')}/{name}" if is_child else f"{shown},{name}"
        now = time.time_ns()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 1_000_000_000))
        if not shown.isprintable():
            shown = shown.encode("unicode_escape").decode()
        self._lines.append(
            f"{stamp}.{now // 1000 % 1_000_000:06d}Z "
            f"[uid:{_shown(answered.uid)},pid:{_shown(answered.pid)}] {answered.operation} "
            f"({shown}): {answered.outcome} <{answered.lasted_ns / 1e9:.6f}>\n"
        )

    async def _flush(self) -> None:
        # The shield keeps the lines: a cancellation between taking and writing them loses them.
        with trio.CancelScope(shield=True):
            await self._write_lines()

    async def _write_lines(self) -> None:
        async with self._writing:
            lines, self._lines = self._lines, []
            lost, self._lost = self._lost, 0
            if lost:
                lines.append(f"# {lost} requests are missing here: they came faster than written\n")
            if not lines or self._file is None:
                return
            try:
                await trio.to_thread.run_sync(_append, self._file, "".join(lines))
            except OSError as error:
                self._turn(False)
                _logger.warning("the access log ends: %s: %s", self._file, error.strerror)


def _shown(number: int | None) -> str:
    return "-" if number is None else str(number)


def _append(file: Path, text: str) -> None:
    """Append `text`, and rotate the file at `_MOST_BYTES`. Raises `OSError`.

    The file has mode 600, because file names may be confidential.
    """
    with open(file, "a", encoding="utf-8", opener=open_file) as stream:
        stream.write(text)
        size_bytes = stream.tell()
    if size_bytes > _MOST_BYTES and file.is_file():
        file.replace(f"{file}.1")
