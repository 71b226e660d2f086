"""Writes of up to 1 MiB, which the relay passes on in several packets."""

import concurrent.futures
import os
import random
from pathlib import Path

import pytest

from tests.mount.harness import MIB, Site, kill_daemon

FILES = 4
PIECE_BYTES = MIB - 4099
"""No multiple of a page, so that requests have all sizes."""


def privileges(site: Site, name: str) -> None:
    """Before `mount`: how large the supervisor may make the buffers of its socket."""
    buffer = {
        "enough": "",
        "none": "relayed_mount._SO_SNDBUFFORCE = -1\n",
        "a tiny buffer": (
            "import socket\n"
            "relayed_mount._SO_SNDBUFFORCE = socket.SO_SNDBUF\n"
            "relayed_mount._BUFFER_BYTES = 16 << 10\n"
        ),
    }[name]
    site.customize(
        "from cachefs.fuse.relay import _relay  # before libfuse\n"
        "from cachefs.supervisor import relayed_mount\n" + buffer
    )


def content(number: int) -> bytes:
    return random.Random(number).randbytes(5 * MIB + number)


def write(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    try:
        for offset in range(0, len(data), PIECE_BYTES):
            piece = data[offset : offset + PIECE_BYTES]
            assert os.write(file, piece) == len(piece)
    finally:
        os.close(file)


@pytest.mark.parametrize("allowed", ["enough", "none", "a tiny buffer"])
def test_all_bytes_arrive_also_when_daemons_are_killed(site: Site, allowed: str) -> None:
    site.expected_trouble = ("was killed by SIGKILL; what is cached is served on",)
    privileges(site, allowed)
    site.mount("--rw", "--data-path", "relay")
    paths = [site.mountpoint / f"file {number}" for number in range(FILES)]
    with concurrent.futures.ThreadPoolExecutor(FILES) as pool:
        for _ in range(2):
            writes = [
                pool.submit(write, path, content(number)) for number, path in enumerate(paths)
            ]
            kill_daemon(site)
            for written in writes:
                written.result(300)
    for number, path in enumerate(paths):
        assert path.read_bytes() == content(number)
        assert (site.files / path.name).read_bytes() == content(number)


def test_a_large_write_is_one_message(site: Site) -> None:
    site.mount("--rw", "--data-path", "relay")
    before = site.status()["relay"]["forwarded"]
    with (site.mountpoint / "file").open("wb", buffering=0) as file:
        piece = os.urandom(MIB)
        for _ in range(100):
            file.write(piece)
    # Without CAP_NET_ADMIN there are four messages for each MiB.
    assert site.status()["relay"]["forwarded"] < before + 500
