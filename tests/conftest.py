"""What holds for every test: servers to ask for, logged warnings fail, CI skips nothing.

A WARNING or ERROR of the `cachefs` logger fails the test that caused it. A test that means to
cause one says so, with `@pytest.mark.expect_log(regex)` or by calling the `expect_log` fixture;
then it fails if the record does not come (unless `required=False`).
"""

import logging
import os
import re
import signal
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TypeVar

import pytest

from cachefs import log as cachefs_log
from cachefs.cache.tier import admission
from tests.disk_limits import set_disk_limits
from tests.full_database import FullDatabase

pytest_plugins = ["tests.servers.fixtures", "tests.distribution"]

IN_CI = os.environ.get("CI", "").lower() in {"1", "true", "yes"}


@pytest.fixture(autouse=True)
def _no_disk_is_slow(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nobody goes around a disk, and no block is given up, because the machine is busy: else each
    test that counts GETs would depend on its speed. `@pytest.mark.real_disk_limits` for those that
    are about it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("real_disk_limits") is None:
            set_disk_limits(patch, patience_s=1000.0, hung_s=1000.0, most_patience_s=1000.0)
            patch.setattr(admission, "STALL_S", 1e6)
        yield


def pytest_configure() -> None:
    """A shell that runs tests in the background has SIGINT ignored, and so would all that they
    start. SIGTERM (of `timeout`, or CI) lets fixtures unmount and stop their servers, too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Whatever the environment says: each daemon would compile all of cachefs, .2 s of CPU.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


_SERVERS = {"seaweedfs", "moto_s3", "hdfs"}
"""The fixtures of tests/servers/fixtures.py."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what each test needs. `make check` runs those that need no mount, no server and
    little time."""
    for item in items:
        if item.path.parent.name == "mount":
            item.add_marker(pytest.mark.mount)
        if item.path.parent.name == "crash":
            item.add_marker(pytest.mark.long)
        if _SERVERS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.server)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") is not None and os.geteuid() != 0:
        pytest.skip("only root can do this")


@dataclass
class _Expected:
    pattern: re.Pattern[str]
    required: bool
    seen: bool = False


class _Guard(logging.Handler):
    """Collects what one test logs and judges it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.expected: list[_Expected] = []
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" [{record.exc_info[1]!r}]"
        self.records.append(f"{record.levelname} {record.name}: {text}")

    def expect(self, regex: str, required: bool = True) -> None:
        self.expected.append(_Expected(re.compile(regex), required))

    def judge(self) -> None:
        """Fail the running test for a record that nobody expected. May be called again."""
        unexpected = []
        for text in self.records:
            matching = [expected for expected in self.expected if expected.pattern.search(text)]
            for expected in matching:
                expected.seen = True
            if not matching:
                unexpected.append(text)
        self.records.clear()
        if unexpected:
            pytest.fail("unexpected log records:\n  " + "\n  ".join(unexpected), pytrace=False)

    def judge_missing(self) -> None:
        missing = [e.pattern.pattern for e in self.expected if e.required and not e.seen]
        if missing:
            pytest.fail(f"expected log records that never came: {missing}", pytrace=False)


_GUARD = pytest.StashKey[_Guard]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    guard = _Guard()
    for mark in item.iter_markers("expect_log"):
        guard.expect(*mark.args, **mark.kwargs)
    item.stash[_GUARD] = guard
    logger = logging.getLogger(cachefs_log.ROOT_LOGGER)
    level = logger.level
    cachefs_log.forget_warnings()
    logger.addHandler(guard)
    try:
        return (yield)
    finally:
        logger.removeHandler(guard)
        logger.setLevel(level)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    item.stash[_GUARD].judge()
    item.stash[_GUARD].judge_missing()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    item.stash[_GUARD].judge()
    return result


@pytest.fixture
def full_database(monkeypatch: pytest.MonkeyPatch) -> FullDatabase:
    return FullDatabase(monkeypatch)


@pytest.fixture
def expect_log(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`expect_log(regex, required=True)`: this WARNING or ERROR is meant to be logged."""
    return request.node.stash[_GUARD].expect


_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)


def _fail_if_skipped(report: _Report) -> _Report:
    """In CI a skip is a failure: the machine there can run everything."""
    if IN_CI and report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: nothing may be skipped in CI, and this was: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _fail_if_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _fail_if_skipped((yield))
