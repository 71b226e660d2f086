"""`cachefs upgrade --all`, in namespaces in which a test's mounts are all there are."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.mount.harness import Site, eventually
from tests.mount.namespaces import CACHEFS, MountNamespace

PLACES = ("one", "two")


@pytest.fixture
def alone(site: Site) -> Iterator[MountNamespace]:
    """A mount namespace that has no other mounts, and no runtime files of others."""
    namespace = MountNamespace("private")
    try:
        Path("/run/cachefs").mkdir(mode=0o700, exist_ok=True)
        namespace.run("mount", "-t", "tmpfs", "-o", "mode=700", "tmpfs", "/run/cachefs")
        with ExitStack() as stack:
            for name in PLACES:
                place, cache = site.files.parent / name, site.files.parent / f"cache-{name}"
                place.mkdir()
                stack.callback(namespace.run, CACHEFS, "umount", place)
                options = ("--cache-dir", cache, "--cache-size", "64MiB", "--free-space-ratio", "0")
                log = ("--log-file", site.files.parent / f"{name}.log")
                namespace.run(CACHEFS, "mount", site.source, place, *options, *log)
            yield namespace
    finally:
        namespace.close()


def status(namespace: MountNamespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(namespace.run(CACHEFS, "status", "--json"))
    return rows


@pytest.mark.root
def test_all_mounts_get_another_daemon(alone: MountNamespace) -> None:
    before = status(alone)
    assert len(before) == len(PLACES)
    said = alone.run(CACHEFS, "upgrade", "--all")
    assert said.count("serves instead of") == len(PLACES)
    after = status(alone)
    eventually(lambda: all(row["state"] == "serving" for row in status(alone)))
    assert {row["pid"] for row in before} & {row["pid"] for row in after} == set()
    assert [row["supervisor_pid"] for row in before] == [row["supervisor_pid"] for row in after]
