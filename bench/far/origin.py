"""Make the S3 server of the benchmark distant, with `relay.c` between the mount and the server."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from tests.servers.ports import free_ports

ROUND_TRIP_MS = 30
CONNECTION_MB_S = 80
_SOURCE = Path(__file__).with_name("relay.c")


@contextlib.contextmanager
def far(endpoint: str, directory: Path) -> Iterator[str]:
    """Yield a URL that leads to `endpoint` with a delay of `ROUND_TRIP_MS` and at most
    `CONNECTION_MB_S` per connection. Compiles the relay in `directory`."""
    program = directory / "relay"
    subprocess.run(["cc", "-O2", "-o", str(program), str(_SOURCE)], check=True)
    (port,) = free_ports(1)
    target = urlsplit(endpoint).port
    arguments = [str(program), str(port), str(target), str(ROUND_TRIP_MS), str(CONNECTION_MB_S)]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as relay:
        try:
            assert relay.stdout is not None
            if relay.stdout.readline().strip() != str(port):
                raise RuntimeError("the relay did not start")
            yield f"http://127.0.0.1:{port}"
        finally:
            relay.communicate()  # closes the relay's standard input, which ends the relay
