"""What `store.py` keeps: buckets, objects and uploads, in memory."""

import bisect
import hashlib
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.servers.store_dials import Dials

_upload_numbers = itertools.count(1)
_LAST = b"\xff"
"""Behind each byte of UTF-8."""


class Refusal(Exception):
    """An error answer. `more` is XML inside of the error."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str = "",
        headers: Mapping[str, str] | None = None,
        more: str = "",
    ) -> None:
        super().__init__(code)
        self.status, self.code, self.message = status, code, message or code
        self.headers, self.more = dict(headers or {}), more


@dataclass
class StoredObject:
    """`data` may be anything with a length and slices that are bytes. `headers` are those of a GET
    beside ETag, time and length: type, user metadata, encryption."""

    data: Any
    e_tag: str
    """In quotes, or empty."""
    headers: dict[str, str] = field(default_factory=dict)
    mtime_s: float = field(default_factory=time.time)
    list_e_tag: str | None = None
    """What LIST shows, if that is the object's own."""
    is_archived: bool = False
    """GET is refused with InvalidObjectState."""
    needs_key: bool = False
    """SSE-C: GET and HEAD without the customer's key are 400, HEAD without a body."""

    @property
    def size_bytes(self) -> int:
        return len(self.data)


@dataclass
class Part:
    data: bytes
    e_tag: str
    mtime_s: float = field(default_factory=time.time)


@dataclass
class StoredUpload:
    """A multipart upload that is open, or (`answer`) was completed."""

    key: str
    headers: dict[str, str]
    began_s: float = field(default_factory=time.time)
    parts: dict[int, Part] = field(default_factory=dict)
    upload_id: str = field(default_factory=lambda: f"upload-{next(_upload_numbers)}")
    answer: Any = None
    made: StoredObject | None = None


class Rows(NamedTuple):
    """A page of a listing. `end` is the last key or prefix of a page that others follow."""

    keys: list[str]
    prefixes: list[str]
    end: str | None


class Bucket:
    """Objects by key, in the order of the store, and uploads."""

    def __init__(self, name: str, dials: Dials) -> None:
        self.name = name
        self.is_by_part = dials.list_order == "parts"
        self.hides_below_files = dials.below_a_file == "hidden"
        self.objects: dict[str, StoredObject] = {}
        self.uploads: dict[str, StoredUpload] = {}
        self.completed: dict[str, StoredUpload] = {}
        self._order: list[bytes] = []
        """Of the keys, as `_place` has them."""
        self._key_at: dict[bytes, str] = {}

    def _place(self, key: str) -> bytes:
        return (key.replace("/", "\0") if self.is_by_part else key).encode(errors="surrogateescape")

    def put(self, key: str, stored: StoredObject) -> None:
        if key not in self.objects:
            place = self._place(key)
            bisect.insort(self._order, place)
            self._key_at[place] = key
        self.objects[key] = stored

    def delete(self, key: str) -> None:
        if self.objects.pop(key, None) is not None:
            place = self._place(key)
            del self._order[bisect.bisect_left(self._order, place)]
            del self._key_at[place]

    def has_below(self, prefix: str) -> bool:
        """Whether a key begins with `prefix`."""
        return bool(self.rows(prefix, "", "", 1).keys)

    def used_bytes(self) -> int:
        """Of all objects and parts."""
        parts = (part for upload in self.uploads.values() for part in upload.parts.values())
        return sum(len(each.data) for each in (*self.objects.values(), *parts))

    def rows(self, prefix: str, delimiter: str, after: str, most: int) -> Rows:
        """The keys and common prefixes that begin with `prefix` and come after `after`."""
        start = self._place(prefix)
        at = bisect.bisect_left(self._order, start)
        if after:
            place = self._place(after)
            if delimiter and after.endswith(delimiter) and after.startswith(prefix):
                place += _LAST  # a common prefix stands for all below it
            at = max(at, bisect.bisect_right(self._order, place))
        keys: list[str] = []
        prefixes: list[str] = []
        end = ""
        while at < len(self._order) and self._order[at].startswith(start):
            key = self._key_at[self._order[at]]
            if self.hides_below_files and self._is_below_a_file(key):
                at += 1
                continue
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            if cut >= 0 and key[: cut + len(delimiter)] <= after:
                at += 1
                continue
            if len(keys) + len(prefixes) >= most:
                return Rows(keys, prefixes, end)
            if cut >= 0:
                end = key[: cut + len(delimiter)]
                prefixes.append(end)
                at = bisect.bisect_left(self._order, self._place(end) + _LAST)
            else:
                end = key
                keys.append(key)
                at += 1
        return Rows(keys, prefixes, None)

    def _is_below_a_file(self, key: str) -> bool:
        cuts = (at for at, each in enumerate(key) if each == "/")
        return any(key[:cut] in self.objects for cut in cuts)

    def upload(self, key: str, upload_id: str) -> StoredUpload:
        found = self.uploads.get(upload_id)
        if found is None or found.key != key:
            raise Refusal(404, "NoSuchUpload", "The specified multipart upload does not exist.")
        return found


def md5(data: bytes) -> str:
    """The ETag of an object that was put in one piece."""
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def opaque(data: bytes) -> str:
    """An ETag of the same form that is no MD5, and another each time."""
    return f'"{hashlib.md5(data + str(time.time_ns()).encode()).hexdigest()}"'


def joined_e_tag(parts: Sequence[Part], data: bytes, kind: str) -> str:
    """The ETag of an upload."""
    if kind == "md5":
        return md5(data)
    if kind == "opaque":
        return f'"{opaque(data).strip(chr(34))}-{len(parts)}"'
    digests = b"".join(hashlib.md5(part.data, usedforsecurity=False).digest() for part in parts)
    return f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"'


def is_same(one: str, other: str) -> bool:
    """Whether two ETags are equal, with quotes or without."""
    return one.strip('"') == other.strip('"')
