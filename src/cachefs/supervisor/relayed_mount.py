"""The mount, /dev/fuse and the relay, which stay while daemons are replaced."""

import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from cachefs.errors import MountError, reason_of
from cachefs.fuse.kernel_mount import KernelMount, kernel_mount
from cachefs.fuse.relay import _relay
from cachefs.supervisor.channel import pair
from cachefs.supervisor.child import Child
from cachefs.supervisor.keeper_link import Held, Taken

_TABLE_ENTRIES = 1 << 21
"""Most blocks in the relay's table: 40 bytes each, and 130 for part checksums. Only used pages take
memory."""
_THREADS = 8
"""Threads of the relay. All but one may wait for disks."""

_SO_SNDBUFFORCE = 32
"""See socket(7). Python does not name it."""
_BUFFER_BYTES = 2 << 20
"""Linux doubles it. Packets count with their overhead."""

_logger = logging.getLogger(__name__)


def _enlarge_buffer(end: socket.socket) -> None:
    """Let a socket hold a WRITE of 1 MiB, if this process may do so. The daemon looks at the size
    (`fuse/relay/session.c`)."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _BUFFER_BYTES)


class RelayedMount:
    """The mount of one supervisor, which is made when the first daemon requests it.

    The object owns the mount, its /dev/fuse, and the relay. The supervisor closes `table_fd`.
    """

    def __init__(self, mountpoint: Path, watch: Callable[[int], None]) -> None:
        """Create the relay's table, but no mount yet. Raises `OSError`.

        `watch` is called with a descriptor that is readable once the mount has ended.
        """
        self._mountpoint = mountpoint
        self._watch = watch
        self.table_fd = _relay.create_table(_TABLE_ENTRIES)
        self._relay: _relay.Relay | None = None
        self._mount: KernelMount | None = None
        self._init: bytes | None = None
        """The kernel's INIT of a mount that was taken over."""

    def adopt(self, taken: Taken) -> bool:
        """Continue a mount of another supervisor. Return False, and take nothing, if another mount
        is visible at the mountpoint."""
        mount = KernelMount(self._mountpoint, taken.fd, taken.device)
        if not mount.is_there():
            return False
        self._mount, self._init = mount, taken.init
        return True

    def give_to(
        self, child: Child, source: str, allow_other: bool, writable: bool, passthrough: bool
    ) -> None:
        """Answer a daemon's request for the mount, with the descriptors to serve it or an error."""
        try:
            self._give_to(child, source, allow_other, writable, passthrough)
        except MountError as error:
            child.channel.send({"error": str(error)})
        except OSError as error:
            child.channel.send({"error": f"the relay could not begin: {reason_of(error)}"})

    def _give_to(
        self, child: Child, source: str, allow_other: bool, writable: bool, passthrough: bool
    ) -> None:
        is_first = self._relay is None
        if self._mount is None:
            self._mount = kernel_mount(self._mountpoint, source, allow_other, writable)
        if self._relay is None:
            self._relay = _relay.Relay(
                self._mount.fd, self.table_fd, _THREADS, writable, passthrough
            )
            if self._init is not None:
                self._relay.adopt(self._init)
            self._watch(self._relay.ended_fd)
        ours, its = pair()
        with ours, its:
            for end in (ours, its):
                _enlarge_buffer(end)
            self._relay.attach(ours.fileno())
            if is_first:
                self._relay.start()  # not earlier: a daemon must answer the kernel's INIT
            if is_first and not self._relay.can_resend:
                pass  # the relay before has answered all that it had read, see `stop_reading`
            elif (self._init is not None or not is_first) and not self._relay.resend():
                _logger.warning(
                    "this kernel can't send requests again (Linux 6.9 can): those that the daemon "
                    "before had not answered have failed with EIO"
                )
            fds = [its.fileno(), self._mount.fd]
            child.channel.send({"mounted": self._mount.device, "notices": True}, fds)

    def detach(self) -> None:
        """Stop forwarding to the present daemon. Its requests wait for the next daemon."""
        if self._relay is not None:
            self._relay.detach()

    def set_file(self, number: int, fd: int, waits: bool) -> None:
        """Give the relay a slab file, which then owns `fd`."""
        if self._relay is not None:
            self._relay.set_file(number, fd, waits)

    def close_file(self, number: int) -> None:
        """Let the relay close a slab file."""
        if self._relay is not None:
            self._relay.close_file(number)

    def drop_files(self) -> None:
        """Let the relay close all slab files, because a new daemon numbers its files anew."""
        if self._relay is not None:
            self._relay.drop_files()

    @property
    def is_made(self) -> bool:
        """Whether the mount was made and not taken away since."""
        return self._mount is not None

    @property
    def name(self) -> tuple[str, str] | None:
        """Mountpoint and device; None before the mount is made and after it was taken away."""
        return (str(self._mount.mountpoint), self._mount.device) if self._mount else None

    def is_there(self) -> bool:
        """Return whether this mount is still the visible one at its mountpoint."""
        return self._mount is not None and self._mount.is_there()

    def held(self) -> Held | None:
        """Return what another supervisor needs to continue the mount; None before the kernel has
        sent its INIT. The descriptor stays this object's."""
        init = self._relay.kept_init() if self._relay is not None else self._init
        if self._mount is None or init is None:
            return None
        return Held(self._mount.device, init, self._mount.fd, self.can_resend)

    @property
    def can_resend(self) -> bool:
        """Whether the kernel can send unanswered requests again, to another relay."""
        return self._relay is not None and self._relay.can_resend

    def stop_reading(self) -> None:
        """Let all further requests wait in the kernel."""
        if self._relay is not None:
            self._relay.stop_reading()

    def unanswered(self) -> int:
        """Return how many requests the daemon has not answered yet."""
        return self._relay.unanswered() if self._relay is not None else 0

    def leave(self) -> None:
        """End the relay, and leave the mount and its unanswered requests to another supervisor.

        This process must exit, and /dev/fuse stays open until then.
        """
        if self._relay is not None:
            self._relay.leave()

    def take_away(self) -> None:
        """Unmount lazily, stop the relay, and close /dev/fuse. A second call does nothing."""
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
        # The relay's threads may still use the descriptor, so another file must not get its number.
        # Once the daemon has closed /dev/fuse, too, processes that still wait get an error.
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(nothing, mount.fd, inheritable=False)
        os.close(nothing)
