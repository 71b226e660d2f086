"""LIST of `store.py`, in both versions."""

import time
from urllib.parse import quote
from xml.sax.saxutils import escape

from tests.servers import store_content
from tests.servers.store_content import Refusal, StoredObject
from tests.servers.store_dials import Dials
from tests.servers.told_s3 import Answer, Asked

_XML = '<?xml version="1.0" encoding="UTF-8"?>\n'
_NOTHING = '"d41d8cd98f00b204e9800998ecf8427e"'
_TOKEN = "after:"


def xml_answer(root: str, inner: str, dials: Dials, status: int = 200) -> Answer:
    """A document of the store."""
    namespace = f' xmlns="{dials.namespace}"' if dials.namespace else ""
    body = f"{_XML}<{root}{namespace}>{inner}</{root}>".encode(errors="surrogateescape")
    return Answer(body, status, {"Content-Type": "application/xml"})


def element(name: str, text: object) -> str:
    """An element with text in it."""
    return f"<{name}>{as_xml(str(text))}</{name}>"


def as_xml(text: str) -> str:
    """Text of XML: control characters as references, as MinIO and Amazon S3 write them."""
    safe = escape(text, {'"': "&quot;"})
    return "".join(f"&#x{ord(each):X};" if each < " " else each for each in safe)


def page(bucket: store_content.Bucket, asked: Asked, dials: Dials) -> Answer:
    """ListObjects and ListObjectsV2."""
    query = asked.query
    is_v2 = query.get("list-type") == "2" and dials.has_list_v2
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("marker", "")
    if is_v2:
        after = _after(query.get("continuation-token", "")) or query.get("start-after", "")
    try:
        asked_rows = int(query.get("max-keys") or 1000)
    except ValueError:
        raise Refusal(400, "InvalidArgument", "max-keys") from None
    most = min(asked_rows, dials.list_rows)
    is_encoded = dials.list_encodes and query.get("encoding-type") == "url"

    def shown(text: str) -> str:
        if not is_encoded:
            return as_xml(text)
        found = quote(text, safe="/-_.~", errors="surrogateescape")
        return found.replace("%20", "+") if dials.list_space == "+" else found

    rows = bucket.rows(prefix, delimiter, after, most) if most else store_content.Rows([], [], None)
    head = element("Name", bucket.name) + f"<Prefix>{shown(prefix)}</Prefix>"
    if delimiter:
        head += f"<Delimiter>{shown(delimiter)}</Delimiter>"
    head += element("MaxKeys", asked_rows) + ("<EncodingType>url</EncodingType>" * is_encoded)
    if is_v2:
        head += element("KeyCount", len(rows.keys) + len(rows.prefixes))
        for name, parameter in (("StartAfter", "start-after"), ("ContinuationToken",) * 2):
            told = query.get("continuation-token" if name == "ContinuationToken" else parameter)
            head += f"<{name}>{shown(told)}</{name}>" if told else ""
    else:
        head += f"<Marker>{shown(after)}</Marker>"
    head += element("IsTruncated", "true" if rows.end is not None else "false")
    if rows.end is not None:
        # S3 sends NextMarker only with a delimiter.
        if is_v2:
            head += element("NextContinuationToken", _token(rows.end))
        elif delimiter:
            head += f"<NextMarker>{shown(rows.end)}</NextMarker>"
    contents = "".join(
        f"<Contents><Key>{shown(key)}</Key>{_row(bucket.objects[key], dials)}</Contents>"
        for key in rows.keys
    )
    prefixes = "".join(
        f"<CommonPrefixes><Prefix>{shown(each)}</Prefix></CommonPrefixes>" for each in rows.prefixes
    )
    return xml_answer(dials.list_root, head + contents + prefixes, dials)


def _token(end: str) -> str:
    return _TOKEN + end.encode(errors="surrogateescape").hex()


def _after(token: str) -> str:
    if not token:
        return ""
    try:
        return bytes.fromhex(token.removeprefix(_TOKEN)).decode(errors="surrogateescape")
    except ValueError:
        raise Refusal(400, "InvalidArgument", "The continuation token is incorrect") from None


def _row(stored: StoredObject, dials: Dials) -> str:
    e_tag: str | None = stored.e_tag
    if stored.list_e_tag is not None:
        e_tag = stored.list_e_tag
    elif dials.list_e_tag != "same":
        e_tag = {
            "none": None,
            "empty": "",
            "other": f'"0x8D{stored.size_bytes * 7:08X}-1"',
            "of nothing": _NOTHING,
            "unquoted": stored.e_tag.strip('"'),
        }[dials.list_e_tag]
    inner = f"<LastModified>{iso_time(stored.mtime_s, dials)}</LastModified>"
    if e_tag is not None:
        inner += element("ETag", e_tag)
    if dials.list_types:
        inner += "<Type>Normal</Type>"
    inner += element("Size", stored.size_bytes)
    return inner + element("StorageClass", stored.headers.get("x-amz-storage-class", "STANDARD"))


def iso_time(mtime_s: float, dials: Dials) -> str:
    """A time of a row. S3 itself has whole seconds, with `.000`."""
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(mtime_s))
    ends = {"ms": ".000Z", "s": "Z", "ns": f".{int(mtime_s % 1 * 1e9):09}Z", "no zone": ""}
    return text + ends[dials.list_time]
