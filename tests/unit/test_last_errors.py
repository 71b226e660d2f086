"""What programs were refused: one line per kind in the log, and the last kinds in the status."""

import errno

import pytest

from cachefs.foreign_text import said
from cachefs.last_errors import MOST_LINES, MOST_SHOWN, PAUSE_S, LastErrors


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def errors(clock: Clock) -> LastErrors:
    return LastErrors(clock)


LOGGED = pytest.mark.expect_log(" gave E")


def archived(errors: LastErrors, number: int) -> None:
    path = f"/d/{number}.bin"
    errors.note("read", path, errno.EIO, f"s3://b/p{path} can't be read in {number} s: archived")


@LOGGED
def test_one_line_for_a_kind(
    errors: LastErrors, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(100):
        archived(errors, number)
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage() == (
        "read of /d/0.bin gave EIO: s3://b/p/d/0.bin can't be read in 0 s: archived"
    )
    (kind,) = errors.report()
    assert (kind["count"], kind["path"], kind["errno"]) == (100, "/d/99.bin", "EIO")
    clock.now += PAUSE_S
    archived(errors, 100)
    assert len(caplog.records) == 2
    assert "99 more like this" in caplog.records[1].getMessage()
    (kind,) = errors.report()
    assert (kind["first_at"], kind["last_at"]) == (1000.0, 1000.0 + PAUSE_S)


def test_other_errnos_are_nothing_to_tell(errors: LastErrors) -> None:
    for number in (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY):
        errors.note("lookup", "/f", number, "x")
    assert not errors.report()


@LOGGED
def test_bounds(errors: LastErrors, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(1000):
        text = chr(0x4E00 + number)
        errors.note("read", "/f", errno.EACCES, text)
    assert len(caplog.records) == MOST_LINES
    assert [kind["text"] for kind in errors.report()] == [
        chr(0x4E00 + number) for number in range(999, 999 - MOST_SHOWN, -1)
    ]


@LOGGED
def test_nothing_from_outside_reaches_a_terminal(
    errors: LastErrors, caplog: pytest.LogCaptureFixture
) -> None:
    errors.note("read", "/\x1b[2J\n", errno.ESTALE, "a\x1b[31m\nforged" + "x" * 10_000)
    (kind,) = errors.report()
    assert kind["path"] == r"/\x1b[2J\n"
    assert kind["text"].startswith(r"a\x1b[31m\nforged")
    assert len(kind["text"]) < 1100
    assert caplog.records[0].getMessage().isprintable()


def test_what_a_store_says() -> None:
    token = "IQoJb3JpZ2luX2VjEHQaCXVzLWVhc3QtMSJHMEUCIQ"
    assert said(f"  a\n\x1b b {token}/{token} c ") == "a ? b (...) c"
    assert len(said("long " * 100)) <= 240
