"""The CSI node plugin: real mounts in directories that a kubelet could have made for pods."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest

from cachefs.csi.spec import csi_pb2 as csi
from cachefs.mounts import find_entry
from tests.mount.csi_plugin import READER, WRITER, Plugin, capability, running
from tests.mount.harness import DATA_PATH, Site, crash, eventually, is_running, standing_still
from tests.mount.namespaces import CACHEFS, MountNamespace

pytestmark = pytest.mark.root

LEFT = "which a dead cachefs had left"


def moved(site: Site, name: str = "data") -> Site:
    """The mountpoint becomes one in the directory of mounts."""
    site.mountpoint = site.files.parent / "mounts" / name
    site.mountpoint.mkdir(parents=True)
    (site.files / "train").mkdir()
    (site.files / "file").write_text("content")
    (site.files / "train/file").write_text("of train")
    return site


@pytest.fixture
def node(site: Site) -> Site:
    return moved(site)


@pytest.fixture
def plugin(node: Site, tmp_path: Path) -> Iterator[Plugin]:
    with running(Plugin(tmp_path, node.mountpoint.parent, "--timeout", "60s")) as plugin:
        yield plugin


def test_two_pods_share_a_mount(node: Site, plugin: Plugin) -> None:
    node.mount("--rw")
    first = plugin.publish("first")
    second = plugin.publish("second", "data/train//second", READER)
    assert (first / "file").read_text() == "content"
    assert [path.name for path in second.iterdir()] == ["file"]
    (first / "train/new").write_text("new")
    assert (second / "new").read_text() == "new"
    with pytest.raises(OSError, match="Read-only"):
        (second / "other").write_text("")
    for _ in range(2):  # as the kubelet does from time to time
        plugin.publish("first")
        plugin.publish("second", "data/train//second", READER)
    assert len(plugin.mounted()) == 2
    code, text = plugin.refused("NodePublishVolume", **plugin.volume("first", readonly=True))
    assert code == "ALREADY_EXISTS"
    assert "writable" in text
    plugin.unpublish("first")
    plugin.unpublish("first")
    assert (second / "file").read_text() == "of train"
    plugin.unpublish("second")
    assert (node.mountpoint / "file").read_text() == "content"
    assert plugin.mounted() == []


def test_bind_mounts_have_the_options_that_are_asked_for(node: Site, plugin: Plugin) -> None:
    node.mount("--rw", "--file-mode", "0755")
    (node.files / "program").write_text("#!/bin/sh\n")
    plugin.publish("pod")
    strict = plugin.publish("strict", volume_capability=capability(WRITER, "ro", "noexec"))
    assert subprocess.run([plugin.pods / "pod/program"], check=False).returncode == 0
    with pytest.raises(PermissionError):
        subprocess.run([strict / "program"], check=False)
    with pytest.raises(OSError, match="Read-only"):
        (strict / "new").write_text("")


def test_a_read_only_mount_is_read_only_in_pods(node: Site, plugin: Plugin) -> None:
    node.mount()
    for _ in range(2):
        pod = plugin.publish("pod")
    with pytest.raises(OSError, match="Read-only"):
        (pod / "new").write_text("")


def test_volumes_of_claims_and_inline_volumes(node: Site, plugin: Plugin) -> None:
    node.mount()
    created = plugin.call(
        "CreateVolume",
        name="pvc-1",
        volume_capabilities=[capability()],
        parameters={"mount": "data", "directory": "train", "csi.storage.k8s.io/pvc/name": "x"},
    )
    assert created.volume.volume_id == "data/train//pvc-1"
    claim = plugin.publish("claim", created.volume.volume_id)
    attributes = {"mount": "data", "directory": "train", "csi.storage.k8s.io/ephemeral": "true"}
    inline = plugin.publish("inline", "csi-0123", volume_context=attributes)
    assert (claim / "file").read_text() == (inline / "file").read_text() == "of train"
    plugin.call("DeleteVolume", volume_id=created.volume.volume_id)
    assert (claim / "file").read_text() == "of train"


def test_what_is_not_there(node: Site, plugin: Plugin) -> None:
    code, text = plugin.refused("NodePublishVolume", **plugin.volume("pod"))
    assert (code, "is not mounted now" in text) == ("UNAVAILABLE", True)
    code, text = plugin.refused("NodePublishVolume", **plugin.volume("pod", "other"))
    assert (code, "there is no mount 'other'" in text) == ("NOT_FOUND", True)
    node.mount()
    code, text = plugin.refused("NodePublishVolume", **plugin.volume("pod", "data/absent"))
    assert (code, "'absent' is no directory" in text) == ("NOT_FOUND", True)
    assert plugin.refused("NodePublishVolume", **plugin.volume("pod", "data/file"))[0] == code
    code, _ = plugin.refused("NodePublishVolume", **plugin.volume("absent/pod"))
    assert code == "FAILED_PRECONDITION"
    place = str(plugin.pods)
    code, _ = plugin.refused("NodeGetVolumeStats", volume_id="data", volume_path=place)
    assert code == "NOT_FOUND"
    plugin.unpublish("pod")
    assert os.listdir(plugin.pods) == []


def test_no_path_leads_out(node: Site, plugin: Plugin, tmp_path: Path) -> None:
    node.mount()
    (node.mountpoint.parent / "link").symlink_to("/etc")
    (plugin.pods / "link").symlink_to(tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    for handle in ("..", "data/..", "data/../..", "data/train/../..", "/etc", "data//../x/..", ""):
        if handle != "data//../x/..":  # what follows "//" means nothing
            code, _ = plugin.refused("NodePublishVolume", **plugin.volume("pod", handle))
            assert code == "INVALID_ARGUMENT", handle
    for attributes in (
        {"mount": "../outside"},
        {"mount": "data", "directory": "../../outside"},
        {"mount": "data", "directory": "/etc"},
        {"mount": "data", "directori": "train"},
        {"directory": "train"},
    ):
        volume = plugin.volume("pod", volume_context=attributes)
        assert plugin.refused("NodePublishVolume", **volume)[0] == "INVALID_ARGUMENT", attributes
    code, _ = plugin.refused("NodePublishVolume", **plugin.volume("pod", "link"))
    assert code == "UNAVAILABLE"  # it is no mount
    mounts = node.mountpoint.parent
    for target in (
        "relative",
        f"{plugin.pods}/../outside",
        f"{mounts}/data",
        f"{mounts}/data/train",
        f"{mounts}/new",
        "/",
        str(tmp_path),
        f"{plugin.pods}/link",
        f"{plugin.pods}/link/mounts/data",
    ):
        volume = plugin.volume("pod", target_path=target)
        assert plugin.refused("NodePublishVolume", **volume)[0] == "INVALID_ARGUMENT", target
    assert plugin.mounted() == []
    assert (node.mountpoint / "file").read_text() == "content"


def test_a_mount_that_is_not_ours_is_left_alone(node: Site, plugin: Plugin) -> None:
    node.mount()
    place = plugin.pods / "pod"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
    try:
        assert plugin.refused("NodePublishVolume", **plugin.volume("pod"))[0] == "INTERNAL"
        call = {"volume_id": "data", "target_path": str(place)}
        assert plugin.refused("NodeUnpublishVolume", **call)[0] == "INTERNAL"
        assert len(plugin.mounted()) == 1
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_dead_mount_is_healed_in_pods_that_run(tmp_path: Path, site: Site) -> None:
    """All are in containers with the propagation of deploy/csi. The pod's container has
    nothing but its own volume."""
    node = moved(site)
    node.expected_trouble += (LEFT,)
    pods = tmp_path / "pods"
    pods.mkdir()
    with ExitStack() as stack:
        host = MountNamespace("private")
        stack.callback(host.close)
        mounts = node.mountpoint.parent
        for place in (pods, mounts):
            host.run("mount", "--bind", place, place)
            host.run("mount", "--make-rshared", place)
        inside = MountNamespace("unchanged", host)
        stack.callback(inside.close)
        inside.run("mount", "--make-rslave", mounts)

        def mount() -> None:
            command = (CACHEFS, "mount", node.source, node.mountpoint, "--cache-dir", node.cache)
            options = ("--cache-size", "64MiB", "--free-space-ratio", "0", "--log-file", node.log)
            host.run(*command, *options, "--data-path", DATA_PATH)

        def kill() -> None:
            entry = find_entry(node.mountpoint)
            if entry is not None and entry.alive:
                crash(entry.pid)
                eventually(lambda: not getattr(find_entry(node.mountpoint), "alive", False))

        mount()
        stack.callback(kill)
        plugin = Plugin(tmp_path, node.mountpoint.parent, "--timeout", "60s", enter=inside.enter())
        stack.callback(plugin.tear_down)
        for pod in ("first", "second"):
            plugin.publish(pod, readonly=pod == "second")
        container = MountNamespace("slave", host)
        stack.callback(container.close)
        volume = tmp_path / "volume"  # a container has the volume at a place of its own
        volume.mkdir()
        container.run("mount", "--bind", pods / "first", volume)
        assert container.run("cat", volume / "file") == "content"

        kill()
        for pod in ("first", "new"):
            code, text = plugin.refused("NodePublishVolume", **plugin.volume(pod))
            assert code == "UNAVAILABLE"
            assert "its daemon has ended; look at" in text
        assert not (pods / "new").exists()
        assert plugin.condition("first").abnormal
        assert "its daemon has ended" in plugin.condition("first").message

        mount()
        plugin.publish("first")
        assert not plugin.condition("first").abnormal
        assert plugin.condition("second").abnormal  # one pod's mount does not spread to others
        plugin.publish("second", readonly=True)
        assert not plugin.condition("second").abnormal
        assert container.run("cat", volume / "file") == "content"
        said = container.run("touch", volume / "new", code=1)
        assert "Read-only" in said
        for pod in ("first", "second"):
            plugin.unpublish(pod)
        assert str(pods) + "/" not in host.run("cat", "/proc/self/mountinfo")


def test_a_daemons_container_is_replaced(node: Site, plugin: Plugin) -> None:
    """With the steps of docs/kubernetes/daemonset.yaml: preStop, SIGTERM, another container."""
    node.mount()
    pid = node.pid()
    pod = plugin.publish("pod", "data/train")
    with (pod / "file").open() as file:
        node.cli("umount", "--lazy", node.mountpoint)
        assert file.read() == "of train"  # until the daemon ends
    code, text = plugin.refused("NodePublishVolume", **plugin.volume("pod", "data/train"))
    assert (code, "is not mounted now" in text) == ("UNAVAILABLE", True)
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: not is_running(pid))
    assert plugin.condition("pod").abnormal
    node.mount()
    plugin.publish("pod", "data/train")
    assert (pod / "file").read_text() == "of train"
    assert not plugin.condition("pod").abnormal
    plugin.unpublish("pod")
    assert plugin.mounted() == []


def test_a_directory_that_was_made_anew_is_shown(node: Site, plugin: Plugin) -> None:
    node.mount(
        *(
            word
            for name in ("attr", "entry", "list", "negative")
            for word in (f"--{name}-ttl", "0s")
        )
    )
    pod = plugin.publish("pod", "data/train")
    shutil.rmtree(node.files / "train")
    eventually(lambda: not (node.mountpoint / "train").exists())
    code, _ = plugin.refused("NodePublishVolume", **plugin.volume("pod", "data/train"))
    assert code == "UNAVAILABLE", "NOT_FOUND would let the kubelet take the volume away"
    (node.files / "train").mkdir()
    (node.files / "train/new").write_text("new")
    eventually((node.mountpoint / "train/new").exists)
    plugin.publish("pod", "data/train")
    eventually((pod / "new").exists)
    plugin.unpublish("pod")
    assert plugin.mounted() == []


def test_a_hanging_mount_stops_nothing_else(node: Site, tmp_path: Path) -> None:
    node.let_daemons_stand_still()
    node.mount()
    root = tmp_path / "second"
    root.mkdir()
    other = Site(root)
    other.mountpoint = node.mountpoint.parent / "other"
    other.mountpoint.mkdir()
    (other.files / "file").write_text("other")
    with ExitStack() as stack:
        stack.callback(other.tear_down)
        other.mount()
        plugin = stack.enter_context(
            running(Plugin(tmp_path, node.mountpoint.parent, "--timeout", "5s"))
        )
        plugin.publish("before")
        with standing_still(node.pid()):
            code, text = plugin.refused("NodePublishVolume", **plugin.volume("pod"))
            assert (code, "hangs: no answer within 5 s" in text) == ("UNAVAILABLE", True)
            began = time.monotonic()
            assert plugin.refused("NodePublishVolume", **plugin.volume("pod"))[0] == code
            assert plugin.condition("before").abnormal
            assert time.monotonic() - began < 4, "known to hang, so it waits no more"
            pod = plugin.publish("other", "other")
            assert (pod / "file").read_text() == "other"
            assert plugin.call("Probe").ready.value
            plugin.unpublish("before")
        eventually(lambda: not _refuses(plugin, "pod"))
        assert (plugin.pods / "pod/file").read_text() == "content"


def _refuses(plugin: Plugin, pod: str) -> bool:
    with suppress(grpc.RpcError):
        plugin.publish(pod)
        return False
    return True


def test_unpublish_while_the_volume_is_in_use(node: Site, plugin: Plugin) -> None:
    node.mount()
    pod = plugin.publish("pod")
    with (pod / "file").open() as file:
        plugin.unpublish("pod")
        assert file.read() == "content"
    assert plugin.mounted() == []
    assert (node.mountpoint / "file").read_text() == "content"


def test_the_plugin_is_replaced(node: Site, plugin: Plugin) -> None:
    node.mount()
    pod = plugin.publish("pod")
    plugin.kill()
    assert (pod / "file").read_text() == "content"
    plugin.start()
    plugin.publish("pod")
    assert len(plugin.mounted()) == 1
    assert plugin.stop() == 0
    plugin.start()
    plugin.unpublish("pod")
    assert plugin.mounted() == []


def test_calls_for_one_target_at_the_same_time(node: Site, plugin: Plugin) -> None:
    node.mount()

    def publish(_: int) -> str:
        try:
            plugin.publish("pod")
        except grpc.RpcError as error:
            return error.code().name
        return "OK"

    with ThreadPoolExecutor(8) as pool:
        results = set(pool.map(publish, range(32)))
    assert "OK" in results
    assert results <= {"OK", "ABORTED"}
    assert len(plugin.mounted()) == 1


def test_stats_are_those_of_the_mount(node: Site, plugin: Plugin) -> None:
    node.mount()
    pod = plugin.publish("pod")
    answer = plugin.call("NodeGetVolumeStats", volume_id="data", volume_path=str(pod))
    usage = {each.unit: each for each in answer.usage}
    expected = os.statvfs(node.mountpoint)
    unit = csi.VolumeUsage
    assert usage[unit.BYTES].total == expected.f_blocks * expected.f_frsize
    assert usage[unit.INODES].total == expected.f_files
    assert not answer.volume_condition.abnormal


def test_requests_without_what_they_need(node: Site, plugin: Plugin) -> None:
    node.mount()
    whole = plugin.volume("pod")
    for field in ("volume_id", "target_path", "volume_capability"):
        request = {name: value for name, value in whole.items() if name != field}
        code, text = plugin.refused("NodePublishVolume", **request)
        assert (code, text) == ("INVALID_ARGUMENT", f"the request has no {field}")
    for wanted in (
        csi.VolumeCapability(),
        csi.VolumeCapability(block=csi.VolumeCapability.BlockVolume()),
        capability(csi.VolumeCapability.AccessMode.UNKNOWN),
        capability(READER, "bind"),
    ):
        request = whole | {"volume_capability": wanted}
        assert plugin.refused("NodePublishVolume", **request)[0] == "INVALID_ARGUMENT"
    assert plugin.refused("NodeUnpublishVolume", volume_id="x")[0] == "INVALID_ARGUMENT"
    assert plugin.refused("NodeGetVolumeStats", volume_id="x")[0] == "INVALID_ARGUMENT"
    assert plugin.call("NodeGetInfo").node_id == "n"
    assert plugin.mounted() == []
