"""`cachefs node-report` about real mounts."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cachefs.control import api
from cachefs.control.client import ask
from cachefs.errors import CachefsError
from cachefs.mounts import report_path, socket_path
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
def test_a_pod_needs_only_the_sockets_for_reports(site: Site) -> None:
    """The pod of deploy/kubernetes/node-report.yaml has /run/cachefs/report, and not the mounts."""
    fill(site)
    site.mount()
    with ExitStack() as stack:
        pod = MountNamespace("private")
        stack.callback(pod.close)
        assert str(site.mountpoint) not in pod.run("cat", "/proc/self/mountinfo")
        hide = "cd /run/cachefs && mkdir -p /mnt && mount --bind report /mnt && "
        hide += "mount -t tmpfs -o mode=755 tmpfs /run/cachefs && mkdir /run/cachefs/report && "
        hide += "mount --move /mnt /run/cachefs/report && mount -o remount,ro /run/cachefs"
        pod.run("sh", "-c", hide)
        said = pod.run(CACHEFS, "node-report", site.mountpoint)
        assert said == "cachefs.io/cached-mnt=0\n"
        assert "cachefs.io/cached-" in pod.run("sh", "-c", f"{CACHEFS} node-report || true")


def test_the_socket_for_reports_changes_nothing(site: Site) -> None:
    site.mount()
    path = report_path(site.mountpoint)
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
    assert ask(path)["mountpoint"] == str(site.mountpoint)
    assert len(ask(path, api.INDEX)["routes"]) == len(api.REPORT_ROUTES) + 1
    for route in (api.SET, api.TIER_ADD, api.CACHE_EVICT, api.WRITES_DROP, api.CONSOLE_TOKEN):
        with pytest.raises(CachefsError, match="doesn't know"):
            ask(path, route, {"access_log": str(site.files / "log")})
    site.umount()
    assert not path.exists()


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user may change."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@pytest.mark.root
def test_other_users_are_not_answered(site: Site, public: Path) -> None:
    """Even if they reach the socket, such as in a directory that somebody has opened."""
    site.mount()
    socket_path(site.mountpoint).rename(public / "sock")
    (public / "sock").chmod(0o777)
    command = ["curl", "-s", "--unix-socket", public / "sock", "http://x/v1/status"]
    own = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "mountpoint" in own.stdout
    other = subprocess.run(command, check=False, capture_output=True, user=65534, group=65534)
    assert (other.returncode != 0, other.stdout) == (True, b"")
    (public / "sock").rename(socket_path(site.mountpoint))


LISTEN = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.root
def test_another_user_who_listens_is_not_believed(public: Path) -> None:
    command = ["/usr/bin/python3", "-c", LISTEN, public / "a.sock"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, user=65534, group=65534) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(CachefsError, match="uid 65534 listens on"):
            ask(public / "a.sock")
        other.communicate()
