"""What commands say of a mount in a container that has only a part of it: the control sockets but
not the mount, or the mount but not the control sockets."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.mount.harness import Site
from tests.mount.namespaces import CACHEFS, MountNamespace

pytestmark = pytest.mark.root


@pytest.fixture
def stack(site: Site) -> Iterator[ExitStack]:
    (site.files / "file").write_text("content")
    with ExitStack() as stack:
        yield stack


def container(stack: ExitStack, propagation: str) -> MountNamespace:
    made = MountNamespace(propagation, own_pids=True)
    stack.callback(made.close)
    return made


def row_of(site: Site, seen_from: MountNamespace, *within: str) -> dict[str, Any]:
    rows = json.loads(seen_from.run(*within, CACHEFS, "status", "--json"))
    (row,) = (row for row in rows if row["mountpoint"] == str(site.mountpoint))
    assert isinstance(row, dict)
    return row


def test_with_the_sockets_alone_it_is_serving(site: Site, stack: ExitStack) -> None:
    """As where cachefs node-report runs: /run/cachefs, no mount, other process ids."""
    site.mount()
    pod = container(stack, "private")
    assert not pod.run("sh", "-c", f"grep {site.mountpoint} /proc/self/mountinfo || true")
    row = row_of(site, pod)
    assert row["state"] == "serving"
    assert row["reads"] == site.status()["reads"]
    pod.run(CACHEFS, "status", site.mountpoint)


def test_a_command_does_not_mistake_the_process_ids_of_another_container(
    site: Site, stack: ExitStack
) -> None:
    site.mount()
    pod = container(stack, "private")
    for words in (["umount"], ["umount", "--force"], ["umount", "--lazy"]):
        said = pod.run(CACHEFS, *words, site.mountpoint, code=1)
        assert "is not mounted here, and is served by a process in another container" in said
    if site.status()["data_path"]["name"] == "relay":
        said = pod.run(CACHEFS, "upgrade", site.mountpoint, code=1)
        assert "is served by a process in another container; upgrade it there" in said
    said = pod.run(CACHEFS, "mount", site.source, site.mountpoint, code=1)
    assert "is already served by a cachefs daemon (a process in another container" in said
    assert (site.mountpoint / "file").read_text() == "content"


def test_an_umount_in_one_container_leaves_the_mount_of_others(
    site: Site, stack: ExitStack
) -> None:
    site.mount()
    pod = container(stack, "slave")
    assert "is unmounted here; a process in another container" in pod.run(
        CACHEFS, "umount", site.mountpoint
    )
    assert (site.mountpoint / "file").read_text() == "content"


def test_with_the_mount_alone_nobody_claims_to_know_its_user(site: Site, stack: ExitStack) -> None:
    """As in a pod that reads: the mount, and no /run/cachefs."""
    site.mount()
    pod = container(stack, "slave")
    pod.run("mount", "-t", "tmpfs", "tmpfs", "/run/cachefs")
    users = ("unshare", "--user", "--map-root-user")
    for within in ((), users):
        row = row_of(site, pod, *within)
        assert row["state"] == "not known here"
        assert "it runs in another container" in row["problem"]
    assert "in another container" in pod.run(CACHEFS, "upgrade", "--all")
    said = pod.run(CACHEFS, "stats", site.mountpoint, "-n", "1", code=1)
    assert "it runs in another container" in said
    powerless = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    for within in (powerless, users):
        said = pod.run(*within, CACHEFS, "umount", site.mountpoint, code=1)
        assert "the root of this container has no right to" in said
    assert (site.mountpoint / "file").read_text() == "content"
