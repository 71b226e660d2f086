"""docs/kubernetes: right by Kubernetes' schemas, and by what cachefs understands."""

import shlex
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cachefs.cli import main
from cachefs.config import MountConfig, load_mount_config

DOCS = Path(__file__).parents[2] / "docs"
DEPLOY = DOCS.parent / "deploy"
FILES = sorted([*(DOCS / "kubernetes").glob("*.yaml"), *(DEPLOY / "kubernetes").glob("*.yaml")])


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


def test_the_commands_are_ones_that_cachefs_has(instance: MountConfig) -> None:
    start = shlex.split(daemon()["command"][2].rpartition("exec ")[2])
    assert f"mkdir -p {instance.mountpoint} " in daemon()["command"][2]
    stop = daemon()["lifecycle"]["preStop"]["exec"]["command"]
    assert stop[-1] == str(instance.mountpoint)
    for program, verb, *args in (start, stop):
        assert program == "cachefs"
        command = main.get_command(None, verb)  # type: ignore[arg-type]
        assert command is not None
        command.make_context(verb, args)


def test_the_probes_ask_where_the_daemon_answers() -> None:
    assert daemon_pod()["hostNetwork"] is True
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert daemon()[probe]["httpGet"]["host"] == "127.0.0.1"
        assert daemon()[probe]["httpGet"]["port"] == 9567
    assert daemon()["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert daemon()["readinessProbe"]["httpGet"]["path"] == "/readyz"
