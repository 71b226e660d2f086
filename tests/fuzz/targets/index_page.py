"""Index pages of web servers (origin/fsspec/index_page.py)."""

from cachefs.origin.fsspec.index_page import links_in

GROWING = {
    "white space": lambda count: b"<a" + b" " * count,
    "open tags": lambda count: b"<a href='" * (count // 9),
    "attributes": lambda count: b"<a " + b"b='' " * (count // 5),
    "equals": lambda count: b"<a " + b"=" * count,
    "open quotes": lambda count: b"<a b=\"<a b='" * (count // 12),
    "spaces before values": lambda count: b"<a " + b"b= " * (count // 3),
    "one link": lambda count: b"<a href='" + b"&#" * (count // 2) + b"'",
    "links": lambda count: b"<a href='x'>" * (count // 12),
}
"""Inputs of about so many bytes."""


def fuzz(data: bytes) -> None:
    for link in links_in(data.decode(errors="surrogateescape")):
        assert len(link) <= 16384
