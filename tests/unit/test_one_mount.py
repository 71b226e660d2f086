"""Which mount a command is about."""

from pathlib import Path

import pytest

from cachefs.cli.mounts import one_mount
from cachefs.cli.mounts.one_mount import the_mount
from cachefs.errors import MountError, UsageError
from cachefs.mounts import RuntimeEntry, inside


def let_there_be(monkeypatch: pytest.MonkeyPatch, **mounts: bool) -> None:
    """By name, and whether its daemon lives."""
    entries = [
        RuntimeEntry(f"/mnt/{name}", "s3://bucket", 1, 1.0, alive=alive)
        for name, alive in mounts.items()
    ]
    monkeypatch.setattr(one_mount, "read_entries", lambda: entries)


def test_the_only_one_need_not_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    let_there_be(monkeypatch, a=True, b=False)
    assert the_mount(None) == the_mount("/mnt/a") == the_mount("/mnt/../mnt/a/") == Path("/mnt/a")
    for name in ("/mnt/b", "/mnt", "/mnt/a/file"):
        with pytest.raises(MountError, match=f"{name} is not mounted by cachefs"):
            the_mount(name)
    with pytest.raises(UsageError, match="is empty"):
        the_mount("")


def test_one_of_several_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    let_there_be(monkeypatch, a=True, b=True)
    with pytest.raises(UsageError, match="several mounts: /mnt/a, /mnt/b; name one"):
        the_mount(None)
    assert the_mount("/mnt/b") == Path("/mnt/b")


def test_nothing_is_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    let_there_be(monkeypatch, a=False)
    monkeypatch.setattr(inside, "cachefs_mounts", list)
    with pytest.raises(MountError, match="nothing is mounted"):
        the_mount(None)
