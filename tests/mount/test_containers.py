"""Mounts shared into containers, as mount namespaces."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.mount.harness import DATA_PATH, Site, crash, eventually
from tests.mount.namespaces import CACHEFS, MountNamespace


class Host:
    """A host of its own: a directory that is shared recursively, in which to mount."""

    def __init__(self, site: Site, stack: ExitStack) -> None:
        self._stack = stack
        self.site = site
        self.shared = site.mountpoint
        self.mountpoint = site.mountpoint / "data"
        self.namespace = self._enter(MountNamespace("private"))
        self.namespace.run("mount", "--bind", self.shared, self.shared)
        self.namespace.run("mount", "--make-rshared", self.shared)
        self.mountpoint.mkdir()
        (site.files / "file").write_text("content")

    def _enter(self, namespace: MountNamespace) -> MountNamespace:
        self._stack.callback(namespace.close)
        return namespace

    def container(self, propagation: str) -> MountNamespace:
        return self._enter(MountNamespace(propagation, self.namespace))

    def mount(self, where: MountNamespace) -> None:
        site = self.site
        options = ("--cache-dir", site.cache, "--cache-size", "64MiB", "--free-space-ratio", "0")
        command = (CACHEFS, "mount", site.source, self.mountpoint, *options)
        where.run(*command, "--log-file", site.log, "--data-path", DATA_PATH)
        self._stack.callback(self.kill)

    def kill(self) -> None:
        """The end of all processes of the mount, if there still are any."""
        from cachefs.mounts import find_entry

        entry = find_entry(self.mountpoint)
        if entry is not None and entry.alive:
            crash(entry.pid)
            eventually(lambda: not getattr(find_entry(self.mountpoint), "alive", False))

    def content(self, seen_from: MountNamespace) -> str:
        return seen_from.run("cat", self.mountpoint / "file")


@pytest.fixture
def host(site: Site) -> Iterator[Host]:
    site.expected_trouble += ("which a dead cachefs had left",)
    with ExitStack() as stack:
        yield Host(site, stack)


def test_a_running_container_sees_mounts_restarts_and_unmounts(host: Host) -> None:
    container = host.container("slave")
    host.mount(host.namespace)
    assert host.content(container) == "content"
    host.kill()
    said = container.run("stat", "-f", host.mountpoint, code=1)
    assert "not connected" in said or "connection abort" in said  # of a request under way
    host.mount(host.namespace)
    assert host.content(container) == "content"
    host.namespace.run(CACHEFS, "umount", host.mountpoint)
    assert "No such file" in container.run("cat", host.mountpoint / "file", code=1)


def test_a_daemon_in_a_container_mounts_for_the_host_and_other_containers(host: Host) -> None:
    daemons, pod = host.container("unchanged"), host.container("slave")
    host.mount(daemons)
    assert host.content(host.namespace) == host.content(pod) == "content"
    host.kill()
    replacement = host.container("unchanged")
    host.mount(replacement)
    assert host.content(host.namespace) == host.content(pod) == "content"
    replacement.run(CACHEFS, "umount", host.mountpoint)
    eventually(lambda: not _is_mounted(host.namespace, host.mountpoint))


def test_a_private_container_keeps_what_it_saw_first(host: Host) -> None:
    """Why docs/KUBERNETES.md asks for HostToContainer."""
    host.mount(host.namespace)
    container = host.container("private")
    assert host.content(container) == "content"
    host.kill()
    host.mount(host.namespace)
    said = container.run("stat", "-f", host.mountpoint, code=1)
    assert "not connected" in said or "connection abort" in said  # of a request under way


def _is_mounted(namespace: MountNamespace, place: Path) -> bool:
    return f" {place} " in namespace.run("cat", "/proc/self/mountinfo")


def test_commands_know_bind_mounts_of_a_mount(host: Host) -> None:
    """That is what containers have: the mount itself, or a directory of it, at another place, and
    perhaps nothing where the daemon mounted it."""
    root = host.site.mountpoint.parent
    whole, part = root / "whole", root / "part"
    (host.site.files / "train").mkdir()
    (host.site.files / "train/a").write_bytes(b"x" * 1000)
    host.mount(host.namespace)
    container = host.container("private")
    for place, what in ((whole, host.mountpoint), (part, host.mountpoint / "train")):
        place.mkdir()
        container.run("mount", "--bind", what, place)
    container.run("umount", host.mountpoint)

    def ask(*words: object) -> dict[str, Any]:
        answer = json.loads(container.run(CACHEFS, *words, "--json"))
        found: dict[str, Any] = answer[0] if isinstance(answer, list) else answer
        return found

    assert ask("load", part)["progress"]["fetched_files"] == 1
    assert ask("info", part / "a")["source"] == f"{host.site.source}/train/a"
    assert ask("du", "-s", part)["cached_bytes"] == 1000
    assert ask("du", "-s", whole / "train")["cached_bytes"] == 1000
    assert ask("info", "a", "--mount", part)["size_bytes"] == 1000
    for place in (whole, part):
        status = ask("status", place)
        assert (status["state"], status["mountpoint"]) == ("serving", str(host.mountpoint))
    rows = json.loads(container.run(CACHEFS, "status", "--json"))
    assert [row["mountpoint"] for row in rows].count(str(host.mountpoint)) == 1
    assert not {str(whole), str(part)} & {row["mountpoint"] for row in rows}
    assert ask("stats", whole, "-n", "1", "-i", "0.2")
    container.run(CACHEFS, "set", part, "max-downloads=7")
    assert ask("status", whole)["limits"]["max_downloads"] == 7
    container.run(CACHEFS, "umount", part)
    assert host.content(host.namespace) == "content"
    assert "is not mounted" in container.run(CACHEFS, "status", part, code=1)
