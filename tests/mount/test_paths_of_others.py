"""Other users own what lies above the paths that root names, and exchange it at bad moments."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cachefs.errors import MountError, UntrustedPathError
from cachefs.fuse import kernel_mount as module
from cachefs.fuse.kernel_mount import kernel_mount
from cachefs.mounts import cachefs_mounts, canonical, unmount
from cachefs.supervisor.keeper_link import KeeperLink
from tests.mount.harness import Site

pytestmark = pytest.mark.root

_OTHER = 2001


def _link_of_other(link: Path, target: Path) -> None:
    link.symlink_to(target)
    os.chown(link, _OTHER, _OTHER, follow_symlinks=False)


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A directory of another user with a mountpoint in it, beside one of root."""
    place = tmp_path / "evil"
    (place / "above" / "mnt").mkdir(parents=True)
    (tmp_path / "etc" / "mnt").mkdir(parents=True)
    for path in (place, *place.rglob("*")):
        os.chown(path, _OTHER, _OTHER)
    return place


def _nothing_is_mounted(below: Path) -> bool:
    return not any(mount.mountpoint.is_relative_to(below) for mount in cachefs_mounts())


def test_a_mountpoint_below_a_directory_of_another_user_can_be_used(evil: Path) -> None:
    place = evil / "above" / "mnt"
    made = kernel_mount(place, "test", False)
    try:
        assert made.is_there()
        made.detach()
        assert not made.is_there()
    finally:
        os.close(made.fd)


@pytest.mark.parametrize("swapped", ["above/mnt", "above"])
def test_a_mountpoint_is_swapped_before_the_mount(swapped: str, evil: Path, tmp_path: Path) -> None:
    place = canonical(evil / "above" / "mnt")
    (evil / swapped).rename(evil / "old")
    _link_of_other(evil / swapped, tmp_path / "etc")
    with pytest.raises(MountError, match="link of uid 2001"):
        kernel_mount(place, "test", False)
    with pytest.raises(UntrustedPathError, match="link of uid 2001"):
        canonical(evil / "above" / "mnt")
    assert _nothing_is_mounted(tmp_path)


@pytest.mark.parametrize(  # the kernel does not let a mountpoint be renamed
    ("swapped", "when"), [("above/mnt", "before"), ("above", "before"), ("above", "after")]
)
def test_a_mountpoint_is_swapped_during_the_mount(
    swapped: str, when: str, evil: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module._mount2

    def swap() -> None:
        (evil / swapped).rename(evil / "old")
        _link_of_other(evil / swapped, tmp_path / "etc")

    def mount2(*args: Any) -> None:
        if when == "before":
            swap()
        real(*args)
        if when == "after":
            swap()

    monkeypatch.setattr(module, "_mount2", mount2)
    with pytest.raises(MountError, match=r"was moved to .*, so it is unmounted again"):
        kernel_mount(evil / "above" / "mnt", "test", False)
    assert _nothing_is_mounted(tmp_path)


def test_an_unmount_does_not_follow_links_of_others(evil: Path, tmp_path: Path) -> None:
    inside = kernel_mount(tmp_path / "etc" / "mnt", "roots", False)
    try:
        (evil / "above").rename(evil / "old")
        _link_of_other(evil / "above", tmp_path / "etc")
        with pytest.raises(UntrustedPathError, match="link of uid 2001"):
            unmount(evil / "above" / "mnt", lazy=True)
        assert inside.is_there()
    finally:
        inside.detach()
        os.close(inside.fd)


@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_a_log_that_another_user_has_planted(kind: str, site: Site, tmp_path: Path) -> None:
    """In a directory such as /tmp."""
    place, target = tmp_path / "tmp", tmp_path / "target"
    place.mkdir()
    place.chmod(0o1777)
    for name in ("log", "access"):
        if kind == "link":
            _link_of_other(place / name, target)
        else:
            os.mkfifo(place / name)
            os.chown(place / name, _OTHER, _OTHER)
    said = site.cli(
        "mount", site.source, site.mountpoint, "--cache-dir", site.cache, "--log-file",
        place / "log", code=2,
    )  # fmt: skip
    assert f"is a {kind}" in said.stderr
    site.mount()
    said = site.cli("set", site.mountpoint, f"access_log={place / 'access'}", code=1)
    assert f"is a {kind}" in said.stderr
    assert not target.exists()


@contextmanager
def _stranger_at(path: Path) -> Iterator[None]:
    """Another user listens at `path`."""
    code = """if True:
        import os, socket, sys
        os.setgid(2001); os.setuid(2001)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(sys.argv[1])
        listener.listen()
        print("listening", flush=True)
        while True:
            client = listener.accept()[0]
            while data := client.recv(1 << 16):
                print(data, flush=True)
    """
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "listening\n"
            yield
        finally:
            process.kill()
            assert process.stdout.read() == ""  # nobody has told it anything


def test_a_stranger_at_the_keepers_place_gets_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="cachefs-test-") as name:
        Path(name).chmod(0o1777)
        place = Path(name, "keeper.sock")
        with _stranger_at(place), pytest.raises(UntrustedPathError, match="uid 2001 listens"):
            KeeperLink(place, Path("/mnt"), "view")
