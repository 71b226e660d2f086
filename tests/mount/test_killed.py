"""Whoever waits for an answer that never comes can be killed, and is not disturbed by less."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachefs.fuse import relay
from tests.mount.harness import MIB, Site, eventually

PATIENCE_S = 180
"""Far below the time after which the origin would answer, which is never."""

HANGING_ORIGIN = """
from cachefs.fuse.relay import _relay  # before libfuse
import pathlib
import trio
from cachefs.origin.resilience.resilient import ResilientOrigin

def hang_on(name, asked):
    plain = getattr(ResilientOrigin, name)
    async def pages():
        pathlib.Path({marks!r}, asked).touch()
        await trio.sleep_forever()
        yield []
    async def one():
        async for _ in pages():
            pass
    def maybe(self, *args):
        if not any(asked in arg for arg in args if isinstance(arg, str)):
            return plain(self, *args)
        return pages() if name == "list_dir" else one()
    setattr(ResilientOrigin, name, maybe)

hang_on("stat", "no-stat")
hang_on("stat_and_read", "no-stat")
hang_on("list_dir", "no-list")
hang_on("read_in_turn", "no-read")
"""

WAYS = {
    "stat": ("no-stat", "libc.access(path, 0)"),
    "list": ("no-list", "os.listdir(path)"),
    "read": ("no-read", "os.read(os.open(path, os.O_RDONLY), 100)"),
    "direct": (
        "no-read",
        "os.preadv(os.open(path, os.O_RDONLY | os.O_DIRECT), [mmap.mmap(-1, 3 << 20)], 0)",
    ),
    "mapped": (
        "no-read",
        "os.posix_fadvise(fd := os.open(path, 0), 0, 0, 1); mmap.mmap(fd, 0, prot=1)[5000]",
    ),
}


@pytest.fixture(scope="module", params=["relay", "python"])
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    if request.param == "relay" and relay.why_not() is not None:
        pytest.skip(f"no relay: {relay.why_not()}")
    root: Path = tmp_path_factory.mktemp(request.param)
    site = Site(root)
    (root / "sitecustomize.py").write_text(HANGING_ORIGIN.format(marks=str(root)))
    site.environment = {"PYTHONPATH": str(root)}
    (site.files / "no-list").mkdir()
    for number in range(len(WAYS)):
        (site.files / f"no-read-{number}").write_bytes(b"x" * 3 * MIB)
    site.mount("--data-path", request.param)
    yield site
    # A request that the origin never answers may keep the file system after it was unmounted.
    site.signal(signal.SIGTERM)
    site.tear_down()


@contextmanager
def waiting(site: Site, way: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process whose request the origin does not answer."""
    asked, code = WAYS[way]
    files = {"list": asked, "stat": f"{asked}-{time.monotonic_ns()}"}  # or it joins the one before
    name = files.get(way, f"{asked}-{list(WAYS).index(way)}")
    mark = site.files.parent / asked
    mark.unlink(missing_ok=True)
    program = (
        "import ctypes, mmap, os, signal, sys\n"
        "libc = ctypes.CDLL(None)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: None)\n"
        "path = os.fsencode(sys.argv[1])\n"
        f"{code}\n"
    )
    process = subprocess.Popen([sys.executable, "-S", "-E", "-c", program, site.mountpoint / name])
    try:
        eventually(mark.exists, PATIENCE_S)
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_process_ends(site: Site, way: str) -> None:
    with waiting(site, way) as process:
        began = time.monotonic()
        process.kill()
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        print(f"{way}: gone after {1000 * (time.monotonic() - began):.0f} ms")


def test_a_signal_that_ends_nothing_disturbs_nobody(site: Site) -> None:
    """A file system on a disk knows no EINTR; programs whose runtime sends signals to itself would
    fail. Who is killed later ends all the same."""
    with waiting(site, "stat") as process:
        for _ in range(3):
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.1)  # if it were wrong this is how long it might take
            assert process.poll() is None
        process.terminate()
        assert process.wait(PATIENCE_S) == -signal.SIGTERM
    assert os.path.ismount(site.mountpoint)
