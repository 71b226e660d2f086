"""Owner, group and mode as the source has them, through the kernel."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import PATIENT, Site
from tests.servers.hdfs import Hdfs

OTHER = 54321
"""A uid that owns nothing."""


def facts(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)


def errors_of(uid: int, *paths: Path) -> list[str]:
    """What this user is told who reads each file or directory."""
    script = f"""
import os, sys
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
for path in sys.argv[1:]:
    try:
        os.listdir(path) if os.path.isdir(path) else open(path).read()
        print("")
    except OSError as error:
        print(type(error).__name__)
"""
    command = [sys.executable, "-c", script, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture
def open_site() -> Iterator[Site]:
    """One that other users can reach. The parents of `tmp_path` belong to pytest, which lets nobody
    else in."""
    with tempfile.TemporaryDirectory(prefix="cachefs-test-") as name:
        Path(name).chmod(0o755)
        site = Site(Path(name))
        yield site
        site.tear_down()


def test_files_of_a_directory_have_its_owners_and_modes(site: Site) -> None:
    (site.files / "d").mkdir()
    (site.files / "d").chmod(0o751)
    (site.files / "f").write_text("data")
    (site.files / "f").chmod(0o640)
    site.files.chmod(0o750)
    if os.geteuid() == 0:
        os.chown(site.files / "f", 1234, 5678)
    site.mount()
    for name in ("", "d", "f"):
        assert facts(site.mountpoint / name) == facts(site.files / name)
    with os.scandir(site.mountpoint) as entries:
        assert {e.name: stat.S_IMODE(e.stat().st_mode) for e in entries} == {"d": 0o751, "f": 0o640}


def test_what_the_user_says_wins(site: Site) -> None:
    (site.files / "d").mkdir()
    (site.files / "f").write_text("data")
    (site.files / "f").chmod(0o600)
    (site.files / "d").chmod(0o700)
    site.mount("--uid", 7, "--file-mode", "444")
    assert facts(site.mountpoint / "f") == (7, os.getgid(), 0o444)
    assert facts(site.mountpoint / "d") == (7, os.getgid(), 0o700)
    site.umount()
    site.mount("--gid", 8, "--dir-mode", "555")
    assert facts(site.mountpoint / "f") == (os.getuid(), 8, 0o600)
    assert facts(site.mountpoint / "d") == (os.getuid(), 8, 0o555)


def test_the_kernel_is_told_of_a_changed_mode(site: Site) -> None:
    for name in ("f", "d"):
        (site.files / name).mkdir() if name == "d" else (site.files / name).write_text("data")
    site.mount("--list-ttl", "0", "--attr-ttl", "1h", "--entry-ttl", "1h")
    with (site.mountpoint / "f").open() as file:
        inos = [(site.mountpoint / name).stat().st_ino for name in ("", "d", "f")]
        (site.files / "d").chmod(0o700)
        (site.files / "f").chmod(0o600)
        site.files.chmod(0o711)
        os.listdir(site.mountpoint)  # the source is asked; --attr-ttl alone would hide the change
        for name, ino in zip(("", "d", "f"), inos, strict=True):
            assert facts(site.mountpoint / name) == facts(site.files / name)
            assert (site.mountpoint / name).stat().st_ino == ino
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
        assert file.read() == "data"


@pytest.mark.root
def test_the_kernel_enforces_the_modes_of_the_source(open_site: Site) -> None:
    site = open_site
    (site.files / "secret").write_text("x")
    (site.files / "secret").chmod(0o600)
    (site.files / "closed").mkdir()
    (site.files / "closed").chmod(0o700)
    (site.files / "public").write_text("x")
    site.mount("--allow-other")
    paths = [site.mountpoint / name for name in ("secret", "closed", "public")]
    assert errors_of(OTHER, *paths) == ["PermissionError", "PermissionError", ""]
    site.umount()
    site.mount("--allow-other", "--file-mode", "644", "--dir-mode", "755")
    assert errors_of(OTHER, *paths) == ["", "", ""]
    site.umount()
    site.files.chmod(0o700)
    site.mount("--allow-other")
    assert errors_of(OTHER, *paths) == ["PermissionError"] * 3, "the root is closed from the start"


@pytest.fixture
def hdfs_site(tmp_path: Path, hdfs: Hdfs) -> Iterator[Site]:
    root = f"/{tmp_path.name}"
    hdfs.make_dir(root)
    site = Site(tmp_path, f"{hdfs.url}{root}")
    site.environment = hdfs.environment
    site.options = PATIENT
    yield site
    site.tear_down()
    hdfs.delete(root)


@pytest.mark.timeout(600)  # Hadoop is downloaded the first time ever
def test_hdfs(hdfs_site: Site, hdfs: Hdfs) -> None:
    site, root = hdfs_site, hdfs_site.source.removeprefix(hdfs.url)
    hdfs.put(f"{root}/f", b"data")
    hdfs.set_mode(f"{root}/f", "640")
    hdfs.set_owner(f"{root}/f", "1234", "nobody-of-this-name")
    hdfs.make_dir(f"{root}/d", "1777")
    hdfs.set_owner(f"{root}/d", "nobody-of-this-name", "5678")
    hdfs.set_mode(root, "711")
    site.mount("--list-ttl", "0")
    assert facts(site.mountpoint / "f") == (1234, os.getgid(), 0o640), "the mounting user's group"
    assert facts(site.mountpoint / "d") == (os.getuid(), 5678, 0o1777)
    assert facts(site.mountpoint)[2] == 0o711
    ino = (site.mountpoint / "f").stat().st_ino
    assert (site.mountpoint / "f").read_bytes() == b"data"
    hdfs.set_mode(f"{root}/f", "600")
    os.listdir(site.mountpoint)
    assert facts(site.mountpoint / "f")[2] == 0o600
    assert (site.mountpoint / "f").stat().st_ino == ino
    assert (site.mountpoint / "f").read_bytes() == b"data"
