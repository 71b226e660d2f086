"""Directories that one LIST shows, against the same listed by delimiter, one by one."""

import random
from collections.abc import Iterable
from xml.sax.saxutils import escape

import pytest

from cachefs.errors import NotFoundError, OriginError
from cachefs.origin.base import Learned, OriginCounters
from cachefs.origin.names import Pages
from cachefs.origin.s3.lister import PageRequest
from cachefs.origin.s3.pages import PagedListing, TreeShapes
from cachefs.origin.s3.versions import Versions
from cachefs.types import Entry

PARTS = ("a", "a-", "a.b", "a b+%", "b", "é", "z", "")
"""With those on both sides of `/` in order, and no name at all."""


class Bucket:
    """What `PagedListing` needs of an origin, with the LISTs of S3 done in memory. `by_part`: in
    the order of a file system."""

    def __init__(self, keys: Iterable[str], page_keys: int, by_part: bool = False) -> None:
        self.shapes = TreeShapes()
        self.versions = Versions("store", Learned())
        self.counters = OriginCounters()
        self.requests: list[PageRequest] = []
        self._order = (lambda key: key.replace("/", "\0")) if by_part else (lambda key: key)
        self._keys = sorted(set(keys), key=self._order)
        self._page_keys = page_keys

    def dir_prefix(self, path: str) -> str:
        return f"top/{path}/" if path else "top/"

    def start_page(self, request: PageRequest) -> PageRequest:
        self.requests.append(request)
        return request

    async def no_such_dir(self, path: str) -> OriginError:
        return NotFoundError(path)

    async def fetch_page(self, request: PageRequest) -> bytes:
        after = request.token or request.start_after
        rows: list[str] = []
        seen = ""
        token = ""
        for key in self._keys:
            if not key.startswith(request.prefix) or self._order(key) <= self._order(after):
                continue
            rest = key[len(request.prefix) :]
            group = ""
            if request.delimiter and "/" in rest:
                group = request.prefix + rest.partition("/")[0] + "/"
                if group == seen or after.startswith(group):
                    continue
            if len(rows) == self._page_keys:
                break
            token = key
            if group:
                seen = group
                # All of the group is behind the token.
                token = max((k for k in self._keys if k.startswith(group)), key=self._order)
                rows.append(f"<CommonPrefixes><Prefix>{escape(group)}</Prefix></CommonPrefixes>")
            else:
                rows.append(
                    f"<Contents><Key>{escape(key)}</Key><Size>{len(key) % 3}</Size><ETag>x</ETag>"
                    "<LastModified>2026-11-02T10:00:00Z</LastModified></Contents>"
                )
        else:
            token = ""
        if token:
            rows.append(f"<NextContinuationToken>{escape(token)}</NextContinuationToken>")
        return f"<ListBucketResult>{''.join(rows)}</ListBucketResult>".encode()

    async def list(self, path: str, below: dict[str, list[Entry]] | None) -> list[Entry]:
        pages = Pages(PagedListing(self, path, below).next_page)  # type: ignore[arg-type]
        return [entry async for page in pages for entry in page]


def random_keys(rng: random.Random) -> list[str]:
    def key() -> str:
        parts = rng.choices(PARTS, weights=[9, 4, 4, 2, 6, 2, 6, 1], k=rng.randint(1, 4))
        return "top/" + "/".join(parts)

    return [key() for _ in range(rng.randint(1, 40))] + ["tip", "top-/x", "tops/x"]


async def truth(bucket: Bucket) -> dict[str, list[Entry]]:
    """Every directory, by delimiter."""
    found: dict[str, list[Entry]] = {}
    left = [""]
    while left:
        path = left.pop()
        found[path] = sorted(await bucket.list(path, None))
        below = [entry.name for entry in found[path] if entry.is_dir]
        left += [f"{path}/{name}" if path else name for name in below]
    return found


@pytest.mark.parametrize("by_part", [False, True])
@pytest.mark.long
async def test_what_lies_below_is_what_its_own_listing_shows(by_part: bool) -> None:
    from_below = 0
    for seed in range(100):
        rng = random.Random(seed)
        keys = random_keys(rng)
        if by_part:  # a file system has no file and directory of one name
            keys = [key for key in keys if not any(k.startswith(key + "/") for k in keys)]
        bucket = Bucket(keys, rng.choice([1, 2, 3, 5, 8, 13, 1000]), by_part)
        expected = await truth(bucket)
        for _ in range(3):  # the shapes are known better each time
            for path in rng.sample(sorted(expected), len(expected)):
                below: dict[str, list[Entry]] = {}
                assert sorted(await bucket.list(path, below)) == expected[path], (seed, path)
                for inner, entries in below.items():
                    if inner in expected:  # else its name is none that can be shown
                        assert sorted(entries) == expected[inner], (seed, path, inner)
                        from_below += 1
    assert from_below > 400


async def test_one_list_shows_a_small_tree() -> None:
    bucket = Bucket([f"top/d{d}/{s}/f{f}" for d in range(3) for s in "xy" for f in range(5)], 1000)
    below: dict[str, list[Entry]] = {}
    assert [name for name, _ in await bucket.list("", below)] == ["d0", "d1", "d2"]
    assert len(bucket.requests) == 1
    assert len(below) == 3 + 6
    assert [name for name, _ in below["d1/y"]] == [f"f{f}" for f in range(5)]


async def test_a_directory_of_files_alone_costs_no_page_more() -> None:
    bucket = Bucket([f"top/f{number:03}" for number in range(35)], 10)
    assert len(await bucket.list("", {})) == 35
    assert len(bucket.requests) == 4


async def test_a_deep_directory_costs_one_list_more_once() -> None:
    bucket = Bucket([f"top/d{number % 7}/f{number:03}" for number in range(100)], 10)
    for cost in (2, 1):
        bucket.requests.clear()
        assert len(await bucket.list("", {})) == 7
        assert len(bucket.requests) == cost


async def test_directories_listed_one_after_the_other_come_together() -> None:
    names = [f"d{number:03}" for number in range(200)]
    bucket = Bucket([f"top/{name}/f{f}" for name in names for f in range(4)], 100)
    await bucket.list("", {})
    bucket.requests.clear()
    known: dict[str, list[Entry]] = {}
    for name in names:
        if name not in known:
            assert len(await bucket.list(name, known)) == 4
    assert len(bucket.requests) < 70, "8 alone, then 25 in one"
    assert all(len(entries) == 4 for entries in known.values())


async def test_a_bucket_without_an_order_is_listed_by_delimiter() -> None:
    bucket = Bucket([f"top/d{number}/f" for number in range(9)], 4)
    random.Random(1).shuffle(bucket._keys)
    bucket._order = {key: number for number, key in enumerate(bucket._keys)}.get  # type: ignore
    bucket._order = lambda key: bucket._keys.index(key) if key in bucket._keys else -1  # type: ignore
    below: dict[str, list[Entry]] = {}
    assert len(await bucket.list("", below)) == 9
    assert below == {}
