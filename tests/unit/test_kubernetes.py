"""docs/kubernetes and deploy/csi: right by Kubernetes' schemas, and by what cachefs understands."""

import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cachefs.cli.csi import command as csi_command
from cachefs.cli.csi import parse_endpoint
from cachefs.config import MountConfig, load_mount_config, split_address
from cachefs.csi import identity as csi_identity
from cachefs.csi.volumes import parse_volume
from tests.unit.manifests import command_line, our_commands, parsed

DOCS = Path(__file__).parents[2] / "docs"
DEPLOY = DOCS.parent / "deploy"
CSI = DEPLOY / "csi"
FILES = sorted(
    [
        *(DOCS / "kubernetes").glob("*.yaml"),
        *(DEPLOY / "kubernetes").glob("*.yaml"),
        *CSI.glob("*.yaml"),
    ]
)


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DOCS / "kubernetes" / name).read_text()))


def daemon_pod() -> dict[str, Any]:
    spec: dict[str, Any] = objects("daemonset.yaml")[0]["spec"]["template"]["spec"]
    return spec


def daemon() -> dict[str, Any]:
    container: dict[str, Any] = daemon_pod()["containers"][0]
    return container


def host_path(pod: dict[str, Any], volume: str) -> str:
    path: str = next(v for v in pod["volumes"] if v["name"] == volume)["hostPath"]["path"]
    return path


@pytest.fixture
def instance(tmp_path: Path) -> MountConfig:
    file = tmp_path / "data.toml"
    config_map = next(o for o in objects("config.yaml") if o["kind"] == "ConfigMap")
    file.write_text(config_map["data"]["data.toml"])
    assert tomllib.loads(file.read_text())["mountpoint"]
    return load_mount_config(None, None, {}, file)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_the_schemas_have_nothing_against_it(file: Path, version: str) -> None:
    resources = list(yaml.safe_load_all(file.read_text()))
    assert resources
    for resource in resources:
        kubernetes_validate.validate(resource, version, strict=True)


def test_the_validator_would_notice() -> None:
    resource = objects("daemonset.yaml")[0]
    resource["spec"]["template"]["spec"]["hostnetwork"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(resource, "1.37", strict=True)


def test_the_daemon_mounts_below_what_it_shares_with_the_host(instance: MountConfig) -> None:
    shared = next(m for m in daemon()["volumeMounts"] if m["name"] == "mounts")
    assert shared["mountPropagation"] == "Bidirectional"
    assert daemon()["securityContext"]["privileged"] is True
    assert shared["mountPath"] == host_path(daemon_pod(), "mounts")
    assert instance.mountpoint.parent == Path(shared["mountPath"])


def test_a_pod_gets_the_parent_of_the_mountpoint(instance: MountConfig) -> None:
    pod = objects("pod.yaml")[0]["spec"]
    assert host_path(pod, "cachefs") == str(instance.mountpoint.parent)
    for container in (*pod["initContainers"], *pod["containers"]):
        for volume in container["volumeMounts"]:
            assert volume["mountPropagation"] == "HostToContainer"


def test_files_and_directories_of_the_instance_are_volumes(instance: MountConfig) -> None:
    places = {mount["mountPath"] for mount in daemon()["volumeMounts"]}
    assert str(instance.credentials_dir) in places
    assert str(instance.cache_dirs[0].parent) in places
    secret = next(o for o in objects("config.yaml") if o["kind"] == "Secret")
    assert set(secret["stringData"]) == {"access_key_id", "secret_access_key"}


def test_the_commands_are_those_of_the_instance(instance: MountConfig) -> None:
    (start,) = our_commands(command_line(daemon()))
    assert parsed(start).params["config_file"] == "/etc/cachefs/data.toml"
    assert f"mkdir -p {instance.mountpoint} " in daemon()["command"][2]
    (keeper,) = objects("keeper.yaml")[0]["spec"]["template"]["spec"]["containers"]
    (keep,) = our_commands(command_line(keeper))
    assert str(instance.keeper) in map(str, parsed(keep).params.values())


def test_keeper_and_daemon_share_what_they_need(instance: MountConfig) -> None:
    pod = objects("keeper.yaml")[0]["spec"]["template"]["spec"]
    assert instance.keeper is not None
    for name, place in (("mounts", instance.mountpoint.parent), ("run", instance.keeper.parent)):
        for each in (pod, daemon_pod()):
            (volume,) = (v for v in each["containers"][0]["volumeMounts"] if v["name"] == name)
            assert volume["mountPath"] == host_path(each, name) == str(place)
    assert "lifecycle" not in daemon()  # an unmount before the end would leave nothing to keep


def test_the_probes_ask_where_the_daemon_answers(instance: MountConfig) -> None:
    """And nobody else: an address that is set is never replaced by a free one."""
    assert "metrics" in instance.given
    host, port = split_address(instance.metrics)
    assert daemon_pod()["hostNetwork"] is True
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert daemon()[probe]["httpGet"]["host"] == host
        assert daemon()[probe]["httpGet"]["port"] == port
    assert daemon()["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert daemon()["readinessProbe"]["httpGet"]["path"] == "/readyz"


def csi_objects(name: str, kind: str) -> list[dict[str, Any]]:
    found = yaml.safe_load_all((CSI / name).read_text())
    return [each for each in found if each["kind"] == kind]


def test_the_csi_plugin_is_started_as_it_can_be() -> None:
    (daemon_set,) = csi_objects("plugin.yaml", "DaemonSet")
    (deployment,) = csi_objects("provisioner.yaml", "Deployment")
    for workload in (daemon_set, deployment):
        containers = workload["spec"]["template"]["spec"]["containers"]
        (plugin,) = (each for each in containers if each["name"] == "cachefs-csi")
        context = parsed(command_line(plugin))
        assert context.command is csi_command
        socket = parse_endpoint(context.params["endpoint"])
        places = {volume["mountPath"] for volume in plugin["volumeMounts"]}
        assert {str(socket.parent), str(context.params["mounts"])} <= places
        for sidecar in containers:
            addresses = [each for each in sidecar["args"] if each.startswith("--csi-address=")]
            assert addresses in ([], [f"--csi-address={socket}"])


def test_the_csi_plugin_sees_mounts_and_shows_volumes(instance: MountConfig) -> None:
    (daemon_set,) = csi_objects("plugin.yaml", "DaemonSet")
    pod = daemon_set["spec"]["template"]["spec"]
    plugin = pod["containers"][0]
    assert plugin["securityContext"]["privileged"] is True
    volumes = {volume["name"]: volume for volume in plugin["volumeMounts"]}
    assert volumes["pods"]["mountPropagation"] == "Bidirectional"
    assert volumes["mounts"]["mountPropagation"] == "HostToContainer"
    assert host_path(pod, "mounts") == str(instance.mountpoint.parent)
    for name in ("pods", "mounts"):  # the kubelet names paths of the host
        assert host_path(pod, name) == volumes[name]["mountPath"]
    assert f"--node-id=$({plugin['env'][0]['name']})" in plugin["args"]
    assert plugin["env"][0]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


def test_the_csi_driver_is_registered_where_its_socket_is() -> None:
    (driver,) = csi_objects("plugin.yaml", "CSIDriver")
    assert driver["metadata"]["name"] == csi_identity.NAME
    assert driver["spec"]["requiresRepublish"] is True
    assert driver["spec"]["attachRequired"] is False
    (daemon_set,) = csi_objects("plugin.yaml", "DaemonSet")
    pod = daemon_set["spec"]["template"]["spec"]
    registrar, probe = pod["containers"][1:]
    path = f"{host_path(pod, 'socket')}/csi.sock"
    assert f"--kubelet-registration-path={path}" in registrar["args"]
    assert path == f"/var/lib/kubelet/plugins/{csi_identity.NAME}/csi.sock"
    port = pod["containers"][0]["ports"][0]["containerPort"]
    assert f"--health-port={port}" in probe["args"]


def test_csi_volumes_are_those_of_the_instance(instance: MountConfig) -> None:
    (volume,) = csi_objects("volume.yaml", "PersistentVolume")
    _, inline = csi_objects("volume.yaml", "Pod")
    (storage_class,) = csi_objects("provisioner.yaml", "StorageClass")
    csi, pod_csi = volume["spec"]["csi"], inline["spec"]["volumes"][0]["csi"]
    assert {csi["driver"], pod_csi["driver"], storage_class["provisioner"]} == {csi_identity.NAME}
    named = [
        parse_volume(csi["volumeHandle"], {}),
        parse_volume("csi-0", pod_csi["volumeAttributes"]),
        parse_volume("", storage_class["parameters"]),
    ]
    assert named[0] == named[1]
    assert {each.mount for each in named} == {instance.mountpoint.name}


def test_claims_pods_and_volumes_fit_each_other() -> None:
    (volume,) = csi_objects("volume.yaml", "PersistentVolume")
    (claim,) = csi_objects("volume.yaml", "PersistentVolumeClaim")
    pods = csi_objects("volume.yaml", "Pod")
    (storage_class,) = csi_objects("provisioner.yaml", "StorageClass")
    (other,) = csi_objects("provisioner.yaml", "PersistentVolumeClaim")
    name = claim["metadata"]["name"]
    assert volume["spec"]["claimRef"] == {"namespace": "default", "name": name}
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert claim["spec"]["storageClassName"] == volume["spec"]["storageClassName"] == ""
    assert pods[0]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == name
    assert other["spec"]["storageClassName"] == storage_class["metadata"]["name"]
    for pod in pods:
        for container in pod["spec"]["containers"]:
            assert container["volumeMounts"][0]["mountPropagation"] == "HostToContainer"
