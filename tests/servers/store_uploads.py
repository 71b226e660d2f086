"""Multipart uploads of `store.py`."""

import re
import xml.etree.ElementTree as ET

from tests.servers import store_signature
from tests.servers.store_content import (
    Part,
    Refusal,
    StoredObject,
    StoredUpload,
    is_same,
    joined_e_tag,
    md5,
    opaque,
)
from tests.servers.store_lists import element, iso_time, xml_answer
from tests.servers.store_objects import (
    Call,
    check_has_checksum,
    check_needed,
    check_room,
    check_writer,
    copied,
    kept_headers,
    source_of,
)
from tests.servers.told_s3 import Answer

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_MOST_PARTS = 10_000


def create(call: Call) -> Answer:
    """CreateMultipartUpload."""
    check_needed(call, is_start=True)
    upload = StoredUpload(call.key, kept_headers(call))
    call.bucket.uploads[upload.upload_id] = upload
    inner = element("Bucket", call.bucket.name) + element("Key", call.key)
    return xml_answer(
        "InitiateMultipartUploadResult", inner + element("UploadId", upload.upload_id), call.dials
    )


def _upload(call: Call) -> StoredUpload:
    return call.bucket.upload(call.key, call.asked.query["uploadId"])


def _number(call: Call) -> int:
    text = call.asked.query["partNumber"]
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_PARTS:
        raise Refusal(400, "InvalidArgument", "Part number must be from 1 to 10000")
    return int(text)


def put_part(call: Call) -> Answer:
    """UploadPart."""
    upload, number = _upload(call), _number(call)
    check_has_checksum(call)
    store_signature.check_body(call.asked)
    body = call.asked.body
    check_room(call, len(body))
    e_tag = md5(body) if call.dials.e_tags == "md5" else opaque(body)
    upload.parts[number] = Part(body, e_tag)
    return Answer(b"", 200, {"ETag": e_tag})


def copy_part(call: Call) -> Answer:
    """UploadPartCopy."""
    upload, number = _upload(call), _number(call)
    source = source_of(call)
    data = source.data
    told = call.asked.headers.get("x-amz-copy-source-range")
    if told is not None:
        span = _RANGE.fullmatch(told)
        if span is None or not int(span[1]) <= int(span[2]) < source.size_bytes:
            raise Refusal(416, "InvalidRange", "the range of the source")
        data = data[int(span[1]) : int(span[2]) + 1]
    check_room(call, len(data))
    e_tag = md5(data) if call.dials.e_tags == "md5" else opaque(data)
    upload.parts[number] = Part(data, e_tag)
    return copied(StoredObject(data, e_tag), "CopyPartResult", call.dials)


def complete(call: Call) -> Answer:
    """CompleteMultipartUpload."""
    dials, query = call.dials, call.asked.query
    again = call.bucket.completed.get(query["uploadId"])
    if again is not None and again.key == call.key and _is_answered_again(call, again):
        answer: Answer = again.answer
        return answer
    upload = _upload(call)
    store_signature.check_body(call.asked)
    try:
        rows = ET.fromstring(call.asked.body).findall("{*}Part")
        wanted = [
            (int(row.findtext("{*}PartNumber") or ""), row.findtext("{*}ETag") or "")
            for row in rows
        ]
    except (ET.ParseError, ValueError):
        raise Refusal(400, "MalformedXML") from None
    parts = _named_parts(upload, wanted)
    sizes = [len(part.data) for part in parts]
    if any(size < dials.least_part_bytes for size in sizes[:-1]):
        raise Refusal(400, "EntityTooSmall", "Your proposed upload is smaller than allowed.")
    if dials.equal_parts and (len(set(sizes[:-1])) > 1 or sizes[-1] > sizes[0]):
        raise Refusal(400, "InvalidPart", "All non-trailing parts must have the same length.")
    check_writer(call, dials.complete_absent, dials.complete_version)
    data = b"".join(part.data for part in parts)
    e_tag = joined_e_tag(parts, data, dials.e_tags_of_uploads)
    del call.bucket.uploads[upload.upload_id]
    upload.made = StoredObject(data, e_tag, upload.headers)
    call.bucket.put(call.key, upload.made)
    inner = element("Bucket", call.bucket.name) + element("Key", call.key) + element("ETag", e_tag)
    inner = element("Location", f"http://{call.asked.headers['host']}/{call.key}") + inner
    upload.parts.clear()
    upload.answer = xml_answer("CompleteMultipartUploadResult", inner, dials)
    call.bucket.completed[upload.upload_id] = upload
    done: Answer = upload.answer
    return done


def _is_answered_again(call: Call, again: StoredUpload) -> bool:
    if call.dials.completes_again == "while it is there":
        return call.bucket.objects.get(call.key) is again.made
    return call.dials.completes_again == "always"


def _named_parts(upload: StoredUpload, wanted: list[tuple[int, str]]) -> list[Part]:
    if not wanted:
        raise Refusal(400, "MalformedXML", "no part")
    numbers = [number for number, _ in wanted]
    if sorted(set(numbers)) != numbers:
        raise Refusal(400, "InvalidPartOrder", "The list of parts was not in ascending order.")
    parts = []
    for number, e_tag in wanted:
        part = upload.parts.get(number)
        if part is None or not is_same(part.e_tag, e_tag):
            raise Refusal(400, "InvalidPart", "One or more of the parts could not be found.")
        parts.append(part)
    return parts


def abort(call: Call) -> Answer:
    """AbortMultipartUpload."""
    upload = _upload(call)
    del call.bucket.uploads[upload.upload_id]
    return Answer(b"", 204)


def list_parts(call: Call) -> Answer:
    """ListParts."""
    upload, query = _upload(call), call.asked.query
    after = int(query.get("part-number-marker") or 0)
    most = min(int(query.get("max-parts") or 1000), 1000)
    numbers = sorted(number for number in upload.parts if number > after)
    inner = element("Bucket", call.bucket.name) + element("Key", call.key)
    inner += element("UploadId", upload.upload_id) + element("PartNumberMarker", after)
    is_more = len(numbers) > most
    numbers = numbers[:most]
    if numbers:
        inner += element("NextPartNumberMarker", numbers[-1])
    inner += element("MaxParts", most) + element("IsTruncated", "true" if is_more else "false")
    for number in numbers:
        part = upload.parts[number]
        row = element("PartNumber", number) + element("ETag", part.e_tag)
        row += element("LastModified", iso_time(part.mtime_s, call.dials))
        inner += f"<Part>{row}{element('Size', len(part.data))}</Part>"
    return xml_answer("ListPartsResult", inner, call.dials)


def list_uploads(call: Call) -> Answer:
    """ListMultipartUploads."""
    prefix = call.asked.query.get("prefix", "")
    key_marker = call.asked.query.get("key-marker", "")
    most = min(int(call.asked.query.get("max-uploads") or 1000), 1000)
    wants_key = call.dials.lists_uploads_of == "key"
    uploads = [
        each
        for each in sorted(call.bucket.uploads.values(), key=lambda u: (u.key, u.began_s))
        if (each.key == prefix if wants_key else each.key.startswith(prefix))
        and each.key > key_marker
    ]
    shown = uploads[:most]
    inner = element("Bucket", call.bucket.name) + element("Prefix", prefix)
    inner += element("KeyMarker", key_marker) + element("MaxUploads", most)
    inner += element("IsTruncated", "true" if len(uploads) > most else "false")
    if len(uploads) > most:
        inner += element("NextKeyMarker", shown[-1].key)
        inner += element("NextUploadIdMarker", shown[-1].upload_id)
    for each in shown:
        row = element("Key", each.key) + element("UploadId", each.upload_id)
        inner += f"<Upload>{row}{element('Initiated', iso_time(each.began_s, call.dials))}</Upload>"
    return xml_answer("ListMultipartUploadsResult", inner, call.dials)
