"""The XML with which S3 explains an answer that is no success.

See https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html. The document comes from
outside: everything in it is bounded before it is shown.
"""

import re
from html import unescape
from typing import NamedTuple

from cachefs.foreign_text import said

_CODE = re.compile(rb"<Code>([A-Za-z][A-Za-z0-9.]{0,59})</Code>")
_MESSAGE = re.compile(rb"<Message>([^<]{1,4000})")
_REGION = re.compile(rb"<Region>([a-z0-9-]{1,40})</Region>")
_ENDPOINT = re.compile(rb"<Endpoint>([A-Za-z0-9.:-]{1,255})</Endpoint>")
_STORAGE_CLASS = re.compile(rb"<StorageClass>([A-Za-z_]{1,40})</StorageClass>")
_PERMISSION = re.compile(r"\b((?:s3|kms|oss)[a-z0-9-]*:[A-Z][A-Za-z]{2,60})\b")


class ErrorDocument(NamedTuple):
    """Each field is empty if the document does not tell it. `message` is the store's sentence; it
    is bounded and printable."""

    code: str = ""
    message: str = ""
    region: str = ""
    endpoint: str = ""
    storage_class: str = ""

    @property
    def permission(self) -> str:
        """The permission that is missing, such as kms:Decrypt, if the sentence names it."""
        found = _PERMISSION.search(self.message)
        return found[1] if found else ""


def error_code(body: bytes) -> str:
    """Return the code in an S3 error document, or an empty string."""
    return _first(_CODE, body)


def parsed(body: bytes) -> ErrorDocument:
    """Return what an error document says; empty fields for a body that is none."""
    message = said(unescape(_first(_MESSAGE, body)))
    fields = (_first(field, body) for field in (_REGION, _ENDPOINT, _STORAGE_CLASS))
    return ErrorDocument(error_code(body), message, *fields)


def _first(pattern: re.Pattern[bytes], body: bytes) -> str:
    found = pattern.search(body)
    return found[1].decode(errors="replace") if found else ""
