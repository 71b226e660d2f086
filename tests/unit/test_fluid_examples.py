"""deploy/fluid: right by Fluid's field names and Kubernetes' schemas, and what Fluid makes of it.

The examples were also valid by the schemas of Fluid's CRDs (charts/fluid/fluid/crds at a826600)
when they were written. Here is only which fields of it they use.
"""

import json
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cachefs.mounts import FSTYPE
from tests.unit.texts import ROOT

EXAMPLES = ROOT / "deploy/fluid"
FILES = sorted(EXAMPLES.glob("*.yaml"))
DATA = ROOT / "tests/data/fluid"
DATASETS = ("one-mount", "several-mounts", "secret")
FLUIDS_FIELDS: dict[str, set[str]] = {
    "Dataset": {
        "accessModes",
        "mounts.encryptOptions.name",
        "mounts.encryptOptions.valueFrom.secretKeyRef.key",
        "mounts.encryptOptions.valueFrom.secretKeyRef.name",
        "mounts.mountPoint",
        "mounts.name",
        "mounts.options.*",
        "mounts.path",
        "mounts.readOnly",
        "sharedEncryptOptions.name",
        "sharedEncryptOptions.valueFrom.secretKeyRef.key",
        "sharedEncryptOptions.valueFrom.secretKeyRef.name",
        "sharedOptions.*",
    },
    "ThinRuntime": {
        "fuse.env.name",
        "fuse.env.value",
        "fuse.options.*",
        "profileName",
        "tieredstore.levels.mediumtype",
        "tieredstore.levels.path",
        "tieredstore.levels.quota",
    },
    "ThinRuntimeProfile": {
        "fileSystemType",
        "fuse.command",
        "fuse.image",
        "fuse.imagePullPolicy",
        "fuse.imageTag",
        "fuse.lifecycle.preStop.exec.command",
        "fuse.options.*",
        "fuse.resources.limits.memory",
        "fuse.resources.requests.cpu",
        "fuse.resources.requests.memory",
        "fuse.volumeMounts.mountPath",
        "fuse.volumeMounts.name",
        "volumes.hostPath.path",
        "volumes.hostPath.type",
        "volumes.name",
    },
}
"""By kind, the fields of `spec` in api/v1alpha1 of Fluid that the examples use."""


def objects(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def one(name: str, kind: str) -> dict[str, Any]:
    (found,) = [o for o in objects(EXAMPLES / f"{name}.yaml") if o["kind"] == kind]
    return found


def fields(value: Any, path: str = "") -> set[str]:
    if isinstance(value, list):
        return set().union(*(fields(part, path) for part in value))
    if not isinstance(value, dict):
        return {path}
    if path.endswith(("options", "sharedOptions")):
        return {f"{path}.*"}
    return set().union(*(fields(v, f"{path}.{k}".lstrip(".")) for k, v in value.items()))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_fields_are_those_of_fluid_and_kubernetes(file: Path) -> None:
    for resource in objects(file):
        if resource["kind"] in FLUIDS_FIELDS:
            assert resource["apiVersion"] == "data.fluid.io/v1alpha1"
            assert fields(resource["spec"]) <= FLUIDS_FIELDS[resource["kind"]]
        else:
            for version in ("1.29", "1.37"):
                kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("name", DATASETS)
def test_the_outputs_of_fluid_are_of_these_examples(name: str) -> None:
    dataset, runtime = one(name, "Dataset"), one(name, "ThinRuntime")
    profile = one("profile", "ThinRuntimeProfile")
    kept = json.loads((DATA / f"{name}.json").read_text())
    config = json.loads(kept["config"])
    assert dataset["metadata"]["name"] == runtime["metadata"]["name"]
    assert runtime["spec"]["profileName"] == profile["metadata"]["name"]
    assert len(config["mounts"]) == len(dataset["spec"]["mounts"])
    for made, mount in zip(config["mounts"], dataset["spec"]["mounts"], strict=True):
        secrets = {
            option["name"]: "/etc/fluid/secrets/{name}/{key}".format(
                **option["valueFrom"]["secretKeyRef"]
            )
            for option in (
                *dataset["spec"].get("sharedEncryptOptions", ()),
                *mount.get("encryptOptions", ()),
            )
        }
        options = {**dataset["spec"].get("sharedOptions", {}), **mount["options"], **secrets}
        plain = {key: mount[key] for key in mount if key not in {"options", "encryptOptions"}}
        assert made == {**plain, "options": options}
    assert config.get("runtimeOptions", {}) == runtime["spec"]["fuse"].get("options", {})
    assert kept["command"] == profile["spec"]["fuse"]["command"]
    assert kept["cacheDir"] == kept["env"]["CACHEFS_CACHE_DIR"]


def test_the_profile_shares_the_control_sockets() -> None:
    spec = one("profile", "ThinRuntimeProfile")["spec"]
    assert spec["fileSystemType"] == FSTYPE
    places = {mount["name"]: mount["mountPath"] for mount in spec["fuse"]["volumeMounts"]}
    hosts = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"]}
    assert places == hosts == {"control": "/run/cachefs"}


def test_several_mounts_are_linked_and_not_waited_for() -> None:
    notes = one("several-mounts", "ThinRuntime")["metadata"]["annotations"]
    assert notes["fluid.io/skip-check-mount-ready-target"] == "All"
    (about,) = json.loads(notes["data.fluid.io/metadataList"])
    assert about["labels"] == {"fluid.io/node-publish-method": "symlink"}
    assert about["selector"] == {"kind": "PersistentVolume"}


def test_the_jobs_load_the_claim_of_a_dataset() -> None:
    job = one("load-job", "Job")["spec"]
    cron_job = one("load-cronjob", "CronJob")["spec"]["jobTemplate"]["spec"]
    assert job == cron_job
    assert job["completions"] == job["parallelism"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    program, verb, *arguments = shlex.split(" ".join(container["command"]))
    assert (program, verb) == ("cachefs", "load")
    assert arguments == [container["volumeMounts"][0]["mountPath"]]
    claim = pod["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim == one("one-mount", "Dataset")["metadata"]["name"]
