"""Whether the kernel may read whole files directly, and why not (fuse/relay/opens.h)."""

import errno
import os
from collections.abc import Mapping, Sized
from typing import Protocol

from cachefs.config import MountConfig
from cachefs.control.report import PassthroughStatus
from cachefs.fuse.uid_limits import UidLimits

_OFF = 2
"""The state of OPEN (`opens_state`) if the relay answers it with ENOSYS."""

_OF_THE_MOUNT = {
    errno.EPERM: "it needs root (CAP_SYS_ADMIN, outside of user namespaces)",
    errno.ENOSYS: "the mount began with an earlier version of cachefs; unmount and mount it again",
    errno.ENOTTY: "this kernel is older than Linux 6.9",
    errno.EOPNOTSUPP: "this kernel was built without FUSE passthrough (CONFIG_FUSE_PASSTHROUGH)",
}
"""Why the kernel refuses it altogether, by errno."""

_OF_FILES = {
    errno.ELOOP: "the cache directory lies on overlayfs or another stacked file system; put it on "
    "a disk, in a container on a volume",
    errno.EINVAL: "the file system of the cache directory has no O_DIRECT; put it on another one",
}
"""Why the kernel refuses files of the cache, by errno."""


class Table(Protocol):
    """The methods of `cachefs.fuse.relay._relay.Table` that `Passthrough` calls."""

    def pass_through(self, allowed: bool, /) -> None: ...
    def pause(self, paused: bool, /) -> None: ...
    def counters(self) -> Mapping[str, int]: ...


def never_passes_through(config: MountConfig) -> str | None:
    """Return why this mount passes no file through, whatever happens; None if it may."""
    if config.passthrough == "off":
        return "off; mount with --passthrough auto"
    if not config.read_only:
        return "the mount is writable; leave out --rw"
    if config.keeper is not None:
        return "off because of --keeper, which can't hand over which files are open"
    if config.verify == "full":
        return "off because of --verify full, which compares every read"
    return None


def object_slabs_from_bytes(config: MountConfig) -> int | None:
    """Return from which size on objects get a slab of their own, so that their files can be passed
    through; None if no file ever is."""
    is_possible = never_passes_through(config) is None and os.geteuid() == 0
    return config.passthrough_from if is_possible else None


class Passthrough:
    """Decides for one mount behind the relay whether files may be passed through when they are
    opened. All methods run on the loop."""

    def __init__(
        self, config: MountConfig, table: Table | None, limits: UidLimits, observers: Sized
    ) -> None:
        """`table` is None without a relay. The caller must call `update` whenever `limits` have
        changed, and `observe` when the first of the `observers` begins or the last one ends."""
        self._never = never_passes_through(config)
        self._is_wanted = config.passthrough != "off"
        self._table = table
        self._limits = limits
        self._observers = observers
        if self._never is None and table is None:
            self._never = "the relay doesn't answer the kernel (see DATA PATH)"
        self.update()

    def update(self) -> None:
        """Allow or forbid it from now on. Files that are open stay as they are."""
        if self._table is not None:
            self._table.pass_through(self._why_not_now() is None)

    def observe(self, is_observed: bool) -> None:
        """Send all READs to the daemon while somebody observes the requests."""
        if self._table is not None:
            self._table.pause(is_observed)
        self.update()

    def _why_not_now(self) -> str | None:
        if self._never is not None:
            return self._never
        if self._limits.by_uid():
            return "off because of --limit-uid, as the kernel would read without a limit"
        if self._observers:
            return "off while an access log or a profile is on"
        return None

    def report(self) -> PassthroughStatus:
        """Return what the status says."""
        counters = {} if self._table is None else self._table.counters()
        return {
            "wanted": self._is_wanted,
            "opens": counters.get("opens", 0),
            "passed_through": counters.get("opens_through", 0),
            "obstacle": self._why_not_now() or _refusal(counters),
        }


def _refusal(counters: Mapping[str, int]) -> str | None:
    """Return why the kernel has refused it at last."""
    number = counters["through_error"]
    if not number:
        return None
    reasons = _OF_THE_MOUNT if counters["opens_state"] == _OFF else _OF_FILES
    return reasons.get(number, f"the kernel refuses it: {os.strerror(number)}")
