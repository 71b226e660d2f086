"""The Debian package on bare machines: from nothing to a mount in two commands."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.tests.bare import Machine, built, check_object_store, check_served, check_upgrade
from deploy.tests.newer import VERSION, newer_deb


@pytest.fixture(params=["bookworm", "trixie"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(request.param, tmp_path / "root")
    yield machine
    machine.close()


def test_from_the_first_command_to_the_last(machine: Machine, tmp_path: Path) -> None:
    deb = built("cachefs_*.deb")
    shutil.copy(deb, machine.root)
    # What root has installed for another Python 3.11 is not the package's.
    theirs = machine.root / "root/.local/lib/python3.11/site-packages"
    theirs.mkdir(parents=True)
    for name in ("click", "trio"):
        (theirs / f"{name}.py").write_text("raise SystemExit('not ours')")

    machine.run(f"apt-get install -y ./{deb.name}")
    machine.run("cachefs mount file:///data /mnt")
    check_served(machine)
    check_object_store(machine, tmp_path / "store")

    assert "python3" not in machine.run("dpkg --list")
    assert "gcc" not in machine.run("dpkg --list").replace("gcc-12-base", "").replace(
        "gcc-14-base", ""
    ).replace("libgcc", "")
    modules = "ssl, hashlib, ctypes, zlib, bz2, lzma, sqlite3, readline, curses, dbm.ndbm"
    machine.run(f"/usr/lib/cachefs/bin/python3.11 -I -c 'import {modules}'")
    # The machine updates what speaks TLS.
    assert "libcurl" not in machine.run("ls /usr/lib/cachefs/lib")
    assert "libssl" not in machine.run("ls /usr/lib/cachefs/lib")
    for path in (
        "/usr/lib/systemd/system/cachefs@.service",
        "/usr/lib/systemd/system/cachefs-keeper.service",
        "/usr/lib/systemd/user/cachefs@.service",
        "/usr/share/man/man1/cachefs-mount.1.gz",
        "/usr/share/man/man8/mount.cachefs.8.gz",
        "/usr/share/bash-completion/completions/cachefs",
        "/usr/share/zsh/vendor-completions/_cachefs",
        "/usr/share/fish/vendor_completions.d/cachefs.fish",
    ):
        assert machine.run(f"dpkg --search {path}") == f"cachefs: {path}\n"
    machine.run("mkdir /by-table; mount -t cachefs file:///data /by-table -o cache_dir=/cache")
    assert machine.run("cat /by-table/train/0001") == "content"
    machine.run("umount /by-table")

    shutil.copy(newer_deb(deb, tmp_path), machine.root / "newer.deb")
    check_upgrade(machine, "apt-get install -y ./newer.deb", VERSION)

    assert "still mounted: /mnt" in machine.run("apt-get remove -y cachefs", code=100)
    check_served(machine)
    machine.run("cachefs umount /mnt")
    wants = "/etc/systemd/system/multi-user.target.wants"  # as `systemctl enable` leaves it
    unit = "/usr/lib/systemd/system/cachefs@.service"
    machine.run(f"mkdir -p {wants}; ln -s {unit} {wants}/cachefs@a.service")
    machine.run("apt-get remove -y cachefs")
    assert not any((machine.root / wants[1:]).iterdir())
    assert not (machine.root / "usr/lib/cachefs").exists()
    assert not (machine.root / "usr/bin/cachefs").is_symlink()


def test_root_writes_nothing_beside_the_package(machine: Machine) -> None:
    """What Python compiled on its first use would stay when the package is removed."""
    deb = built("cachefs_*.deb")
    shutil.copy(deb, machine.root)
    machine.run(f"apt-get install -y ./{deb.name}")
    before = sorted(map(str, (machine.root / "usr/lib/cachefs").rglob("*")))
    machine.run("cachefs mount file:///data /mnt && cachefs status && cachefs umount /mnt")
    assert sorted(map(str, (machine.root / "usr/lib/cachefs").rglob("*"))) == before
