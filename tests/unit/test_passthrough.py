"""Why files are not passed through: what the daemon decides, and what `cachefs status` says."""

import errno
from collections.abc import Mapping

import pytest

from cachefs.config import load_mount_config
from cachefs.daemon.passthrough import Passthrough
from cachefs.fuse.observers import RequestObservers
from cachefs.fuse.uid_limits import UidLimits


class Table:
    """What the daemon has told the relay."""

    def __init__(self) -> None:
        self.allowed = self.paused = False
        self.state = {"opens": 3, "opens_through": 1, "opens_state": 1, "through_error": 0}

    def pass_through(self, allowed: bool) -> None:
        self.allowed = allowed

    def pause(self, paused: bool) -> None:
        self.paused = paused

    def counters(self) -> Mapping[str, int]:
        return self.state


class Mount:
    """A mount of which only this is there."""

    def __init__(self, has_relay: bool = True, **options: object) -> None:
        config = load_mount_config("s3://b", "/mnt", {"passthrough": "auto", **options})
        self.table = Table()
        self.limits, self.observers = UidLimits({}), RequestObservers()
        table = self.table if has_relay else None
        self.passthrough = Passthrough(config, table, self.limits, self.observers)
        self.limits.on_change = self.passthrough.update
        self.observers.on_change = self.passthrough.observe

    @property
    def obstacle(self) -> str | None:
        return self.passthrough.report()["obstacle"]


def test_what_the_status_says() -> None:
    mount = Mount()
    assert mount.table.allowed
    assert mount.passthrough.report() == {
        "wanted": True,
        "opens": 3,
        "passed_through": 1,
        "obstacle": None,
    }


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"passthrough": "off"}, "--passthrough auto"),
        ({"read_only": False}, "the mount is writable"),
        ({"keeper": "/run/keeper"}, "--keeper"),
        ({"verify": "full"}, "--verify full"),
        ({"has_relay": False}, "the relay doesn't answer the kernel"),
    ],
)
def test_mounts_that_never_pass_through(options: dict[str, object], why: str) -> None:
    mount = Mount(**options)  # type: ignore[arg-type]
    assert not mount.table.allowed
    assert why in str(mount.obstacle)


async def test_limits_of_users_count() -> None:
    """The kernel would read without a limit."""
    mount = Mount()
    mount.limits.set(1000, 1 << 20)
    mount.limits.set(1001, 1 << 20)
    mount.limits.set(1000, 0)
    assert not mount.table.allowed
    assert "--limit-uid" in str(mount.obstacle)
    mount.limits.set(1001, 0)
    assert mount.table.allowed
    assert mount.obstacle is None


def test_observers_see_every_read() -> None:
    mount = Mount()
    for _ in range(2):
        mount.observers.append(print)
        assert (mount.table.allowed, mount.table.paused) == (False, True)
        assert "access log or a profile" in str(mount.obstacle)
        mount.observers.remove(print)
        assert (mount.table.allowed, mount.table.paused) == (True, False)


@pytest.mark.parametrize(
    ("state", "number", "why"),
    [
        (2, errno.EPERM, "needs root (CAP_SYS_ADMIN"),
        (2, errno.ENOSYS, "began with an earlier version"),
        (2, errno.ENOTTY, "older than Linux 6.9"),
        (2, errno.EOPNOTSUPP, "CONFIG_FUSE_PASSTHROUGH"),
        (1, errno.ELOOP, "lies on overlayfs"),
        (1, errno.EINVAL, "no O_DIRECT"),
        (1, errno.ENOSPC, "the kernel refuses it: No space left on device"),
    ],
)
def test_what_the_kernel_refuses(state: int, number: int, why: str) -> None:
    mount = Mount()
    mount.table.state |= {"opens_state": state, "through_error": number}
    assert why in str(mount.obstacle)
