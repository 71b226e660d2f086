"""deploy/kubernetes: the labels that one example sets are those that the other asks for."""

from typing import Any

import yaml

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


def test_the_report_finds_the_daemons() -> None:
    pod = objects("node-report.yaml")["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["env"][0]["name"] == "NODE_NAME"
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/run/cachefs/report"]
    (volume,) = pod["volumes"]
    assert volume["hostPath"]["path"] == "/run/cachefs/report"


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
