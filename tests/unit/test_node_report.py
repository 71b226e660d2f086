"""`cachefs node-report`: names and values of labels, and what it asks of an API server."""

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cachefs.cli import node_report
from cachefs.cli.nodes.api_server import ApiServer
from cachefs.cli.nodes.labels import PREFIX, changes, checked_name, label_value, names_of
from cachefs.errors import CachefsError, UsageError
from tests.servers.certificates import Certificates, make_certificates

TOKEN = "token-of-the-pod"


@pytest.mark.parametrize(
    ("cached", "size", "value"),
    [
        (0, 0, "0"),
        (0, 10, "0"),
        (99, 1000, "0"),
        (799, 1000, "70"),
        (800, 1000, "80"),
        (999_999, 1_000_000, "90"),
        (10, 10, "100"),
        (11, 10, "100"),
    ],
)
def test_percent_are_rounded_down_to_tens(cached: int, size: int, value: str) -> None:
    assert label_value(cached, size) == value


def test_names_come_from_paths() -> None:
    fluid = Path("/runtime-mnt/thin/lab/driving/thin-fuse")
    places = [Path("/mnt/data"), Path("/mnt/my data!"), fluid, fluid / "maps/new"]
    found = list(names_of(places).values())
    assert found == ["data", "my-data", "lab.driving", "lab.driving.maps.new"]


def test_names_differ_and_fit() -> None:
    places = [Path("/a/data"), Path("/b/data"), Path("/c/" + "x" * 200), Path("/d/文字"), Path("/")]
    found = names_of(places)
    assert len(set(found.values())) == len(places)
    assert found == names_of(places[::-1])
    for name in found.values():
        assert checked_name(name) == name
    assert found[places[0]].startswith("data-")


@pytest.mark.parametrize("name", ["", "x" * 57, "a/b", "a b", "a-", "é", "a\n"])
def test_wrong_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="can't be part of a label"):
        checked_name(name)


def test_only_what_differs_changes() -> None:
    present = {f"{PREFIX}a": "80", f"{PREFIX}b": "10", "other/cached-c": "5"}
    wanted = {f"{PREFIX}a": "80"}
    assert changes(present, wanted, complete=False) == {}
    assert changes(present, wanted, complete=True) == {f"{PREFIX}b": None}
    assert changes(present, {f"{PREFIX}a": "90"}, complete=False) == {f"{PREFIX}a": "90"}


class FakeServer:
    """An API server with one Node."""

    def __init__(self, certificates: Certificates) -> None:
        self.node: Any = {"metadata": {"labels": {"a": "1"}}}
        self.status = 200
        self.seen: list[tuple[str, str, str, Any]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_PATCH(self) -> None:
                size = int(self.headers["Content-Length"])
                self._answer(json.loads(self.rfile.read(size)))

            def _answer(self, body: Any) -> None:
                assert self.headers["Authorization"] == f"Bearer {TOKEN}"
                fake.seen.append((self.command, self.path, self.headers["Content-Type"], body))
                content = json.dumps(fake.node).encode()
                self.send_response(fake.status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.server, certificates.key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("api") / "certificates")


@pytest.fixture
def account(tmp_path: Path, certificates: Certificates) -> Path:
    """The directory of the pod's service account."""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "ca.crt").write_bytes(certificates.ca.read_bytes())
    return tmp_path


@pytest.fixture
def server(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    server = FakeServer(certificates)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    yield server
    server.close()


def test_labels_are_read_and_changed(server: FakeServer, account: Path) -> None:
    api = ApiServer("node-1.lab", account)
    assert api.labels() == {"a": "1"}
    api.change_labels({"b": "2", "c": None})
    path = "/api/v1/nodes/node-1.lab"
    assert server.seen == [
        ("GET", path, "application/json", None),
        (
            "PATCH",
            path,
            "application/merge-patch+json",
            {"metadata": {"labels": {"b": "2", "c": None}}},
        ),
    ]


@pytest.mark.parametrize("node", ["", "a/../b", "a b", "-a", "A", "a" * 254, "a?x"])
def test_names_of_nodes_are_checked(server: FakeServer, account: Path, node: str) -> None:
    with pytest.raises(UsageError, match="can't be the name of a Node"):
        ApiServer(node, account)


@pytest.mark.parametrize(
    "node", [None, [], {}, {"metadata": 3}, {"metadata": {"labels": {"a": 1}}}]
)
def test_wrong_answers_are_refused(server: FakeServer, account: Path, node: Any) -> None:
    server.node = node
    with pytest.raises(CachefsError, match="not a Node"):
        ApiServer("node", account).labels()


@pytest.mark.parametrize(("status", "said"), [(403, "get and patch"), (500, "status 500")])
def test_failures_are_explained(server: FakeServer, account: Path, status: int, said: str) -> None:
    server.status = status
    with pytest.raises(CachefsError, match=said) as caught:
        ApiServer("node", account).labels()
    assert TOKEN not in str(caught.value)


def test_another_server_gets_no_token(server: FakeServer, account: Path) -> None:
    other = make_certificates(account / "others")
    (account / "ca.crt").write_bytes(other.ca.read_bytes())
    with pytest.raises(CachefsError, match="failed"):
        ApiServer("node", account).labels()
    assert server.seen == []


def test_a_token_that_is_no_header_is_not_shown(server: FakeServer, account: Path) -> None:
    (account / "token").write_text("hunter\n2")
    with pytest.raises(CachefsError, match="ValueError") as caught:
        ApiServer("node", account).labels()
    assert "hunter" not in str(caught.value)


def test_outside_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UsageError, match="this is no pod"):
        ApiServer("node")


def test_the_command_changes_only_what_differs(
    server: FakeServer, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [Path("/mnt/data"), Path("/mnt/broken")]
    sums: dict[str, Any] = {"data": {"cached_bytes": 85, "size_bytes": 100}}

    def usage(data_set: Any) -> Any:
        if data_set.name not in sums:
            raise CachefsError("no answer")
        return sums[data_set.name]

    monkeypatch.setattr(node_report, "_places", lambda: places)
    monkeypatch.setattr(node_report, "_usage", usage)
    monkeypatch.setattr(ApiServer.__init__, "__defaults__", (account,))
    labels = {f"{PREFIX}data": "70", f"{PREFIX}gone": "10", "other": "1"}
    server.node = {"metadata": {"labels": labels}}

    def run(code: int) -> list[Any]:
        server.seen.clear()
        done = CliRunner().invoke(node_report.command, ["--apply", "node"], standalone_mode=False)
        assert (done.return_value, done.exception) == (code, None)
        assert f"{PREFIX}data=80\n" in done.stdout
        return [body["metadata"]["labels"] for _, _, _, body in server.seen if body]

    assert run(1) == [{f"{PREFIX}data": "80"}]  # the other may come back, so nothing is removed
    del places[1]
    assert run(0) == [{f"{PREFIX}data": "80", f"{PREFIX}gone": None}]
    labels[f"{PREFIX}data"] = "80"
    del labels[f"{PREFIX}gone"]
    assert run(0) == []
