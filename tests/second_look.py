"""`python -m tests.second_look ARGUMENTS-OF-PYTEST`: runs pytest, and what failed once more.

The failed tests run again alone, one after the other. A test that fails twice fails the run. One
that fails only once is unstable: a defect of the test or of the code, which somebody must mend. The
run then passes, names it at its end, and keeps its first failure in `REPORT`. More than
`MOST_UNSTABLE` unstable tests fail the run. Nothing else repeats tests.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

MOST_UNSTABLE = 5
MOST_REPEATED = 30
"""If more tests have failed, chance is not the cause, and none of them runs again."""
REPORT = Path(".build/unstable-tests.txt")

_FAILED = 1
"""pytest's exit code if tests have failed."""


class Recorder:
    """The plugin that writes the failures of a run as a JSON object: for each test, or file that
    can't be collected, the text of its failure."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._failures: dict[str, str] = {}

    def _note(self, report: pytest.TestReport | pytest.CollectReport, when: str) -> None:
        if report.failed:
            earlier = self._failures.get(report.nodeid, "")
            self._failures[report.nodeid] = f"{earlier}in its {when}:\n{report.longreprtext}\n"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report, report.when)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report, "collection")

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps(self._failures))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures-to", type=Path, help="the JSON file that gets all failures")


def pytest_configure(config: pytest.Config) -> None:
    """Workers send their reports to the process that prints them: it alone records them."""
    file = config.getoption("failures_to")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(file))


def run_pytest(arguments: Sequence[str]) -> tuple[int, dict[str, str]]:
    """Return the exit code of a new pytest, and what failed in it."""
    with TemporaryDirectory() as directory:
        file = Path(directory) / "failures.json"
        plugin = ["-p", "tests.second_look", "--failures-to", str(file)]
        command = [sys.executable, "-m", "pytest", *plugin, *arguments]
        code = subprocess.run(command, check=False).returncode
        return code, json.loads(file.read_text()) if file.exists() else {}


def judge(first: Mapping[str, str], second: Mapping[str, str]) -> int:
    """Print both results of each test of `first`, and write `REPORT`. Return the exit code."""
    unstable = {test: failure for test, failure in first.items() if test not in second}
    for test in first:
        print(f"{test}: failed, then {'passed alone' if test in unstable else 'failed again'}")
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text("\n".join(f"# {test}\n{text}" for test, text in unstable.items()))
    if unstable:
        print(f"unstable: {len(unstable)} tests (first failures: {REPORT}):", *unstable, sep="\n  ")
    if len(unstable) > MOST_UNSTABLE:
        print(f"More than {MOST_UNSTABLE} unstable tests fail the run.")
    return _FAILED if second or len(unstable) > MOST_UNSTABLE else 0


def main(arguments: Sequence[str]) -> int:
    """Return the exit code of the run."""
    REPORT.unlink(missing_ok=True)
    code, first = run_pytest(arguments)
    if code != _FAILED or not first:
        return code
    if len(first) > MOST_REPEATED:
        print(f"{len(first)} tests have failed, so none of them runs again.")
        return code
    print(f"\nA second look at {len(first)} failed tests, alone and one after the other:")
    sys.stdout.flush()
    code, second = run_pytest(["-q", *first])
    if code not in (0, _FAILED):
        return code
    return judge(first, second)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
