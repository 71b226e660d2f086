"""Refuse secrets in a source, which the process list, /proc/mounts and `status` show."""

import re
from urllib.parse import urlsplit

_NO_USER = ("http", "https", "s3", "s3a", "oss", "gs", "gcs")
"""Schemes in which the text before an @ is a token, or a mistake."""

_SECRET_QUERY = re.compile(
    r"[?&](x-(amz|goog|oss)-(signature|credential|security-token)|sig|signature|"
    r"(aws|oss|google)access(key)?id|security-token|(access_?)?token|(api_?)?key|"
    r"pass(word|wd)?|secret)=",
    re.IGNORECASE,
)


def shown(source: str) -> str:
    """Return a source for a message, without the parts that may be secret."""
    return re.sub(r"[^/@]*@", "", source.partition("?")[0])


def refuse_secrets(source: str) -> None:
    """Raise `ValueError` for a URL with a password, token or signature. The error does not quote
    the URL."""
    scheme, _, rest = source.partition("://")
    place = urlsplit(f"x://{rest}")
    is_token = place.username is not None and scheme.removeprefix("fsspec+").lower() in _NO_USER
    if place.password is not None or is_token:
        raise ValueError(
            "a source must not carry a password or a token; credentials come from the environment "
            "(AWS_ACCESS_KEY_ID, ...), from files or from ~/.aws/credentials"
        )
    if _SECRET_QUERY.search(rest):
        raise ValueError(
            "a source must not carry a signature or a key after its ?, where everybody on this "
            "machine can see it; credentials come from the environment or from files"
        )
