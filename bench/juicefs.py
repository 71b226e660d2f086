"""Run JuiceFS on the benchmark's S3 server, set up as its manual advises."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.case import Bench

BUCKET = "juicefs"
_TIMEOUT_S = 180


class JuiceFS:
    """A volume with its metadata in SQLite, mounted in the sandbox."""

    def __init__(self, bench: Bench, options: Sequence[str] = ()) -> None:
        """Every mount also gets `options`."""
        self._bench = bench
        base = bench.directory / "juicefs"
        self.path = base / "mnt"
        self._base = base
        self._meta = f"sqlite3://{base}/meta.db"
        self.cache = base / "cache"
        self._options = options
        server = bench.server
        self._environment = {
            **os.environ,
            "ACCESS_KEY": server.access_key,
            "SECRET_KEY": server.secret_key,
            "JFS_NO_UPDATE": "1",
        }
        self.process: subprocess.Popen[bytes] | None = None
        self._arguments: list[str] = []

    def __enter__(self) -> "JuiceFS":
        self.format()
        self.mount()
        return self

    def __exit__(self, *failure: object) -> None:
        self.unmount()
        shutil.rmtree(self._base, ignore_errors=True)

    def format(self) -> None:
        """Make the volume."""
        self.path.mkdir(parents=True)
        self._bench.server.make_bucket(BUCKET)
        bucket = f"{self._bench.server.endpoint}/{BUCKET}"
        self.call("format", "--storage", "minio", "--bucket", bucket, "--trash-days", "0",
                  self._meta, "bench")  # fmt: skip

    def fill(self, prefix: str, names: Sequence[str]) -> None:
        """Copy the local files below `prefix` into the volume."""
        self._bench.say(f"copying {len(names):,} files into JuiceFS")
        shutil.copytree(self._bench.local / prefix, self.path / prefix)

    def warm_up(self, prefix: str, requests: int = 32) -> float:
        """Run `juicefs warmup` of a directory from an empty cache, and return its seconds."""
        self.unmount()
        shutil.rmtree(self.cache, ignore_errors=True)
        self.mount()
        began = time.monotonic()
        self.call("warmup", "-p", str(requests), str(self.path / prefix))
        return time.monotonic() - began

    @property
    def command_line(self) -> str:
        """The command line of the last mount, as a user would type it."""
        return shlex.join(["juicefs", *self._arguments])

    def mount(self, cache: Path | None = None, cache_mib: int = 8192) -> None:
        """Mount the volume, with its block cache in `cache`, by default in the directory of the
        last mount."""
        self.cache = cache or self.cache
        self._arguments = [
            "mount", self._meta, str(self.path), "--cache-dir", str(self.cache),
            "--cache-size", str(cache_mib), "--free-space-ratio", "0.01", "--no-usage-report",
            "--attr-cache", "3600", "--entry-cache", "3600", "--dir-entry-cache", "3600",
            "--open-cache", "3600", "--no-syslog", *self._options,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            [self._command, *self._arguments],
            env=self._environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while not self.path.is_mount():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError("juicefs did not mount")
            time.sleep(0.05)

    def unmount(self) -> None:
        """Unmount, and wait until the client has ended. Does nothing if it is not mounted."""
        if self.process is None:
            return
        if self.path.is_mount():
            subprocess.run([self._command, "umount", str(self.path)], check=False,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           timeout=_TIMEOUT_S)  # fmt: skip
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def version(self) -> str:
        """Return the version that `juicefs --version` prints."""
        return self.call("--version").removeprefix("juicefs version").strip()

    @property
    def _command(self) -> str:
        return str(Path(sys.executable).with_name("juicefs"))

    def call(self, *arguments: str) -> str:
        """Run a juicefs command and return its output. Raises `RuntimeError` if it fails."""
        done = subprocess.run(
            [self._command, *arguments], env=self._environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"juicefs {arguments[0]} failed: {done.stderr[-500:]}")
        return done.stdout
