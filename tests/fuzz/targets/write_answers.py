"""XML answers to writes (origin/s3/writing/messages.py, origin/s3/answer_xml.py)."""

from collections.abc import Callable
from functools import partial

from cachefs.errors import BadDataError
from cachefs.origin.s3.writing import messages
from tests.fuzz.targets._support import check_text

_PART = b"<Part><PartNumber>1</PartNumber><Size>1</Size><ETag>a</ETag></Part>"
GROWING = {
    "white space": lambda count: b" " * count,
    "white space before": lambda count: b"\n" * count + b"<R><ETag>a</ETag></R>",
    "white space behind": lambda count: b"<?xml version='1.0'?>" + b" " * count + b"<R/>",
    "open rows": lambda count: b"<ListPartsResult>" + b"<Part>" * (count // 6),
    "open errors": lambda count: b"<DeleteResult>" + b"<Error>" * (count // 7),
    "rows": lambda count: (
        b"<DeleteResult>" + b"<Error><Key>a</Key></Error>" * (count // 27) + b"</DeleteResult>"
    ),
    "short rows": lambda count: (
        b"<ListPartsResult>" + b"<a/>" * (count // 4) + b"</ListPartsResult>"
    ),
    "short texts": lambda count: (
        b"<DeleteResult><Error>" + b"<a/>" * (count // 4) + b"</Error></DeleteResult>"
    ),
    "names": lambda count: (
        b"<R>" + b"".join(b"<a%07x/>" % n for n in range(10**7, 10**7 + count // 11)) + b"</R>"
    ),
    "parts": lambda count: (
        b"<ListPartsResult>" + _PART * (count // len(_PART)) + b"</ListPartsResult>"
    ),
    "attributes": lambda count: b"<R " + b"".join(b"a%d='' " % n for n in range(count // 8)),
    "one text": lambda count: b"<R><ETag>" + b"&amp;" * (count // 5) + b"</ETag></R>",
    "one tag": lambda count: b"<R><" + b"a" * count,
    "comments": lambda count: b"<R>" + b"<!---->" * (count // 7) + b"</R>",
}
"""Inputs of about so many bytes."""


def _try(parse: Callable[[bytes], object], data: bytes) -> None:
    try:
        parse(data)
    except BadDataError as error:
        check_text(error)


_NOT_DELETED = [partial(messages.not_deleted, is_oss=is_oss) for is_oss in (False, True)]
PARSERS = tuple(
    partial(_try, parse)
    for parse in (
        messages.is_error,
        *_NOT_DELETED,
        messages.parts_in,
    )
)
"""What is measured with `GROWING`."""


def fuzz(data: bytes) -> None:
    for parse in (
        messages.is_error,
        *_NOT_DELETED,
        messages.e_tag_in,
        messages.upload_id_in,
        messages.parts_in,
        partial(messages.uploads_in, key="k"),
    ):
        _try(parse, data)
