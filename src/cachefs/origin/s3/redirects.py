"""Decides which redirects of a store are followed, for all requests to it.

Who can write to a bucket, or answer in its place, may redirect a request to any address that this
machine reaches: the bytes of an internal service would become the content of a file, and a session
token would go along. So a redirect is followed only to the same key of the same bucket, on a host
that is the store's own, and the request is signed anew for that host. AWS and OSS move requests
between their own hosts (a new bucket is reached through 307 until its name has spread); any other
store may only change between `HOST/BUCKET` and `BUCKET.HOST`. The scheme never changes. An answer
that only names another region is followed to that region's host at AWS, and else on the same host.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import SplitResult, unquote, urlsplit

from cachefs.errors import OriginError
from cachefs.origin.s3 import errors as s3_errors
from cachefs.origin.s3.config import S3Target
from cachefs.origin.s3.endpoints import aws_hosts

STATUSES = (301, 302, 303, 307, 308)
_DENIED_BY_OSS = (403, "oss")
"""OSS denies a request that should go to another endpoint, which its answer names:
https://www.alibabacloud.com/help/en/oss/support/http-status-code-403"""
MOST = 3
"""The most redirects of one request. AWS sends one."""
_MOST_CHARACTERS = 4096
"""Of an address. A longest key with all bytes quoted has 3,072."""
_SHOWN = re.compile("[A-Za-z0-9.:_\\[\\]-]{1,255}")
_ENDPOINT = re.compile(rb"<Endpoint>([A-Za-z0-9.-]{1,255})</Endpoint>")
_OSS = re.compile(r"oss-([a-z0-9-]+?)(?:-internal)?\.(aliyuncs\.com)")
"""Hosts of OSS, without the bucket. The groups are as in `aws_hosts`."""


def followed(
    target: S3Target,
    key: str,
    subject: str,
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    verb: str = "read",
) -> S3Target | None:
    """Return the target to which a request for `key` is sent next; None if the answer names no
    other place, so that it is an error like any other. Raises an `OriginError` about `subject` if
    the redirect is not followed."""
    place = _place(target, status, headers, body)
    region = s3_errors.named_region(headers, body)
    if place is not None:
        moved = _own(target, key, place, region)
        if moved is not None:
            return moved
    if region not in (None, target.region) and s3_errors.concerns_region(status, headers, body):
        return _in_region(target, str(region))
    if (refused := refusal(target, subject, status, headers, body, verb)) is not None:
        raise refused
    return None


def _in_region(target: S3Target, region: str) -> S3Target:
    """Return the target in another region: at AWS on that region's host, else on the same host."""
    own = urlsplit(target.endpoint).netloc.lower()
    found = aws_hosts().fullmatch(own)
    if found is None or "accelerate" in own:
        return replace(target, region=region)
    before, domain = own[: found.start(1) if found[1] else found.start(2)], found[2]
    host = f"{before}{region}.{domain}"
    scheme, _, rest = target.base_url.partition("://")
    return replace(
        target,
        region=region,
        endpoint=f"{scheme}://{host}",
        base_url=f"{scheme}://{rest.replace(own, host, 1)}",
    )


def refusal(
    target: S3Target,
    subject: str,
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    verb: str = "read",
) -> OriginError | None:
    """Return the error of a redirect that is not followed; None if the answer names no other
    place, or names it only in the body of another error. It is no `OriginUnavailableError`: the
    store has answered, and will answer the same."""
    place = _place(target, status, headers, body)
    if place is None or not (status == 307 or (status in STATUSES and headers.get("location"))):
        return None
    return OriginError(
        f"{subject} can't be {verb}: {target.endpoint} redirects it to {_shown(place)} (HTTP "
        f"{status}), which is not followed: if the bucket is there, give that address as --endpoint"
    )


def _place(
    target: S3Target, status: int, headers: Mapping[str, str], body: bytes
) -> SplitResult | str | None:
    """Return the address that an answer names, or its text if it can't be parsed."""
    text = headers.get("location", "") if status in STATUSES else ""
    if not text:
        if status not in (301, 307) and (status, target.scheme) != _DENIED_BY_OSS:
            return None
        named = _ENDPOINT.search(body)
        if named is None:
            return None
        text = f"{urlsplit(target.base_url).scheme}://{named[1].decode()}"
    try:
        place = urlsplit(text if len(text) <= _MOST_CHARACTERS else "")
        return place if place.hostname else text
    except ValueError:
        return text


def _shown(place: SplitResult | str) -> str:
    """Return scheme and host for a message, without anything else that the answer says."""
    if isinstance(place, str):
        return "an address that has no host"
    host = place.netloc.rpartition("@")[2]
    scheme = place.scheme if place.scheme in ("http", "https") else "?"
    return f"{scheme}://{host}" if _SHOWN.fullmatch(host) else "an odd address"


def _own(
    target: S3Target, key: str, place: SplitResult | str, region: str | None
) -> S3Target | None:
    """Return the target at `place` if that is the same bucket of the same store, else None."""
    here = urlsplit(target.base_url)
    if isinstance(place, str) or place.scheme != here.scheme or "@" in place.netloc:
        return None
    bucket, host = target.bucket, place.netloc.lower()
    within = host.startswith(f"{bucket}.")
    there = host.removeprefix(f"{bucket}.") if within else host
    root = "" if within else f"/{bucket}"
    if (
        not within and not place.path and not here.path
    ):  # the store keeps to the form of the address
        root, place = "", place._replace(netloc=f"{bucket}.{place.netloc}")
    if unquote(place.path) not in ("", root, f"{root}/", f"{root}/{key}"):
        return None
    base_url = f"{here.scheme}://{place.netloc}{root}"
    own = urlsplit(target.endpoint).netloc.lower()
    for pattern in (aws_hosts(), _OSS):
        ours, found = pattern.fullmatch(own), pattern.fullmatch(there)
        if ours is not None and found is not None:
            name = region or found[1] or target.region
            is_same = ours[2] == found[2]
            return replace(target, base_url=base_url, region=name) if is_same else None
    return replace(target, base_url=base_url) if there == own else None
