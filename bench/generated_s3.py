"""An S3 server with computed objects that are never stored, for the metadata of millions of them.

As a program it serves the bucket `data` on the given port until it is killed. Below `tree/` are
directories `dNNNN` of 1,000 objects each; `flat/` has all objects in one directory. It supports
HEAD, GET and LIST of whole directories (version 2, with and without a delimiter), and reports their
counts at `/-/counts`.
"""

import argparse
import http.server
import json
import subprocess
import sys
import urllib.request
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from bench import sandbox
from tests.servers.ports import answers, free_ports, wait_until

BUCKET = "data"
PER_DIRECTORY = 1_000
_PAGE = 1_000
_TIME = "2026-01-02T03:04:05.000Z"
_HTTP_TIME = "Fri, 02 Jan 2026 03:04:05 GMT"
_SIZE_BYTES = 100_000


def name_of(number: int) -> str:
    return f"{number:07}.jpg"


def path_in_tree(number: int) -> str:
    """Return the path of an object below the prefix `tree`."""
    return f"d{number // PER_DIRECTORY:04}/{name_of(number)}"


class GeneratedS3:
    """The server as a child process, with `count` objects below each of `tree/` and `flat/`."""

    def __init__(self, count: int) -> None:
        self.count = count
        (port,) = free_ports(1)
        self.environment = {
            "AWS_ACCESS_KEY_ID": "generated",
            "AWS_SECRET_ACCESS_KEY": "generated",
            "AWS_REGION": "us-east-1",
        }
        self.endpoint = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.generated_s3", str(port), str(count)],
            cwd=Path(__file__).resolve().parent.parent,
        )
        wait_until(lambda: answers(port), 20, "the generated S3 server did not come up")

    def __enter__(self) -> "GeneratedS3":
        return self

    def __exit__(self, *failure: object) -> None:
        sandbox.end_process(self._process.pid)
        self._process.wait()

    def counts(self) -> dict[str, int]:
        """Return the numbers of LIST, HEAD and GET requests answered so far."""
        with urllib.request.urlopen(f"{self.endpoint}/-/counts", timeout=10) as answer:
            counts: dict[str, int] = json.load(answer)
        return counts


def _e_tag(number: int) -> str:
    """Return an ETag like that of a multipart upload, which is no digest of the bytes."""
    return f"{number:032x}-1"


class _Keys(Sequence[str]):
    """A range of the bucket's keys: first those of `flat/`, then as many of `tree/`."""

    def __init__(self, count: int, numbers: range) -> None:
        self._count = count
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, position: Any) -> Any:
        number = self._numbers[position]
        if number < self._count:
            return f"flat/{name_of(number)}"
        return f"tree/{path_in_tree(number - self._count)}"


def _prefix_row(prefix: str) -> str:
    return f"<CommonPrefixes><Prefix>{prefix}</Prefix></CommonPrefixes>"


def _row(key: str) -> str:
    number = int(key.rpartition("/")[2].removesuffix(".jpg"))
    return (
        f"<Contents><Key>{key}</Key><LastModified>{_TIME}</LastModified>"
        f"<ETag>&quot;{_e_tag(number)}&quot;</ETag><Size>{_SIZE_BYTES}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    count = 0
    counts: ClassVar[Counter[str]] = Counter()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/-/counts":
            counts = {name: self.counts[name] for name in ("LIST", "HEAD", "GET")}
            self._send(200, json.dumps(counts).encode())
        elif "list-type=2" in url.query:
            self.counts["LIST"] += 1
            self._list(parse_qs(url.query))
        else:
            self.counts["GET"] += 1
            self._object(b"\0" * _SIZE_BYTES)

    def do_HEAD(self) -> None:
        self.counts["HEAD"] += 1
        self._object(None)

    def _object(self, body: bytes | None) -> None:
        number = self._number(urlsplit(self.path).path.removeprefix(f"/{BUCKET}/"))
        if number is None:
            self._send(404, b"")
            return
        headers = {"ETag": f'"{_e_tag(number)}"', "Last-Modified": _HTTP_TIME}
        self._send(200, body, headers, _SIZE_BYTES)

    def _number(self, key: str) -> int | None:
        digits = key.rpartition("/")[2].removesuffix(".jpg")
        if not digits.isdecimal() or int(digits) >= self.count:
            return None
        number = int(digits)
        known = (f"tree/{path_in_tree(number)}", f"flat/{name_of(number)}")
        return number if key in known else None

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        most = min(_PAGE, int(query.get("max-keys", ["1000"])[0]))
        by_delimiter = "delimiter" in query and prefix in ("", "tree/")
        below = self._prefixes(prefix) if by_delimiter else self._keys(prefix)
        after = query.get("start-after", [""])[0]
        start = int(query.get("continuation-token", [bisect_right(below, after)])[0])
        end = min(start + most, len(below))
        row = _prefix_row if by_delimiter else _row
        rows = [row(below[position]) for position in range(start, end)]
        more = end < len(below)
        token = f"<NextContinuationToken>{end}</NextContinuationToken>" if more else ""
        text = (
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{prefix}</Prefix><KeyCount>{len(rows)}</KeyCount>"
            f"<MaxKeys>{most}</MaxKeys><EncodingType>url</EncodingType>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(rows)}"
            "</ListBucketResult>"
        )
        self._send(200, text.encode())

    def _prefixes(self, prefix: str) -> Sequence[str]:
        """Return all directories in the bucket, or those below `tree/`."""
        if not prefix:
            return ["flat/", "tree/"]
        return [f"tree/d{number:04}/" for number in range(-(-self.count // PER_DIRECTORY))]

    def _keys(self, prefix: str) -> "_Keys":
        """Return all keys that begin with `prefix`, the prefix of a directory, in order."""
        count = self.count
        if prefix == "":
            return _Keys(count, range(2 * count))
        if prefix == "flat/":
            return _Keys(count, range(count))
        if prefix == "tree/":
            return _Keys(count, range(count, 2 * count))
        if prefix.startswith("tree/d") and prefix[6:-1].isdecimal():
            first = int(prefix[6:-1]) * PER_DIRECTORY
            return _Keys(count, range(count + first, count + min(first + PER_DIRECTORY, count)))
        return _Keys(count, range(0))

    def _send(
        self,
        status: int,
        body: bytes | None,
        headers: dict[str, str] | None = None,
        length: int | None = None,
    ) -> None:
        self.send_response_only(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body or b"") if length is None else length))
        self.end_headers()
        if body:
            self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("count", type=int)
    arguments = parser.parse_args()
    _Handler.count = arguments.count
    server = http.server.ThreadingHTTPServer(("127.0.0.1", arguments.port), _Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
