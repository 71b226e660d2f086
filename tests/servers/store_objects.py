"""GET, HEAD, PUT, copies and deletions of `store.py`."""

import base64
import gzip
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from email.utils import formatdate
from typing import NamedTuple
from urllib.parse import unquote

from tests.servers import store_signature
from tests.servers.store_content import Bucket, Refusal, StoredObject, is_same, md5, opaque
from tests.servers.store_dials import Condition, Dials
from tests.servers.store_lists import element, iso_time, xml_answer
from tests.servers.told_s3 import Answer, Asked

_KEPT = (
    "content-type",
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "expires",
    "x-amz-storage-class",
    "x-amz-server-side-encryption",
    "x-amz-server-side-encryption-aws-kms-key-id",
)
_META = "x-amz-meta-"
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_CHUNK_BYTES = 64 << 10


class Call(NamedTuple):
    """One request to one bucket. `buckets` are all of the store, for copies."""

    asked: Asked
    bucket: Bucket
    key: str
    dials: Dials
    buckets: dict[str, Bucket]


# -- reading -----------------------------------------------------------------------------------


def get(call: Call) -> Answer:
    """GetObject and HeadObject."""
    asked, dials = call.asked, call.dials
    stored = found(call)
    if stored.needs_key:
        raise Refusal(400, "InvalidRequest", "The object was stored using server side encryption.")
    _check_reader(asked, stored, dials)
    if stored.is_archived and asked.method == "GET":
        storage_class = element("StorageClass", stored.headers.get("x-amz-storage-class", ""))
        raise Refusal(403, "InvalidObjectState", "not valid for its class", None, storage_class)
    headers = {
        "ETag": stored.e_tag,
        "Last-Modified": formatdate(int(stored.mtime_s), usegmt=True),
        "Accept-Ranges": "bytes",
        **stored.headers,
    }
    if not stored.e_tag:
        del headers["ETag"]
    if dials.tells_md5 and stored.e_tag and "-" not in stored.e_tag:
        headers["Content-MD5"] = base64.b64encode(bytes.fromhex(stored.e_tag.strip('"'))).decode()
    accepts_gzip = "gzip" in asked.headers.get("accept-encoding", "")
    if dials.gzip == "unpacks" and headers.get("content-encoding") == "gzip" and not accepts_gzip:
        del headers["content-encoding"]
        headers["x-goog-stored-content-encoding"] = "gzip"
        headers["Warning"] = "214 UploadServer gunzipped"
        whole = gzip.decompress(stored.data)
        return Answer(_chunks(whole), 200, headers | {"Transfer-Encoding": "chunked"})
    is_plain = "content-encoding" not in headers and stored.size_bytes
    if dials.gzip == "packs" and accepts_gzip and is_plain and _is_text(headers):
        headers |= {"ETag": f"W/{stored.e_tag}", "Content-Encoding": "gzip"}
        return Answer(gzip.compress(stored.data), 200, headers)
    first, last = 0, stored.size_bytes - 1
    status = 200
    wanted = _RANGE.fullmatch(asked.headers.get("range", "")) if dials.ranges else None
    if wanted is not None and wanted[0] != "bytes=-":
        first, last = _span(wanted, stored.size_bytes)
        status = 206
        headers["Content-Range"] = f"bytes {first}-{last}/{stored.size_bytes}"
    if asked.method == "HEAD":
        return Answer(b"", status, headers, length=last - first + 1)
    data = stored.data if status == 200 else stored.data[first : last + 1]
    return Answer(_chunks(data) if dials.chunked else bytes(data), status, headers)


def _is_text(headers: dict[str, str]) -> bool:
    return headers.get("content-type", "").startswith("text/")


def _chunks(data: bytes) -> Iterator[bytes]:
    yield from (data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES))


def _span(wanted: re.Match[str], size_bytes: int) -> tuple[int, int]:
    if not wanted[1]:
        first, last = max(0, size_bytes - int(wanted[2])), size_bytes - 1
    else:
        first = int(wanted[1])
        last = min(int(wanted[2]) if wanted[2] else size_bytes, size_bytes - 1)
    if first >= size_bytes:
        raise Refusal(416, "InvalidRange", "", {"Content-Range": f"bytes */{size_bytes}"})
    return first, last


def found(call: Call) -> StoredObject:
    """The object. Raises `Refusal`."""
    stored = call.bucket.objects.get(call.key)
    if stored is None:
        key = element("Key", call.key)
        raise Refusal(404, call.dials.no_such_key, "The specified key does not exist.", None, key)
    return stored


def _check_reader(asked: Asked, stored: StoredObject, dials: Dials) -> None:
    match, none_match = asked.headers.get("if-match"), asked.headers.get("if-none-match")
    if match and dials.get_if_match and match != "*" and not is_same(match, stored.e_tag):
        raise Refusal(412, "PreconditionFailed", "", None, "<Condition>If-Match</Condition>")
    if none_match and is_same(none_match, stored.e_tag):
        raise Refusal(304, "NotModified")


# -- writing -----------------------------------------------------------------------------------


def check_writer(call: Call, absent: Condition, version: Condition) -> None:
    """Raise `Refusal` if the conditions of a write are not met, or not known."""
    asked, dials = call.asked, call.dials
    stored = call.bucket.objects.get(call.key)
    if dials.forbid_overwrite and asked.headers.get("x-oss-forbid-overwrite") == "true" and stored:
        raise Refusal(409, "FileAlreadyExists", "The object you specified already exists.")
    for name, what in (("if-none-match", absent), ("if-match", version)):
        told = asked.headers.get(name)
        if told is None or what == "ignores":
            continue
        if what == "refuses":
            raise Refusal(501, "NotImplemented", "A header you provided is not implemented")
        failed = Refusal(412, "PreconditionFailed", "", None, f"<Condition>{name}</Condition>")
        if name == "if-none-match":
            if told != "*":
                raise Refusal(501, "NotImplemented", "If-None-Match other than *")
            if stored is not None:
                raise failed
        elif stored is None:
            raise Refusal(*dials.version_of_nothing)
        elif told != "*" and not is_same(told, stored.e_tag):
            raise failed


def check_room(call: Call, more_bytes: int) -> None:
    """Raise `Refusal` if the quota has no room for so many bytes."""
    quota = call.dials.quota_bytes
    if quota is not None and call.bucket.used_bytes() + more_bytes > quota:
        raise Refusal(*call.dials.quota_error)


def check_needed(call: Call, *, is_start: bool = False) -> None:
    """Raise `Refusal` if a header that the bucket demands is missing."""
    dials, headers = call.dials, call.asked.headers
    if dials.needs_sse and "x-amz-server-side-encryption" not in headers:
        raise Refusal(403, "AccessDenied", "explicit deny in a resource-based policy")
    is_copy = "x-amz-copy-source" in headers
    if dials.needs_checksum and not (is_copy or is_start):
        check_has_checksum(call)


def check_has_checksum(call: Call) -> None:
    """Raise `Refusal` if Object Lock wants a checksum and there is none."""
    if call.dials.needs_checksum and not store_signature.has_checksum(call.asked):
        raise Refusal(
            400,
            "InvalidRequest",
            "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with "
            "Object Lock parameters",
        )


def kept_headers(call: Call) -> dict[str, str]:
    """The headers of a PUT that a GET repeats."""
    dials = call.dials
    keeps = dials.keeps_metadata
    if call.key.endswith("/"):
        keeps = keeps and dials.keeps_metadata_of_markers
    headers = {
        name: value
        for name, value in call.asked.headers.items()
        if name in _KEPT or (keeps and name.startswith(_META))
    }
    own = {"content-type": "binary/octet-stream"}
    if dials.e_tags == "kms":
        own["x-amz-server-side-encryption"] = "aws:kms"
    return own | headers


def put(call: Call) -> Answer:
    """PutObject."""
    dials = call.dials
    check_needed(call)
    store_signature.check_body(call.asked)
    check_writer(call, dials.put_absent, dials.put_version)
    check_room(call, len(call.asked.body))
    body = call.asked.body
    e_tag = md5(body) if dials.e_tags == "md5" else opaque(body)
    stored = StoredObject(body, e_tag, kept_headers(call))
    call.bucket.put(call.key, stored)
    return Answer(b"", 200, {"ETag": e_tag, **_encryption(stored)})


def _encryption(stored: StoredObject) -> dict[str, str]:
    return {n: v for n, v in stored.headers.items() if n.startswith("x-amz-server-side")}


def source_of(call: Call) -> StoredObject:
    """The source of a copy. Raises `Refusal`."""
    headers = call.asked.headers
    bucket, _, key = unquote(headers["x-amz-copy-source"].lstrip("/")).partition("/")
    if bucket not in call.buckets:
        raise Refusal(404, "NoSuchBucket")
    stored = found(call._replace(bucket=call.buckets[bucket], key=key))
    match = headers.get("x-amz-copy-source-if-match")
    none_match = headers.get("x-amz-copy-source-if-none-match")
    if match and match != "*" and not is_same(match, stored.e_tag):
        raise Refusal(412, "PreconditionFailed", "of the source")
    if none_match and is_same(none_match, stored.e_tag):
        raise Refusal(412, "PreconditionFailed", "of the source")
    return stored


def copy(call: Call) -> Answer:
    """CopyObject."""
    dials, headers = call.dials, call.asked.headers
    check_needed(call)
    source = source_of(call)
    check_writer(call, dials.copy_absent, dials.copy_version)
    check_room(call, source.size_bytes)
    replaces = headers.get("x-amz-metadata-directive", "COPY").upper() == "REPLACE"
    if source is call.bucket.objects.get(call.key) and not replaces:
        raise Refusal(400, "InvalidRequest", "This copy request is illegal because it is trying "
                      "to copy an object to itself without changing its metadata.")  # fmt: skip
    kept = kept_headers(call) if replaces else dict(source.headers)
    e_tag = source.e_tag
    if "-" in e_tag and dials.e_tags == "md5":
        e_tag = md5(source.data)  # a copy has one part
    elif dials.e_tags == "kms":
        e_tag = opaque(source.data)
    fresh = StoredObject(source.data, e_tag, kept)
    call.bucket.put(call.key, fresh)
    return copied(fresh, "CopyObjectResult", dials)


def copied(fresh: StoredObject, root: str, dials: Dials) -> Answer:
    """The answer to a copy."""
    e_tag = fresh.e_tag if dials.quotes_copies else fresh.e_tag.strip('"')
    inner = element("LastModified", iso_time(fresh.mtime_s, dials)) + element("ETag", e_tag)
    return xml_answer(root, inner, dials)


def delete(call: Call) -> Answer:
    """DeleteObject."""
    dials = call.dials
    stored = call.bucket.objects.get(call.key)
    if stored is None and dials.delete_of_nothing is not None:
        raise Refusal(*dials.delete_of_nothing)
    told = call.asked.headers.get("if-match")
    if told is not None and dials.delete_version == "refuses":
        raise Refusal(501, "NotImplemented")
    if told is not None and dials.delete_version == "checks":
        if stored is None:
            raise Refusal(*dials.version_of_nothing)
        if told != "*" and not is_same(told, stored.e_tag):
            raise Refusal(412, "PreconditionFailed")
    call.bucket.delete(call.key)
    return Answer(b"", 204)


def delete_many(call: Call) -> Answer:
    """DeleteObjects."""
    dials = call.dials
    if dials.delete_many_needs_md5 and not store_signature.has_checksum(call.asked):
        raise Refusal(
            400, "InvalidRequest", "Missing required header for this request: Content-MD5"
        )
    store_signature.check_body(call.asked)
    try:
        root = ET.fromstring(call.asked.body)
    except ET.ParseError:
        raise Refusal(400, "MalformedXML") from None
    keys = [each.text or "" for each in root.findall(".//{*}Object/{*}Key")]
    if not 0 < len(keys) <= 1000:
        raise Refusal(400, "MalformedXML", "1 to 1000 keys")
    is_quiet = root.findtext("{*}Quiet") == "true"
    inner = ""
    for key in keys:
        if "DeleteObject" in dials.forbids:
            told = element("Key", key) + element("Code", "AccessDenied")
            inner += f"<Error>{told}<Message>Access Denied</Message></Error>"
            continue
        call.bucket.delete(key)
        inner += "" if is_quiet else f"<Deleted>{element('Key', key)}</Deleted>"
    if not inner and not dials.delete_many_quiet_body:
        return Answer()
    return xml_answer("DeleteResult", inner, dials)
