"""Notices to the kernel: names that it must drop. A thread sends them.

The kernel may keep the sender of a notice waiting until all look-ups in that directory have been
answered, so the event loop must not send one. pyfuse3 has such a thread, too, but nothing waits for
its end: it would use a session that has been freed, and what it had not sent would be lost.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

import trio

log = logging.getLogger(__name__)

_LAST_NOTICES_S = 2.0
"""How long `finish` waits. What the kernel, or a busy machine, delays for longer is lost."""

Send = Callable[[int, bytes], None]
"""Takes the directory's inode number and the name. Raises `OSError`."""


class NameNotices:
    """Sends notices one by one, in their order, with `send`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._queue: SimpleQueue[tuple[int, bytes] | Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, parent: int, name: bytes) -> None:
        """Send a notice soon. Returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="notices", daemon=True)
            self._thread.start()
        self._queue.put((parent, name))

    async def sent(self) -> None:
        """Wait until all notices that were put before are sent."""
        if self._thread is None:
            return
        are_sent = trio.Event()
        token = trio.lowlevel.current_trio_token()

        def tell() -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(are_sent.set)

        self._queue.put(tell)
        await are_sent.wait()

    def finish(self) -> None:
        """Wait until all notices are sent, at most `_LAST_NOTICES_S`. Nothing may be put after."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_LAST_NOTICES_S)

    def _run(self) -> None:
        while (notice := self._queue.get()) is not None:
            if callable(notice):
                notice()
                continue
            try:
                self._send(*notice)
            except OSError as error:  # the kernel doesn't know the name, or the mount has ended
                log.debug(
                    "the kernel does not drop %r in inode %d: %s", notice[1], notice[0], error
                )
