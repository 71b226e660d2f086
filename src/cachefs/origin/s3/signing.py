"""Signature Version 4 of a plain GET, in 15 us, and of any other request, in 25 us.

botocore's signer takes 150 us. A test compares the signatures with
botocore's.
"""

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from functools import lru_cache

from botocore.credentials import ReadOnlyCredentials

NO_BODY = hashlib.sha256(b"").hexdigest()
_ALGORITHM = "AWS4-HMAC-SHA256"


def signed_headers(
    credentials: ReadOnlyCredentials,
    region: str,
    host: str,
    path: str,
    now_s: float,
    more: tuple[tuple[str, str], ...] = (),
) -> dict[str, str]:
    """Return the headers that sign `GET path`, and `more` of them (lower-case names beginning with
    `x-amz-`). `path` is quoted and has no query."""
    stamp = _stamp(int(now_s))
    headers = {"x-amz-content-sha256": NO_BODY, "x-amz-date": stamp}
    if credentials.token:
        headers["x-amz-security-token"] = credentials.token
    if more:
        headers = dict(sorted([*headers.items(), *more]))
    names = ";".join(["host", *headers])
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    canonical = f"GET\n{path}\n\nhost:{host}\n{lines}\n{names}\n{NO_BODY}"
    headers["Authorization"] = _authorization(credentials, region, stamp, names, canonical)
    return headers


def sign(
    credentials: ReadOnlyCredentials,
    region: str,
    method: str,
    host: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    sha256: str,
    now_s: float,
) -> dict[str, str]:
    """Return `headers` (lower-case names) and those that sign any request. `path` and `query` are
    quoted, and `query` is sorted. `sha256` is the digest of the body in hexadecimal digits; the
    store refuses another body."""
    stamp = _stamp(int(now_s))
    signed = {**headers, "x-amz-content-sha256": sha256, "x-amz-date": stamp}
    if credentials.token:
        signed["x-amz-security-token"] = credentials.token
    pairs = sorted({"host": host, **signed}.items())
    names = ";".join(name for name, _ in pairs)
    lines = "".join(f"{name}:{' '.join(value.split())}\n" for name, value in pairs)
    canonical = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{sha256}"
    signed["authorization"] = _authorization(credentials, region, stamp, names, canonical)
    return signed


def _authorization(
    credentials: ReadOnlyCredentials, region: str, stamp: str, names: str, canonical: str
) -> str:
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = f"{_ALGORITHM}\n{stamp}\n{scope}\n{digest}"
    signature = _signer(credentials.secret_key, stamp[:8], region)
    return (
        f"{_ALGORITHM} Credential={credentials.access_key}/{scope}, "
        f"SignedHeaders={names}, Signature={signature(text)}"
    )


@lru_cache(maxsize=2)
def _stamp(now_s: int) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))


@lru_cache(maxsize=16)
def _signer(secret_key: str, day: str, region: str) -> Callable[[str], str]:
    """Return a function that gives the HMAC-SHA256 of a text with the key of that day, in hex
    digits. It keeps the states of both digests after the key (RFC 2104): hmac.digest takes 5 us,
    this 2 us."""
    key = f"AWS4{secret_key}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    padded = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
    outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    def signature(text: str) -> str:
        within, around = inner.copy(), outer.copy()
        within.update(text.encode())
        around.update(within.digest())
        return around.hexdigest()

    return signature
