"""The console in a real browser: what it shows, who may see and do what, and what it costs."""

import json
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cachefs.control import api
from cachefs.control.client import ask
from cachefs.control.console.app import ROUTES
from cachefs.control.console.guard import HEADERS
from cachefs.mounts import socket_path
from tests.mount.harness import Site, eventually
from tests.servers.chromium import Browser, Page, find_browser
from tests.servers.ports import free_ports

AXE = Path(__file__).parents[2] / ".build/axe.min.js"
"""From `scripts/fetch`."""
MOST_BYTES = 300_000
FIRST_PAINT_MS = 10_000
"""Ten times the bar."""
SIGNED_IN = "document.querySelectorAll('#files tr').length"
SHOWN = "document.querySelector('#state-text').innerText === 'Serving'"
NONE = "\N{EN DASH}"
SECRET = "only-for-its-owner"

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no chromium-headless-shell here")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A mount that all tests use, with names of its own for each test that changes something."""
    site = Site(tmp_path_factory.mktemp("console"))
    noise = random.Random(1)
    for number in range(6):
        for name in (f"train/{number}", f"hot/{number}", f"{SECRET}/{number}"):
            (site.files / name).parent.mkdir(exist_ok=True)
            (site.files / name).write_bytes(noise.randbytes(100_000))
    (site.files / "deep/below").mkdir(parents=True)
    (site.files / "deep/below/file").write_bytes(b"x" * 1000)
    (site.files / "odd ünïcödé <b>&amp; 🙂").write_bytes(b"x")
    site.mount("--mem-size", "64MiB", "--mem-dir", site.cache.with_name("mem"))
    for path in (site.mountpoint / "train").iterdir():
        path.read_bytes()
    site.wait_until_stored(6)
    yield site
    site.tear_down()


def address(site: Site) -> str:
    return f"http://{site.status()['metrics']}"


def link(site: Site) -> str:
    """A link with a new token."""
    return site.cli("console", site.mountpoint, "--no-browser").stdout.strip()


@pytest.fixture
def page(browser: Browser, mounted: Site) -> Iterator[Page]:
    """A page with a session. Nothing on it has failed at the end."""
    with browser.page() as page:
        page.open(link(mounted))
        page.wait(SIGNED_IN)
        page.wait(SHOWN)
        yield page
        assert page.errors == []


def get(url: str, **headers: str) -> httpx.Response:
    return httpx.get(url, headers=headers, trust_env=False, timeout=300)


def post(url: str, body: Any = None, **headers: str) -> httpx.Response:
    return httpx.post(url, json=body or {}, headers=headers, trust_env=False, timeout=300)


def metrics(site: Site) -> dict[tuple[str, tuple[str, ...]], float]:
    """What `/metrics` says, by name and values of the labels."""
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(get(f"{address(site)}/metrics").text)
        for sample in family.samples
    }


# -- figures -------------------------------------------------------------------------------------


def figures(site: Site) -> dict[tuple[str, tuple[str, ...]], float]:
    """What the console's snapshot says, in the form of `metrics`."""
    snapshot = get(f"{address(site)}/console/snapshot").json()
    found = {}
    for name, pairs in snapshot["metrics"].items():
        for labels, value in pairs:
            if not isinstance(value, dict):
                found[name, tuple(sorted(labels))] = value
                continue
            bounds = [*map(repr, snapshot["bounds_s"]), "+Inf"]
            for bound, count in zip(bounds, value["cumulated"], strict=True):
                found[f"{name}_bucket", tuple(sorted((*labels, bound)))] = count
            found[f"{name}_sum", tuple(sorted(labels))] = value["sum"]
            found[f"{name}_count", tuple(sorted(labels))] = value["cumulated"][-1]
    return found


def test_figures_are_those_of_metrics(mounted: Site) -> None:
    differing: set[object] = set()

    def equal() -> bool:
        wanted = {
            (name, tuple(sorted(labels))): value
            for (name, labels), value in metrics(mounted).items()
        }
        shown = figures(mounted)
        assert shown.keys() == wanted.keys()
        differing.clear()
        differing.update(key for key in wanted if wanted[key] != shown[key])
        return {name for name, _ in differing} <= {  # type: ignore[misc]
            "process_cpu_seconds_total",
            "process_resident_memory_bytes",
        }

    eventually(equal)


def test_the_page_shows_the_figures(page: Page, mounted: Site) -> None:
    text = page.text("#tiers")
    found = metrics(mounted)
    for path in (mounted.cache, mounted.cache.with_name("mem")):
        assert str(path) in text
    sent = sum(n for (name, _), n in found.items() if name == "cachefs_origin_requests_total")
    shown = "document.querySelector('#origin div:nth-child(2) dd').innerText.replace(',', '')"
    page.wait(f"Number({shown}) >= {int(sent)}")
    assert "600,000" not in text
    assert "586 KiB" in text, "what was stored: 6 files of 100,000 bytes"
    path = mounted.mountpoint / "hot/0"
    page.wait("document.querySelector('#t-hit-more').innerText !== ''")
    path.read_bytes()
    page.wait("document.querySelector('#chart-latency tbody td').innerText.includes('s')")
    page.wait("document.querySelector('#chart-throughput canvas')")
    assert page.text("#mountpoint") == str(mounted.mountpoint)


# -- who may see and do what ---------------------------------------------------------------------


def test_without_a_session_there_are_no_names_and_no_actions(
    browser: Browser, mounted: Site
) -> None:
    url = address(mounted)
    for route in ROUTES:
        answer = httpx.request(
            route.method, f"{url}/console/actions{route.path}", trust_env=False, timeout=300
        )
        assert answer.status_code == 401, route
        for authorization in ("Bearer", "Bearer wrong", "Basic eDp5"):
            answer = post(f"{url}/console/actions/v1/cache/evict", Authorization=authorization)
            assert answer.status_code == 401
    mounted.cli("load", mounted.mountpoint / SECRET)
    with browser.page() as page:
        page.open(url)
        page.wait(SHOWN)
        page.wait("document.querySelectorAll('#jobs tr').length")
        assert f"cachefs console {mounted.mountpoint}" in page.text("#locked")
        for selector in (".owner", "#end-session"):
            assert page.evaluate(
                f"[...document.querySelectorAll('{selector}')].every(e => !e.checkVisibility())"
            )
        assert SECRET not in page.evaluate("document.documentElement.outerHTML")
    for path in ("/", "/metrics", "/console/snapshot", "/console/mounts"):
        assert SECRET not in get(url + path).text


def test_a_token_works_once(browser: Browser, mounted: Site) -> None:
    given = link(mounted)
    url, _, token = given.partition("#token=")
    with browser.page() as page:
        page.open(given)
        page.wait(SIGNED_IN)
        assert page.evaluate("location.href") == url, "the token is not in the history"
        page.send("Page.reload")
        page.wait(SIGNED_IN)
        page.click("#end-session")
        page.wait("!document.body.classList.contains('signed-in')")
        assert page.evaluate("sessionStorage.length") == 0
        assert SECRET not in page.evaluate("document.body.outerHTML")
    assert post(f"{url}console/session/begin", {"token": token}).status_code == 403
    for wrong in (token[:-1], "", "é" * 40, "\udcff"):
        body = json.dumps({"token": wrong})
        answer = httpx.post(f"{url}console/session/begin", content=body, trust_env=False)
        assert answer.status_code == 403
    assert post(f"{url}console/session/begin", {"token": 5}).status_code == 400
    long = httpx.post(f"{url}console/session/begin", content=b"x" * (2 << 20), trust_env=False)
    assert long.status_code == 413
    with browser.page() as page:
        page.open(given)
        page.wait("document.querySelector('#notice').innerText.includes('used already')")
        assert page.errors
        assert all("403" in error for error in page.errors)


def test_a_session_that_has_ended(browser: Browser, mounted: Site) -> None:
    with browser.page() as page:
        page.open(link(mounted))
        page.wait(SIGNED_IN)
        page.evaluate("sessionStorage.setItem('cachefs-session', 'another')")
        page.click("#files button.link")
        page.wait("document.querySelector('#notice').innerText.includes('session has ended')")
        page.wait("!document.body.classList.contains('signed-in')")


def test_only_own_hosts_and_pages_get_answers(browser: Browser, mounted: Site) -> None:
    url = address(mounted)
    port = url.rpartition(":")[2]
    for path in ("/", "/console/snapshot", "/console/assets/main.js", "/console/session/begin"):
        for host in (
            "evil.test",
            f"evil.test:{port}",
            "127.0.0.1.evil.test",
            "10.0.0.1",
            "",
            "[::",
        ):
            assert get(url + path, Host=host).status_code == 421, (path, host)
    for host in (f"localhost:{port}", "LOCALHOST", "127.0.0.1", "127.9.9.9:1", "[::1]:80"):
        assert get(url, Host=host).status_code == 200, host
    assert get(url, Origin="http://evil.test").status_code == 403
    assert get(url, Origin="null").status_code == 403
    assert get(url, Origin=url).status_code == 200
    with browser.page() as page:  # a name of another site, that leads to this machine
        page.open(f"http://rebound.test:{port}/")
        assert "answers only to localhost" in page.text("body")
        page.open(f"http://rebound.test:{port}/console/snapshot")
        assert "cachefs_" not in page.text("body")
    for path in ("/", "/console/nothing", "/console/assets/uplot.css", "/console/snapshot"):
        headers = get(url + path).headers
        assert {name: headers.get(name) for name in HEADERS} == HEADERS, path
        assert "access-control-allow-origin" not in headers
    assert get(f"{url}/console/assets/..%2fapp.py").status_code == 404


# -- the page ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_it(browser: Browser, mounted: Site, width: int, scheme: str) -> None:
    with browser.page(width, 900, scheme) as page:
        for url in (address(mounted), link(mounted)):
            page.open("about:blank")
            page.open(url)
            page.wait(SHOWN)
            page.wait("document.querySelectorAll('#chart-flight canvas').length")
            if "#" in url:
                page.wait(SIGNED_IN)
            page.evaluate(f"{AXE.read_text()};0")
            found = page.evaluate(
                "axe.run().then(r => r.violations.map(v => `${v.impact} ${v.id}: "
                "${v.nodes.map(n => n.html + n.failureSummary).join('\\n')}`))"
            )
            assert found == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.errors == []


def test_it_is_small_and_needs_no_other_server(browser: Browser, mounted: Site) -> None:
    url = address(mounted)
    with browser.page() as page:
        page.open(url)
        page.wait(SHOWN)
        page.wait("performance.getEntriesByName('first-contentful-paint').length")
        paint_ms = page.evaluate(
            "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        )
        print(f"first paint after {paint_ms:.0f} ms, {page.received_bytes:,} bytes")
        assert paint_ms < FIRST_PAINT_MS
        assert 10_000 < page.received_bytes < MOST_BYTES
        assert [asked for asked in page.urls if not asked.startswith(f"{url}/")] == []
        assert page.errors == []


def test_the_keyboard_is_enough(page: Page, mounted: Site) -> None:
    focused = "document.activeElement"
    page.press("Tab")
    assert page.evaluate(f"{focused}.innerText") == "Skip to the figures"
    page.evaluate(
        "window.changed = new Promise(done =>"
        " addEventListener('hashchange', () => setTimeout(done)));0"
    )
    page.press("Enter")
    page.wait(f"{focused}.id === 'main'")
    page.evaluate("window.changed.then(() => 0)")
    listed = sum("cache/names" in url for url in page.urls)
    assert listed == 1, "a new place in the page must not open the top directory again"

    def tab_to(selector: str) -> None:
        for _ in range(60):
            page.press("Tab")
            if page.evaluate(f"{focused}.matches({json.dumps(selector)})"):
                return
        raise AssertionError(f"no way to {selector}")

    tab_to("#files button.link")
    assert page.evaluate(f"{focused}.innerText") == "deep/"
    page.press("Enter")
    page.wait("document.querySelector('#crumbs').innerText.includes('deep')")
    page.wait(f"{focused}.getAttribute('aria-current') === 'page'")
    tab_to("#files input")
    page.press("Space")
    assert page.text("#selected") == "1 selected"
    assert page.evaluate("!document.querySelector('[data-action=evict]').disabled")


def choose(page: Page, name: str) -> None:
    """Select one name of the directory that is open, and no other."""
    page.wait(f"[...document.querySelectorAll('#files input')].some(e => e.value === '{name}')")
    page.evaluate(
        "for (const e of document.querySelectorAll('#files input')) "
        f"if (e.checked !== (e.value === '{name}')) e.click()"
    )


def cell(name: str, number: int) -> str:
    """The text of a cell of a name, in JavaScript."""
    return (
        f"[...document.querySelectorAll('#files tr')].find(r => r.cells[1].innerText === '{name}/')"
        f"?.cells[{number}].innerText"
    )


def test_load_pin_and_evict(page: Page, mounted: Site) -> None:
    done = "document.querySelector('#files-said').innerText"
    choose(page, "hot")
    page.click("[data-action=load]")
    page.wait(f"{done}.includes('has started')")
    page.wait("document.querySelector('#jobs').innerText.includes('Done')")
    page.wait("document.querySelector('#jobs').innerText.includes('hot')")
    eventually(lambda: cached_bytes(mounted, "hot") == 600_000)
    choose(page, "hot")
    page.click("[data-action=pin]")
    page.wait(f"{done}.includes('are pinned')")
    page.wait(f"{cell('hot', 3)} === '100 %' && {cell('hot', 4)} !== '{NONE}'")
    choose(page, "hot")
    page.click("[data-action=evict]")
    page.wait(f"{done}.includes('All of it is pinned')")
    choose(page, "hot")
    page.click("[data-action=unpin]")
    page.wait(f"{cell('hot', 4)} === '{NONE}'")
    choose(page, "hot")
    page.click("[data-action=evict]")
    page.wait("document.querySelector('#confirm').open")
    assert "586 KiB of 6 files" in page.text("#confirm-text")
    assert page.evaluate("document.activeElement.value") == "no"
    page.press("Escape")
    page.wait(f"{done}.includes('Nothing was evicted')")
    choose(page, "hot")
    page.click("[data-action=evict]")
    page.wait("document.querySelector('#confirm').open")
    page.click("#confirm button[value=yes]")
    page.wait(f"{done}.includes('were evicted')")
    page.wait(f"{cell('hot', 3)} === '0 %'")
    assert cached_bytes(mounted, "hot") == 0


def cached_bytes(site: Site, name: str) -> int:
    names = ask(socket_path(site.mountpoint), api.CACHE_NAMES, {"path": ""}, 300)["names"]
    return next(entry["cached_bytes"] for entry in names if entry["name"] == name)


def test_limits_and_nothing_else_can_be_set(page: Page, mounted: Site) -> None:
    page.evaluate(
        "document.querySelector('#max-downloads').value = 7;"
        "document.querySelector('#download-limit').value = 1.5;"
        "document.querySelector('#uid').value = 4711;"
        "document.querySelector('#uid-limit').value = 2"
    )
    page.click("#limits-form button")
    page.wait("document.querySelector('#uid-limits').innerText.includes('4711 to 2 MiB/s')")
    limits = mounted.status()["limits"]
    assert (limits["max_downloads"], limits["download_limit"]) == (7, 3 << 19)
    assert limits["limit_uid"] == {"4711": 2 << 20}
    session = page.evaluate("sessionStorage.getItem('cachefs-session')")
    url = f"{address(mounted)}/console/actions/v1/settings"
    answer = post(url, {"access_log": "/tmp/x"}, Authorization=f"Bearer {session}")
    assert answer.status_code == 403
    assert "cachefs set" in answer.json()["error"]
    mounted.cli("set", mounted.mountpoint, "download-limit=0", "max-downloads=64")


def test_hot_and_slow_paths(page: Page, mounted: Site) -> None:
    page.evaluate("document.querySelector('#seconds').value = '5'")
    page.click("#profile-form button")
    page.wait("document.querySelector('#profile-said').innerText.startsWith('Watching')")

    def was_seen() -> bool:
        for name in ("train/1", "train/2"):
            fd = os.open(mounted.mountpoint / name, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.read(fd, 1000)
            os.close(fd)
        return bool(page.evaluate("document.querySelectorAll('#hottest tr').length"))

    eventually(was_seen)
    assert "train/1" in page.text("#hottest")
    assert "read" in page.text("#slowest")


def test_it_asks_nothing_while_it_is_hidden(page: Page) -> None:
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
    tell = "document.dispatchEvent(new Event('visibilitychange'))"
    page.evaluate(hide % "true" + tell)
    page.evaluate("new Promise(done => setTimeout(done, 2500))")  # what was under way
    asked = len(page.urls)
    page.evaluate("new Promise(done => setTimeout(done, 2500))")
    assert len(page.urls) == asked
    page.evaluate(hide % "false" + tell)
    eventually(lambda: len(page.urls) > asked)


# -- mounts of their own -------------------------------------------------------------------------


def test_a_daemon_that_is_gone_and_comes_back(browser: Browser, site: Site) -> None:
    where = f"127.0.0.1:{free_ports(1)[0]}"
    site.mount("--metrics", where)
    with browser.page() as page:
        page.open(f"http://{where}/")
        page.wait(SHOWN)
        site.umount()
        page.wait("document.querySelector('#state-text').innerText === 'Not answering'")
        assert "does not answer" in page.text("#notice")
        site.mount("--metrics", where)
        page.wait(SHOWN)
        page.wait("document.querySelector('#notice').hidden")


def test_two_mounts_of_a_node(site: Site, page: Page, mounted: Site) -> None:
    """`page` comes after `site`: its teardown is first, while the mount that it shows still is."""
    (site.files / "elsewhere").write_bytes(b"x")
    site.mount()
    page.wait(
        "[...document.querySelectorAll('#mounts a')].some(a => "
        f"a.innerText === {json.dumps(str(site.mountpoint))})"
    )
    page.evaluate(
        "[...document.querySelectorAll('#mounts a')].find(a => "
        f"a.innerText === {json.dumps(str(site.mountpoint))}).click()"
    )
    page.wait(f"location.host === '{site.status()['metrics']}'")
    page.wait("document.querySelector('#files')?.innerText.includes('elsewhere')")


def test_the_command(site: Site) -> None:
    opened = site.files.parent / "opened"
    browser = site.files.parent / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}\n')
    browser.chmod(0o755)
    site.environment = {"DISPLAY": ":77", "BROWSER": str(browser), "WAYLAND_DISPLAY": ""}
    site.mount("--metrics", "off")
    assert "has no console" in site.cli("console", site.mountpoint, code=1).stderr
    site.umount()
    site.mount("--metrics", "0.0.0.0:0")
    url = site.cli("console", site.mountpoint).stdout.strip()
    token = url.partition("#token=")[2]
    assert url.startswith("http://127.0.0.1:")
    eventually(opened.exists)
    eventually(lambda: opened.read_text().startswith("file://"))
    assert token not in opened.read_text()
    file = Path(opened.read_text().removeprefix("file://"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert url in file.read_text()
    file.unlink()


def test_one_directory_at_a_time(site: Site) -> None:
    for number in range(5):
        (site.files / f"d{number}/below").mkdir(parents=True)
        (site.files / f"d{number}/file").write_bytes(b"x" * 1000)
    site.mount()
    socket = socket_path(site.mountpoint)

    def names(**arguments: object) -> dict[str, Any]:
        return ask(socket, api.CACHE_NAMES, arguments, 300)

    first = names(limit=2)
    assert [entry["name"] for entry in first["names"]] == ["d0", "d1"]
    assert first["has_more"]
    assert (first["names"][0]["files"], first["names"][0]["is_whole"]) == (0, False)
    rest = names(after="d1")
    assert [entry["name"] for entry in rest["names"]] == ["d2", "d3", "d4"]
    assert not rest["has_more"]
    (below, file) = names(path="d0")["names"]
    assert (below["kind"], file["kind"], file["size_bytes"]) == ("directory", "file", 1000)
    (site.mountpoint / "d0/file").read_bytes()
    site.wait_until_stored(1)
    found = names(limit=1)["names"][0]
    assert (found["cached_bytes"], found["size_bytes"], found["files"]) == (1000, 1000, 1)
    for wrong in ({"path": "d0/file"}, {"path": "none"}, {"after": "a/b"}, {"limit": 0}):
        with pytest.raises(Exception, match=r"directory|one name|limit"):
            names(**wrong)
