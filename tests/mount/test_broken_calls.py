"""System calls of another user with odd names, offsets, flags and requests: none ends the daemon,
and together they write little into its log."""

import os
import subprocess
import sys

import pytest

from tests.mount.harness import Site
from tests.sizes import size

CALLS = size(4_000, 100_000)
MOST_LINES = 100
USER = 2001

CALL = r"""
import ctypes, fcntl, mmap, os, random, resource, sys

chance = random.Random(int(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 62, 1 << 62))
libc = ctypes.CDLL(None, use_errno=True)
FIXED = [b".", b"..", b"f", b"d", b"d/f", b"d/../d/./f", b"d//f", b"f/", b"f/x", b"a" * 255,
         b"a" * 256, b"\xff\xfe", b"\n", b"\x1b[2J", b"\xed\xa0\x80", b" ", b"-rf", b"d/" * 2000,
         b"x" * 4095, b".cachefs", "\u202e".encode(), b"e\xcc\x81", b"%2e%2e", b"a\\b"]
# Not between these: a source may have to store zeros for all of a file that has a hole.
OFFSETS = [0, 1, 4095, 4096, 1 << 20, 1 << 52, (1 << 62), (1 << 63) - 4097, (1 << 63) - 1, -1]
NAMES = [b"user.cachefs", b"user.cachefs.state", b"user.cachefs.hint", b"user.x", b"trusted.x",
         b"security.capability", b"system.posix_acl_access", b"system.posix_acl_default", b"user.",
         b"user." + b"n" * 250, b"x", b"user.\xff\n"]

def name():
    if chance.random() < 0.7:
        return chance.choice(FIXED)
    letters = bytes(b for b in chance.randbytes(chance.randrange(1, 60)) if b and b != 47)
    return letters or b"z"

def some(most=5000):
    return chance.randbytes(chance.choice([0, 1, 10, 300, most]))

def on_path():
    path, other = name(), name()
    number = chance.choice([0, 1, -1, 0o7777, 2001, (1 << 32) - 2, (1 << 31)])
    chance.choice([
        lambda: os.stat(path), lambda: os.lstat(path), lambda: os.mkdir(path, number),
        lambda: os.rmdir(path), lambda: os.unlink(path), lambda: os.rename(path, other),
        lambda: os.link(path, other), lambda: os.symlink(some(4000) or b"x", path),
        lambda: os.readlink(path), lambda: os.mkfifo(path), lambda: os.mknod(path, number),
        lambda: os.chmod(path, number & 0o7777), lambda: os.chown(path, number, number),
        lambda: os.utime(path, ns=(chance.choice([0, -1, 10**18, 2**63 - 1]),) * 2),
        lambda: os.truncate(path, chance.choice(OFFSETS)), lambda: os.statvfs(path),
        lambda: os.listdir(path), lambda: os.listxattr(path),
        lambda: os.getxattr(path, chance.choice(NAMES)),
        lambda: os.setxattr(path, chance.choice(NAMES), some(60_000), chance.randrange(3)),
        lambda: os.removexattr(path, chance.choice(NAMES)), lambda: os.access(path, number & 7),
        lambda: libc.renameat2(-100, path, -100, other, chance.randrange(8)),
    ])()

def on_file():
    flags = chance.choice([os.O_RDONLY, os.O_WRONLY, os.O_RDWR]) | os.O_NONBLOCK
    for flag in (os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND, os.O_DIRECTORY, os.O_TMPFILE,
                 os.O_DIRECT, os.O_NOATIME, os.O_PATH, os.O_SYNC):
        if chance.random() < 0.15:
            flags |= flag
    fd = os.open(name(), flags, 0o666)
    try:
        for _ in range(chance.randrange(1, 6)):
            at, length = chance.choice(OFFSETS), chance.choice([0, 1, 4096, 1 << 17])
            try:
                chance.choice([
                    lambda: os.pread(fd, length, at), lambda: os.pwrite(fd, some(), at),
                    lambda: os.ftruncate(fd, at), lambda: os.lseek(fd, at, chance.randrange(6)),
                    lambda: os.fsync(fd), lambda: os.fdatasync(fd), lambda: os.fstat(fd),
                    lambda: os.listdir(fd), lambda: os.fchmod(fd, length & 0o7777),
                    lambda: libc.fallocate(fd, chance.randrange(64), ctypes.c_long(at),
                                           ctypes.c_long(chance.choice([1, 4096, -1]))),
                    lambda: fcntl.ioctl(fd, chance.getrandbits(32), bytearray(some(300))),
                    lambda: fcntl.fcntl(fd, chance.randrange(1, 1100), length),
                    lambda: fcntl.flock(fd, chance.choice([5, 6, 8])),
                    lambda: os.copy_file_range(fd, fd, length, at & 0xFFFFF, 0),
                    lambda: os.sendfile(1, fd, at, 0),
                    lambda: mmap.mmap(fd, 4096, mmap.MAP_PRIVATE, mmap.PROT_READ)[:10] and None,
                    lambda: os.posix_fadvise(fd, at, length, chance.randrange(6)),
                ])()
            except (OSError, ValueError, OverflowError, TypeError):
                pass
    finally:
        os.close(fd)

for _ in range(int(sys.argv[2])):
    try:
        chance.choice([on_path, on_file])()
    except (OSError, ValueError, OverflowError, TypeError):
        pass
print("done")
"""


@pytest.mark.root
@pytest.mark.parametrize("option", ["--rw", None])
def test_no_system_call_ends_the_daemon(site: Site, option: str | None) -> None:
    (site.files / "d").mkdir()
    for file in (site.files / "f", site.files / "d/f"):
        file.write_bytes(b"x" * 10_000)
        file.chmod(0o666)
    for directory in (site.files, site.files / "d"):
        directory.chmod(0o777)
    site.expected_trouble += (".",)
    site.mount(*([option] if option else []))
    before = site.status()["pid"]
    lines = site.log.read_text().count("\n")
    # The directory is entered before the user changes: nobody else may pass those above it.
    done = subprocess.run(
        [sys._base_executable, "-c", CALL, "7", str(CALLS // 2)],  # type: ignore[attr-defined]
        cwd=site.mountpoint,
        user=USER,
        group=USER,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("done\n"), done
    assert site.status()["pid"] == before
    os.listdir(site.mountpoint)
    added = site.log.read_text().splitlines()[lines:]
    assert len(added) <= MOST_LINES, added[:MOST_LINES]
    assert not any("Traceback" in line for line in added), added
