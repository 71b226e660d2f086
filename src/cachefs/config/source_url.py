"""Read a source as users write it: one spelling for one place, and no secrets, because the process
list, /proc/mounts and `status` show it."""

import re
from urllib.parse import unquote, urlsplit

_SAME_SCHEME = {"s3a": "s3", "s3n": "s3"}
"""Hadoop's names of a scheme. Sources are the same with either."""
_OWN_SCHEMES = ("s3", "oss", "hdfs", "file", "http", "https")
"""Schemes that may be written in capitals, as in any URL. fsspec distinguishes some of its own."""
_ARN = re.compile(r"arn:aws[a-z-]*:(?P<service>[a-z0-9-]*):[^:/]*:[^:/]*:(?P<rest>.*)", re.DOTALL)
_AWS_HOST = re.compile(
    r"(?:(?P<bucket>[a-z0-9.-]+)\.)?s3(?:[.-](?:dualstack|fips|accelerate|[a-z]{2}(?:-[a-z0-9]+)+))*"
    r"\.(?:amazonaws\.com|amazonaws\.com\.cn|amazonaws\.eu)"
)
_OSS_HOST = re.compile(
    r"(?P<bucket>[a-z0-9-]+)\.(?P<endpoint>(?:s3\.)?oss-[a-z0-9-]+\.aliyuncs\.com)"
)
_CONSOLE_HOST = re.compile(r"(?:[a-z0-9.-]+\.)?console\.(?:aws\.amazon\.com|amazonaws\.cn)")
_NO_USER = ("http", "https", "s3", "s3a", "oss", "gs", "gcs")
"""Schemes in which the text before an @ is a token, or a mistake."""

_SECRET_QUERY = re.compile(
    r"[?&](x-(amz|goog|oss)-(signature|credential|security-token)|sig|signature|"
    r"(aws|oss|google)access(key)?id|security-token|(access_?)?token|(api_?)?key|"
    r"pass(word|wd)?|secret)=",
    re.IGNORECASE,
)


def normal_source(source: str) -> str:
    """Return a source with the scheme as cachefs writes it. Raises `ValueError` with the text to
    write instead for an ARN and for what is no URL."""
    source = source.strip()
    scheme, separator, rest = source.partition("://")
    if _ARN.match(rest if separator else source):
        raise ValueError(_arn_advice(rest if separator else source))
    if not separator or not scheme:
        raise ValueError(
            f'"{shown(source)}" is no URL; write s3://BUCKET/PREFIX, or file:///DIR for a directory'
        )
    if scheme.lower() == "s3" and (found := _AWS_HOST.fullmatch(rest.partition("/")[0].lower())):
        raise ValueError(_bucket_advice(found["bucket"], rest.partition("/")[2]))
    return with_own_scheme(source)


def with_own_scheme(url: str) -> str:
    """Return a URL with its scheme as cachefs writes it."""
    scheme, separator, rest = url.partition("://")
    plain = _SAME_SCHEME.get(scheme.lower(), scheme.lower())
    return f"{plain}://{rest}" if separator and plain in _OWN_SCHEMES else url


def _arn_advice(arn: str) -> str:
    found = _ARN.match(arn)
    service, rest = (found["service"], found["rest"]) if found else ("", "")
    kind, _, name = rest.partition("/")
    if kind.startswith("accesspoint") or service != "s3" or not kind:
        return (
            "the ARN of an access point is no source; write the alias of the access point, which "
            "its page in the console shows, as in s3://NAME-0123abcd-s3alias/PREFIX"
        )
    place = f"{kind}/{name}".rstrip("/*")
    return f"an ARN is no source; write s3://{place}"


def refuse_web_address(source: str) -> None:
    """Raise `ValueError` for the address of a bucket, or of its page in the console, which is no
    tree of index pages."""
    try:
        place = urlsplit(source)
    except ValueError:
        return
    host, path = (place.hostname or "").lower(), unquote(place.path).lstrip("/")
    if place.scheme not in ("http", "https"):
        return
    if found := _AWS_HOST.fullmatch(host):
        raise ValueError(_bucket_advice(found["bucket"], path))
    if found := _OSS_HOST.fullmatch(host):
        text = f"oss://{found['bucket']}/{path}".rstrip("/")
        raise ValueError(
            f"this is the address of a bucket; write {text} with --endpoint {found['endpoint']}"
        )
    if _CONSOLE_HOST.fullmatch(host):
        raise ValueError("this is a page of the AWS console; write s3://BUCKET/PREFIX")


def _bucket_advice(bucket: str | None, path: str) -> str:
    place = f"{bucket}/{path}" if bucket else path
    text = f"s3://{place}".rstrip("/") if place else "s3://BUCKET/PREFIX"
    return (
        f"this is the address of a bucket; write {text} (with --region NAME, and --anonymous if "
        "it is public)"
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
