"""Single values out of answers: headers, and error documents (origin/retry_after.py, s3/errors.py,
digest.py, redirects.py)."""

import contextlib

from cachefs.errors import OriginError
from cachefs.origin.retry_after import parse_retry_after
from cachefs.origin.s3 import digest, redirects
from cachefs.origin.s3 import errors as s3_errors
from cachefs.origin.s3.config import S3Target
from cachefs.origin.s3.listing import version_of
from tests.fuzz.targets._support import parts

TARGET = S3Target("b", "", "http://h", "http://h/b", "us-east-1", False, None)
MD5 = bytes(16)

GROWING = {
    "one text": lambda count: b"x" * count,
    "white space": lambda count: b" " * count,
    "digits": lambda count: b"1" * count,
    "codes without an end": lambda count: b"<Code>" * (count // 6),
    "a long code": lambda count: b"<Error><Code>" + b"A" * count + b"</Code></Error>",
    "a long header": lambda count: b"etag:" + b'"' * count,
    "a date": lambda count: b"Sat, " + b"1 " * (count // 2),
    "brackets of a date": lambda count: b"(" * count,
}
MOST_BYTES = 1 << 16
"""Inputs of about so many bytes."""


def fuzz(data: bytes) -> None:
    for part in parts(data):
        text = part.decode("latin-1")
        code = s3_errors.error_code(part)
        seconds = parse_retry_after(text)
        assert seconds is None or 0 <= seconds < float("inf")
        for status in (301, 403, 404, 429, 500, sum(part[:2]) + 100):
            found = s3_errors.from_status(TARGET, "s3://b/k", status, code, text[:40], seconds)
            assert isinstance(found, OriginError)
        for status in redirects.STATUSES:
            headers = {"location": text} if text else {}
            with contextlib.suppress(OriginError):
                redirects.followed(TARGET, "k", "s3://b/k", status, headers, part)
        digest.md5_in(version_of(text, 0, 0), "b")
        name, _, value = text.partition(":")
        digest.is_no_md5({name.lower(): value.strip()}, MD5)
