"""A mount that somebody else may take away at the same moment."""

import errno
from pathlib import Path

import pytest

from cachefs.fuse import kernel_mount
from cachefs.fuse.kernel_mount import KernelMount


@pytest.mark.parametrize(("number", "stays"), [(errno.EINVAL, True), (errno.EPERM, False)])
def test_an_error_is_one_unless_the_mount_is_gone(
    number: int, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(mountpoint: Path, *, lazy: bool) -> None:
        nonlocal is_there
        is_there = stays
        raise OSError(number, "refused")

    monkeypatch.setattr(KernelMount, "is_there", lambda self: is_there)
    monkeypatch.setattr(kernel_mount, "unmount", fails)
    is_there = True
    with pytest.raises(OSError, match="refused"):
        KernelMount(Path("/mnt"), -1, "0:99").detach()


def test_somebody_else_may_unmount_it_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmounted_already(mountpoint: Path, *, lazy: bool) -> None:
        nonlocal is_there
        is_there = False
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(KernelMount, "is_there", lambda self: is_there)
    monkeypatch.setattr(kernel_mount, "unmount", unmounted_already)
    is_there = True
    mount = KernelMount(Path("/mnt"), -1, "0:99")
    mount.detach()
    mount.detach()
