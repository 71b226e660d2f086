"""Mount namespaces: what a container sees, and places where a test may mount what it likes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cachefs.mounts import FSTYPE
from tests.mount.harness import children_of, eventually

CACHEFS = Path(sys.executable).with_name("cachefs")


class MountNamespace:
    """A process that does nothing in a mount namespace of its own, and commands run beside it.

    `propagation` is that of unshare(1): "private", "slave" (what Kubernetes calls HostToContainer),
    or "unchanged" (Bidirectional, where the mounts are shared). `within` is the one that it is made
    in, else the test's own. With `own_pids`, processes have numbers of their own, as in containers.
    """

    def __init__(
        self, propagation: str, within: "MountNamespace | None" = None, *, own_pids: bool = False
    ) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root can make mount namespaces")
        script = "exec sleep 600"
        if within is None and propagation == "private":
            # A mount of another test that it kept would live on after its unmount.
            script = f"umount -c -i -l -a -t {FSTYPE}; {script}"
        command = ["unshare", "--mount", "--propagation", propagation]
        if own_pids:
            command += ["--pid", "--fork", "--kill-child"]
            script = f"mount -t proc proc /proc; {script}"
        command += ["sh", "-c", script]
        self._process = subprocess.Popen([*(within.enter() if within else []), *command])
        self._kinds = ["--mount", *(["--pid"] if own_pids else [])]
        self._own_pids = own_pids
        eventually(self._has_begun)

    def _has_begun(self) -> bool:
        return self._first() is not None

    def _first(self) -> int | None:
        """The process that does nothing, once it does nothing."""
        pids = children_of(self._process.pid) if self._own_pids else [self._process.pid]
        named = [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text() == "sleep\n"]
        return named[0] if named else None

    def enter(self) -> list[str]:
        return ["nsenter", *self._kinds, "--target", str(self._first())]

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
