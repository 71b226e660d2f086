"""Mount namespaces: what a container sees, and places where a test may mount what it likes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cachefs.mounts import FSTYPE
from tests.mount.harness import eventually

CACHEFS = Path(sys.executable).with_name("cachefs")


class MountNamespace:
    """A process that does nothing in a mount namespace of its own, and commands run beside it.

    `propagation` is that of unshare(1): "private", "slave" (what Kubernetes calls HostToContainer),
    or "unchanged" (Bidirectional, where the mounts are shared). `within` is the one that it is made
    in, else the test's own.
    """

    def __init__(self, propagation: str, within: "MountNamespace | None" = None) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root can make mount namespaces")
        script = "exec sleep 600"
        if within is None and propagation == "private":
            # A mount of another test that it kept would live on after its unmount.
            script = f"umount -c -i -l -a -t {FSTYPE}; {script}"
        command = ["unshare", "--mount", "--propagation", propagation, "sh", "-c", script]
        self._process = subprocess.Popen([*(within.enter() if within else []), *command])
        comm = Path(f"/proc/{self._process.pid}/comm")
        eventually(lambda: comm.read_text() == "sleep\n")

    def enter(self) -> list[str]:
        return ["nsenter", "--mount", "--target", str(self._process.pid)]

    def run(self, *command: object, code: int = 0, **environment: str) -> str:
        """stdout, or stderr where a failure is expected."""
        done = subprocess.run(
            [*self.enter(), *map(str, command)],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env=os.environ | environment,
        )
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done.stderr if code else done.stdout

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
