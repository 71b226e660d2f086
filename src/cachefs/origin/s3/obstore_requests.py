"""GETs through obstore. `get` blocks and must be called in a worker thread."""

from datetime import datetime, timedelta
from typing import Any, NamedTuple

import obstore
from obstore.store import S3Store

from cachefs.errors import BadDataError
from cachefs.origin.body import Body
from cachefs.origin.options import OriginOptions
from cachefs.origin.s3 import digest
from cachefs.origin.s3.config import S3Target, read_ca_file
from cachefs.origin.s3.credentials import CredentialProvider
from cachefs.origin.s3.listing import MOST_BYTES, version_of, whole_seconds
from cachefs.types import ObjectMeta

_PIECE_BYTES = 16 << 10
"""The piece size of a body whose progress is watched: at 16 KiB/s one piece arrives per second."""


def open_store(target: S3Target, provider: CredentialProvider, options: OriginOptions) -> S3Store:
    """Return obstore's client for the bucket. Sends no request."""
    client: dict[str, Any] = {
        "allow_http": target.endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=options.connect_timeout_s),
        "timeout": timedelta(seconds=options.total_timeout_s),
        "read_timeout": timedelta(seconds=options.idle_timeout_s),
    }
    ca_pem = read_ca_file(target)
    if ca_pem and target.endpoint.startswith("https://"):
        client["root_certificate"] = ca_pem
    # `config.py` computes the URL with the bucket once, for both libraries. With "virtual hosted",
    # obstore appends the key to this URL unchanged.
    config: dict[str, Any] = {
        "endpoint": target.base_url,
        "virtual_hosted_style_request": True,
        "region": target.region,
        "client_options": client,
        # `resilience` does the retries.
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
    }
    if provider.anonymous:
        config["skip_signature"] = True
    else:
        config["credential_provider"] = provider.for_obstore
    return S3Store(target.bucket, **config)


class Got(NamedTuple):
    """The result of a GET. `data` is None if the answer has the wrong version or length.
    `size_bytes` is the length that arrived or was announced."""

    version: str
    size_bytes: int
    data: memoryview | None = None
    is_as_told: bool = True


def get(
    store: S3Store,
    key: str,
    meta: ObjectMeta,
    offset: int,
    length: int,
    md5: bytes | None,
    body: Body | None,
) -> Got:
    """Return `length` bytes at `offset` of the version `meta`, and whether they have this MD5. If
    the answer announces another version or length, its body is not read and takes no memory. Never
    reads on after more than `length` bytes."""
    options: Any = {}
    if is_strong(meta.version):
        options["if_match"] = meta.version
    if (offset, length) != (0, meta.size_bytes):
        options["range"] = (offset, offset + length)
    result = obstore.get(store, key, options=options)
    found = meta_from(result.meta).version
    start, end = result.range
    if found != meta.version or end - start != length:
        return Got(found, end - start)
    pieces: list[memoryview] = []
    count = 0
    for piece in result.stream(min_chunk_size=length if body is None else _PIECE_BYTES):
        view = memoryview(piece)
        count += view.nbytes
        if count > length:
            return Got(found, count)
        if body is None:
            pieces.append(view)
        elif not body.add(view):
            return Got(found, count)
    if count != length:
        return Got(found, count)
    if body is not None:
        data = body.take()
    else:  # obstore seems to deliver one piece, which needs no copy; this is not guaranteed
        data = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
    return Got(found, length, data, md5 is None or digest.has_md5(data, md5))


def meta_from(found: Any) -> ObjectMeta:
    """Convert obstore's description. Raises `BadDataError` if it has neither an ETag nor a time:
    some servers answer like this for a directory, which is no object."""
    modified: datetime = found["last_modified"]  # 1970 if the answer has none
    mtime_ns = whole_seconds(modified)
    size: int = found["size"]
    e_tag: str | None = found.get("e_tag")
    if not e_tag and not mtime_ns:
        raise BadDataError("the answer has neither an ETag nor a time, so it describes no object")
    if size > MOST_BYTES:
        raise BadDataError(f"the answer tells of {size} bytes, which no object has")
    return ObjectMeta(size, mtime_ns, version_of(e_tag, mtime_ns, size))


def is_strong(version: str) -> bool:
    """Whether `version` is an ETag that can be sent as If-Match. Weak ETags never match. A version
    that no header can hold is only compared with the version of the answer."""
    return version.startswith('"') and version.isascii() and version.isprintable()
