"""Machines to install on: copies of a root that mmdebstrap made, each in namespaces of its own."""

import json
import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.servers.certificates import make_certificates
from tests.servers.seaweedfs import SeaweedFS
from tests.servers.tls_front import TlsFront

TOP = Path(__file__).parents[2]
DIST = TOP / "dist"
ROOTS = TOP / ".build/roots"

_MAKE = """
source deploy/packages/common.sh
need mmdebstrap=mmdebstrap
make_root "bare-$1" "$1" "" --skip=cleanup/apt/lists
"""
_ENTER = """
umount -c -i -l -a -t fuse.cachefs
mount --bind "$1" "$1"
mount --rbind /dev "$1/dev"
mount -t proc proc "$1/proc"
mount -t tmpfs tmpfs "$1/run"
echo entered
exec sleep infinity
"""
"""A mount of another test that the new namespace kept would live on after its unmount."""


def built(pattern: str) -> Path:
    """Return the one file of this name in dist/."""
    (found,) = DIST.glob(pattern)
    return found


def eventually(is_so: Any, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, is_so
        time.sleep(0.05)


class Machine:
    """A bare Debian, with nothing of cachefs: no Python, no compiler, no fuse3. apt has its lists,
    as on a machine that is in use."""

    def __init__(self, suite: str, root: Path) -> None:
        subprocess.run(["bash", "-c", _MAKE, "bash", suite], cwd=TOP, check=True)
        subprocess.run(["cp", "-a", ROOTS / f"bare-{suite}", root], check=True)
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        (root / "data/train").mkdir(parents=True)
        (root / "data/train/0001").write_text("content")
        (root / "data/large").write_bytes(os.urandom(4 << 20))
        self.root = root
        apart = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork"]
        self._first = subprocess.Popen(
            [*apart, "--kill-child", "sh", "-euc", _ENTER, "sh", root], stdout=subprocess.PIPE
        )
        assert self._first.stdout is not None
        assert self._first.stdout.readline() == b"entered\n"
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children")
        self._pid = int(children.read_text())

    def _enter(self, command: str) -> list[str]:
        inside = ["env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
        inside += ["HOME=/root", "DEBIAN_FRONTEND=noninteractive", "sh", "-c", command]
        target = ["nsenter", "--target", str(self._pid), "--mount", "--pid"]
        return [*target, "--", "chroot", str(self.root), *inside]

    def run(self, command: str, code: int = 0) -> str:
        """Run a command as root and return its output."""
        done = subprocess.run(
            self._enter(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == code, (command, done.returncode, done.stdout)
        return done.stdout

    def hold(self, path: str) -> "subprocess.Popen[bytes]":
        """Start a process that has `path` open, and reads all of it when it gets a line."""
        script = f"exec 3< {shlex.quote(path)}; echo open; read -r line; exec cat <&3"
        process = subprocess.Popen(
            self._enter(script), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        return process

    def status(self, mountpoint: str = "/mnt") -> dict[str, Any]:
        (row,) = json.loads(self.run(f"cachefs status {mountpoint} --json"))
        assert isinstance(row, dict)
        return row

    def close(self) -> None:
        """End all its processes, and so all its mounts."""
        self._first.kill()
        self._first.communicate()
        shutil.rmtree(self.root)


def check_served(machine: Machine) -> None:
    """The mount on /mnt has the data, and a relay serves it."""
    assert machine.run("cat /mnt/train/0001") == "content"
    status = machine.status()
    assert status["state"] == "serving"
    assert status["data_path"]["name"] == "relay", status["data_path"]


def check_object_store(machine: Machine, directory: Path) -> None:
    """A mount of an object store has the data. They speak TLS."""
    certificates = make_certificates(directory / "tls")
    shutil.copy(certificates.ca, machine.root / "ca.pem")
    with SeaweedFS(directory) as store:
        store.make_bucket("data")
        store.put("data", "train/0001", b"content")
        keys = f"AWS_ACCESS_KEY_ID={store.access_key} AWS_SECRET_ACCESS_KEY={store.secret_key}"
        with TlsFront(certificates, int(store.endpoint.rpartition(":")[2])) as front:
            place = f"--endpoint https://127.0.0.1:{front.port} --addressing path --ca-file /ca.pem"
            cache = "--cache-dir /cache-of-store --cache-size 64MiB"
            machine.run("mkdir /store")
            machine.run(f"{keys} cachefs mount s3://data /store {place} {cache}")
            assert machine.run("cat /store/train/0001") == "content"
            machine.run("cachefs umount /store")
            assert front.resumed


def check_upgrade(machine: Machine, install: str, version: str) -> None:
    """`install` brings `version`, which then serves, and files stay open."""
    before = machine.status()
    assert before["version"] != version
    holder = machine.hold("/mnt/large")
    machine.run(install)
    after = machine.status()
    assert (after["version"], after["supervisor_pid"]) == (version, before["supervisor_pid"])
    assert holder.communicate(b"\n", timeout=300)[0] == (machine.root / "data/large").read_bytes()
    check_served(machine)
