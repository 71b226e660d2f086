"""What `make test` does about failed tests, on suites of a few tests."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.texts import ROOT

UNSTABLE = """
import pathlib, pytest
FILE = pathlib.Path(__file__).with_name("seen")
@pytest.fixture
def once(request):
    if request.node.callspec.id == "a b" and not FILE.exists():
        FILE.touch()
        raise RuntimeError("the first time")
@pytest.mark.parametrize("odd", ["a b", "[x]"])
def test_odd(once, odd):
    pass
"""
MANY = """
import pathlib, pytest
@pytest.mark.parametrize("number", range({count}))
def test_many(number):
    file = pathlib.Path(__file__).with_name(f"seen{{number}}")
    if not file.exists():
        file.touch()
        assert False
"""


def run(directory: Path, text: str) -> subprocess.CompletedProcess[str]:
    (directory / "tests").mkdir()
    shutil.copy(ROOT / "tests/second_look.py", directory / "tests")
    (directory / "tests/test_it.py").write_text(text)
    command = [sys.executable, "-m", "tests.second_look", "-n", "2", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "tests"], cwd=directory, capture_output=True, text=True, check=False
    )


def test_what_passes_is_not_looked_at_again(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_it(): pass")
    assert done.returncode == 0
    assert "second look" not in done.stdout
    assert not (tmp_path / ".build").exists()


def test_what_fails_once_is_named_and_kept(tmp_path: Path) -> None:
    done = run(tmp_path, UNSTABLE)
    assert done.returncode == 0, done.stdout
    name = "tests/test_it.py::test_odd[a b]"
    assert f"{name}: failed, then passed alone\n" in done.stdout
    last, *tests = done.stdout[done.stdout.index("unstable: ") :].splitlines()
    assert last == "unstable: 1 tests (first failures: .build/unstable-tests.txt):"
    assert tests == [f"  {name}"]
    assert "the first time" in (tmp_path / ".build/unstable-tests.txt").read_text()


def test_what_fails_twice_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, UNSTABLE + "def test_bad():\n    assert False\n")
    assert done.returncode == 1
    assert "tests/test_it.py::test_bad: failed, then failed again\n" in done.stdout
    assert "unstable: 1 tests" in done.stdout


def test_a_file_that_cannot_be_collected_fails_the_run(tmp_path: Path) -> None:
    assert run(tmp_path, "import nothing_of_this_name").returncode == 2


def test_a_worker_that_dies_fails_its_test(tmp_path: Path) -> None:
    done = run(tmp_path, "import os\ndef test_it():\n    os._exit(3)\n")
    assert done.returncode != 0


@pytest.mark.parametrize(
    ("count", "said"), [(6, "More than 5 unstable"), (31, "none of them runs")]
)
def test_many_failures_fail_the_run(tmp_path: Path, count: int, said: str) -> None:
    done = run(tmp_path, MANY.format(count=count))
    assert done.returncode == 1
    assert said in done.stdout
