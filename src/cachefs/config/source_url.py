"""What a source must not carry: it is seen in the process list, in /proc/mounts and in `status`."""

import re
from urllib.parse import urlsplit

_NO_USER = ("http", "https", "s3", "s3a", "oss", "gs", "gcs")
"""Where what stands before an @ is a token, or a mistake."""

_SECRET_QUERY = re.compile(
    r"[?&](x-(amz|goog|oss)-(signature|credential|security-token)|sig|signature|"
    r"(aws|oss|google)access(key)?id|security-token|(access_?)?token|(api_?)?key|"
    r"pass(word|wd)?|secret)=",
    re.IGNORECASE,
)


def shown(source: str) -> str:
    """A source for a message, whatever it is: without what may be secret."""
    return re.sub(r"[^/@]*@", "", source.partition("?")[0])


def refuse_secrets(source: str) -> None:
    """Raises `ValueError`, which quotes nothing, for a URL with a password, token or signature."""
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
