"""What a supervisor does with the keeper: it takes a mount over, has it kept, and leaves it."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from cachefs.errors import reason_of
from cachefs.supervisor.keeper_link import KeeperLink
from cachefs.supervisor.relayed_mount import RelayedMount

_TRY_AGAIN_S = 5.0

_logger = logging.getLogger(__name__)


class KeptMount:
    """The supervisor's mount, as the keeper knows it. Without a keeper (`path` is None) all methods
    do nothing.

    `watch` and `unwatch` add descriptors to the supervisor's loop. If the keeper is gone, the mount
    is served on, and the keeper is tried again every `_TRY_AGAIN_S`.
    """

    def __init__(
        self,
        path: Path | None,
        view: str,
        mountpoint: Path,
        mount: RelayedMount,
        watch: Callable[[int, Callable[[], None]], None],
        unwatch: Callable[[int], object],
    ) -> None:
        self._path, self._view, self._mountpoint = path, view, mountpoint
        self._mount = mount
        self._watch, self._unwatch = watch, unwatch
        self._link: KeeperLink | None = None
        self._is_ready = False
        self._has_complained = False
        self.was_taken = False
        """Whether this supervisor continues a mount of another one."""
        self.is_kept = False
        """Whether the mount outlives this process."""
        self.next_try_s: float | None = None
        """When `look_at_the_clock` must be called; None if nothing is due."""

    @property
    def is_connected(self) -> bool:
        """Whether there is a keeper."""
        return self._link is not None

    def take(self) -> bool:
        """Take over the mount that the keeper has of this mountpoint. Return whether there was one.

        Waits for the end of the supervisor before this one. Raises `MountError` if that one does
        not end.
        """
        self._connect()
        if self._link is None:
            return False
        try:
            taken, why = self._link.take()
            if why is not None:
                _logger.warning(
                    "the mount on %s was ended, files that were open there fail: %s",
                    self._mountpoint,
                    why,
                )
            if taken is None:
                return False
            if not self._mount.adopt(taken):
                _logger.warning(
                    "%s shows another mount than the one that the keeper has, which is ended",
                    self._mountpoint,
                )
                os.close(taken.fd)
                self._link.drop()
                return False
        except OSError as error:
            self._lose(error)
            return False
        _logger.info("the mount on %s is continued", self._mountpoint)
        self.was_taken = self.is_kept = True
        return True

    def begin(self) -> None:
        """Let the keeper have the mount: the kernel's first request has been answered."""
        self._is_ready = True
        self._keep()

    def look_at_the_clock(self, now_s: float) -> None:
        """Try a lost keeper again if that is due."""
        if self.next_try_s is not None and now_s >= self.next_try_s:
            self._connect()
            if self._is_ready:
                self._keep()

    def leave(self) -> bool:
        """Leave the mount to the keeper; the process must exit now. Return False if the keeper does
        not have it."""
        if self._link is None:
            return False
        self._mount.leave()
        try:
            self._link.leave()
        except OSError as error:
            self._lose(error)
            return False
        return True

    def forget(self) -> None:
        """Tell the keeper that the mount has ended, and disconnect."""
        self.next_try_s = None
        self.is_kept = False
        if self._link is None:
            return
        try:
            self._link.forget()
        except OSError:
            pass  # it is gone, and the mount as well
        finally:
            self._disconnect()

    def _connect(self) -> None:
        if self._path is None or self._link is not None:
            return
        try:
            self._link = KeeperLink(self._path, self._mountpoint, self._view)
        except OSError as error:
            self._lose(error)
            return
        self.next_try_s = None
        self._watch(self._link.fileno(), self._hear)

    def _keep(self) -> None:
        held = self._mount.held()
        if self._link is None or held is None:
            return
        try:
            self._link.keep(held)
        except OSError as error:
            self._lose(error)
            return
        self.is_kept = True
        self._has_complained = False

    def _hear(self) -> None:
        assert self._link is not None
        try:
            error = self._link.hear()
        except OSError as lost:
            self._lose(lost)
            return
        if error is not None:
            _logger.error("%s", error)

    def _lose(self, why: OSError) -> None:
        if not self._has_complained:
            _logger.warning(
                "no keeper answers at %s (%s): until one does, the mount ends with this process",
                self._path,
                reason_of(why),
            )
        self._has_complained = True
        self.is_kept = False
        self._disconnect()
        self.next_try_s = time.monotonic() + _TRY_AGAIN_S

    def _disconnect(self) -> None:
        if self._link is not None:
            if self._link.fileno() >= 0:
                self._unwatch(self._link.fileno())
            self._link.close()
            self._link = None
