"""Read from the origin without cachefs: the same requests, as fast as obstore and HTTP allow."""

import http.client
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote, urlsplit

from bench.rig import BUCKET, Reading, Server

_RANGE_BYTES = 8 << 20
_TOKEN = re.compile(rb"<NextContinuationToken>([^<]*)</NextContinuationToken>")


def get_all(store: Any, keys: Sequence[str], in_flight: int) -> Reading:
    """GET whole objects with `in_flight` threads."""
    import obstore

    def get(key: str) -> int:
        return len(obstore.get(store, key).bytes())

    return timed(get, keys, in_flight, len(keys))


def get_ranges(store: Any, key: str, size_bytes: int, in_flight: int) -> Reading:
    """GET one object in ranges of 8 MiB with `in_flight` threads."""
    import obstore

    def get(start: int) -> int:
        length = min(_RANGE_BYTES, size_bytes - start)
        return len(obstore.get_range(store, key, start=start, length=length))

    return timed(get, range(0, size_bytes, _RANGE_BYTES), in_flight, 1)


def list_with_obstore(store: Any, prefix: str) -> tuple[int, float]:
    """List `prefix` with obstore. Return the number of keys, and seconds."""
    import obstore

    began = time.monotonic()
    count = sum(len(page) for page in obstore.list(store, prefix, chunk_size=1000))
    return count, time.monotonic() - began


def list_pages(server: Server, prefix: str) -> tuple[int, float]:
    """List `prefix` with plain ListObjectsV2 on one connection. Return the number of keys, and
    seconds.

    It parses only what the next request needs, so the result is the origin's own time.
    """
    address = urlsplit(server.endpoint)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    began = time.monotonic()
    count, token = 0, None
    try:
        while True:
            body = _page(connection, server, prefix, token)
            count += body.count(b"<Key>")
            found = _TOKEN.search(body)
            if found is None:
                return count, time.monotonic() - began
            token = found[1].decode()
    finally:
        connection.close()


def _page(
    connection: http.client.HTTPConnection, server: Server, prefix: str, token: str | None
) -> bytes:
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    fields = {"list-type": "2", "prefix": prefix, "delimiter": "/", "max-keys": "1000"}
    if token is not None:
        fields["continuation-token"] = token
    query = "&".join(f"{name}={quote(fields[name], safe='')}" for name in sorted(fields))
    target = f"/{BUCKET}?{query}"
    request = AWSRequest("GET", server.endpoint + target)
    credentials = Credentials(server.access_key, server.secret_key)
    S3SigV4Auth(credentials, "s3", server.region).add_auth(request)
    connection.request("GET", target, headers=dict(request.headers.items()))
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"LIST answered {answer.status}: {body[:200]!r}")
    return body


def timed(get: Any, items: Sequence[Any], in_flight: int, files: int) -> Reading:
    """Call `get`, which returns a number of bytes, for all items with `in_flight` threads."""
    with ThreadPoolExecutor(in_flight) as pool:
        list(pool.map(time.sleep, [0.01] * in_flight))  # start all threads before the clock
        began = time.monotonic()
        total_bytes = sum(pool.map(get, items))
        return Reading(files, total_bytes, time.monotonic() - began)
