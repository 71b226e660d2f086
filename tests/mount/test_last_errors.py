"""An error that a program gets leaves a line in the log, and is in the status with its cause."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import Site
from tests.servers.told_s3 import DATE, Answer, Asked, ToldS3, page, row

ARCHIVED = (
    b"<Error><Code>InvalidObjectState</Code><Message>not \x1b[2Jvalid</Message>"
    b"<StorageClass>DEEP_ARCHIVE</StorageClass></Error>"
)
NAMES = [f"cold{number}" for number in range(5)]


def answer(asked: Asked) -> Answer:
    if asked.is_list:
        return page(*(row(name) for name in [*NAMES, "hot"]))
    if asked.method == "GET" and "cold" in asked.path:
        return Answer(ARCHIVED, 403)
    return Answer(b"data", headers={"Last-Modified": DATE, "ETag": '"one"'})


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ToldS3(answer) as server:
        site = Site(tmp_path, "s3://b")
        site.environment = server.environment
        site.mount("--prefetch", "off")
        yield site
        site.tear_down()


def test_archived_objects(site: Site) -> None:
    for name in NAMES:
        with pytest.raises(OSError, match="Input/output error") as raised:
            (site.mountpoint / name).read_bytes()
        assert raised.value.errno == errno.EIO
    assert (site.mountpoint / "hot").read_bytes() == b"data"
    lines = [line for line in site.log.read_text().splitlines() if "gave EIO" in line]
    assert len(lines) == 1, "one line for the kind"
    assert "read of /cold0 gave EIO: " in lines[0]
    assert "archived (DEEP_ARCHIVE): restore it" in lines[0]
    assert "credentials" not in lines[0]
    assert lines[0].isprintable()
    (error,) = site.status()["errors"]
    assert (error["errno"], error["path"]) == ("EIO", "/cold4")
    assert error["count"] >= len(NAMES)
