"""scripts/fetch against a registry on this machine."""

import base64
import hashlib
import importlib.machinery
import importlib.util
import io
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit.texts import ROOT

CONTENT = b"var chart = 1;\n"


def tarball(content: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as members:
        member = tarfile.TarInfo("package/chart.js")
        member.size = len(content)
        members.addfile(member, io.BytesIO(content))
    return packed.getvalue()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, without npm."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader("scripts_fetch", str(ROOT / "scripts/fetch"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    return module


class Registry:
    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.asked: list[str] = []


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    state = Registry()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.path)
            answer = state.answers.get(self.path)
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            self.wfile.write(answer or b"")

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("NPM_CONFIG_REGISTRY", f"http://127.0.0.1:{server.server_port}/npm/")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield state
        server.shutdown()
        thread.join()


def package(script: ModuleType, content: bytes = CONTENT) -> Any:
    integrity = base64.b64encode(hashlib.sha512(tarball(content)).digest()).decode()
    digest = hashlib.sha256(content).hexdigest()
    file = script.File("package/chart.js", "static/chart.js", digest)
    return script.Package("chart", "1.2.3", integrity, (file,))


URL = "/npm/chart/-/chart-1.2.3.tgz"


def test_it_fetches_once(script: ModuleType, registry: Registry, tmp_path: Path) -> None:
    registry.answers[URL] = tarball(CONTENT)
    assert script.fetch(package(script), tmp_path)
    assert (tmp_path / "static/chart.js").read_bytes() == CONTENT
    assert not script.fetch(package(script), tmp_path)
    assert registry.asked == [URL]
    (tmp_path / "static/chart.js").write_bytes(b"of an older version")
    assert script.fetch(package(script), tmp_path)
    assert [path.name for path in (tmp_path / "static").iterdir()] == ["chart.js"]


def test_it_refuses_other_bytes(script: ModuleType, registry: Registry, tmp_path: Path) -> None:
    registry.answers[URL] = tarball(CONTENT + b"steal();")
    with pytest.raises(script.FetchError, match="SHA-512"):
        script.fetch(package(script), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_one_line(
    script: ModuleType, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "PACKAGES", (package(script),))
    with pytest.raises(SystemExit) as ended:
        script.main([])
    said = str(ended.value.code)
    assert said.startswith("fetch: error: can't fetch chart 1.2.3 from the npm registry")
    assert "404" in said
    assert "NPM_CONFIG_REGISTRY" in said
    assert "\n" not in said


def test_a_build_without_the_files_fails(tmp_path: Path) -> None:
    """Rather than make a console without charts."""
    for name in ("setup.py", "scripts/fetch"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    made = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=tmp_path,
        env={"PATH": "/nothing", "HOME": "/nothing", "NPM_CONFIG_REGISTRY": "http://127.0.0.1:1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 1
    assert "fetch: error: can't fetch uplot" in made.stderr


def test_git_has_none_of_the_files(script: ModuleType) -> None:
    files = [file.destination for each in script.PACKAGES for file in each.files]
    assert all((ROOT / file).is_file() for file in files)
    if not (ROOT / ".git").exists():
        return

    def git(command: str) -> list[str]:
        return subprocess.check_output(["git", command, *files], cwd=ROOT, text=True).split()

    assert git("ls-files") == []
    assert git("check-ignore") == files
