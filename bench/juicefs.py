"""JuiceFS on the benchmark's S3 server, set up as its manual advises."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.case import Bench

_TIMEOUT_S = 180
_BUCKET = "juicefs"


class JuiceFS:
    """A volume with its metadata in SQLite, mounted in the sandbox."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        base = bench.directory / "juicefs"
        self.path = base / "mnt"
        self._base = base
        self._meta = f"sqlite3://{base}/meta.db"
        self._cache = base / "cache"
        server = bench.server
        self._environment = {
            **os.environ,
            "ACCESS_KEY": server.access_key,
            "SECRET_KEY": server.secret_key,
            "JFS_NO_UPDATE": "1",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "JuiceFS":
        self.path.mkdir(parents=True)
        self._bench.server.make_bucket(_BUCKET)
        bucket = f"{self._bench.server.endpoint}/{_BUCKET}"
        self._call("format", "--storage", "minio", "--bucket", bucket, "--trash-days", "0",
                   self._meta, "bench")  # fmt: skip
        self._mount()
        return self

    def __exit__(self, *failure: object) -> None:
        self._unmount()
        shutil.rmtree(self._base, ignore_errors=True)

    def fill(self, prefix: str, names: Sequence[str]) -> None:
        """Copy the local files in."""
        self._bench.say(f"copying {len(names):,} files into JuiceFS")
        shutil.copytree(self._bench.local / prefix, self.path / prefix)

    def warm_up(self, prefix: str, requests: int = 32) -> float:
        """Seconds of `juicefs warmup` of a directory, from an empty cache."""
        self._unmount()
        shutil.rmtree(self._cache, ignore_errors=True)
        self._mount()
        began = time.monotonic()
        self._call("warmup", "-p", str(requests), str(self.path / prefix))
        return time.monotonic() - began

    def _mount(self) -> None:
        self._process = subprocess.Popen(
            [
                self._command, "mount", self._meta, str(self.path), "--cache-dir", str(self._cache),
                "--cache-size", "8192", "--free-space-ratio", "0.01", "--no-usage-report",
                "--attr-cache", "3600", "--entry-cache", "3600", "--dir-entry-cache", "3600",
                "--open-cache", "3600", "--no-syslog",
            ],
            env=self._environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while not self.path.is_mount():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError("juicefs did not mount")
            time.sleep(0.05)

    def _unmount(self) -> None:
        if self._process is None:
            return
        if self.path.is_mount():
            subprocess.run([self._command, "umount", str(self.path)], check=False,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           timeout=_TIMEOUT_S)  # fmt: skip
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    @property
    def _command(self) -> str:
        return str(Path(sys.executable).with_name("juicefs"))

    def _call(self, *arguments: str) -> None:
        done = subprocess.run(
            [self._command, *arguments], env=self._environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"juicefs {arguments[0]} failed: {done.stderr[-500:]}")
