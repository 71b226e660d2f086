"""A cache disk that goes bad under a mount: it is done without, and readers are served."""

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from cachefs.fuse import relay
from tests.mount.harness import Site, eventually, is_running

pytestmark = pytest.mark.skipif(relay.why_not() is not None, reason=f"no relay: {relay.why_not()}")

FILES = 30


def content(number: int) -> bytes:
    return random.Random(number).randbytes(20_000)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    for number in range(FILES):
        (site.files / f"{number}").write_bytes(content(number))
    (site.files / "dir").mkdir()
    (site.files / "dir" / "new").write_bytes(b"new")
    site.mount("--data-path", "relay", "--entry-ttl", "2s", "--attr-ttl", "2s")
    read_all(site)
    eventually(lambda: site.status()["tiers"][0]["cached_blocks"] == FILES)
    try:
        yield site
    finally:
        site.tear_down()


def read_all(site: Site) -> None:
    for number in range(FILES):
        path = site.mountpoint / f"{number}"
        # Inodes are gone with a namespace: the kernel asks for names again when a TTL ends.
        eventually(partial(is_readable, path, content(number)))


def is_readable(path: Path, wanted: bytes) -> bool:
    """False while it is stale."""
    try:
        assert path.read_bytes() == wanted
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return False
    return True


def replace_daemon(site: Site, number: signal.Signals = signal.SIGKILL) -> None:
    pid = site.daemon_pid()
    os.kill(pid, number)
    eventually(lambda: not is_running(pid))
    eventually(lambda: answers(site, pid))


def answers(site: Site, not_pid: int) -> bool:
    """Another daemon than that one."""
    try:
        return site.daemon_pid() != not_pid
    except AssertionError:  # `status` fails while there is none
        return False


def new_files_are_shown(site: Site) -> None:
    """What nobody has looked for yet."""
    assert (site.mountpoint / "dir" / "new").read_bytes() == b"new"


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """For those who open it from now on."""
    subprocess.run(["mount", "--bind", directory, directory], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", directory], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def test_a_damaged_identity_costs_the_cache_and_not_the_mount(site: Site) -> None:
    site.expected_trouble += ("was killed by", "can't be understood", "names are kept in")
    (site.cache / "cachefs.json").write_text("{")
    replace_daemon(site)
    assert site.status()["tiers"] == []
    read_all(site)
    new_files_are_shown(site)
    replace_daemon(site)
    read_all(site)


def test_a_read_only_disk_costs_the_cache_and_not_the_mount(site: Site) -> None:
    site.expected_trouble += ("was killed by", "not writable", "Read-only", "names are kept in")
    with read_only(site.cache):
        replace_daemon(site)
        read_all(site)
        new_files_are_shown(site)
        assert site.status()["tiers"] == []
    # With its directory back the next daemon has it again, and gives no number twice.
    replace_daemon(site)
    eventually(lambda: len(site.status()["tiers"]) == 1)
    read_all(site)


@pytest.mark.parametrize("name", ["index", "namespace"])
def test_databases_that_can_not_be_read_are_made_anew(site: Site, name: str) -> None:
    """The daemon that finds out dies of it. The next one looks before it maps them."""
    site.expected_trouble += ("was killed by", "can't be read", "can't be used", "is damaged")
    site.expected_trouble += ("Fatal Python error",)
    data = site.cache / name / "data.mdb"
    data.rename(data.with_name("moved"))
    data.write_bytes(random.randbytes(100_000))
    replace_daemon(site, signal.SIGSEGV)
    read_all(site)
    new_files_are_shown(site)
    assert (site.cache / f"{name}.bad").is_dir()
    assert len(site.status()["tiers"]) == 1


def test_a_namespace_that_is_cut_under_the_daemon_is_made_anew(site: Site) -> None:
    site.expected_trouble += ("was killed by", "can't be used", "Fatal Python error", "is damaged")
    pid = site.daemon_pid()
    os.truncate(site.cache / "namespace" / "data.mdb", 8192)

    def is_replaced() -> bool:
        with contextlib.suppress(OSError):
            (site.mountpoint / f"{random.random()}").stat()
        return not is_running(pid)

    eventually(is_replaced)
    eventually(lambda: answers(site, pid))
    read_all(site)
    new_files_are_shown(site)


def test_without_the_disk_of_the_spool_all_changes_are_refused(tmp_path: Path) -> None:
    """The unsent changes are on that disk. With it back, the next daemon continues with them."""
    site = Site(tmp_path)
    site.expected_trouble += ("was killed by", "not writable", "Read-only", "names are kept in")
    site.expected_trouble += ("all changes are refused",)
    (site.files / "old").write_bytes(b"old")
    site.mount("--rw", "--data-path", "relay", "--entry-ttl", "2s", "--attr-ttl", "2s")
    try:
        written = os.open(site.mountpoint / "new", os.O_CREAT | os.O_WRONLY)
        os.write(written, b"before")
        with read_only(site.cache):
            replace_daemon(site)
            eventually(partial(is_readable, site.mountpoint / "old", b"old"))
            for change in (
                partial(os.write, written, b"lost"),
                partial((site.mountpoint / "another").touch),
                partial((site.mountpoint / "old").write_bytes, b"changed"),
                partial((site.mountpoint / "old").unlink),
                partial((site.mountpoint / "old").chmod, 0o600),
                partial((site.mountpoint / "directory").mkdir),
            ):
                with pytest.raises(OSError, match=r"Read-only|Stale"):
                    change()
            with pytest.raises(OSError, match="Input/output"):
                os.fsync(written)
        replace_daemon(site)
        os.pwrite(written, b" and after", 6)
        os.close(written)
        assert (site.files / "new").read_bytes() == b"before and after"
        site.umount()
    finally:
        site.tear_down()


def kill_who_maps(data: Path) -> None:
    """Let all rows of a database lie far behind the end of its file."""
    pages = bytearray(data.read_bytes())
    for start in range(2 * 4096, len(pages), 4096):
        if pages[start + 10] & 2:  # a page with rows
            pages[start + 16 : start + 80] = b"\xf0\xff" * 32
    data.write_bytes(pages)


@pytest.mark.parametrize("name", ["index", "namespace"])
def test_a_database_that_kills_the_first_daemon_is_made_anew(site: Site, name: str) -> None:
    """The mount begins all the same, and the next one finds nothing to mend."""
    site.expected_trouble += ("it is tried once more", "is damaged")
    site.expected_trouble += ("can't be used", "Fatal Python error", "was killed by")
    site.umount()
    kill_who_maps(site.cache / name / "data.mdb")
    site.mount("--data-path", "relay")
    assert (site.cache / f"{name}.bad").is_dir()
    read_all(site)
    new_files_are_shown(site)
    site.umount()
    shutil.rmtree(site.cache / f"{name}.bad")
    site.mount("--data-path", "relay")
    read_all(site)
    assert not (site.cache / f"{name}.bad").exists()


def test_a_flipped_bit_in_the_namespace_shows_no_other_file(site: Site) -> None:
    """In the record of each file, and in that of each name."""
    site.expected_trouble += ("has a wrong checksum or is lost",)
    numbers = {number: (site.mountpoint / f"{number}").stat().st_ino for number in range(FILES)}
    site.umount()
    data = site.cache / "namespace" / "data.mdb"
    pages = data.read_bytes()
    for number, ino in numbers.items():
        name = f"{number}".encode()
        inode = ino.to_bytes(8, "little")
        assert name + inode in pages
        pages = pages.replace(name + inode, name + (ino ^ 1).to_bytes(8, "little"))
    pages = pages.replace((20_000).to_bytes(8, "little"), (20_000 ^ 128).to_bytes(8, "little"))
    data.write_bytes(pages)
    site.mount("--data-path", "relay")
    assert sorted(os.listdir(site.mountpoint)) == sorted([*map(str, range(FILES)), "dir"])
    read_all(site)
