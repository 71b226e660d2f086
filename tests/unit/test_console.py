"""The console's tokens and sessions, its guards, and what it costs the daemon."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from cachefs.control import sessions as limits
from cachefs.control.api import Handler, Route
from cachefs.control.console import app
from cachefs.control.console.snapshot import Snapshots
from cachefs.control.exporter import Exporter
from cachefs.control.metrics_server import application
from cachefs.control.sessions import IDLE_S, SESSION_S, TOKEN_S, Sessions
from tests.unit.test_metrics import House

STATIC = Path(app.__file__).with_name("static")
ROOT = Path(__file__).parents[2]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def known(clock: Clock) -> Sessions:
    return Sessions(clock)


# -- tokens and sessions -------------------------------------------------------------------------


def test_a_token_gives_one_session(known: Sessions) -> None:
    token = known.new_token()
    session = known.exchange(token)
    assert session is not None
    assert known.exchange(token) is None
    assert known.is_valid(session)
    assert not known.is_valid(token)
    assert not known.is_valid("")
    known.end(session)
    assert not known.is_valid(session)
    known.end(session)


def test_a_token_is_short_lived(known: Sessions, clock: Clock) -> None:
    first, second = known.new_token(), known.new_token()
    clock.now_s = TOKEN_S - 1
    assert known.exchange(first) is not None
    clock.now_s = TOKEN_S + 1
    assert known.exchange(second) is None


def test_a_session_ends_when_nobody_uses_it(known: Sessions, clock: Clock) -> None:
    session = known.exchange(known.new_token())
    assert session is not None
    for _ in range(3):
        clock.now_s += IDLE_S - 1
        assert known.is_valid(session)
    clock.now_s += IDLE_S + 1
    assert not known.is_valid(session)


def test_a_session_ends_in_any_case(known: Sessions, clock: Clock) -> None:
    session = known.exchange(known.new_token())
    assert session is not None
    while clock.now_s < SESSION_S:
        assert known.is_valid(session)
        clock.now_s += IDLE_S / 2
    clock.now_s += 1
    assert not known.is_valid(session)


def test_their_number_is_bounded(known: Sessions) -> None:
    tokens = [known.new_token() for _ in range(limits._MOST_TOKENS + 1)]
    assert known.exchange(tokens[0]) is None
    given = [known.exchange(known.new_token()) for _ in range(limits._MOST_SESSIONS + 1)]
    valid = [session is not None and known.is_valid(session) for session in given]
    assert valid == [False] + [True] * limits._MOST_SESSIONS


def test_tokens_are_not_kept_as_they_are(known: Sessions) -> None:
    token = known.new_token()
    session = known.exchange(known.new_token())
    kept = repr(vars(known))
    assert token not in kept
    assert str(session) not in kept


# -- guards --------------------------------------------------------------------------------------


def client(
    house: House, address: str = "127.0.0.1", handlers: dict[Route, Handler] | None = None
) -> httpx.AsyncClient:
    """Of the metrics' server, for a browser at `address`."""
    app = application(house.state, handlers or {})
    transport = httpx.ASGITransport(app=app, client=(address, 1234))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_sessions_are_for_browsers_of_the_same_machine() -> None:
    house = House(metrics="node.test:1")
    token = house.state.sessions.new_token()
    for address in ("192.0.2.7", "2001:db8::1", ""):
        async with client(house, address) as far:
            begun = await far.post("/console/session/begin", json={"token": token})
            assert begun.status_code == 403
            assert "ssh -L" in begun.json()["error"]
            assert (await far.get("/console/snapshot")).status_code == 200
    async with client(house) as near:
        begun = await near.post("/console/session/begin", json={"token": token})
        assert begun.status_code == 200
    bearer = {"Authorization": f"Bearer {begun.json()['session']}"}
    async with client(house, "192.0.2.7") as far:
        assert (await far.get("/console/actions/v1", headers=bearer)).status_code == 403
    async with client(house) as near:
        assert (await near.get("/console/actions/v1", headers=bearer)).status_code == 200
        await near.post("/console/session/end", json={"session": begun.json()["session"]})
        assert (await near.get("/console/actions/v1", headers=bearer)).status_code == 401


async def test_the_host_of_the_option_is_own() -> None:
    async with client(House(metrics="node.test:1")) as asked:
        for host, code in (("node.test:9", 200), ("NODE.test", 200), ("other.test", 421)):
            assert (await asked.get("/", headers={"Host": host})).status_code == code


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "http://evil.test", "null", ""])
async def test_an_origin_that_is_another_or_none_is_refused(origin: str) -> None:
    async with client(House()) as asked:
        headers = {"Host": "localhost:9567", "Origin": origin}
        assert (await asked.get("/console/snapshot", headers=headers)).status_code == 403


async def test_only_the_routes_of_the_console_are_there() -> None:
    async def answer(arguments: dict[str, Any]) -> dict[str, Any]:
        return {}

    house = House()
    everything = {Route("POST", "/v1/metadata/import"): answer, app.api.CACHE_EVICT: answer}
    session = house.state.sessions.exchange(house.state.sessions.new_token())
    async with client(house, handlers=everything) as asked:  # type: ignore[arg-type]
        asked.headers["Authorization"] = f"Bearer {session}"
        url = "/console/actions/v1"
        assert (await asked.post(f"{url}/cache/evict", json={})).status_code == 200
        assert (await asked.post(f"{url}/metadata/import", json={})).status_code == 404


# -- cost ----------------------------------------------------------------------------------------


async def test_one_snapshot_a_second_for_all_pages(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    house, computed = House(), 0
    figures = Exporter.figures

    def counted(self: Exporter) -> dict[str, list[list[Any]]]:
        nonlocal computed
        computed += 1
        return figures(self)

    monkeypatch.setattr(Exporter, "figures", counted)
    snapshots = Snapshots(house.state, Exporter(house.state))
    assert computed == 0
    for _ in range(50):
        snapshots.content()
        await trio.sleep(0.1)
    assert computed <= 6
    content = json.loads(snapshots.content())
    assert content["metrics"]["cachefs_cache_hits_total"] == [[[], 7]]


async def test_what_the_browser_has_is_not_sent_again() -> None:
    async with client(House()) as asked:
        first = await asked.get("/console/assets/main.js")
        assert first.headers["content-encoding"] == "gzip"
        assert first.headers["content-type"].startswith("text/javascript")
        again = await asked.get(
            "/console/assets/main.js", headers={"If-None-Match": first.headers["etag"]}
        )
        assert (again.status_code, again.content) == (304, b"")
        assert (await asked.get("/console/assets/uplot-LICENSE")).status_code == 404
        assert (await asked.post("/console/assets/main.js")).status_code == 405


# -- files ---------------------------------------------------------------------------------------


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*src=)", page)
    for path in STATIC.iterdir():
        if path.suffix in {".html", ".css", ".js"} and not path.name.startswith("uplot"):
            text = path.read_text()
            assert not re.search(r"https?://(?!\$)", text), path
            assert not re.search(r"innerHTML|insertAdjacentHTML|\beval\b|document\.write", text)


def test_the_page_names_all_modules() -> None:
    """So that the browser asks for all of them at once."""
    page = (STATIC / "index.html").read_text()
    named = set(re.findall(r"/console/assets/([\w.-]+)", page))
    assert named == {path.name for path in STATIC.iterdir()} - {"index.html", "uplot-LICENSE"}


def test_each_element_that_scripts_use_is_there() -> None:
    page = (STATIC / "index.html").read_text()
    there = set(re.findall(r'\bid="([\w-]+)"', page))
    scripts = "".join(path.read_text() for path in STATIC.glob("*.js") if path.stem != "uplot")
    assert set(re.findall(r'\$\("([\w-]+)"\)', scripts)) <= there
