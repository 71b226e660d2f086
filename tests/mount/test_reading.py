"""What programs see of a mount: bytes, names, attributes, errors."""

import errno
import mmap
import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.conftest import ODD_NAMES
from tests.mount.harness import MIB, Site, drop_pages


def tree(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }


def test_the_tree_is_that_of_the_source(shared: Site) -> None:
    assert tree(shared.mountpoint) == tree(shared.files)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_can_be_opened_and_are_listed(shared: Site, name: str) -> None:
    assert (shared.mountpoint / "odd" / name).read_text() == name
    assert name in os.listdir(shared.mountpoint / "odd")


def test_a_large_directory_is_listed_completely_and_the_second_time_for_nothing(
    shared: Site,
) -> None:
    wanted = sorted(os.listdir(shared.files / "big"))
    big = shared.mountpoint / "big"
    assert sorted(os.listdir(big)) == wanted
    before = shared.origin()
    assert sorted(os.listdir(big)) == wanted
    long = subprocess.run(["ls", "-la", big], capture_output=True, text=True, check=True).stdout
    assert len(long.splitlines()) == 2_500 + 3
    found = subprocess.run(["find", big], capture_output=True, text=True, check=True).stdout
    assert len(found.splitlines()) == 2_501
    sizes = {entry.name: entry.stat().st_size for entry in os.scandir(big)}
    assert sizes == {entry.name: entry.stat().st_size for entry in os.scandir(shared.files / "big")}
    assert shared.origin() == before


def test_a_directory_can_be_read_in_pieces_and_from_the_start_again(shared: Site) -> None:
    script = (
        "import ctypes, os, sys\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)\n"
        "def count():\n"
        "    buffer, total = ctypes.create_string_buffer(4096), 0\n"
        "    while (got := libc.syscall(217, fd, buffer, 4096)) > 0:\n"
        "        position = 0\n"
        "        while position < got:\n"
        "            length = buffer.raw[position + 16 : position + 18]\n"
        "            position += int.from_bytes(length, 'little')\n"
        "            total += 1\n"
        "    return total\n"
        "first = count()\n"
        "os.lseek(fd, 0, os.SEEK_SET)\n"
        "print(first, count())\n"
    )
    if os.uname().machine != "x86_64":
        script = script.replace("217", "61")
    done = subprocess.run(
        [sys.executable, "-c", script, shared.mountpoint / "big"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["2502", "2502"]


def test_reads_at_and_past_the_end(shared: Site) -> None:
    size = 5 * MIB + 123
    fd = os.open(shared.mountpoint / "large", os.O_RDONLY)
    try:
        whole = (shared.files / "large").read_bytes()
        assert os.pread(fd, 1000, size - 10) == whole[-10:]
        for offset in (size, size + 1, size + 100 * MIB):
            assert os.pread(fd, 1000, offset) == b""
        assert os.pread(fd, 300_000, MIB - 100_000) == whole[MIB - 100_000 : MIB + 200_000]
        assert os.lseek(fd, 0, os.SEEK_END) == size
    finally:
        os.close(fd)
    assert (shared.mountpoint / "empty").read_bytes() == b""


def test_o_direct(shared: Site) -> None:
    whole = (shared.files / "large").read_bytes()
    fd = os.open(shared.mountpoint / "large", os.O_RDONLY | os.O_DIRECT)
    try:
        buffer = mmap.mmap(-1, MIB)  # page-aligned, as O_DIRECT wants it
        for offset in (0, 4096, MIB - 4096, 5 * MIB - 4096, 5 * MIB, 6 * MIB):
            got = os.preadv(fd, [buffer], offset)
            assert buffer[:got] == whole[offset : offset + MIB]
        buffer.close()
    finally:
        os.close(fd)


def test_mmap(shared: Site) -> None:
    whole = (shared.files / "mapped").read_bytes()
    with (
        (shared.mountpoint / "mapped").open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=3) as private,
    ):
        for offset in random.Random(2).sample(range(len(whole)), 200):
            assert mapped[offset : offset + 5000] == whole[offset : offset + 5000]
        assert mapped[:] == whole
        private[10:15] = b"mine!"
        assert private[10:15] == b"mine!"
        assert mapped[:] == whole


def test_a_shared_object_can_be_loaded(shared: Site) -> None:
    script = "import ctypes, sys; ctypes.PyDLL(sys.argv[1]).PyInit_cpython; print('loaded')"
    done = subprocess.run(
        [sys.executable, "-c", script, shared.mountpoint / "shared.so"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "loaded\n"


def test_scripts_and_binaries_can_be_executed(shared: Site) -> None:
    done = subprocess.run(
        [shared.mountpoint / "script", "here"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "ran here\n"
    subprocess.run([shared.mountpoint / "binary"], check=True)


def test_modes_and_owners_are_as_told(shared: Site) -> None:
    file = (shared.mountpoint / "small").stat()
    directory = (shared.mountpoint / "deep").stat()
    assert (file.st_mode, directory.st_mode) == (stat.S_IFREG | 0o755, stat.S_IFDIR | 0o711)
    assert {(info.st_uid, info.st_gid) for info in (file, directory)} == {(12, 34)}


def test_permissions_are_enforced_by_the_kernel(site: Site) -> None:
    (site.files / "secret").write_text("x")
    site.mount("--file-mode", "400", "--uid", "12345", "--allow-other")
    script = (
        f"import os; os.setgroups([]); os.setgid(54321); os.setuid(54321)\n"
        f"print(os.stat({str(site.mountpoint / 'secret')!r}).st_uid)\n"
        f"os.open({str(site.mountpoint / 'secret')!r}, os.O_RDONLY)\n"
    )
    # Directories above must let that user through.
    for parent in site.mountpoint.parents:
        if parent.stat().st_mode & 0o005 != 0o005:
            pytest.skip(f"other users can't enter {parent}") if os.geteuid() else parent.chmod(
                0o755
            )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout == "12345\n"
    assert "PermissionError" in done.stderr


def test_sizes_links_and_times(shared: Site) -> None:
    for name in ("small", "large", "empty", "deep/er/file"):
        ours, theirs = (shared.mountpoint / name).stat(), (shared.files / name).stat()
        assert ours.st_size == theirs.st_size
        assert ours.st_blocks == -(-ours.st_size // 512)
        assert ours.st_nlink == 1
        assert abs(ours.st_mtime_ns - theirs.st_mtime_ns) < 1_000_000_000
        assert ours.st_atime_ns == ours.st_mtime_ns == ours.st_ctime_ns
    assert (shared.mountpoint / "deep").stat().st_nlink == 1


def test_a_missing_name_is_enoent(shared: Site) -> None:
    for name in ("nothing", "deep/nothing", "nothing/deep", "odd/N"):
        with pytest.raises(FileNotFoundError):
            (shared.mountpoint / name).stat()
    with pytest.raises(NotADirectoryError):
        (shared.mountpoint / "small" / "x").stat()
    with pytest.raises(OSError, match=r"too long|No such file"):
        (shared.mountpoint / ("n" * 256)).stat()


WRITERS: dict[str, Callable[[Path], object]] = {
    "open for writing": lambda root: os.open(root / "small", os.O_WRONLY),
    "open for both": lambda root: os.open(root / "small", os.O_RDWR),
    "truncating open": lambda root: os.open(root / "small", os.O_WRONLY | os.O_TRUNC),
    "create": lambda root: os.open(root / "new", os.O_CREAT | os.O_WRONLY),
    "truncate": lambda root: os.truncate(root / "small", 0),
    "unlink": lambda root: os.unlink(root / "small"),
    "mkdir": lambda root: os.mkdir(root / "new"),
    "rmdir": lambda root: os.rmdir(root / "deep"),
    "rename": lambda root: os.rename(root / "small", root / "new"),
    "link": lambda root: os.link(root / "small", root / "new"),
    "symlink": lambda root: os.symlink("small", root / "new"),
    "mknod": lambda root: os.mknod(root / "new", stat.S_IFIFO | 0o600),
    "chmod": lambda root: os.chmod(root / "small", 0o600),
    "chown": lambda root: os.chown(root / "small", 1, 1),
    "utime": lambda root: os.utime(root / "small", (1, 1)),
    "setxattr": lambda root: os.setxattr(root / "small", "user.x", b"y"),
    "removexattr": lambda root: os.removexattr(root / "small", "user.cachefs.version"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_everything_that_would_write_is_erofs(shared: Site, writer: str) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
        WRITERS[writer](shared.mountpoint)


def test_xattrs(shared: Site) -> None:
    path = shared.mountpoint / "deep/er/file"
    path.read_bytes()
    names = {"user.cachefs.version", "user.cachefs.cached", "user.cachefs.source"}
    assert set(os.listxattr(path)) == names
    assert os.getxattr(path, "user.cachefs.source").decode() == f"{shared.source}/deep/er/file"
    assert os.getxattr(path, "user.cachefs.version")
    assert 0 <= int(os.getxattr(path, "user.cachefs.cached")) <= 100
    assert os.listxattr(path.parent) == ["user.cachefs.source"]
    assert os.getxattr(shared.mountpoint, "user.cachefs.source").decode() == shared.source
    for where, name in ((path, "user.other"), (path.parent, "user.cachefs.cached")):
        with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
            os.getxattr(where, name)
    for name in ("security.selinux", "system.posix_acl_access"):
        # There are none in the whole mount, so `ls -l` need not ask for each file.
        with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
            os.getxattr(path, name)
    done = subprocess.run(
        ["getfattr", "--absolute-names", "-d", path], capture_output=True, text=True, check=True
    )
    assert all(f"{name}=" in done.stdout for name in names)


def test_statfs(shared: Site) -> None:
    info = os.statvfs(shared.mountpoint)
    assert info.f_flag & os.ST_RDONLY
    assert info.f_namemax == 255
    assert info.f_blocks * info.f_frsize == 1 << 50
    assert info.f_bavail == info.f_bfree == info.f_blocks
    assert (
        subprocess.run(["df", shared.mountpoint], capture_output=True, check=False).returncode == 0
    )


def test_dropped_pages_are_read_again_from_the_cache(shared: Site) -> None:
    path = shared.mountpoint / "mapped"
    whole = path.read_bytes()
    before = shared.origin()
    drop_pages(path)
    assert path.read_bytes() == whole
    assert shared.origin()["gets"] == before["gets"]
