"""Metrics: what is documented, exported and drawn is the same; and how they are counted."""

import itertools
import json
import os
import re
import socket
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import promql_parser
import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Receive, Scope, Send

from cachefs.cache.counters import CacheCounters, TierCounters, TierStatus
from cachefs.config import load_mount_config, split_address
from cachefs.control import metrics_server, serving
from cachefs.control.exporter import Exporter
from cachefs.control.http import MAX_CONNECTIONS
from cachefs.control.metrics_server import application
from cachefs.control.mount_state import MountState
from cachefs.control.pace import Paced
from cachefs.control.routes.set import SetRoutes
from cachefs.control.serving import listener_uid, serve_metrics
from cachefs.daemon.passthrough import Passthrough
from cachefs.errors import CachefsError
from cachefs.fuse.access_log import AccessLog
from cachefs.fuse.uid_limits import INO_BITS, UidLimits
from cachefs.metrics import BOUNDS_S, METRICS, OF_SHARED, OF_WRITES, Histogram, Requests
from cachefs.namespace.namespace import Ttls
from cachefs.namespace.outage import StaleState
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.shared.tier import SharedTier
from cachefs.types import DataPath, DataPathName, Medium
from cachefs.writes.unsent.report import UnsentCounts, UnsentState
from tests.memory_origin import MemoryOrigin

DOCS = Path(__file__).parents[2] / "docs"
HISTOGRAM_PARTS = ("_bucket", "_count", "_sum")


class FakeCache:
    def __init__(self) -> None:
        self.counters = CacheCounters(hits=7)
        self.tier = TierCounters(hits=3)
        self.waiting_readers = self.fetching_count = self.storing_count = self.held_bytes = 0
        self.shared = SharedTier("s3://b")

    def status(self) -> list[TierStatus]:
        return [TierStatus('/a "b"\\c\n', Medium.SSD, "normal", *range(1, 8), self.tier)]


class FakeNamespace:
    def __init__(self, stale_if_error_s: float) -> None:
        self.ttls = Ttls(1.0, 1.0, 1.0, 1.0, stale_if_error_s)
        state = StaleState(is_stale=True, since_ns=None, answer_count=3)
        self.outage = SimpleNamespace(state=state)
        self.table = SimpleNamespace(bad_rows=0)


class FakeUnsent:
    def __init__(self) -> None:
        space = SimpleNamespace(root=Path("/spool"), used_bytes=5000, limit_bytes=9000)
        self.spool = SimpleNamespace(space=space)
        self.files = Counter({UnsentState.FAILED: 2, UnsentState.HELD: 1})

    def counts(self) -> UnsentCounts:
        return UnsentCounts(self.files, Counter({UnsentState.FAILED: 70}))


class House:
    """The state of a mount that nobody mounts."""

    def __init__(self, unsent: Any = None, **options: object) -> None:
        config = load_mount_config("s3://b", "/mnt", options)
        origin = ResilientOrigin(MemoryOrigin(), Resilience())
        self.limits = UidLimits({})
        self.cache: Any = FakeCache()
        self.origin = origin
        self.state = MountState(
            config,
            origin,
            self.cache,
            self.limits,
            SetRoutes({}, AccessLog(), config.mountpoint),
            DataPath(DataPathName.PYTHON),
            Requests(),
            FakeNamespace(config.stale_if_error),  # type: ignore[arg-type]
            SimpleNamespace(running_count=0, all=list),  # type: ignore[arg-type]
            None,
            Passthrough(config, None, self.limits, ()).report,
            unsent,
        )

    def samples(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """By name and values of the labels."""
        text, _ = Exporter(self.state).render("")
        return {
            (sample.name, tuple(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
        }


@pytest.fixture
def house() -> House:
    return House()


def exported_names() -> set[str]:
    names = set()
    for metric in METRICS:
        parts = HISTOGRAM_PARTS if metric.kind == "histogram" else ("",)
        names |= {metric.name + part for part in parts}
    return names


# -- documents -----------------------------------------------------------------------------------


def test_the_document_lists_every_metric() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+) \| ([\w, ]*) \| (.+) \|$",
        (DOCS / "METRICS.md").read_text(),
        re.MULTILINE,
    )
    wanted = [(m.name, m.kind, ", ".join(m.labels), m.text) for m in METRICS]
    assert rows == wanted


def test_names_follow_the_conventions() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"(cachefs|process)_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert "milli" not in metric.name


def test_the_dashboard_uses_only_metrics_that_exist() -> None:
    board = json.loads((DOCS / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    queries += [
        variable["definition"]
        for variable in board["templating"]["list"]
        if variable["type"] == "query"
    ]
    assert len(queries) > 20
    for query in queries:
        if not query.startswith("label_values"):  # Grafana's own
            promql_parser.parse(query.replace("$__rate_interval", "5m"))
    used = set(re.findall(r"\b(?:cachefs|process)_\w+", " ".join(queries)))
    assert used <= exported_names()
    labels = {label for metric in METRICS for label in metric.labels} | {"instance", "le"}
    named = re.findall(r"[{,]\s*(\w+)\s*(?:=~|=|!=)", " ".join(queries))
    grouped = [
        name
        for group in re.findall(r"by \(([^)]+)\)", " ".join(queries))
        for name in group.split(", ")
    ]
    assert set(named) | set(grouped) <= labels
    assert [panel["id"] for panel in board["panels"]] == list(range(1, len(board["panels"]) + 1))


# -- values --------------------------------------------------------------------------------------


def test_everything_in_the_table_is_exported_and_nothing_else() -> None:
    house = House(FakeUnsent())
    house.cache.shared.members.use("127.0.0.1:11211")
    house.state.requests.histogram("read", "hit").note(1)
    house.limits.read_bytes[house.limits.handle(1, 7) >> INO_BITS] = 5
    assert {name for name, _ in house.samples()} == exported_names()
    text, kind = Exporter(house.state).render("")
    assert kind.startswith("text/plain")
    types = {f.name: f.type for f in text_string_to_metric_families(text.decode())}
    assert types == {m.name.removesuffix("_total"): m.kind for m in METRICS}


def test_only_writable_mounts_export_metrics_of_writes(house: House) -> None:
    text, _ = Exporter(house.state).render("")
    assert not [name for name in OF_WRITES if name.removesuffix("_total") in text.decode()]
    assert {metric.name for metric in METRICS} >= OF_WRITES
    assert "writes" not in house.state.status()


def test_only_mounts_with_a_shared_tier_export_its_metrics(house: House) -> None:
    text, _ = Exporter(house.state).render("")
    assert "cachefs_shared" not in text.decode()
    assert len(OF_SHARED) > 10
    assert "shared" not in house.state.status()
    house.cache.shared.members.use("127.0.0.1:11211")
    assert house.state.status()["shared"]["state"] == "no members"


async def test_writes_are_exported() -> None:
    house = House(FakeUnsent())
    writes = house.origin.counters.writes
    writes.count("puts")
    writes.count("parts")
    writes.count("parts")
    writes.sent_bytes, writes.errors = 1000, 3
    samples = house.samples()
    assert samples["cachefs_origin_write_requests_total", ("part",)] == 2
    assert samples["cachefs_origin_write_requests_total", ("delete",)] == 0
    assert samples["cachefs_origin_sent_bytes_total", ()] == 1000
    assert samples["cachefs_origin_write_errors_total", ()] == 3
    assert samples["cachefs_unsent_files", ("failed",)] == 2
    assert samples["cachefs_unsent_files", ("open",)] == 0
    assert samples["cachefs_unsent_bytes", ("failed",)] == 70
    assert samples["cachefs_spool_used_bytes", ()] == 5000
    found: Any = house.state.status()["writes"]
    assert (found["unsent_files"], found["states"]["held"], found["parts"]) == (3, 1, 2)
    house.state.mounted = True
    code, text = await answer(house, "/readyz")
    assert code == 200
    assert "2 files could not be sent yet, and 1 wait for a user" in text


def test_openmetrics_when_asked_for(house: House) -> None:
    text, kind = Exporter(house.state).render("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


def test_odd_characters_in_labels(house: House) -> None:
    assert house.samples()["cachefs_tier_hits_total", ("SSD", '/a "b"\\c\n')] == 3


def test_histograms() -> None:
    histogram = Histogram()
    for ns in (0, 8191, 8192, 10_000_000, 1 << 62):
        histogram.note(ns)
    counts = dict(zip(BOUNDS_S, histogram.cumulated(), strict=False))
    assert BOUNDS_S[0] == 8.192e-6
    assert counts[8.192e-6] == 2
    assert counts[1.6384e-5] == 3
    assert counts[BOUNDS_S[-1]] == 4
    assert histogram.cumulated()[-1] == 5
    assert histogram.sum_ns == 8191 + 8192 + 10_000_000 + (1 << 62)


def test_users_beyond_the_first_are_counted_together(house: House) -> None:
    for uid in range(300):
        number = house.limits.handle(1, uid) >> INO_BITS
        house.limits.read_bytes[number] = 10
    house.limits.stalled_ns[0] = 2_000_000_000
    samples = house.samples()
    read = {key[1][0]: n for key, n in samples.items() if key[0] == "cachefs_user_read_bytes_total"}
    assert read == {**{str(uid): 10 for uid in range(200)}, "other": 1000}
    assert samples["cachefs_user_stalled_seconds_total", ("other",)] == 2


async def test_the_same_over_the_control_socket(house: House) -> None:
    house.state.requests.histogram("read", "hit").note(9_000)
    house.state.requests.histogram("read", "hit").note(1_000_000_000)
    house.limits.read_bytes[house.limits.handle(1, 7) >> INO_BITS] = 5
    answer: Any = await house.state.answer_requests({})
    (entry,) = answer["requests"]
    assert (entry["operation"], entry["outcome"], entry["count"]) == ("read", "hit", 2)
    assert entry["seconds"] == pytest.approx(1.000009)
    found = dict(zip(answer["bounds_s"], entry["cumulated"], strict=True))
    assert (found[8.192e-6], found[1.6384e-5], found[BOUNDS_S[-1]]) == (0, 1, 2)
    assert answer["users"] == [{"uid": 7, "read_bytes": 5, "stalled_s": 0}]
    assert json.loads(json.dumps(answer)) == answer | {"bounds_s": list(BOUNDS_S)}


# -- health --------------------------------------------------------------------------------------


async def answer(house: House, path: str) -> tuple[int, str]:
    transport = httpx.ASGITransport(app=application(house.state))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        response = await client.get(path)
        return response.status_code, response.text


async def test_ready_when_mounted(house: House) -> None:
    assert await answer(house, "/healthz") == (200, "ok\n")
    assert await answer(house, "/readyz") == (503, "not mounted yet\n")
    house.state.mounted = True
    assert await answer(house, "/readyz") == (200, "ok\n")
    assert (await answer(house, "/metrics"))[0] == 200
    assert (await answer(house, "/other"))[0] == 404


@pytest.mark.parametrize(
    ("stale_if_error", "down_s", "code"),
    [("indefinite", 1e6, 200), ("0", 0, 503), ("1h", 3000, 200), ("1h", 4000, 503)],
)
async def test_an_origin_that_is_down(
    monkeypatch: pytest.MonkeyPatch, stale_if_error: str, down_s: float, code: int
) -> None:
    house = House(stale_if_error=stale_if_error)
    house.state.mounted = True
    monkeypatch.setattr(house.origin._prober, "down_since", house.state.started_at - down_s)
    monkeypatch.setattr(house.origin._prober._breaker, "is_open", True)
    found, text = await answer(house, "/readyz")
    assert found == code
    assert ("from the cache" if code == 200 else "does not answer since") in text


async def have_it_loaded(host: str, port: int) -> None:
    """Return when the server has answered: it is loaded for its first client."""
    async with await trio.open_tcp_stream(host, port) as stream:
        await stream.send_all(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b"".join([piece async for piece in stream]).endswith(b"ok\n")


async def test_nothing_needs_a_thread(nursery: trio.Nursery) -> None:
    """They answer while every thread hangs, in a disk or in the origin."""
    house = House(metrics="127.0.0.1:0")
    await nursery.start(serve_metrics, house.state)
    assert house.state.metrics_address is not None
    host, port = split_address(house.state.metrics_address)
    limiter = trio.to_thread.current_default_thread_limiter()
    borrowers = [object() for _ in range(int(limiter.total_tokens))]
    for borrower in borrowers:
        limiter.acquire_on_behalf_of_nowait(borrower)
    try:
        for path, wanted in (("/healthz", 200), ("/readyz", 503), ("/metrics", 200)):
            with trio.fail_after(300):
                async with await trio.open_tcp_stream(host, port) as stream:
                    await stream.send_all(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                    assert f" {wanted} ".encode() in (await stream.receive_some())[:20]
    finally:
        for borrower in borrowers:
            limiter.release_on_behalf_of(borrower)


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
async def test_a_connection_is_closed_for_a_client_that_asks_for_it(
    nursery: trio.Nursery, version: str
) -> None:
    house = House(metrics="127.0.0.1:0")
    await nursery.start(serve_metrics, house.state)
    assert house.state.metrics_address is not None
    host, port = split_address(house.state.metrics_address)
    head = f"GET /healthz {version}\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    await have_it_loaded(host, port)
    idle_tasks = trio.lowlevel.current_statistics().tasks_living
    with trio.fail_after(300):
        async with await trio.open_tcp_stream(host, port) as stream:
            await stream.send_all(head.encode())
            received = b"".join([piece async for piece in stream])
            while trio.lowlevel.current_statistics().tasks_living > idle_tasks:  # noqa: ASYNC110
                await trio.sleep(0.01)
    assert received.endswith(b"ok\n")


async def test_idle_connections_do_not_stand_in_the_way(nursery: trio.Nursery) -> None:
    """Liveness is asked for there."""
    house = House(metrics="127.0.0.1:0")
    await nursery.start(serve_metrics, house.state)
    assert house.state.metrics_address is not None
    host, port = split_address(house.state.metrics_address)
    await have_it_loaded(host, port)
    idle = [await trio.open_tcp_stream(host, port) for _ in range(MAX_CONNECTIONS + 12)]
    for _ in range(3):
        with trio.fail_after(300):
            async with await trio.open_tcp_stream(host, port) as stream:
                await stream.send_all(b"GET /healthz HTTP/1.0\r\n\r\n")
                assert b" 200 " in (await stream.receive_some())[:20]
    for connection in idle:
        await connection.aclose()


async def test_who_gives_up_costs_no_scrape(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(metrics="127.0.0.1:0")
    monkeypatch.setattr(metrics_server, "_LEAST_PAUSE_S", 1000.0)
    scrapes = 0
    render = Exporter.render

    def counted(self: Exporter, accept: str) -> tuple[bytes, str]:
        nonlocal scrapes
        scrapes += 1
        return render(self, accept)

    monkeypatch.setattr(Exporter, "render", counted)
    await nursery.start(serve_metrics, house.state)
    assert house.state.metrics_address is not None
    host, port = split_address(house.state.metrics_address)
    await have_it_loaded(host, port)
    idle_tasks = trio.lowlevel.current_statistics().tasks_living

    async def ask() -> trio.SocketStream:
        stream = await trio.open_tcp_stream(host, port)
        await stream.send_all(b"GET /metrics HTTP/1.0\r\n\r\n")
        return stream

    with trio.fail_after(300):
        first = await ask()
        assert b" 200 " in (await first.receive_some())[:20]
        others = [await ask() for _ in range(10)]
        for stream in (first, *others):
            await stream.aclose()
        while trio.lowlevel.current_statistics().tasks_living > idle_tasks:  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert scrapes == 1


async def test_many_scrapes_leave_the_loop_to_others(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[tuple[float, float]] = []

    def render(self: Exporter, accept: str) -> tuple[bytes, str]:
        began = time.perf_counter()
        time.sleep(0.005)
        times.append((began, time.perf_counter()))
        return b"", "text/plain"

    monkeypatch.setattr(Exporter, "render", render)
    transport = httpx.ASGITransport(app=application(house.state))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        codes = []

        async def scrape() -> None:
            codes.append((await client.get("/metrics")).status_code)

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(scrape)
            await trio.testing.wait_all_tasks_blocked(0.001)
            assert (await client.get("/healthz")).text == "ok\n"
            assert len(codes) < 10, "it waits for no scrape"
    assert codes == [200] * 10
    for (began, ended), (following, _) in itertools.pairwise(times):
        assert following - ended >= 9 * (ended - began)


async def test_requests_are_paced(autojump_clock: trio.testing.MockClock) -> None:
    times: list[float] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        times.append(trio.current_time())

    paced: Any = Paced(app, 100)
    await trio.sleep(5)
    began_at = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(10_000):  # of clients that go away at once
            nursery.start_soon(paced, {}, None, None)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert 99 <= len(times) <= 102
    async with trio.open_nursery() as nursery:
        for _ in range(300):
            nursery.start_soon(paced, {}, None, None)
    assert trio.current_time() - began_at == pytest.approx(3, abs=0.05)


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/console/snapshot"])
async def test_a_foreign_name_that_leads_to_loopback_gets_nothing(house: House, path: str) -> None:
    async def code(server: str, host: str) -> int:
        transport = httpx.ASGITransport(app=application(house.state))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{server}") as client:
            return (await client.get(path, headers={"Host": host})).status_code

    assert await code("127.0.0.1:9567", "evil.test") == 421
    assert await code("[::1]:9567", "evil.test:9567") == 421
    for host in ("127.0.0.1:9567", "localhost", "[::1]"):
        assert await code("127.0.0.1:9567", host) == 200
    if path != "/console/snapshot":  # it has stricter rules
        assert await code("127.0.0.1:9567", "10.0.0.7:9567") == 200
        assert await code("10.0.0.7:9567", "node1.test:9567") == 200


@pytest.mark.expect_log("metrics are on .* by a process of uid 65534")
async def test_who_has_the_port_is_said(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    monkeypatch.setattr(serving, "listener_uid", lambda port: 65534)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = taken.getsockname()
        assert listener_uid(place[1]) == os.geteuid()
        monkeypatch.setattr(serving, "split_address", lambda _: place)
        house = House()
        await nursery.start(serve_metrics, house.state)


# -- the address ---------------------------------------------------------------------------------


def test_addresses() -> None:
    def metrics(value: str) -> str:
        return load_mount_config("s3://b", "/mnt", {"metrics": value}).metrics

    for good in ("off", "0.0.0.0:1", "[::1]:9567", "localhost:0"):
        assert metrics(good) == good
    for bad in ("", "9567", ":9567", "host", "host:", "host:x", "host:65536", "::1:9567", "[a]:1"):
        with pytest.raises(CachefsError, match="--metrics"):
            metrics(bad)


async def test_a_free_port_when_the_default_is_taken(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    first, second = House(metrics="127.0.0.1:0"), House()
    await nursery.start(serve_metrics, first.state)
    taken = first.state.metrics_address
    assert taken is not None
    monkeypatch.setattr(
        serving, "split_address", lambda _: ("127.0.0.1", int(taken.rpartition(":")[2]))
    )
    await nursery.start(serve_metrics, second.state)
    assert second.state.metrics_address not in {None, taken}
    for house in (first, second):
        url = f"http://{house.state.metrics_address}/healthz"
        assert (await trio.to_thread.run_sync(lambda url=url: httpx.get(url).text)) == "ok\n"
        assert house.state.status()["metrics"] == house.state.metrics_address
    with pytest.raises(CachefsError, match=r"can't listen on .* choose another address"):
        await serve_metrics(House(metrics=taken).state)


async def test_no_metrics() -> None:
    house = House(metrics="off")
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_metrics, house.state)
    assert house.state.metrics_address is None
