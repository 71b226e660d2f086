"""Which directories are accepted; the others stay as they were."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.cache_dir.directory import CacheDirectory, slab_bytes_for
from cachefs.cache_dir.probe import probe_read_flags
from cachefs.errors import CacheDirError
from cachefs.format.slab import class_of, slab_layout
from cachefs.types import BLOCK_BYTES

MIB = 1 << 20


def fingerprint(path: Path) -> list[tuple[str, int, int, str]]:
    found = []
    for item in [path, *sorted(path.rglob("*"))]:
        digest = hashlib.sha1(item.read_bytes()).hexdigest() if item.is_file() else ""
        status = item.stat()
        found.append((str(item), status.st_mode, status.st_mtime_ns, digest))
    return found


def refused(path: Path, match: str, source: str = "s3://a") -> None:
    before = fingerprint(path)
    with pytest.raises(CacheDirError, match=match):
        CacheDirectory.open(path, 64 * MIB, source)
    assert fingerprint(path) == before


def test_created_and_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "x" / "cache"
    tier = CacheDirectory.open(path, 64 * MIB, "s3://a")
    assert path.stat().st_mode & 0o777 == 0o700
    tier.close()
    again = CacheDirectory.open(path, 9999 * MIB, "s3://a")
    assert again.identity == tier.identity
    assert again.identity.slab_bytes == 2 * MIB + 8192
    again.close()


def test_locked(tmp_path: Path) -> None:
    tier = CacheDirectory.open(tmp_path, 64 * MIB, "s3://a")
    refused(tmp_path, f"in use .*pid {os.getpid()}")
    tier.close()
    CacheDirectory.open(tmp_path, 64 * MIB, "s3://a").close()


def test_other_source(tmp_path: Path) -> None:
    CacheDirectory.open(tmp_path, 64 * MIB, "s3://a").close()
    refused(tmp_path, "belongs to the mount of s3://a", "s3://b")


def test_newer_format(tmp_path: Path) -> None:
    CacheDirectory.open(tmp_path, 64 * MIB, "s3://a").close()
    identity = tmp_path / "cachefs.json"
    identity.write_text(json.dumps({"format": 3, "who": "knows"}))
    refused(tmp_path, "format 3")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "x"}', '{"format": 2, "uuid": 7}'])
def test_damaged_identity(tmp_path: Path, text: str) -> None:
    (tmp_path / "cachefs.json").write_text(text)
    refused(tmp_path, "can't be understood")


def test_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    refused(tmp_path, "other files")


def test_shared_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    refused(tmp_path, "shared by all users")


def test_not_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    refused(path, "not a directory")


def test_interrupted_creation(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("")
    (tmp_path / "cachefs.json.tmp").write_text("{")
    (tmp_path / "slabs").mkdir()
    CacheDirectory.open(tmp_path, 64 * MIB, "s3://a").close()
    refused(tmp_path, "belongs to the mount of s3://a", "s3://b")


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that everybody can reach. The parents of `tmp_path` belong to pytest, which lets
    nobody else in."""
    with tempfile.TemporaryDirectory(prefix="cachefs-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.root
@pytest.mark.parametrize(
    ("mode", "owner", "text"),
    [
        (0o755, 0, "not writable"),
        (0o777, 12345, "belongs to another user"),
    ],
)
def test_directories_of_others(open_to_all: Path, mode: int, owner: int, text: str) -> None:
    directory = open_to_all / "c"
    directory.mkdir()
    os.chown(directory, owner, owner)
    directory.chmod(mode)
    code = (
        "import os, sys; from cachefs.cache_dir.directory import CacheDirectory\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: CacheDirectory.open(sys.argv[1], 1 << 26, 's')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("CacheDirError")
    assert text in done.stdout
    assert os.listdir(directory) == []


def test_slab_size_follows_the_quota() -> None:
    assert slab_bytes_for(10 * MIB) == 2 * MIB + 8192
    assert slab_bytes_for(4096 * MIB) == 8 * MIB + 8192
    assert slab_bytes_for(100 << 30) == 64 * MIB + 8192


@pytest.mark.parametrize("quota_bytes", [10 * MIB, 4096 * MIB, 100 << 30])
def test_whole_blocks_fit_a_slab_exactly(quota_bytes: int) -> None:
    slab_bytes = slab_bytes_for(quota_bytes)
    layout = slab_layout(class_of(BLOCK_BYTES), slab_bytes)
    assert layout.slot_offset(layout.slot_count) == slab_bytes


def test_probe_of_a_memory_file_system(tmp_path: Path) -> None:
    shm = Path("/dev/shm/cachefs-probe-test")
    assert probe_read_flags(shm) == 0
    assert not shm.exists()
    assert probe_read_flags(tmp_path / "p") in (os.RWF_NOWAIT, 0, None)


@pytest.mark.parametrize("mode", [0o775, 0o777])
def test_a_directory_that_others_could_write_to_is_closed(
    mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A umask of 002 makes such a directory, and an emptyDir of Kubernetes is one."""
    caplog.set_level("INFO")
    path = tmp_path / "cache"
    for _ in range(2):
        path.mkdir(exist_ok=True)
        path.chmod(mode)
        for name in ("slabs", "jobs"):
            (path / name).mkdir(exist_ok=True)
            (path / name).chmod(mode)
        CacheDirectory.open(path, 64 * MIB, "s3://a").close()
        assert path.stat().st_mode & 0o777 == 0o700
        assert not (path / "slabs").stat().st_mode & 0o022
        assert not (path / "jobs").stat().st_mode & 0o022
    assert sum("could write to it" in text for text in caplog.messages) == 2


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize(
    "name",
    ["slabs", "index", "namespace/x", "jobs", "manifest", "spool", "lock", "cachefs.json.tmp",
     "probe.tmp", "index/lock.mdb", "namespace.bad"],
)  # fmt: skip
def test_links_in_the_directory_are_refused(name: str, is_new: bool, tmp_path: Path) -> None:
    path, outside = tmp_path / "cache", tmp_path / "outside"
    path.mkdir()
    outside.mkdir()
    (outside / "file").write_bytes(b"of somebody else")
    if not is_new:
        CacheDirectory.open(path, 64 * MIB, "s3://a").close()
    place = path / name
    place.parent.mkdir(exist_ok=True)
    if place.is_dir():
        place.rmdir()
    place.unlink(missing_ok=True)
    place.symlink_to(outside / "file" if "." in name or name == "lock" else outside)
    before = fingerprint(outside)
    refused(path, f"{name} is a link")
    assert fingerprint(outside) == before


def test_a_slab_with_a_second_name_is_not_opened(tmp_path: Path) -> None:
    tier = CacheDirectory.open(tmp_path / "cache", 64 * MIB, "s3://a")
    (tmp_path / "outside").write_bytes(bytes(4096))
    tier.paths.slab(1).hardlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="has 2 names"):
        tier.open_slab(1)
    tier.close()
