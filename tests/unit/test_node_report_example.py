"""deploy/kubernetes: the labels that one example sets are those that the other asks for."""

import re
from typing import Any

import yaml

from cachefs.cli import main
from cachefs.cli.nodes.labels import PREFIX, checked_name, label_value
from tests.unit.texts import ROOT

PLACE = ROOT / "deploy/kubernetes"


def objects(name: str) -> dict[str, Any]:
    return {o["kind"]: o for o in yaml.safe_load_all((PLACE / name).read_text())}


def test_the_account_has_the_rights_that_it_needs_and_no_others() -> None:
    found = objects("node-report.yaml")
    assert found["ClusterRole"]["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]}
    ]
    account = found["ServiceAccount"]["metadata"]
    (subject,) = found["ClusterRoleBinding"]["subjects"]
    assert subject == {"kind": "ServiceAccount", **account}
    assert (
        found["ClusterRoleBinding"]["roleRef"]["name"] == found["ClusterRole"]["metadata"]["name"]
    )
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account["name"]


def test_the_command_is_one_that_cachefs_has() -> None:
    pod = objects("node-report.yaml")["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = re.search(r"cachefs (node-report .*)", container["command"][2])
    assert words is not None
    verb, *arguments = words[1].split()
    command = main.get_command(None, verb)  # type: ignore[arg-type]
    assert command is not None
    command.make_context(verb, arguments)
    assert container["env"][0]["name"] == "NODE_NAME"
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/run/cachefs"]


def test_the_pod_asks_for_labels_that_there_may_be() -> None:
    spec = objects("near-the-data.yaml")["Pod"]["spec"]
    affinity = spec["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    for term in affinity:
        for asked in term["preference"]["matchExpressions"]:
            assert asked["key"].startswith(PREFIX)
            checked_name(asked["key"].removeprefix(PREFIX))
            assert asked["operator"] == "Gt"
            least = int(asked["values"][0]) + 1
            assert label_value(least, 100) == str(least)
