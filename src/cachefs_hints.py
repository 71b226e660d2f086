"""Send a cachefs mount the files that a job will read, in order, so that it fetches them early.

This file needs nothing but Python. You can copy it into an image without cachefs. See
docs/HINTS.md.

    with Hints("/mnt/data") as hints:
        for path in hints.ahead_of(paths):     # below /mnt/data
            read(path)

    sampler = HintedSampler(RandomSampler(dataset), hints, lambda index: dataset.paths[index])

On a directory that is not in a cachefs mount, hints have no effect.
"""

import errno
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_PREFIX = b"user.cachefs.hint."
_NAME_BYTES = 255
"""Longest name of an extended attribute in Linux (XATTR_NAME_MAX)."""
_FULL = b"0"
_PAUSE_S = 0.02
_LEAVE_S = 5.0
_NO_HINTS = {
    errno.EACCES,
    errno.ENODATA,
    errno.ENOENT,
    errno.ENOTCONN,
    errno.ENOTDIR,
    errno.ENOTSUP,
    errno.EPERM,
}
"""Errors that concern the directory, and so every path."""


class Hints:
    """The hints of one job for one mount. Any thread may use it. Call `close` at the end, or use
    `with`."""

    def __init__(self, directory: "str | os.PathLike[str]") -> None:
        """`directory` is the mountpoint or a directory below it. Paths are absolute, or relative
        to it."""
        self._directory = os.path.abspath(directory)
        self._job = secrets.token_hex(4).encode()
        self.refused_count = 0
        """How many paths the mount has refused."""
        self.first_refused: tuple[str, str] | None = None
        """The first of them, and why it was refused."""
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "Hints":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def send(self, paths: "Iterable[str | os.PathLike[str]]") -> int:
        """Send paths in the order in which they will be read. Return how many the mount has taken.

        Waits while the mount's queue is full, until `close`. Skips a path that the mount refuses,
        such as one that is too long, and notes it in `refused_count` and `first_refused`. Ends if
        the directory takes no hints at all: it is in no cachefs mount, or gone.
        """
        count = 0
        for path in paths:
            try:
                if not self._send(self._relative(path)):
                    break
            except OSError as error:
                if error.errno in _NO_HINTS:
                    break
                self._note_refused(path, os.strerror(error.errno or errno.EIO))
            except ValueError as error:
                self._note_refused(path, str(error))
            else:
                count += 1
        return count

    def _note_refused(self, path: "str | os.PathLike[str]", why: str) -> None:
        with self._lock:
            self.refused_count += 1
            self.first_refused = self.first_refused or (os.fspath(path), why)

    def send_in_background(self, paths: "Iterable[str | os.PathLike[str]]") -> None:
        """Send paths as `send` does, in a daemon thread, which does not keep the process alive."""
        thread = threading.Thread(target=self.send, args=(list(paths),), daemon=True)
        self._threads.append(thread)
        thread.start()

    def ahead_of(self, paths: "Iterable[str | os.PathLike[str]]") -> "Iterator[Any]":
        """Yield the same paths in the same order, and send them in the background."""
        wanted = list(paths)
        self.send_in_background(wanted)
        yield from wanted

    def close(self) -> None:
        """Stop sending. Waits at most 5 s for each background thread."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(_LEAVE_S)

    def _relative(self, path: "str | os.PathLike[str]") -> bytes:
        text = os.fspath(path)
        if os.path.isabs(text):  # noqa: PTH117 - a file name may be bytes
            text = os.path.relpath(text, self._directory)
        return os.fsencode(text)

    def _send(self, path: bytes) -> bool:
        """Send one path, and repeat it while the queue is full. Return False after `close`."""
        while not self._stopped.is_set():
            if self._ask(path) != _FULL:
                return True
            self._stopped.wait(_PAUSE_S)
        return False

    def _ask(self, path: bytes) -> bytes:
        head = _PREFIX + self._job + b"."
        room = _NAME_BYTES - len(head) - 1
        while len(path) > room:
            os.getxattr(self._directory, head + b"+" + path[:room])
            path = path[room:]
        return os.getxattr(self._directory, head + b"=" + path)


class HintedSampler:
    """Wraps a PyTorch sampler, or any iterable of indices. At the start of each iteration it
    sends the files of that epoch. `path_of(index)` returns the path of a sample's file."""

    def __init__(
        self, sampler: Any, hints: Hints, path_of: "Callable[[Any], str | os.PathLike[str]]"
    ) -> None:
        self._sampler = sampler
        self._hints = hints
        self._path_of = path_of

    def __iter__(self) -> "Iterator[Any]":
        indices = list(self._sampler)
        self._hints.send_in_background([self._path_of(index) for index in indices])
        yield from indices

    def __len__(self) -> int:
        return len(self._sampler)
