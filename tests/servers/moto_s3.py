"""moto's S3 server in a process of its own, for keys that SeaweedFS can't store."""

import subprocess
import sys
from typing import Self

from tests.servers.ports import answers, free_ports, wait_until
from tests.servers.s3_server import S3Server, stop_process


class MotoS3(S3Server):
    """Started by `with`, gone after it. It checks no credentials."""

    access_key = "AKIDMOTOTEST"
    secret_key = "moto-secret"

    def __enter__(self) -> Self:
        (port,) = free_ports(1)
        self.endpoint = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            wait_until(lambda: answers(port), 60, "moto is mute")
        except BaseException:
            stop_process(self._process)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close_client()
        stop_process(self._process)
