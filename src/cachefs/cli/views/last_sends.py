"""What `cachefs umount` does about unsent files: it waits for them, and says what is left."""

import contextlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from cachefs.cli.output.text import say
from cachefs.control import api
from cachefs.errors import CachefsError
from cachefs.mounts import socket_path
from cachefs.units import format_bytes


class LastSends:
    """The unsent files of one mount that is about to end. A daemon that does not answer is not
    waited for. Most mounts have none, because they are read-only, so `wait` does the imports."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._spool: Path | None = None
        self.is_interrupted = False
        """Whether the user did not want to wait."""

    def wait(self) -> None:
        """Send what is unsent, with progress on a terminal. After Ctrl-C, or if the origin does not
        answer, the rest is left in the spool."""
        from cachefs.cli.mounts.unsent import spool_of
        from cachefs.cli.views.unsent import flushing

        with contextlib.suppress(CachefsError):
            self._spool = spool_of(self._place)
            if self._spool is None:
                return
            try:
                with flushing() as show:
                    show.follow(self._lines())
            except KeyboardInterrupt:
                self.is_interrupted = True
                self._leave(True)

    def _lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        from cachefs.control.client import stream

        lines = stream(
            socket_path(self._place), api.WRITES_FLUSH, {"paths": [""], "replace": False}
        )
        with closing(lines):
            for line in lines:
                if "failure" not in line:
                    yield "", line

    def _leave(self, leaves: bool) -> None:
        from cachefs.control.client import ask

        with contextlib.suppress(CachefsError):
            ask(socket_path(self._place), api.WRITES_LEAVE, {"leave": leaves})

    def note_still_mounted(self) -> None:
        """Let the mount go on as if nobody had tried to unmount it."""
        if self.is_interrupted:
            self._leave(False)

    def tell_rest(self) -> None:
        """Say in one line what is left in the spool. Call it when the daemon has ended."""
        if self._spool is None:
            return
        from cachefs.cli.mounts.path_request import counted
        from cachefs.writes.unsent.leftover import read_spool

        try:
            files = read_spool(self._spool).files
        except CachefsError:
            return  # another mount uses it already
        if files:
            size = format_bytes(sum(file.size_bytes for file in files))
            stay = "stays" if len(files) == 1 else "stay"
            say(
                f"cachefs: {counted(len(files), 'file')} ({size}) that the source does not have "
                f"{stay} in the spool; the next mount with this cache directory goes on with them, "
                f"and cachefs writes --cache-dir {self._spool.parent} shows them",
                err=True,
            )
