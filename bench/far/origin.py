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
def far(endpoint: str, directory: Path, round_trip_ms: float = ROUND_TRIP_MS) -> Iterator[str]:
    """Yield a URL that leads to `endpoint` with a delay of `round_trip_ms` and at most
    `CONNECTION_MB_S` per connection. Compiles the relay in `directory`."""
    (port,) = free_ports(1)
    program = directory / f"relay-{port}"
    subprocess.run(["cc", "-O2", "-o", str(program), str(_SOURCE)], check=True)
    target = urlsplit(endpoint).port
    arguments = [str(program), str(port), str(target), str(round_trip_ms), str(CONNECTION_MB_S)]
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
