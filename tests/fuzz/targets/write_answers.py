"""XML answers to writes (origin/s3/writing/messages.py, answer_xml.py)."""

from cachefs.errors import BadDataError
from cachefs.origin.s3.writing import messages
from tests.fuzz.targets._support import check_text

GROWING = {
    "white space": lambda count: b" " * count,
    "white space before": lambda count: b"\n" * count + b"<R><ETag>a</ETag></R>",
    "white space behind": lambda count: b"<?xml version='1.0'?>" + b" " * count + b"<R/>",
    "open rows": lambda count: b"<ListPartsResult>" + b"<Part>" * (count // 6),
    "open errors": lambda count: b"<DeleteResult>" + b"<Error>" * (count // 7),
    "rows": lambda count: (
        b"<DeleteResult>" + b"<Error><Key>a</Key></Error>" * (count // 27) + b"</DeleteResult>"
    ),
    "attributes": lambda count: b"<R " + b"".join(b"a%d='' " % n for n in range(count // 8)),
    "one text": lambda count: b"<R><ETag>" + b"&amp;" * (count // 5) + b"</ETag></R>",
    "one tag": lambda count: b"<R><" + b"a" * count,
    "comments": lambda count: b"<R>" + b"<!---->" * (count // 7) + b"</R>",
}
"""Inputs of about so many bytes."""


def fuzz(data: bytes) -> None:
    messages.is_error(data)
    for parse in (
        messages.not_deleted,
        messages.e_tag_in,
        messages.upload_id_in,
        messages.parts_in,
        lambda body: messages.uploads_in(body, "k"),
    ):
        try:
            parse(data)
        except BadDataError as error:
            check_text(error)
