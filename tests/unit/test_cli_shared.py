"""`cachefs shared` before a daemon that only takes notes, and members that are none."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from cachefs.cli import main
from cachefs.cli import shared as shared_module
from cachefs.cli.mounts import one_mount
from cachefs.cli.views.shared import print_shared
from cachefs.control import api
from cachefs.errors import CachefsError
from cachefs.mounts import RuntimeEntry
from cachefs.shared.inspection import Inspection
from tests.servers.ports import free_ports
from tests.servers.told_tcp import ToldTcp
from tests.unit.test_shared_inspection import Claims

HOW = "mount with --shared HOST:PORT, or use cachefs set MOUNTPOINT shared=HOST:PORT"


def member(address: str = "10.0.0.1:11211", **changes: object) -> dict[str, Any]:
    return {
        "address": address,
        "state": "in",
        "share": 0.5,
        "hits": 1200,
        "misses": 34,
        "hit_bytes": 5 << 20,
        "stored_blocks": 7,
        "failures": 0,
        "latency_s": 0.0004,
        "latency_p95_s": 0.0021,
        "problem": None,
    } | changes


def shared(*members: dict[str, Any], **changes: object) -> dict[str, Any]:
    return {
        "from": "dns:cache.example:11211",
        "state": "in use",
        "problem": None,
        "hits": 75,
        "misses": 25,
        "hit_bytes": 3 << 30,
        "waited": 4,
        "stored_blocks": 1,
        "stored_bytes": 1 << 20,
        "dropped_blocks": 2,
        "bad_values": 0,
        "share_kept": 1.0,
        "members": list(members),
    } | changes


Show = Callable[[dict[str, Any] | None], None]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Show:
    """Sets what the daemon of /mnt/a says of its shared tier."""
    report: dict[str, Any] = {}

    def ask(path: Path, route: api.Route, arguments: object, timeout_s: float) -> dict[str, Any]:
        assert (path, route) == (Path("/run/a"), api.STATUS)
        if not report:
            raise CachefsError("no daemon")
        return report

    def entries() -> list[RuntimeEntry]:
        return [RuntimeEntry("/mnt/a", "s3://b", 1, 0.0, alive=True)]

    monkeypatch.setattr(shared_module, "ask", ask)
    monkeypatch.setattr(shared_module, "socket_path", lambda place: Path("/run", place.name))
    monkeypatch.setattr(one_mount, "read_entries", entries)
    return lambda tier: report.update({"mountpoint": "/mnt/a", "shared": tier})


@pytest.fixture
def good() -> Iterator[str]:
    """The address of a member with which nothing is wrong."""
    with ToldTcp(Claims()) as server:
        yield f"127.0.0.1:{server.port}"


@pytest.fixture
def small() -> Iterator[str]:
    """The address of a member that refuses large blocks."""
    with ToldTcp(Claims(item_size_max="1048576")) as server:
        yield f"127.0.0.1:{server.port}"


@pytest.fixture
def dead() -> str:
    """The address of a member that is not there."""
    return f"127.0.0.1:{free_ports(1)[0]}"


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["shared", *args])


def lines_of(*args: str, code: int = 0) -> list[str]:
    result = run(*args)
    assert (result.exit_code, result.stderr) == (code, ""), result.output
    return result.stdout.splitlines()


def error_of(*args: str, code: int) -> str:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    (line,) = result.stderr.splitlines()
    return line.removeprefix("cachefs: error: ")


def test_status_shows_the_tier_and_its_members(show: Show, good: str, dead: str) -> None:
    out = member(dead, state="out", failures=3, problem="it has closed the connection")
    show(shared(member(good), out, share_kept=0.25, bad_values=1))
    lines = lines_of("status", "/mnt/a")
    assert lines[:6] == [
        "SHARED TIER    in use",
        "MEMBERS        2 from dns:cache.example:11211",
        "HITS           75 (3 GiB), 25 misses, hit ratio 75.0%; 4 waited for others",
        "STORED         1 block (1 MiB), 2 dropped",
        "KEPT           25% of the blocks, because it is smaller than the data",
        "BAD VALUES     1 value did not have the right checksum, and were not used",
    ]
    known = [line.split() for line in lines if line.startswith("127.0.0.1:")]
    assert known[0] == [good, *"in 50.0% 1.2k 34 5.0M 7 0 400us 2.1ms".split()]
    assert known[1][:2] == [dead, "OUT"]
    assert known[2] == [good, *"1.6.18 2h 9 4.0M/64M 2.0K/1.0G 10 0".split()]
    assert known[3] == [dead, *"- - - - - - -".split()]
    assert lines[-2] == f"{dead}: it has closed the connection"
    assert lines[-1].startswith(f"{dead}: it can't be reached (Connection refused): ")


def test_status_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    address = "cachefs-memcached-117.cachefs-memcached.cachefs.svc.cluster.local:11211"
    large = member(
        address,
        hits=10**9 - 1,
        misses=10**9 - 1,
        hit_bytes=999 << 40,
        stored_blocks=10**9,
        failures=10**6,
        latency_s=0.0123,
        latency_p95_s=0.0199,
        share=1.0,
        state="out",
    )
    server = Inspection(
        address,
        11211,
        [],
        "1.6.18",
        10**7,
        10**9,
        10**9,
        10**12,
        10**12,
        10**8,
        10**8,
        10**7,
        10**7,
        4096,
        4096,
        2 << 20,
    )
    print_shared(Console(width=80, markup=False), {"shared": shared(large)}, {address: server})
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    shown = "".join(line.split(" ")[0] for line in text.splitlines()[5:])
    assert address in shown


def test_what_a_daemon_says_of_members_cannot_control_the_terminal(show: Show, good: str) -> None:
    show(
        shared(
            member(good, problem="\x1b[2J\nx"), problem="a\x07b" + "c" * 9999, **{"from": "\x1b"}
        )
    )
    text = run("status", "/mnt/a").stdout
    assert all(mark.isprintable() or mark == "\n" for mark in text)
    assert max(map(len, text.splitlines())) < 600


@pytest.mark.parametrize("state", ["bypassed", "off", "no members"])
def test_status_of_a_tier_that_is_not_used(show: Show, state: str) -> None:
    show(shared(state=state, problem="it is slower than the origin"))
    lines = lines_of("status", "/mnt/a")
    assert lines[0] == f"SHARED TIER    {state.upper()}"
    assert lines[-1] == "the shared tier: it is slower than the origin"


def test_status_of_a_mount_without_one(show: Show) -> None:
    show(None)
    assert lines_of("status", "/mnt/a") == [f"/mnt/a has no shared tier; {HOW}"]
    assert json.loads(run("status", "/mnt/a", "--json").stdout) == {"shared": None, "servers": []}


def test_status_as_json(show: Show, good: str) -> None:
    tier = shared(member(good))
    show(tier)
    answer = json.loads("\n".join(lines_of("status", "/mnt/a", "--json")))
    assert answer["shared"] == tier
    assert answer["servers"][0]["version"] == "1.6.18"
    assert answer["servers"][0]["problems"] == []


def test_check_of_good_members(good: str) -> None:
    said = "memcached 1.6.18, with 1 GiB of disk and 64 MiB of memory: nothing is wrong"
    assert lines_of("check", good) == [f"1 member, {said}"]
    assert lines_of("check", f"{good}, {good},") == [f"1 member, {said}"]


def test_check_says_what_is_wrong(good: str, small: str, dead: str) -> None:
    lines = lines_of("check", ",".join([dead, good, small]), code=1)
    assert [line.partition(": ")[0] for line in lines] == [dead, small]
    assert "it can't be reached" in lines[0]
    assert lines[1].endswith("start it with -I 2m")


def test_check_as_json(good: str, small: str) -> None:
    assert json.loads(run("check", good, "--json").stdout)["problems"] == []
    result = run("check", f"{good},{small}", "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert answer["problems"][0].startswith(f"{small}: it refuses values")
    assert [server["item_size_max_bytes"] for server in answer["servers"]] == [2 << 20, 1 << 20]


def test_check_of_a_mount(show: Show, good: str, small: str) -> None:
    show(shared(member(good)))
    assert lines_of("check", "/mnt/a")[0].startswith("1 member, memcached 1.6.18, ")
    show(shared(member(good), member(small), problem="more than half of the members are out"))
    lines = lines_of("check", "/mnt/a", code=1)
    assert lines[0] == "more than half of the members are out"
    assert lines[1].startswith(f"{small}: ")
    assert len(lines) == 2


def test_check_of_a_mount_without_members(show: Show) -> None:
    show(shared(state="no members"))
    assert lines_of("check", "/mnt/a", code=1) == [
        "there are no members in dns:cache.example:11211"
    ]
    show(None)
    assert error_of("check", "/mnt/a", code=1) == f"/mnt/a has no shared tier; {HOW}"


def test_a_daemon_that_does_not_answer(show: Show) -> None:
    assert error_of("status", "/mnt/a", code=1) == "/mnt/a: no daemon"
    assert error_of("check", "/mnt/a", code=1) == "/mnt/a: no daemon"
    assert "is not mounted by cachefs" in error_of("check", "/mnt/b", code=1)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("localhost:x", '"localhost:x" in the list is no member; write HOST:PORT'),
        ("localhost:0", '"localhost:0" in the list has no port'),
        ("a:1,b", '"b" in the list is no member'),
        ("dns:a:1", '"dns:a:1" in the list is no member'),
        ("", "the mountpoint is empty"),
    ],
)
def test_what_is_no_address(target: str, said: str) -> None:
    assert error_of("check", target, code=2).startswith(said)
