"""`cachefs node-report` about real mounts."""

import json
import subprocess
from contextlib import ExitStack

import pytest

from tests.mount.harness import Site, eventually
from tests.mount.namespaces import CACHEFS, MountNamespace


def fill(site: Site) -> None:
    (site.files / "train").mkdir()
    (site.files / "train/a").write_bytes(b"x" * 1000)
    (site.files / "rest").write_bytes(b"x" * 150)


def test_a_mount_and_paths_in_it(site: Site) -> None:
    fill(site)
    site.mount()
    ask = ("node-report", site.mountpoint, f"mine={site.mountpoint}/train")
    assert site.cli(*ask).stdout == "cachefs.io/cached-mnt=0\ncachefs.io/cached-mine=0\n"
    site.cli("load", site.mountpoint / "train")
    expected = "cachefs.io/cached-mnt=80\ncachefs.io/cached-mine=100\n"  # 1000 of 1150 bytes
    eventually(lambda: site.cli(*ask).stdout == expected)

    rows = json.loads(site.cli(*ask, "--format", "json").stdout)
    assert rows[1] == {
        "name": "mine",
        "path": f"{site.mountpoint}/train",
        "cached_bytes": 1000,
        "size_bytes": 1000,
        "label": "cachefs.io/cached-mine",
        "value": "100",
    }
    everything = [CACHEFS, "node-report", "--format", "json"]  # fails if a foreign mount does
    said = subprocess.run(everything, capture_output=True, text=True, check=False).stdout
    assert str(site.mountpoint) in [row["path"] for row in json.loads(said)]


def test_wrong_names_and_paths(site: Site) -> None:
    fill(site)
    site.mount()
    twice = site.cli("node-report", f"a={site.mountpoint}", f"a={site.mountpoint}/train", code=2)
    assert "two data sets have the name 'a'" in twice.stderr
    wrong = site.cli("node-report", f"a b={site.mountpoint}", code=2)
    assert "can't be part of a label" in wrong.stderr
    gone = site.cli("node-report", site.mountpoint / "gone", site.mountpoint / "train", code=1)
    assert f"{site.mountpoint}/gone: " in gone.stderr
    assert gone.stdout == "cachefs.io/cached-train=0\n"
    assert "is no pod" in site.cli("node-report", site.mountpoint, "--apply", "a", code=2).stderr


@pytest.mark.root
def test_a_pod_needs_only_the_control_sockets(site: Site) -> None:
    """The pod of deploy/kubernetes/node-report.yaml has /run/cachefs, and not the mounts."""
    fill(site)
    site.mount()
    with ExitStack() as stack:
        pod = MountNamespace("private")
        stack.callback(pod.close)
        assert str(site.mountpoint) not in pod.run("cat", "/proc/self/mountinfo")
        said = pod.run(CACHEFS, "node-report", site.mountpoint)
        assert said == "cachefs.io/cached-mnt=0\n"
        assert "cachefs.io/cached-" in pod.run("sh", "-c", f"{CACHEFS} node-report || true")
