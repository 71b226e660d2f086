"""The end of a writable mount with unsent files: `cachefs umount` waits, and says what is left."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import CLI, PATIENCE_S, Site, eventually
from tests.mount.test_unsent import no_origin, unsent, write_in_vain
from tests.servers.fault_proxy import Fault, FaultProxy
from tests.servers.seaweedfs import SeaweedFS

_WRITER = """
import sys
with open(sys.argv[1], "wb") as stream:
    stream.write(b"content")
"""


@pytest.fixture
def proxy(seaweedfs: SeaweedFS) -> Iterator[FaultProxy]:
    with FaultProxy(seaweedfs.endpoint) as proxy:
        yield proxy


@contextlib.contextmanager
def store_mount(
    root: Path, seaweedfs: SeaweedFS, proxy: FaultProxy, bucket: str, timeout: str
) -> Iterator[Site]:
    """A mount whose store takes nothing until the proxy lets it through."""
    site = Site(root, f"s3://{bucket}/prefix")
    site.environment = seaweedfs.environment | {"AWS_ENDPOINT_URL": proxy.endpoint}
    site.expected_trouble = ("cachefs.origin", "cachefs.namespace", "stays in the spool")
    site.mount("--rw", "--write-timeout", timeout)
    try:
        proxy.fault(Fault.ERROR, method="PUT", text="file")
        yield site
    finally:
        proxy.clear()
        site.tear_down()


@contextlib.contextmanager
def busy_mount(root: Path, seaweedfs: SeaweedFS, proxy: FaultProxy, bucket: str) -> Iterator[Site]:
    """A mount with one file, which is being sent. The process that wrote it was killed."""
    with store_mount(root, seaweedfs, proxy, bucket, "10m") as site:
        file = site.mountpoint / "file"
        writer = subprocess.Popen([sys.executable, "-S", "-E", "-c", _WRITER, file])
        eventually(lambda: [row["state"] for row in unsent(site)] == ["sending"])
        writer.kill()
        writer.wait(PATIENCE_S)
        yield site


class Unmounting:
    """`cachefs umount` in a terminal."""

    def __init__(self, site: Site) -> None:
        self._screen, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [*CLI, "umount", str(site.mountpoint)],
            stdout=terminal,
            stderr=terminal,
            env=os.environ | site.environment | {"TERM": "xterm"},
        )
        os.close(terminal)
        self.text = ""

    def wait_for(self, text: str) -> None:
        """Wait until this text was shown."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            self.text += os.read(self._screen, 4096).decode()

    def end(self) -> int:
        """Wait for the end, and return the exit code."""
        with contextlib.suppress(OSError):  # EIO: nobody has the terminal any more
            while piece := os.read(self._screen, 4096):
                self.text += piece.decode()
        os.close(self._screen)
        return self.process.wait(PATIENCE_S)


def test_umount_waits_for_what_is_unsent(
    tmp_path: Path, seaweedfs: SeaweedFS, proxy: FaultProxy
) -> None:
    bucket = seaweedfs.make_bucket("umount-waits")
    with busy_mount(tmp_path, seaweedfs, proxy, bucket) as site:
        umount = Unmounting(site)
        umount.wait_for("sending 1 file, 7 B left")
        assert site.is_mounted()
        proxy.clear()
        assert umount.end() == 0, umount.text
        assert "spool" not in umount.text
        assert not site.is_mounted()
    answer = seaweedfs.client.get_object(Bucket=bucket, Key="prefix/file")
    assert answer["Body"].read() == b"content"


def test_ctrl_c_leaves_what_is_unsent_in_the_spool(
    tmp_path: Path, seaweedfs: SeaweedFS, proxy: FaultProxy
) -> None:
    bucket = seaweedfs.make_bucket("umount-interrupted")
    with busy_mount(tmp_path, seaweedfs, proxy, bucket) as site:
        eventually(lambda: "still sending file: 0 B of 7 B after " in site.log.read_text())
        umount = Unmounting(site)
        umount.wait_for("sending 1 file")
        umount.process.send_signal(signal.SIGINT)
        assert umount.end() == 130, umount.text
        assert "1 file (7 B) that the source does not have stays in the spool" in umount.text
        assert not site.is_mounted()
        assert not site.is_running()
        assert "unsent files in the spool: 1 (7 B) in " in site.log.read_text()
        proxy.clear()
        site.mount("--rw")
        site.cli("flush", site.mountpoint)
        assert (site.mountpoint / "file").read_bytes() == b"content"
        assert unsent(site) == []
        site.umount()
    answer = seaweedfs.client.get_object(Bucket=bucket, Key="prefix/file")
    assert answer["Body"].read() == b"content"


def test_umount_says_what_could_not_be_sent(site: Site) -> None:
    site.expected_trouble = ("it stays in the spool",)
    site.mount("--rw")
    with no_origin(site):
        write_in_vain(site.mountpoint / "file", b"four")
        said = site.cli("umount", site.mountpoint).stderr
    assert said.startswith("cachefs: 1 file (4 B) that the source does not have stays in the spool")
    assert said.count("\n") == 1
    assert f"cachefs writes --cache-dir {site.cache}" in said
    (row,) = unsent(site, "--cache-dir", site.cache)
    assert (row["path"], row["size_bytes"]) == ("file", 4)


def test_a_mount_in_use_goes_on(site: Site) -> None:
    site.mount("--rw")
    (site.mountpoint / "file").write_bytes(b"four")
    with (site.mountpoint / "file").open("rb"):
        assert "is in use by" in site.cli("umount", site.mountpoint, code=1).stderr
    (site.mountpoint / "file").write_bytes(b"seven..")
    assert (site.files / "file").read_bytes() == b"seven.."
    site.umount()


def test_a_command_inside_a_mount_does_not_keep_it_busy(site: Site) -> None:
    site.mount()

    def umount(script: str) -> str:
        command = ["sh", "-c", script, "sh", *CLI]
        done = subprocess.run(
            command, cwd=site.mountpoint, stderr=subprocess.PIPE, text=True, check=False
        )
        return done.stderr

    said = umount('"$@" umount .; exit')  # the shell stays there
    assert "is in use by sh (process" in said
    assert said.count("(process") == 1
    assert umount('exec "$@" umount .') == ""
    assert not site.mountpoint.is_mount()


def test_a_mount_with_the_output_of_the_command(site: Site) -> None:
    site.mount("--rw")
    with (site.mountpoint / "log").open("w") as log:
        done = subprocess.run(
            [*CLI, "umount", site.mountpoint],
            stdout=log,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert f"this command itself (open file {site.mountpoint}/log)" in done.stderr
    site.umount()
