"""Mounts with `--passthrough auto`: whether OPEN is answered, and what `cachefs status` says.
tests/relay/test_opens.py has the kernel's side."""

import os
import platform
import signal

import pytest

from cachefs.fuse import relay
from tests.mount.harness import Site, eventually

RELAY = ("--data-path", "relay")
AUTO = (*RELAY, "--passthrough", "auto")
KILLED = "was killed by SIGKILL"

needs_linux_6_9 = pytest.mark.skipif(
    tuple(map(int, platform.release().split(".")[:2])) < (6, 9), reason="needs Linux 6.9"
)
if relay.why_not() is not None:
    pytest.skip(str(relay.why_not()), allow_module_level=True)


@pytest.fixture
def small(site: Site) -> Site:
    (site.files / "small").write_bytes(b"content")
    return site


def line_of(site: Site) -> str:
    """The line of `cachefs status MOUNTPOINT`; empty if it has none."""
    lines = site.cli("status", site.mountpoint).stdout.splitlines()
    return next((line for line in lines if line.startswith("PASSTHROUGH")), "")


@needs_linux_6_9
def test_opens_are_answered_and_the_status_says_so(small: Site) -> None:
    small.mount(*AUTO)
    path = small.mountpoint / "small"
    assert [path.read_bytes() for _ in range(3)] == [b"content"] * 3
    assert small.status()["passthrough"] == {
        "wanted": True,
        "opens": 3,
        "passed_through": 0,
        "obstacle": None,
    }
    assert line_of(small) == "PASSTHROUGH    on: 0 of 3 opens went to the cache disk directly"
    small.cli("set", small.mountpoint, "limit-uid=1000=1MiB")
    assert "not now: off because of --limit-uid" in line_of(small)

    with path.open("rb", buffering=0) as file:
        small.expected_trouble = (KILLED,)
        before = small.status()["pid"]
        os.kill(before, signal.SIGKILL)
        eventually(lambda: path.read_bytes() == b"content" and line_of(small) != "")
        assert file.read() == b"content"
    assert small.status()["pid"] != before
    assert small.status()["passthrough"]["opens"] >= 5
    assert "not now: off because of --limit-uid" in line_of(small)
    small.cli("set", small.mountpoint, "limit-uid=1000=0")
    assert line_of(small).startswith("PASSTHROUGH    on: 0 of ")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        pytest.param(RELAY, "", id="training"),
        pytest.param((*AUTO, "--rw"), "not now: the mount is writable", id="writable"),
    ],
)
def test_other_mounts_answer_no_open(small: Site, options: tuple[str, ...], why: str) -> None:
    small.mount(*options)
    assert (small.mountpoint / "small").read_bytes() == b"content"
    assert small.status()["passthrough"]["opens"] == 0
    assert why in line_of(small)
