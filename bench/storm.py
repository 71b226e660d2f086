"""`python -m bench.storm` runs many readers against a server that refuses over 16 requests at once.

32 processes share 2,000 cold files of 20 KB. A proxy before the S3 server answers 503 above 16
concurrent requests and delays each request, so that the number of requests in flight decides the
speed. One mount must find the limit itself; in turns with it runs a mount with the option for 16.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from bench import rig, sandbox
from tests.servers.fault_proxy import FaultProxy

READERS = 32
LIMIT = 16
FILE_BYTES = 20_000
LATENCY_S = 0.1
REQUESTS_BAR = 1.3
THROUGHPUT_BAR = 0.8


@dataclass(frozen=True, slots=True)
class Round:
    """One mount and one pass over all files."""

    files_s: float
    requests_per_block: float
    rejected: int


def main() -> None:
    """Parse the arguments and run in the sandbox."""
    parser = argparse.ArgumentParser(prog="python -m bench.storm", description=__doc__)
    parser.add_argument("--files", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a bar is missed")
    arguments = parser.parse_args()
    sandbox.run("storm", lambda directory: _work(directory, arguments))


def _work(directory: Path, arguments: argparse.Namespace) -> int:
    names = [f"{number:05}.bin" for number in range(arguments.files)]
    measured: dict[str, list[Round]] = {"adaptive": [], "fixed": []}
    with rig.server(directory / "server") as server, FaultProxy(server.endpoint) as proxy:
        body = bytes(range(256)) * (FILE_BYTES // 256 + 1)
        rig.upload(server.store(), ((f"storm/{name}", body[:FILE_BYTES]) for name in names))
        proxy.limit(LIMIT, LATENCY_S)
        for turn in range(arguments.rounds):
            for kind, options in (("adaptive", []), ("fixed", ["--max-downloads", str(LIMIT)])):
                found = _round(directory / f"{kind}-{turn}", server, proxy, names, options)
                measured[kind].append(found)
                print(
                    f"{kind:8}  {found.files_s:6.0f} files/s  "
                    f"{found.requests_per_block:.3f} requests per block, {found.rejected} refused",
                    flush=True,
                )
    ratios = [
        adaptive.files_s / fixed.files_s
        for adaptive, fixed in zip(measured["adaptive"], measured["fixed"], strict=True)
    ]
    ratio = statistics.median(ratios)
    requests = max(found.requests_per_block for found in measured["adaptive"])
    print(f"throughput, adaptive / fixed limit of {LIMIT}: {ratio:.2f} (bar {THROUGHPUT_BAR})")
    print(f"requests per block, at most: {requests:.3f} (bar {REQUESTS_BAR})")
    missed = ratio < THROUGHPUT_BAR or requests > REQUESTS_BAR
    return int(arguments.strict and missed)


def _round(
    base: Path, server: rig.Server, proxy: FaultProxy, names: list[str], options: list[str]
) -> Round:
    mount = rig.Mount(
        base,
        f"s3://{rig.BUCKET}/storm",
        server.environment,
        proxy.endpoint,
        ["--cache-size", "1GiB", "--free-space-ratio", "0.01", *options],
    )
    with mount:
        rig.list_directory(mount.path)
        time.sleep(0.2)
        before = proxy.counts()
        reading = rig.read_files(mount.path, names, READERS, list_file=base / "read.list")
        after = proxy.counts()
    if reading.bytes != len(names) * FILE_BYTES:
        raise RuntimeError(f"{reading.bytes} bytes were read instead of {len(names) * FILE_BYTES}")
    mount.remove()
    return Round(
        reading.files_s,
        (after.requests - before.requests) / len(names),
        after.rejected - before.rejected,
    )


if __name__ == "__main__":
    main()
