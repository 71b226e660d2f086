"""The pure parts: names, twins, pages of XML."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.origin.names import TwinMerger, is_key_name, is_name, resolve_twins
from cachefs.origin.s3 import listing as s3_listing
from cachefs.types import Entry, ObjectMeta


@pytest.mark.parametrize("name", ["a", "...", " ", "é" * 127, "n" * 255, "a\nb", "\udcff"])
def test_names(name) -> None:
    assert is_name(name)
    assert is_key_name(name) == name.isprintable()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "\0", "n" * 256, "é" * 128])
def test_no_names(name) -> None:
    assert not is_name(name)
    assert not is_key_name(name)


def by_key(entry: Entry) -> str:
    return entry.name if entry.meta else entry.name + "/"


files = st.builds(
    lambda name, size: Entry(name, ObjectMeta(size, 0, "v")),
    st.text("a-0/".replace("/", "!"), min_size=1, max_size=4),
    st.integers(0, 1),
)
directories = st.builds(lambda name: Entry(name, None), st.text("a-0!", min_size=1, max_size=4))


@given(
    st.lists(st.one_of(files, directories), max_size=30, unique_by=by_key),
    st.integers(1, 5),
)
def test_merging_page_by_page_equals_resolving_at_once(entries, page) -> None:
    entries.sort(key=by_key)
    merger = TwinMerger()
    merged: list[Entry] = []
    for start in range(0, len(entries), page):
        merged += merger.feed(entries[start : start + page])
    merged += merger.finish()
    assert sorted(merged, key=by_key) == sorted(resolve_twins(entries), key=by_key)


ROW = (
    "<Contents><Key>{}</Key><LastModified>2026-11-21T09:23:17.5Z</LastModified>"
    "<ETag>&quot;e&#34;</ETag><Size>5</Size><Owner><ID>x</ID></Owner></Contents>"
)


def page(keys: list[str], prefixes: list[str], encoded: bool) -> bytes:
    rows = "\n".join(ROW.format(key) for key in keys)
    dirs = "".join(f"<CommonPrefixes><Prefix>{p}</Prefix></CommonPrefixes>" for p in prefixes)
    kind = "<EncodingType>url</EncodingType>" if encoded else ""
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/">'
        f"<Prefix>p/</Prefix>{kind}{rows}{dirs}</ListBucketResult>\n"
    ).encode()


PAGES = [
    page([], [], True),
    page(["p/a", "p/b%2B+c", "p/&amp;"], ["p/x+y/", "p/d/"], True),
    page(["p/a", "p/b%2B+c", "p/&amp;"], ["p/x+y/"], False),
]


@pytest.mark.parametrize("body", PAGES)
def test_both_parsers_agree(body) -> None:
    fast = s3_listing._columns_fast(body)
    assert fast is not None
    assert fast == s3_listing._columns(body, 1000)


def test_decoding_and_order() -> None:
    entries = s3_listing.parse_page(PAGES[1], "p/").entries
    assert [entry.name for entry in entries] == ["&", "a", "b+ c", "d", "x y"]
    meta = ObjectMeta(5, 1_795_252_997_000_000_000, '"e"')
    assert [entry.meta for entry in entries] == [meta, meta, meta, None, None]
    plain = s3_listing.parse_page(PAGES[2], "p/").entries
    assert [entry.name for entry in plain] == ["&", "a", "b%2B+c", "x+y"]


def test_unusual_xml_takes_the_parser() -> None:
    body = PAGES[1].replace(b"<Key>p/a", b'<Key a="b">p/a')
    assert s3_listing._columns_fast(body) is None
    assert len(s3_listing.parse_page(body, "p/").entries) == 5


def test_token() -> None:
    body = b"<NextContinuationToken>a&amp;b/+=</NextContinuationToken>"
    assert s3_listing.next_token(body) == "a&b/+="
    assert s3_listing.next_token(b"<x/>") is None


@pytest.mark.parametrize(
    ("e_tag", "version"),
    [('"a"', '"a"'), ("a", '"a"'), ('W/"a"', 'W/"a"'), ("", "7-3"), (None, "7-3")],
)
def test_version(e_tag, version) -> None:
    assert s3_listing.version_of(e_tag, 7, 3) == version


def _page_of(*rows: tuple[bytes, bytes, bytes]) -> bytes:
    """A page of rows of key, size and time."""
    form = b"<Contents><Key>%b</Key><Size>%b</Size><LastModified>%b</LastModified><ETag>e</ETag>"
    text = b"".join(form % row + b"</Contents>" for row in rows)
    return b"<ListBucketResult>" + text + b"</ListBucketResult>"


_TIME = b"2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    "odd",
    [
        (b"odd", b"1.5", _TIME),
        (b"odd", b"1", b"soon"),
        (b"odd", b"1", b"2026-01-01T00:00:00." + b"0" * 5000 + b"Z"),
        (b"od\xffd", b"1", _TIME),
        (b"o/" * 600 + b"d", b"1", _TIME),
    ],
    ids=["size", "time", "long time", "no UTF-8", "long key"],
)
def test_an_odd_row_hides_no_others(odd: tuple[bytes, bytes, bytes]) -> None:
    body = _page_of((b"a", b"1", _TIME), odd, (b"x", b"1", _TIME))
    listed = s3_listing.parse_page(body, "")
    assert [entry.name for entry in listed.entries] == ["a", "x"]
    assert listed.unshown == 1
    tree = s3_listing.parse_tree(body, "")
    assert [entry.name for entry in tree.pages[""].entries] == ["a", "x"]
    assert tree.pages[""].unshown == 1


def test_a_time_without_a_zone_is_utc() -> None:
    body = _page_of((b"a", b"1", _TIME), (b"b", b"1", _TIME.removesuffix(b"Z")))
    metas = [entry.meta for entry in s3_listing.parse_page(body, "").entries]
    assert metas[0] == metas[1]


def test_a_page_of_very_many_directories_is_listed_with_a_delimiter() -> None:
    body = _page_of(*((b"%d/" % n + b"a/" * 500, b"1", _TIME) for n in range(200)))
    tree = s3_listing.parse_tree(body, "")
    assert (tree.pages, tree.last_key, tree.is_whole) == ({}, "", False)
