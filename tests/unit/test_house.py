"""The flows of docs/ARCHITECTURE.md, names that tests must not share, and the form of calls."""

import ast
import re

import pytest

from tests.unit.texts import DOCUMENTS, ROOT, SOURCES

PACKAGE = ROOT / "src/cachefs"
MOST_FILES_OF_A_FLOW = 12
FLOWS = (ROOT / "docs/ARCHITECTURE.md").read_text().split("## Files by flow")[1].split("\n## ")[0]


def flows() -> dict[str, list[str]]:
    rows = [line for line in FLOWS.splitlines() if line.startswith("| ")]
    return {row.split("|")[1].strip(): re.findall(r"`([\w/]+\.(?:py|c))`", row) for row in rows[1:]}


@pytest.mark.parametrize("flow", flows())
def test_a_flow_enters_few_files(flow: str) -> None:
    files = flows()[flow]
    assert 0 < len(files) <= MOST_FILES_OF_A_FLOW
    assert [name for name in files if not (PACKAGE / name).exists()] == []


def test_all_flows_are_there() -> None:
    wanted = {"cold read", "look-up", "directory", "eviction", "load", "status"}
    assert wanted <= flows().keys()


def test_tests_of_the_shared_s3_server_do_not_share_buckets() -> None:
    """Which of them run in one process, with one server, differs from run to run."""
    call = re.compile(r"\b(?:seaweedfs|weed)\.make_bucket\([\"']([\w-]+)[\"']\)")
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [name for path in tests for name in call.findall(path.read_text())]
    assert len(names) > 10
    assert sorted(names) == sorted(set(names))


def test_no_text_forgets_writable_mounts() -> None:
    forgets = re.compile(
        r"read cache mount|never writes to it|(A mount is|mounts are) read-only(; leave| and)"
        r"|it remains read-only|so far\)|with the uploader|by cachefs yet"
    )
    others = [ROOT / "pyproject.toml", ROOT / "deploy/packages/deb"]
    files = [file for file in (*DOCUMENTS, *SOURCES, *others) if file.name != "CHANGELOG.md"]
    found = [(str(file), forgets.findall(" ".join(file.read_text().split()))) for file in files]
    assert [(file, words) for file, words in found if words] == []


def test_arguments_stand_in_the_call_itself() -> None:
    """A tuple that is written only to be unpacked, as in f(*(a, b)), makes the formatter write
    several arguments in one line, and the reader look for a reason."""
    found = [
        f"{path.relative_to(ROOT)}:{argument.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        for argument in call.args
        if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple)
    ]
    assert found == []


def test_one_function_closes_slabs() -> None:
    """The document says so (docs/CONCURRENCY.md)."""
    closing = [
        path.name
        for path in SOURCES
        for _ in re.finditer(r"os\.close\(\w*slab\w*\.fd\)|slab\.fd = -1", path.read_text())
    ]
    assert closing == ["open_slabs.py"] * 2
