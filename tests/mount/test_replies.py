"""READs that a thread of the engine answers: of cold small files, if all is as expected, and of
what is on its way already."""

import hashlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mount.harness import PATIENT, Site, eventually
from tests.servers.told_s3 import DATE, Answer, Asked, ToldS3, page, row

CONTENT = os.urandom(180_000)
MD5 = hashlib.md5(CONTENT).hexdigest()
BUSY = b"<Error><Code>SlowDown</Code><Message>later</Message></Error>"
CHANGED = b"<Error><Code>PreconditionFailed</Code></Error>"


class Source:
    """Answers the first GET of each object by `first`, and all others with its content."""

    def __init__(self) -> None:
        self.first: Callable[[], Answer] = right
        self.asked: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, asked: Asked) -> Answer:
        if asked.is_list:
            return page(*(row(f"f{number:02}", len(CONTENT), e_tag=MD5) for number in range(16)))
        if asked.method != "GET":
            return right()
        with self._lock:
            is_first = asked.path not in self.asked
            self.asked.append(asked.path)
        return self.first() if is_first else right()


def right(body: bytes = CONTENT) -> Answer:
    return Answer(body, headers={"Last-Modified": DATE, "ETag": f'"{MD5}"'})


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def site(tmp_path: Path, source: Source) -> Iterator[Site]:
    with ToldS3(source) as server:
        site = Site(tmp_path, "s3://b")
        site.environment = server.environment
        site.options = PATIENT
        site.mount("--prefetch", "off")
        os.listdir(site.mountpoint)
        yield site
        site.tear_down()


def read_all(site: Site) -> None:
    """By 16 readers, in the order of the names backwards."""
    files = sorted(site.mountpoint.iterdir(), reverse=True)
    with ThreadPoolExecutor(16) as readers:
        assert all(content == CONTENT for content in readers.map(Path.read_bytes, files))


def test_one_get_for_each_file(site: Site, source: Source) -> None:
    read_all(site)
    assert len(source.asked) == len(set(source.asked)) == 16
    assert site.origin()["gets"] == 16
    assert site.origin()["get_bytes"] == 16 * len(CONTENT)


@pytest.mark.parametrize(
    "first",
    [
        lambda: Answer(BUSY, 503),
        lambda: Answer(CHANGED, 412),
        lambda: right(CONTENT[1:] + b"x"),
        lambda: right(CONTENT[:-1]),
        lambda: Answer(CONTENT, headers={"Last-Modified": DATE, "ETag": '"another"'}),
        lambda: Answer(
            CONTENT,
            headers={"Last-Modified": DATE, "ETag": f'"{MD5}"'},
            breaks_after_bytes=100_000,
        ),
    ],
    ids=["busy", "changed", "damaged", "short", "replaced", "broken"],
)
def test_other_answers_are_left_to_the_usual_way(
    site: Site, source: Source, first: Callable[[], Answer]
) -> None:
    """It asks again, and nobody gets a wrong byte or an error."""
    source.first = first
    read_all(site)
    assert len(source.asked) > 16


def test_a_store_that_is_silent_at_first(site: Site, source: Source) -> None:
    released = threading.Event()

    def silent() -> Answer:
        released.wait(20)
        return right()

    source.first = silent
    try:
        read_all(site)
    finally:
        released.set()


def test_a_killed_reader_disturbs_nobody(site: Site, source: Source) -> None:
    """Its READ has been answered when the bytes come."""
    asked, released = threading.Event(), threading.Event()

    def late() -> Answer:
        asked.set()
        released.wait(20)
        return right()

    source.first = late
    program = f"open({str(site.mountpoint / 'f07')!r}, 'rb').read()"
    with subprocess.Popen([sys.executable, "-c", program]) as reader:
        assert asked.wait(20)
        reader.kill()
        reader.wait(20)
    released.set()
    eventually(lambda: site.origin()["get_bytes"] == len(CONTENT))
    source.first = right
    read_all(site)


def test_reads_of_what_is_on_its_way(tmp_path: Path) -> None:
    """At any offsets, by several threads. One request of each three breaks."""
    content = os.urandom(24 << 20)
    numbers = itertools.count()

    def answer(asked: Asked) -> Answer:
        if asked.is_list:
            return page(row("f", len(content), e_tag="e"))
        head = {"Last-Modified": DATE, "ETag": '"e"'}
        if "range" not in asked.headers:
            return Answer(content, headers=head)
        first, last = map(int, asked.headers["range"].removeprefix("bytes=").split("-"))
        head["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        time.sleep(0.02)
        breaks_after_bytes = 100_000 if next(numbers) % 3 == 2 else None
        return Answer(content[first : last + 1], 206, head, None, breaks_after_bytes)

    def read(place: int) -> bool:
        with (site.mountpoint / "f").open("rb", buffering=0) as file:
            return os.pread(file.fileno(), 2_500_000, place) == content[place:][:2_500_000]

    with ToldS3(answer) as server:
        site = Site(tmp_path, "s3://b")
        site.environment = server.environment
        site.options = PATIENT
        site.mount("--prefetch", "off")
        try:
            with ThreadPoolExecutor(4) as readers:
                assert all(readers.map(read, range(0, len(content), 1_234_567)))
        finally:
            site.tear_down()


def test_as_many_reads_of_a_user_at_once_as_ever(tmp_path: Path, source: Source) -> None:
    """READs that the engine gives back take no more than their places."""
    lock = threading.Lock()
    now = most = 0

    def answer(asked: Asked) -> Answer:
        nonlocal now, most
        with lock:
            now += asked.method == "GET" and not asked.is_list
            most = max(most, now)
        try:
            time.sleep(0.05)
            return source(asked)
        finally:
            with lock:
                now -= asked.method == "GET" and not asked.is_list

    source.first = lambda: Answer(CHANGED, 412)
    with ToldS3(answer) as server:
        site = Site(tmp_path, "s3://b")
        site.environment = server.environment
        site.options = PATIENT
        site.customize(
            "from cachefs.fuse.relay import _relay  # before libfuse\n"
            "_relay.reads_ready_fd()\n"
            "for user in range(1 << 15):\n"
            "    _relay.bound_reads(user, 2, False)\n"
        )
        site.mount("--prefetch", "off")
        try:
            os.listdir(site.mountpoint)
            read_all(site)
        finally:
            site.tear_down()
    assert most == 2
