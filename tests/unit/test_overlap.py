"""A source, its mountpoint and its cache must not lie in one another."""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from cachefs.errors import UsageError
from cachefs.mounts import local_directory, overlap, refuse_overlaps
from cachefs.mounts.table import MountEntry, all_mounts

ENDLESS = "lies in .*, so the mount would show itself without end"
SHOWN = "lies in .*, so the mount would show its own cache"
HIDDEN = "lies below the mountpoint .*, which would hide it"
WAITS = "lies below the mountpoint .*, which would wait for itself"
IN_CACHE = "lies in the cache directory"


@pytest.fixture
def places(tmp_path: Path) -> Path:
    for name in ("src/sub/deep", "m", "c", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("src/sub")
    (tmp_path / "chain").symlink_to(tmp_path / "link")
    return tmp_path


@contextmanager
def bound(source: Path, place: Path) -> Iterator[None]:
    subprocess.run(["mount", "--bind", source, place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


def refused(places: Path, source: str, mountpoint: str, cache: str, why: str) -> None:
    """Expect the refusal. The places are relative to `places`, and nothing is made in them."""
    before = sorted(places.rglob("*"))
    with pytest.raises(UsageError, match=why) as refusal:
        refuse_overlaps(f"file://{places}/{source}", places / mountpoint, [places / cache])
    assert "\n" not in str(refusal.value)
    assert sorted(places.rglob("*")) == before


@pytest.mark.parametrize(
    ("source", "mountpoint", "cache", "why"),
    [
        ("src", "src", "c", ENDLESS),
        ("src", "src/sub/deep", "c", ENDLESS),
        ("src/", "src/sub", "c", ENDLESS),
        ("other/../src", "src/sub", "c", ENDLESS),
        ("chain", "src/sub/deep", "c", ENDLESS),
        ("./src//sub/../.", "src/sub", "c", ENDLESS),
        ("", "m", "c", ENDLESS),
        ("m/sub", "m", "c", HIDDEN),
        ("link", "src", "c", HIDDEN),
        ("src", "m", "src", SHOWN),
        ("src", "m", "src/not/there", SHOWN),
        ("src", "m", "link/c", SHOWN),
        ("src", "m", "chain", SHOWN),
        ("c/slabs", "m", "c", IN_CACHE),
        ("link", "m", "src", IN_CACHE),
        ("src", "m", "m/c", WAITS),
        ("other", "src/sub", "link/c", WAITS),
        ("other", "c/m", "c", IN_CACHE),
        ("other", "src/sub/deep", "link", IN_CACHE),
    ],
)
def test_places_that_lie_in_one_another(
    places: Path, source: str, mountpoint: str, cache: str, why: str
) -> None:
    refused(places, source, mountpoint, cache, why)


@pytest.mark.parametrize("scheme", ["file", "local", "fsspec+file"])
def test_other_spellings_of_a_local_source(
    places: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(places))
    for path in (f"/{places}/src", "~/src"):
        source = f"{scheme}://{path}"
        with pytest.raises(UsageError, match=ENDLESS):
            refuse_overlaps(source, places / "src/sub", [])
        url = source.removeprefix("fsspec+")
        assert str(local_directory(source)) == os.path.normpath(
            LocalFileSystem._strip_protocol(url)
        )


def test_several_caches_and_sources_elsewhere(places: Path) -> None:
    source = f"file://{places}/src"
    refuse_overlaps(source, places / "m", [places / "c", places / "srcs"])
    with pytest.raises(UsageError, match=f"cache directory {places}/src/x {SHOWN}"):
        refuse_overlaps(source, places / "m", [places / "c", places / "src/x"])
    refuse_overlaps("s3://bucket/src", places / "src", [places / "c"])
    with pytest.raises(UsageError, match=WAITS):
        refuse_overlaps("s3://bucket", places / "m", [places / "m/c"])


@pytest.mark.root
def test_bind_mounts(places: Path) -> None:
    with bound(places / "src/sub", places / "other"):
        refused(places, "src", "other/deep", "c", ENDLESS)
        refused(places, "src", "m", "other/deep/c", SHOWN)
        refused(places, "other", "src/sub/deep", "c", ENDLESS)
        refused(places, "other/deep", "src/sub", "c", HIDDEN)
        refuse_overlaps(f"file://{places}/other/deep", places / "m", [places / "src/c"])


@pytest.mark.root
def test_a_file_system_that_is_mounted_in_the_source(places: Path) -> None:
    with ExitStack() as stack:
        subprocess.run(["mount", "-t", "tmpfs", "cachefs-test", places / "src/sub"], check=True)
        stack.callback(subprocess.run, ["umount", places / "src/sub"], check=True)
        (places / "src/sub/of-it").mkdir()
        stack.enter_context(bound(places / "src/sub/of-it", places / "other"))
        refused(places, "src", "m", "src/sub/c", SHOWN)
        refused(places, "src", "m", "other/c", SHOWN)
        # What the mount hides is not in the source.
        stack.enter_context(bound(places / "m", places / "src/sub/of-it"))
        refuse_overlaps(f"file://{places}/src", places / "c", [places / "other/c"])


class TestOtherMounts:
    """Mounts of cachefs are in the table only: what they show is not looked at."""

    @pytest.fixture(autouse=True)
    def _table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.added: list[MountEntry] = []
        mounts = all_mounts()
        monkeypatch.setattr(overlap, "all_mounts", lambda: mounts + self.added)

    def add(self, source: str, place: Path) -> None:
        device = f"0:{900 + len(self.added)}"
        self.added.append(MountEntry(place, "fuse.cachefs", source, device))

    def test_a_mount_below_the_source_is_fine(self, places: Path) -> None:
        self.add("s3://bucket", places / "src/sub")
        self.add(f"file://{places}/other", places / "src/sub/deep")
        refuse_overlaps(f"file://{places}/src", places / "m", [places / "c"])

    def test_two_mounts_that_show_each_other(self, places: Path) -> None:
        self.add(f"file://{places}/other", places / "src/sub")
        refused(places, "src", "other/m", "c", ENDLESS)
        refused(places, "src", "m", "other/c", SHOWN)

    def test_three_mounts_in_a_circle(self, places: Path) -> None:
        self.add(f"file://{places}/other", places / "src/sub")
        self.add(f"file://{places}/c", places / "other/x")
        refused(places, "src", "c/m", "elsewhere", ENDLESS)

    def test_a_source_in_a_mount(self, places: Path) -> None:
        self.add(f"file://{places}/src", places / "other")
        refused(places, "other/sub", "src/sub/deep", "c", ENDLESS)
        refused(places, "other", "m", "src/c", SHOWN)
        refuse_overlaps(f"file://{places}/other", places / "m", [places / "c"])

    def test_the_mount_of_an_earlier_daemon(self, places: Path) -> None:
        self.add(f"file://{places}/src", places / "m")
        refuse_overlaps(f"file://{places}/src", places / "m", [places / "c"])


def test_places_that_do_not_answer_are_not_compared(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence = threading.Event()

    def hang() -> list[MountEntry]:
        silence.wait()
        return []

    monkeypatch.setattr(overlap, "_TIMEOUT_S", 0.01)
    monkeypatch.setattr(overlap, "all_mounts", hang)
    refuse_overlaps(f"file://{places}/m", places / "m", [places / "c"])
    silence.set()
