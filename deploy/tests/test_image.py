"""The image in containers of runc, with mounts propagated as Kubernetes does it
(docs/KUBERNETES.md): one container mounts, another one reads."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.tests.bare import built, eventually

MOST_BYTES = 250_000_000
FLUID = ["bash", "cat", "grep", "awk", "mount", "umount", "stat", "mountpoint", "sleep", "sed"]
"""Programs that scripts of Fluid call in the container of a mount."""
_HOST = """
umount -c -i -l -a -t fuse.cachefs
mount --bind "$1/mounts" "$1/mounts"
mount --make-rshared "$1/mounts"
echo entered
exec sleep infinity
"""


class Host:
    """A node: a mount namespace with a shared mount, as systemd makes `/`.

    The containers' roots lie outside it, as on a node: runc makes the mount private on which a
    root lies."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.image = directory / "image"
        (directory / "mounts").mkdir()
        (directory / "source").mkdir()
        (directory / "source/file").write_text("content")
        self._first = subprocess.Popen(
            [
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-euc",
                _HOST,
                "sh",
                directory,
            ],
            stdout=subprocess.PIPE,
        )
        assert self._first.stdout is not None
        assert self._first.stdout.readline() == b"entered\n"
        self._names: list[str] = []
        self.unpack()

    def unpack(self) -> None:
        layout = self.directory / "layout"
        layout.mkdir()
        subprocess.run(["tar", "-C", layout, "-xf", built("cachefs-*-image.tar")], check=True)
        (tag,) = [
            each["annotations"]["org.opencontainers.image.ref.name"]
            for each in json.loads((layout / "index.json").read_text())["manifests"]
        ]
        unpack = ["umoci", "unpack", "--image", f"{layout}:{tag}", self.image]
        subprocess.run(unpack, check=True, capture_output=True)

    def run(self, *command: object, code: int = 0) -> str:
        done = subprocess.run(
            ["nsenter", "--mount", "--target", str(self._first.pid), *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == code, (command, done.returncode, done.stdout)
        return done.stdout

    def runc(self, *command: object, code: int = 0) -> str:
        return self.run("runc", "--root", self.directory / "runc", *command, code=code)

    def start(self, name: str, args: list[str], propagation: str, *, privileged: bool) -> None:
        """Start a container. `args` follow the entry point of the image, unless they begin with a
        path."""
        config: dict[str, Any] = json.loads((self.image / "config.json").read_text())
        entry = config["process"]["args"][:1]
        assert entry == ["cachefs"]
        config["process"] |= {"args": args if args[0][0] == "/" else entry + args}
        config["process"]["terminal"] = False
        config["root"] = {"path": str(self.image / "rootfs")}
        for source, target, how in (
            ("mounts", "/mnt/cachefs", propagation),
            ("source", "/source", "rprivate"),
            (f"cache-{name}", "/var/cache/cachefs", "rprivate"),
            ("run", "/run/cachefs", "rprivate"),
        ):
            (self.directory / source).mkdir(0o700 if source == "run" else 0o755, exist_ok=True)
            config["mounts"].append(
                {
                    "source": str(self.directory / source),
                    "destination": target,
                    "type": "bind",
                    "options": ["rbind", "rw", how],
                }
            )
        config["linux"]["rootfsPropagation"] = propagation
        if privileged:
            # What docs/KUBERNETES.md says is enough, with what root has in any container.
            some = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID", "SYS_ADMIN"]
            everything = [f"CAP_{name}" for name in some]
            kinds = ("bounding", "effective", "permitted")
            config["process"]["capabilities"] = dict.fromkeys(kinds, everything)
            fuse = {"type": "c", "major": 10, "minor": 229}
            config["linux"]["devices"] = [{"path": "/dev/fuse", "fileMode": 0o666, **fuse}]
            config["linux"]["resources"] = {"devices": [{"allow": True, "access": "rwm"}]}
            for kind in ("maskedPaths", "readonlyPaths"):
                config["linux"].pop(kind, None)
        bundle = self.directory / f"bundle-{name}"
        bundle.mkdir(exist_ok=True)
        (bundle / "config.json").write_text(json.dumps(config))
        # Its output goes to a file: a container in the background keeps a pipe open.
        start = 'runc --root "$1" run --detach --bundle "$2" "$3" >>"$2/log" 2>&1 || cat "$2/log"'
        assert self.run("sh", "-c", start, "sh", self.directory / "runc", bundle, name) == ""
        self._names.append(name)

    def log(self, name: str) -> str:
        return (self.directory / f"bundle-{name}/log").read_text()

    def delete(self, name: str) -> None:
        """Kill a container as the kernel does when memory is short, and remove it."""
        self._names.remove(name)
        self.runc("delete", "--force", name)

    def close(self) -> None:
        for name in list(self._names):
            self.delete(name)
        self._first.kill()
        self._first.communicate()
        shutil.rmtree(self.directory)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    (tmp_path / "host").mkdir()
    host = Host(tmp_path / "host")
    yield host
    host.close()


def mount(host: Host) -> None:
    options = ["--foreground", "--cache-size", "64MiB", "--free-space-ratio", "0"]
    host.start(
        "daemon",
        ["mount", "file:///source", "/mnt/cachefs/data", *options],
        "rshared",
        privileged=True,
    )
    eventually(lambda: is_mounted(host) or is_stopped(host))
    assert is_mounted(host), host.log("daemon")


def is_mounted(host: Host) -> bool:
    return "fuse.cachefs" in host.run("cat", "/proc/self/mounts")


def is_stopped(host: Host) -> bool:
    return json.loads(host.runc("state", "daemon"))["status"] == "stopped"


def content(host: Host) -> str:
    return host.runc("exec", "reader", "cat", "/mnt/cachefs/data/file")


def test_the_image_is_small() -> None:
    assert built("cachefs-*-image.tar").stat().st_size <= MOST_BYTES


def test_a_mount_for_other_containers(host: Host) -> None:
    (host.directory / "mounts/data").mkdir()
    host.start("reader", ["/bin/sleep", "infinity"], "rslave", privileged=False)
    mount(host)
    assert content(host) == "content"
    status = status_of(host)
    assert (status["state"], status["data_path"]["name"]) == ("serving", "relay")

    host.delete("daemon")  # what it mounted is dead now
    mount(host)
    # Not earlier: of the dead mount, the kernel still has pages. And a first process that has no
    # handlers yet, as during its start, ignores SIGTERM.
    eventually(lambda: status_of(host).get("state") == "serving")
    assert content(host) == "content"

    host.runc("kill", "daemon", "TERM")  # as the kubelet does
    eventually(lambda: is_stopped(host))
    assert not is_mounted(host)


def status_of(host: Host) -> dict[str, Any]:
    """What cachefs knows of the mount; nothing while it starts."""
    rows: list[dict[str, Any]] = json.loads(
        host.runc("exec", "daemon", "cachefs", "status", "--json")
    )
    return rows[0] if rows else {}


def test_what_else_is_in_the_image(host: Host) -> None:
    host.start("daemon", ["/bin/sleep", "infinity"], "rslave", privileged=False)
    for program in FLUID:
        host.runc("exec", "daemon", "bash", "-c", f"command -v {program}")
    assert "Usage: cachefs" in host.runc("exec", "daemon", "cachefs", "--help")
    grpc = "/usr/lib/cachefs/bin/python3.11 -c 'import grpc, google.protobuf, pyarrow.parquet'"
    host.runc("exec", "daemon", "sh", "-c", grpc)
    libcurl = "from cachefs.origin.http import why_not as w; import ssl; assert w() is None, w()"
    host.runc("exec", "daemon", "/usr/lib/cachefs/bin/python3.11", "-c", libcurl)
