"""The headers and bodies of writes, and what their answers say. Nothing here does I/O."""

import hashlib
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urlencode
from xml.sax.saxutils import escape

from cachefs.errors import BadDataError
from cachefs.foreign_numbers import whole_number
from cachefs.origin.options import OriginOptions
from cachefs.origin.s3 import answer_xml
from cachefs.origin.s3.listing import MOST_BYTES, version_of, whole_seconds
from cachefs.origin.writable import Attributes, Condition, PartTag
from cachefs.types import ObjectMeta

_META = "x-amz-meta-"
TAGGING = "x-amz-tagging"
_WRITE_ID = _META + "cachefs-write"
_KEPT = (
    "content-type",
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "expires",
)
"""Headers that a copy with new metadata must state again."""
_LONGEST_TEXT = 1024
_NO_PARTS = "the list of the parts of an upload can't be understood"
_MD5_TAG = re.compile('^"([0-9a-fA-F]{32})"$')


def object_headers(options: OriginOptions) -> dict[str, str]:
    """Return the headers that each new object gets, for policies and for costs."""
    stated = {
        "x-amz-server-side-encryption": options.sse,
        "x-amz-server-side-encryption-aws-kms-key-id": options.sse_kms_key,
        "x-amz-storage-class": options.storage_class,
        "x-amz-acl": options.acl,
        TAGGING: options.tags and urlencode(parse_qsl(options.tags, True), quote_via=quote),
    }
    return {name: value for name, value in stated.items() if value}


def metadata(attributes: Attributes, write_id: str, kind: int = stat.S_IFREG) -> dict[str, str]:
    """Return the headers that keep attributes with an object: `mtime` in seconds with a fraction,
    as rclone and s3fs write it; `mode` with the file type (decimal), `uid` and `gid` as s3fs."""
    headers = {**dict(attributes.headers), _WRITE_ID: write_id}
    if attributes.mtime_ns is not None:
        seconds, fraction = divmod(attributes.mtime_ns, 1_000_000_000)
        text = f"{seconds}.{fraction:09}".rstrip("0").rstrip(".")
        if seconds < 0 and fraction:
            text = f"-{-seconds - 1}.{1_000_000_000 - fraction:09}".rstrip("0")
        headers[_META + "mtime"] = text
    if attributes.mode is not None:
        headers[_META + "mode"] = str(kind | (attributes.mode & 0o1777))
    if attributes.uid is not None:
        headers[_META + "uid"] = str(attributes.uid)
    if attributes.gid is not None:
        headers[_META + "gid"] = str(attributes.gid)
    return headers


def metadata_again(found: Mapping[str, str], write_id: str) -> dict[str, str]:
    """Return the headers with which a copy has the metadata of an object, given those of a HEAD."""
    kept = {n: v for n, v in found.items() if n in _KEPT or n.startswith(_META)}
    return {**kept, _WRITE_ID: write_id}


def write_id_of(headers: Mapping[str, str]) -> str | None:
    """Return the id of the write that made an object, from the headers of a HEAD."""
    return headers.get(_WRITE_ID)


def condition_headers(condition: Condition | None, is_oss: bool) -> dict[str, str]:
    """Return the headers that make a request depend on the object. OSS has one of its own."""
    if condition is None:
        return {}
    if condition.version is not None:
        return {"if-match": condition.version}
    return {"x-oss-forbid-overwrite": "true"} if is_oss else {"if-none-match": "*"}


def copy_source(bucket: str, key: str, version: str) -> dict[str, str]:
    """Return the headers that name one version of an object as the source of a copy."""
    return {
        "x-amz-copy-source": f"/{bucket}/{quote(key, safe='/-_.~')}",
        "x-amz-copy-source-if-match": version,
    }


def query_of(**parameters: str) -> str:
    """Return a sorted and quoted query. An underscore in a name stands for a hyphen."""
    pairs = sorted((name.replace("_", "-"), value) for name, value in parameters.items())
    return "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in pairs)


def described(headers: Mapping[str, str]) -> ObjectMeta:
    """Return the metadata of an object from the headers of a HEAD. Raises `BadDataError`."""
    size_bytes = whole_number(headers.get("content-length", ""))
    if size_bytes is None or size_bytes > MOST_BYTES:
        raise BadDataError("the answer to a HEAD does not state a size")
    mtime_ns = _time_ns(headers.get("last-modified"))
    version = version_of(headers.get("etag"), mtime_ns, size_bytes)
    return ObjectMeta(size_bytes, mtime_ns, version)


def written(headers: Mapping[str, str], e_tag: str, size_bytes: int) -> ObjectMeta:
    """Return the metadata of an object that has just been written. The time of the answer stands
    for the time of the object, which the answer lacks."""
    mtime_ns = _recent_ns(headers.get("date"))
    return ObjectMeta(size_bytes, mtime_ns, version_of(e_tag, mtime_ns, size_bytes))


@lru_cache(maxsize=8)
def _recent_ns(text: str | None) -> int:
    return _time_ns(text)


def _time_ns(text: str | None) -> int:
    try:
        return whole_seconds(parsedate_to_datetime(text or ""))
    except (ValueError, OverflowError):
        return 0


def completion(parts: Sequence[PartTag]) -> bytes:
    """Return the body of CompleteMultipartUpload."""
    rows = "".join(
        f"<Part><PartNumber>{part.number}</PartNumber><ETag>{escape(part.tag)}</ETag></Part>"
        for part in sorted(parts)
    )
    return (
        '<CompleteMultipartUpload xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"{rows}</CompleteMultipartUpload>"
    ).encode()


def expected_e_tag(parts: Iterable[PartTag]) -> str | None:
    """Return the ETag that S3 gives an upload of these parts, or None if their ETags are no MD5s
    (as with some encryption)."""
    digests = []
    for part in sorted(parts):
        found = _MD5_TAG.match(part.tag)
        if found is None:
            return None
        digests.append(bytes.fromhex(found[1]))
    whole = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
    return f'"{whole}-{len(digests)}"'


def is_same_e_tag(one: str | None, other: str | None) -> bool:
    """Whether two ETags are equal; stores differ in quotes and capitals."""
    if not one or not other:
        return False
    return one.strip('"').lower() == other.strip('"').lower()


def deletion(keys: Iterable[str]) -> bytes:
    """Return the body of DeleteObjects."""
    rows = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in keys)
    return (
        '<Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Quiet>true</Quiet>{rows}</Delete>"
    ).encode()


def not_deleted(body: bytes, is_oss: bool) -> dict[str, str]:
    """Return the codes by the keys that DeleteObjects has not deleted; "" stands for a key that the
    answer does not name. Raises `BadDataError`."""
    if is_oss and not body.strip():  # OSS has nothing to say if all are deleted
        return {}
    codes: dict[str, str] = {}

    def take_row(name: str, row: dict[str, str]) -> None:
        if name == "Error" and row.get("Code") != "NoSuchKey":
            codes[row.get("Key", "")] = row.get("Code", "")

    if answer_xml.parse(body, take_row).root != "DeleteResult":
        raise BadDataError("the answer to a deletion can't be understood")
    return codes


def is_error(body: bytes) -> bool:
    """Whether the body is an error document; S3 sends some with status 200."""
    return bool(body) and answer_xml.root_of(body) == "Error"


def e_tag_in(body: bytes) -> str:
    """Return the ETag of CompleteMultipartUpload, CopyObject or UploadPartCopy. Raises
    `BadDataError`."""
    return _e_tag(answer_xml.parse(body).texts)


def _e_tag(texts: Mapping[str, str]) -> str:
    text = texts.get("ETag", "").strip()
    if not 0 < len(text) <= _LONGEST_TEXT:
        raise BadDataError("the answer to a write has no ETag")
    return text if text.startswith('"') else f'"{text}"'


def upload_id_in(body: bytes) -> str:
    """Return the id of a new upload. Raises `BadDataError`."""
    upload_id = answer_xml.parse(body).texts.get("UploadId", "")
    if not 0 < len(upload_id) <= _LONGEST_TEXT:
        raise BadDataError("the answer to a new upload has no id")
    return upload_id


class PartsPage(NamedTuple):
    """One page of ListParts. `after` is where the next page begins, None if there is none."""

    parts: list[PartTag]
    after: str | None


def parts_in(body: bytes) -> PartsPage:
    """Parse a page of ListParts. Raises `BadDataError`."""
    parts: list[PartTag] = []

    def take_row(name: str, row: dict[str, str]) -> None:
        if name == "Part":
            parts.append(_part(row))

    document = answer_xml.parse(body, take_row)
    if document.root != "ListPartsResult":
        raise BadDataError(_NO_PARTS)
    marker = document.texts.get("NextPartNumberMarker", "").strip()
    is_truncated = document.texts.get("IsTruncated", "").strip() == "true"
    return PartsPage(parts, marker if is_truncated and whole_number(marker) is not None else None)


def _part(row: Mapping[str, str]) -> PartTag:
    number, size = (whole_number(row.get(name, "").strip()) for name in ("PartNumber", "Size"))
    if number is None or size is None or size > MOST_BYTES:
        raise BadDataError(_NO_PARTS)
    return PartTag(number, size, _e_tag(row))


def uploads_in(body: bytes, key: str) -> list[tuple[str, float]]:
    """Return the id and the time of the beginning (seconds since 1970) of each upload of this key
    in a page of ListMultipartUploads. Raises `BadDataError`."""
    found: list[tuple[str, float]] = []

    def take_row(name: str, row: dict[str, str]) -> None:
        if name != "Upload" or row.get("Key") != key:
            return
        try:
            began = datetime.fromisoformat(row["Initiated"].strip()).replace(tzinfo=UTC)
            found.append((row["UploadId"], began.timestamp()))
        except (KeyError, ValueError, OverflowError):
            raise BadDataError("the list of uploads can't be understood") from None

    answer_xml.parse(body, take_row)
    return found


def seconds_of(date: str | None) -> float:
    """Return the time of a Date header in seconds since 1970. Raises `BadDataError`."""
    now_ns = _time_ns(date)
    if not now_ns:
        raise BadDataError("the answer of the store has no date")
    return now_ns / 1e9
