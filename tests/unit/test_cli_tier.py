"""`cachefs tier` before a daemon that only takes notes."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cachefs.cli import main
from cachefs.cli import tier as tier_module
from cachefs.cli.mounts import one_mount
from cachefs.control import api
from cachefs.control.api import Route
from cachefs.errors import CachefsError
from cachefs.mounts import RuntimeEntry

MIB = 1 << 20


class Daemon:
    """What was asked, and what is answered next."""

    def __init__(self) -> None:
        self.asked: list[tuple[Route, dict[str, Any]]] = []
        self.answer: dict[str, Any] | Exception = {}
        self.alive = True

    def read_entries(self) -> list[RuntimeEntry]:
        return [RuntimeEntry("/mnt/a", "s3://b", 1, 0.0, alive=self.alive)]

    def ask(
        self, path: Path, route: Route, arguments: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        self.asked.append((route, arguments))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Daemon:
    daemon = Daemon()
    monkeypatch.setattr(tier_module, "ask", daemon.ask)
    monkeypatch.setattr(one_mount, "read_entries", daemon.read_entries)
    monkeypatch.setattr(tier_module, "socket_path", lambda place: Path("/run", place.name))
    return daemon


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["tier", *args])


def line_of(*args: str) -> str:
    """The one line that a change prints."""
    result = run(*args)
    assert (result.exit_code, result.stderr) == (0, "")
    (line,) = result.stdout.splitlines()
    return line


def error_of(*args: str, code: int) -> str:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    (line,) = result.stderr.splitlines()
    return line.removeprefix("cachefs: error: ")


def test_resize_says_what_was_and_what_is(daemon: Daemon) -> None:
    daemon.answer = {"before": {"quota_bytes": 1 << 30}, "after": {"quota_bytes": 512 * MIB}}
    line = line_of("resize", "/mnt/a", "/ssd/../ssd/c", "512MiB")
    assert line.startswith("/ssd/c: the quota was 1 GiB and is 512 MiB until the mount ends; ")
    assert "[[tier]]" in line
    assert daemon.asked == [(api.TIER_RESIZE, {"path": "/ssd/c", "quota_bytes": 512 * MIB})]


def test_add_sends_what_was_given(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = {"path": "/new", "medium": "HDD", "quota_bytes": 1 << 30, "cached_blocks": 0}
    daemon.answer = {"after": after}
    options = ["--medium", "hdd", "--high", "90%", "--free-space-ratio", "0", "--pin-limit", "1"]
    line = line_of("add", "/mnt/a", "/new", "--size", "1GiB", *options)
    assert line.startswith("/new: added as HDD tier of 1 GiB, until the mount ends; ")
    ratios = {"high": 0.9, "free_space_ratio": 0.0, "pin_limit": 1.0}
    given = {"medium": "HDD", "path": "/new", "quota_bytes": 1 << 30, **ratios}
    assert daemon.asked == [(api.TIER_ADD, given)]
    after["cached_blocks"] = 9
    monkeypatch.chdir(tmp_path)
    assert ", with 9 blocks, until" in line_of("add", "/mnt/a", "new", "--size", "64MiB")
    given = {"medium": "SSD", "path": str(tmp_path / "new"), "quota_bytes": 64 * MIB}
    assert daemon.asked[1] == (api.TIER_ADD, given)


def test_remove_says_that_the_directory_stays(daemon: Daemon) -> None:
    daemon.answer = {"before": {"path": "/ssd"}}
    line = line_of("remove", "/mnt/a", "/ssd")
    assert line.startswith("/ssd: taken out of the cache until the mount ends; ")
    assert line.endswith("its directory is left there")
    assert daemon.asked == [(api.TIER_REMOVE, {"path": "/ssd"})]


def test_what_the_daemon_refuses_is_told_with_the_mount(daemon: Daemon) -> None:
    daemon.answer = CachefsError("/ssd is no tier of this mount")
    assert error_of("remove", "/mnt/a", "/ssd", code=1) == "/mnt/a: /ssd is no tier of this mount"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["resize", "/mnt/a", "/ssd"], "missing argument 'SIZE'"),
        (["resize", "/mnt/a", "/ssd", "lots"], "'SIZE': \"lots\" is not a size"),
        (["resize", "/mnt/a", "/ssd", "-1"], "no such option"),
        (["resize", "/mnt/a", "", "1GiB"], 'PATH: "" is not a path'),
        (["resize", "", "/ssd", "1GiB"], "the mountpoint is empty"),
        (["add", "/mnt/a", "/ssd"], "missing option '--size'"),
        (["add", "/mnt/a", "/ssd", "--size", "1GiB", "--medium", "tape"], "'tape' is not one of"),
        (
            ["add", "/mnt/a", "/ssd", "--size", "1GiB", "--low", "2"],
            "'--low': \"2\" is not a ratio",
        ),
        (["list"], "missing argument 'MOUNTPOINT'"),
        (["explode"], "no such command 'explode'"),
    ],
)
def test_nonsense_is_told_in_one_line(daemon: Daemon, args: list[str], said: str) -> None:
    assert said in error_of(*args, code=2)
    assert daemon.asked == []


def test_a_mount_that_is_not_there(daemon: Daemon) -> None:
    daemon.alive = False
    assert "/mnt/a is not mounted by cachefs" in error_of("list", "/mnt/a", code=1)
    assert "/mnt/a is not mounted by cachefs" in error_of("remove", "/mnt/a", "/x", code=1)


def test_no_command_shows_the_help() -> None:
    result = run()
    assert result.exit_code == 2
    for name in ("list", "resize", "add", "remove"):
        assert f"\n  {name} " in result.stderr
        assert run(name, "--help").exit_code == 0
