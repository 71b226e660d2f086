"""Checks Signature Version 4 with botocore, and the checksums of a body."""

import base64
import binascii
import calendar
import hashlib
import hmac
import time
import zlib
from collections.abc import Mapping
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.servers.store_content import Refusal
from tests.servers.store_dials import Dials
from tests.servers.told_s3 import Asked

_UNSIGNED = "UNSIGNED-PAYLOAD"
_CLOCK_S = 900


def access_key_of(asked: Asked) -> str:
    """The access key that a request names, or ""."""
    _, _, rest = asked.headers.get("authorization", "").partition("Credential=")
    return rest.partition("/")[0]


def check(asked: Asked, keys: Mapping[str, tuple[str, str]], dials: Dials, now_s: float) -> None:
    """Raise `Refusal` unless the request is signed with one of `keys`: secret and session token by
    access key."""
    header = asked.headers.get("authorization", "")
    if header.startswith("OSS ") and dials.oss_signatures:
        _check_oss(asked, header, keys)
        return
    if not header.startswith("AWS4-HMAC-SHA256 "):
        raise Refusal(403, "AccessDenied", "Access Denied")
    fields = dict(
        each.strip().split("=", 1) for each in header.partition(" ")[2].split(",") if "=" in each
    )
    access_key, *scope = fields.get("Credential", "").split("/")
    if len(scope) != 4 or scope[2:] != ["s3", "aws4_request"]:
        raise Refusal(400, "AuthorizationHeaderMalformed", f"scope {scope}")
    if access_key not in keys:
        raise Refusal(403, "InvalidAccessKeyId", "The access key does not exist in our records.")
    _check_region(scope[1], dials)
    _check_clock(asked.headers.get("x-amz-date", ""), scope[0], now_s)
    secret, token = keys[access_key]
    if asked.headers.get("x-amz-security-token", "") != token:
        raise Refusal(400, "InvalidToken", "The provided token is malformed or otherwise invalid.")
    signed_names = fields.get("SignedHeaders", "").split(";")
    unsigned = [n for n in asked.headers if n.startswith("x-amz-") and n not in signed_names]
    if unsigned or "host" not in signed_names:
        raise Refusal(403, "AccessDenied", f"There were headers that were not signed: {unsigned}")
    if signature(asked, access_key, secret, scope[1], signed_names) != fields.get("Signature"):
        raise Refusal(403, "SignatureDoesNotMatch", "The calculated signature does not match.")


def _check_oss(asked: Asked, header: str, keys: Mapping[str, tuple[str, str]]) -> None:
    """Check OSS's own signature, version 1, of a request with the bucket in the path, as
    alibabacloud.com/help/en/oss/developer-reference/include-signatures-in-the-authorization-header
    describes it."""
    from oss2.auth import ProviderAuth

    access_key, _, told = header.removeprefix("OSS ").partition(":")
    if access_key not in keys:
        raise Refusal(403, "InvalidAccessKeyId")
    headers = asked.headers
    lines = [asked.method, *(headers.get(n, "") for n in ("content-md5", "content-type", "date"))]
    lines += [f"{n}:{headers[n]}" for n in sorted(headers) if n.startswith("x-oss-")]
    names = ProviderAuth._subresource_key_set
    parts = [
        f"{name}={value}" if value else name
        for name, value in sorted(asked.query.items())
        if name in names
    ]
    text = "\n".join([*lines, asked.path + ("?" + "&".join(parts) if parts else "")])
    wanted = hmac.digest(keys[access_key][0].encode(), text.encode(), "sha1")
    if base64.b64encode(wanted).decode() != told:
        raise Refusal(403, "SignatureDoesNotMatch")


def _check_region(region: str, dials: Dials) -> None:
    if dials.other_regions is None or region in (dials.region, *dials.other_regions):
        return
    raise Refusal(
        400,
        "AuthorizationHeaderMalformed",
        f"the region '{region}' is wrong; expecting '{dials.region}'",
        {"x-amz-bucket-region": dials.region} if dials.names_region in ("both", "header") else {},
        f"<Region>{dials.region}</Region>" if dials.names_region in ("both", "body") else "",
    )


def _check_clock(stamp: str, day: str, now_s: float) -> None:
    try:
        told_s = calendar.timegm(time.strptime(stamp, "%Y%m%dT%H%M%SZ"))
    except ValueError:
        raise Refusal(403, "AccessDenied", "x-amz-date is missing") from None
    if not stamp.startswith(day):
        raise Refusal(400, "AuthorizationHeaderMalformed", "the date of the scope is wrong")
    if abs(told_s - now_s) > _CLOCK_S:
        raise Refusal(403, "RequestTimeTooSkewed", "The difference between clocks is too large.")


def signature(asked: Asked, access_key: str, secret: str, region: str, names: list[str]) -> str:
    """The signature that the request ought to have, by botocore."""
    path, _, query = asked.target.partition("?")
    pairs = sorted(parse_qsl(query, keep_blank_values=True, errors="surrogateescape"))
    text = "&".join(f"{_quoted(name)}={_quoted(value)}" for name, value in pairs)
    raw_path = unquote(path, errors="surrogateescape")
    url = f"http://{asked.headers['host']}{quote(raw_path, safe='/-_.~', errors='surrogateescape')}"
    auth = S3SigV4Auth(Credentials(access_key, secret), "s3", region)
    headers = {name: asked.headers.get(name, "") for name in names}
    headers["X-Amz-Content-SHA256"] = headers.pop("x-amz-content-sha256", _UNSIGNED)
    request = AWSRequest(asked.method, f"{url}?{text}" if text else url, headers)
    request.context["timestamp"] = asked.headers["x-amz-date"]
    assert urlsplit(request.url).path
    found: str = auth.signature(
        auth.string_to_sign(request, auth.canonical_request(request)), request
    )
    return found


def _quoted(text: str) -> str:
    return quote(text, safe="-_.~", errors="surrogateescape")


def has_checksum(asked: Asked) -> bool:
    """Whether a request says what its body must be, as Object Lock wants it."""
    names = asked.headers
    return "content-md5" in names or any(n.startswith("x-amz-checksum-") for n in names)


def check_body(asked: Asked) -> None:
    """Raise `Refusal` if the body is not what a header says. CRC32C and CRC64NVME are not looked
    at: Python has neither."""
    headers, body = asked.headers, asked.body
    told = headers.get("x-amz-content-sha256", _UNSIGNED)
    if told.startswith("STREAMING-"):
        raise Refusal(501, "NotImplemented", "bodies in signed chunks")
    if told != _UNSIGNED and told != hashlib.sha256(body).hexdigest():
        raise Refusal(400, "XAmzContentSHA256Mismatch")
    if "content-md5" in headers:
        wanted = _decoded(headers["content-md5"])
        if len(wanted) != 16:
            raise Refusal(400, "InvalidDigest", "The Content-MD5 you specified is not valid.")
        if wanted != hashlib.md5(body, usedforsecurity=False).digest():
            raise Refusal(400, "BadDigest", "The Content-MD5 you specified did not match.")
    found = {
        "crc32": lambda: zlib.crc32(body).to_bytes(4, "big"),
        "sha1": lambda: hashlib.sha1(body, usedforsecurity=False).digest(),
        "sha256": lambda: hashlib.sha256(body).digest(),
    }
    for name, digest in found.items():
        told = headers.get(f"x-amz-checksum-{name}", "")
        if told and _decoded(told) != digest():
            raise Refusal(400, "BadDigest", f"The {name.upper()} you specified did not match.")


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return b""
