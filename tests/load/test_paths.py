"""Lines of lists, and patterns."""

import os

import pytest

from cachefs.errors import UsageError
from cachefs.load.paths import PathReader, path_filter

READER = PathReader("/mnt/data", "s3://bucket/train")


@pytest.mark.parametrize(
    ("line", "path"),
    [
        (b"a/b.jpg\n", "a/b.jpg"),
        (b"a/b.jpg\r\n", "a/b.jpg"),
        (b"./a//b.jpg/", "a/b.jpg"),
        (b"/mnt/data/a", "a"),
        (b"/mnt/data", ""),
        (b"s3://bucket/train/a b", "a b"),
        (b"s3://bucket/train/", ""),
        (b'{"path": "x/y", "size": 3}', "x/y"),
        (b"#hash", "#hash"),
        (b" space ", " space "),
        (b"odd-\xff", os.fsdecode(b"odd-\xff")),
    ],
)
def test_lines(line: bytes, path: str) -> None:
    read = READER.line(line)
    assert read is not None
    assert read.path == path


def test_an_empty_line_is_no_path() -> None:
    assert READER.line(b"\n") is None


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"/mnt/database/x", "is not below /mnt/data"),
        (b"s3://other/x", "is not below"),
        (b"a/../b", r"must not contain \.\."),
        (b"{nonsense", "is no JSON"),
        (b'{"size": 3}', 'has no "path"'),
        (b"[1]", None),
        (b"a\0b", "zero bytes"),
        (b"x" * 70_000, "is no path"),
    ],
)
def test_lines_that_are_no_paths(line: bytes, complaint: str | None) -> None:
    if complaint is None:
        assert READER.line(line) is not None  # an odd name, but a name
        return
    with pytest.raises(UsageError, match=complaint):
        READER.line(line)


def test_patterns() -> None:
    wanted = path_filter(["*.jpg", "labels/*"], ["*tmp*", "train/bad/*"])
    assert wanted is not None
    assert wanted("train/a.jpg")
    assert wanted("labels/deep/x.json")
    assert not wanted("train/a.png")
    assert not wanted("train/tmp1.jpg")
    assert not wanted("train/bad/a.jpg")
    assert path_filter([], []) is None
    only_excluded = path_filter([], ["*.png"])
    assert only_excluded is not None
    assert only_excluded("a.jpg")
    assert not only_excluded("a.png")
