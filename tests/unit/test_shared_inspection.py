"""`inspect` before services that only claim to be memcached, and before real ones."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.shared.inspection import (
    LEAST_ITEM_BYTES,
    Inspection,
    inspect,
    inspect_all,
)
from tests.servers.memcached import Memcached, flags, memcached_binary
from tests.servers.ports import free_ports
from tests.servers.told_tcp import Answer, ToldTcp

LONG_S = 60.0
SHORT_S = 0.3

STATS = {
    "pid": "1",
    "uptime": "7200",
    "version": "1.6.18",
    "max_connections": "4096",
    "curr_connections": "10",
    "rejected_connections": "0",
    "limit_maxbytes": "67108864",
    "bytes": "3000",
    "slab_global_page_pool": "60",
    "curr_items": "12",
    "evictions": "0",
    "extstore_bytes_used": "2000",
    "extstore_limit_maxbytes": "1073741824",
    "extstore_objects_used": "9",
    "extstore_objects_evicted": "3",
}
SETTINGS = {"item_size_max": "2097152", "evictions": "on", "ext_item_age": "0"}


def listed(stats: dict[str, str]) -> bytes:
    lines = [f"STAT {name} {value}\r\n" for name, value in stats.items()]
    return "".join([*lines, "END\r\n"]).encode("latin-1")


class Claims:
    """What a service says of itself."""

    def __init__(self, version: str = "1.6.18", **stats: str | None) -> None:
        """`stats` with the names of `SETTINGS`, and others; `evictions` is a counter here."""
        given = {name: value for name, value in (STATS | stats).items() if value is not None}
        named = [name for name in given if name not in STATS and name in SETTINGS]
        settings = {name: given.pop(name) for name in named}
        self.answers: dict[bytes, Answer] = {
            b"version": f"VERSION {version}\r\n".encode(),
            b"stats": listed(given),
            b"stats settings": listed(SETTINGS | settings),
            b"mn": b"MN\r\n",
        }

    def __call__(self, line: bytes) -> Answer:
        return self.answers.get(line, b"ERROR\r\n")


def seen(answer: object, timeout_s: float = LONG_S, greeting: bytes = b"") -> Inspection:
    with ToldTcp(answer, greeting) as server:  # type: ignore[arg-type]
        found = inspect("127.0.0.1", server.port, timeout_s)
    assert (found.host, found.port) == ("127.0.0.1", server.port)
    for problem in found.problems:
        assert problem.isprintable()
        assert len(problem) < 300
    return found


def problem_of(answer: object, timeout_s: float = LONG_S, greeting: bytes = b"") -> str:
    (problem,) = seen(answer, timeout_s, greeting).problems
    return problem


def test_a_good_member() -> None:
    found = seen(Claims())
    assert found == Inspection(
        "127.0.0.1",
        found.port,
        [],
        version="1.6.18",
        uptime_s=7200,
        memory_used_bytes=4 << 20,
        memory_limit_bytes=64 << 20,
        disk_used_bytes=2000,
        disk_limit_bytes=1 << 30,
        items=12,
        disk_items=9,
        evictions=0,
        disk_evictions=3,
        connections=10,
        connections_max=4096,
        item_size_max_bytes=2 << 20,
    )


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("1.5.22", "its version 1.5.22 is too old: install memcached 1.6.17 or a later one"),
        ("1.6.9", "is too old"),
        ("1.4.0-rc1", "its version 1.4.0-rc1 is too old"),
        ("1.6.10", "often refuses blocks of 1 MiB"),
        ("1.6.16_beta+git", "often refuses blocks of 1 MiB"),
    ],
)
def test_old_versions(version: str, said: str) -> None:
    found = seen(Claims(version))
    assert found.version == version
    assert [said in problem for problem in found.problems] == [True]


@pytest.mark.parametrize("version", ["1.6.17", "1.6.40", "1.10.0", "2.0.0"])
def test_new_versions(version: str) -> None:
    assert seen(Claims(version)).problems == []


@pytest.mark.parametrize(
    ("stats", "said"),
    [
        ({"extstore_limit_maxbytes": None}, "it has no extstore"),
        ({"extstore_limit_maxbytes": "0"}, "-o ext_path=FILE:SIZE"),
        ({"item_size_max": "1048576"}, "it refuses values above 1 MiB, but blocks have up to 1 M"),
        ({"item_size_max": str(LEAST_ITEM_BYTES - 1)}, "start it with -I 2m"),
        ({"max_connections": "100"}, "it allows only 100 connections"),
        ({"curr_connections": "4000"}, "it has 4000 connections of at most 4096"),
        ({"rejected_connections": "5"}, "it has refused 5 connections"),
        ({"evictions": "77"}, "it has dropped 77 items from memory"),
        ({"ext_item_age": "4294967295"}, "start it with -o ext_item_age=0"),
    ],
)
def test_what_can_be_wrong(stats: dict[str, str | None], said: str) -> None:
    assert said in problem_of(Claims(**stats))


def test_several_things_are_wrong() -> None:
    assert (
        len(seen(Claims("1.6.12", item_size_max="1000", extstore_limit_maxbytes=None)).problems)
        == 3
    )


def test_memory_without_extstore() -> None:
    assert seen(Claims(extstore_limit_maxbytes=None)).memory_used_bytes == 3000


def test_stats_extstore_is_never_asked() -> None:
    """It ends a memcached before 1.6.10 that has no extstore."""
    with ToldTcp(Claims()) as server:
        inspect("127.0.0.1", server.port, LONG_S)
    assert server.asked == [b"version", b"stats", b"stats settings", b"mn"]


def test_an_unreachable_member() -> None:
    (port,) = free_ports(1)
    (problem,) = inspect("127.0.0.1", port, LONG_S).problems
    assert problem.startswith("it can't be reached (Connection refused): ")
    (problem,) = inspect("no-such-member.invalid", 1, LONG_S).problems
    assert problem.startswith("it can't be reached (")
    (problem,) = inspect("a" * 70 + ".b", 1, LONG_S).problems
    assert problem.startswith(("its name is no name", "it can't be reached ("))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n\r\n<html>", '"HTTP/1.1 400 Bad Request"'),
        (b"-ERR unknown command 'version'\r\n", "it is no memcached"),
        (b"\x1b[31m\0\xff\n", "it is no memcached"),
        (b"VERSION 1.6.18\r\nEND\r\n", "it is no memcached"),
        (b"VERSION evil\r\n", "it is no memcached"),
        (b"VERSION 99999999999999999999.1.1\r\n", "it is no memcached"),
        (b"VERSION 1.6.18" + b"x" * 4000 + b"\r\n", "it is no memcached"),
        (b"ERROR\r\n", 'it says "ERROR"'),
        (b"\r\n", "it is no memcached"),
        (b"CLIENT_ERROR unauthenticated\r\n", "it demands a password"),
        (b"ERROR Too many open connections\r\n", "as many connections as it allows"),
        (None, "it closes the connection without an answer"),
    ],
)
def test_another_service(answer: bytes | None, said: str) -> None:
    assert said in problem_of(lambda line: answer)


@pytest.mark.parametrize("command", [b"stats", b"stats settings", b"mn"])
@pytest.mark.parametrize(
    "answer",
    [
        b"ERROR\r\n",
        b"SERVER_ERROR \x1b[2J\r\n",
        b"nonsense\r\nEND\r\n",
        b"STAT \x1b 1\r\nEND\r\n",
        b"STAT a 1\nEND\r\n",
        None,
    ],
)
def test_a_service_that_answers_only_the_first_question(
    command: bytes, answer: bytes | None
) -> None:
    claims = Claims()
    claims.answers[command] = answer
    found = seen(claims)
    assert len(found.problems) == 1


@pytest.mark.parametrize("value", ["-1", "1e9", "9" * 50, "", "²", "0x10"])
def test_numbers_that_are_none(value: str) -> None:
    claims = Claims(bytes=value, limit_maxbytes=value, uptime=value)
    found = seen(claims)
    assert (found.memory_used_bytes, found.memory_limit_bytes, found.uptime_s) == (None,) * 3


def test_silence() -> None:
    problem = problem_of(lambda line: b"", SHORT_S)
    assert problem.startswith("it does not answer within 0.3 s: ")
    claims = Claims()
    claims.answers[b"stats"] = b"STAT pid 1\r\n"
    assert problem_of(claims, SHORT_S).startswith("it does not answer within 0.3 s: ")


def test_a_line_without_an_end() -> None:
    assert '"nonsense"' in problem_of(lambda line: b"nonsense", SHORT_S)


def endless(piece: bytes, pause_s: float = 0.0) -> Iterator[bytes]:
    for _ in itertools.count():
        time.sleep(pause_s)
        yield piece


@pytest.mark.parametrize("command", [b"version", b"stats", b"stats settings"])
@pytest.mark.parametrize("piece", [b"x" * 5000, b"STAT a 1\r\n" * 500, b"\0" * 5000])
def test_endless_answers(command: bytes, piece: bytes) -> None:
    claims = Claims()
    claims.answers[command] = endless(piece)
    assert "it is no memcached" in problem_of(claims)


def test_an_endless_answer_that_comes_slowly() -> None:
    claims = Claims()
    claims.answers[b"stats"] = endless(b"STAT a 1\r\n", 0.01)
    began_at = time.monotonic()
    assert problem_of(claims, SHORT_S).startswith("it does not answer within 0.3 s: ")
    assert time.monotonic() - began_at < 30


def test_a_service_that_speaks_first() -> None:
    assert '"220 mail.example"' in problem_of(
        lambda line: b"500 what?\r\n", greeting=b"220 mail.example\r\n"
    )


def test_many_members_keep_their_order() -> None:
    with ToldTcp(Claims()) as good, ToldTcp(lambda line: b"") as silent:
        places = [("127.0.0.1", port) for port in [good.port, silent.port, *free_ports(1)] * 20]
        found = inspect_all(places, SHORT_S * 3)
    assert [(one.host, one.port) for one in found] == places
    assert [bool(one.problems) for one in found[1::3]] == [True] * 20
    assert all("can't be reached" in one.problems[0] for one in found[2::3])
    assert inspect_all([], SHORT_S) == []


def test_a_silent_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(*_: object) -> None:
        time.sleep(3)
        raise OSError

    monkeypatch.setattr("socket.create_connection", stuck)
    (found,) = inspect_all([("a.example", 11211)], 0.1)
    assert found.problems == ["its name was not found in time: see to the name server"]


@pytest.fixture
def needs_memcached() -> None:
    if memcached_binary() is None:
        pytest.skip("memcached is missing: apt-get install memcached")


def real(directory: Path, *arguments: str) -> Inspection:
    with Memcached(directory, arguments or None) as member:
        return inspect("127.0.0.1", member.port, LONG_S)


@pytest.mark.server
@pytest.mark.usefixtures("needs_memcached")
def test_a_real_member(tmp_path: Path) -> None:
    with Memcached(tmp_path) as member:
        block = b"x" * (1 << 20)
        stored = member.ask(b"ms a %d\r\n%b" % (len(block), block))
        assert stored == b"HD\r\n"
        found = inspect("127.0.0.1", member.port, LONG_S)
    assert found.problems == []
    assert found.items == 1
    assert found.memory_limit_bytes == 64 << 20
    assert found.disk_limit_bytes == 256 << 20
    assert found.item_size_max_bytes == 2 << 20
    assert found.connections_max == 4096
    assert found.uptime_s is not None


@pytest.mark.server
@pytest.mark.usefixtures("needs_memcached")
@pytest.mark.parametrize(
    ("remove", "add", "said"),
    [
        (["-o"], [], "it has no extstore"),
        (["-I"], [], "it refuses values above 1 MiB"),
        (["-c"], ["-c", "50"], "it allows only 50 connections"),
        (["-o"], ["-o", "ext_path={}/e:256M"], "start it with -o ext_item_age=0"),
        ([], ["-M"], "start it without -M"),
    ],
)
def test_real_members_with_other_flags(
    tmp_path: Path, remove: list[str], add: list[str], said: str
) -> None:
    arguments = flags(tmp_path)
    for flag in remove:
        at = arguments.index(flag)
        del arguments[at : at + 2]
    found = real(tmp_path, *arguments, *(word.format(tmp_path) for word in add))
    assert [said in problem for problem in found.problems] == [True]


@pytest.mark.server
@pytest.mark.usefixtures("needs_memcached")
def test_a_real_member_that_demands_a_password(tmp_path: Path) -> None:
    (tmp_path / "users").write_text("user:secret\n")
    found = real(tmp_path, *flags(tmp_path), "-Y", str(tmp_path / "users"))
    assert ["it demands a password" in problem for problem in found.problems] == [True]


@pytest.mark.server
@pytest.mark.usefixtures("needs_memcached")
def test_a_real_member_that_is_stopped(tmp_path: Path) -> None:
    with Memcached(tmp_path) as member:
        member.pause()
        (problem,) = inspect("127.0.0.1", member.port, SHORT_S).problems
        assert problem.startswith("it does not answer within 0.3 s: ")
        member.go_on()
        assert inspect("127.0.0.1", member.port, LONG_S).problems == []


@pytest.mark.server
@pytest.mark.usefixtures("needs_memcached")
def test_a_real_member_that_is_started_again(tmp_path: Path) -> None:
    with Memcached(tmp_path) as member:
        before = member.port, member.pid
        member.kill()
        (problem,) = inspect("127.0.0.1", member.port, LONG_S).problems
        assert problem.startswith("it can't be reached (Connection refused)")
        member.start()
        assert member.port == before[0]
        assert member.pid != before[1]
        assert member.stats()["curr_items"] == "0"
