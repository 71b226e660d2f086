"""The mount, /dev/fuse and the relay: what stays while daemons come and go."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from cachefs.errors import MountError, reason_of
from cachefs.fuse.kernel_mount import KernelMount, kernel_mount
from cachefs.fuse.relay import _relay
from cachefs.supervisor.channel import pair
from cachefs.supervisor.child import Child

_TABLE_ENTRIES = 1 << 21
"""Blocks that the relay may know; 32 bytes each, of which only what is used takes memory."""
_THREADS = 8
"""All but one may wait for disks."""

_logger = logging.getLogger(__name__)


class RelayedMount:
    """Made once for each mountpoint; mounted for the first daemon that asks."""

    def __init__(self, mountpoint: Path, watch: Callable[[int], None]) -> None:
        """`watch` is given a descriptor that is readable once the mount has ended. Raises
        `OSError`."""
        self._mountpoint = mountpoint
        self._watch = watch
        self.table_fd = _relay.create_table(_TABLE_ENTRIES)
        self._relay: _relay.Relay | None = None
        self._mount: KernelMount | None = None

    def give_to(self, child: Child, source: str, allow_other: bool) -> None:
        """Answer its request for the mount: with what it takes to serve it, or an error."""
        try:
            self._give_to(child, source, allow_other)
        except MountError as error:
            child.channel.send({"error": str(error)})
        except OSError as error:
            child.channel.send({"error": f"the relay could not begin: {reason_of(error)}"})

    def _give_to(self, child: Child, source: str, allow_other: bool) -> None:
        is_first = self._mount is None or self._relay is None
        if self._mount is None:
            self._mount = kernel_mount(self._mountpoint, source, allow_other)
        if self._relay is None:
            self._relay = _relay.Relay(self._mount.fd, self.table_fd, _THREADS)
            self._watch(self._relay.ended_fd)
        ours, its = pair()
        with ours, its:
            self._relay.attach(ours.fileno())
            if is_first:
                self._relay.start()  # not before: the kernel's INIT needs a real answer
            elif not self._relay.resend():
                _logger.warning(
                    "this kernel can't send requests again (Linux 6.9 can): those that the daemon "
                    "before had not answered have failed with EIO"
                )
            fds = [its.fileno(), self._mount.fd]
            child.channel.send({"mounted": self._mount.device, "notices": True}, fds)

    def detach(self) -> None:
        """The daemon is gone, or goes: what it was to answer waits for the next one."""
        if self._relay is not None:
            self._relay.detach()

    def set_file(self, number: int, fd: int, waits: bool) -> None:
        """A slab file; `fd` is taken over."""
        if self._relay is not None:
            self._relay.set_file(number, fd, waits)

    def close_file(self, number: int) -> None:
        """A slab file is not used any more."""
        if self._relay is not None:
            self._relay.close_file(number)

    def drop_files(self) -> None:
        """A new daemon numbers its files anew."""
        if self._relay is not None:
            self._relay.drop_files()

    @property
    def is_made(self) -> bool:
        """A daemon has asked for it, and it was not taken away."""
        return self._mount is not None

    @property
    def name(self) -> tuple[str, str] | None:
        """Mountpoint and device, once it is made."""
        return (str(self._mount.mountpoint), self._mount.device) if self._mount else None

    def is_there(self) -> bool:
        """Whether it is still what is seen at its mountpoint."""
        return self._mount is not None and self._mount.is_there()

    def take_away(self) -> None:
        """Unmount, lazily, and let go of the kernel. May be called twice."""
        mount, relay = self._mount, self._relay
        self._mount = self._relay = None
        if mount is None:
            return
        try:
            mount.detach()
        except OSError as error:
            _logger.error("can't unmount %s: %s", mount.mountpoint, error.strerror)
        if relay is not None:
            relay.stop()
        # Its threads may look at the descriptor once more, so its number must not become another
        # file's. Once the daemon has let go of it, too, those who still wait get an error.
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(nothing, mount.fd, inheritable=False)
        os.close(nothing)
