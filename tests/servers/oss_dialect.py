"""OSS's own dialect in front of an S3 server, as far as reading goes: signatures that are replaced
unseen, no XML namespace, a Type for each object, times of whole seconds."""

import http.client
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qsl, quote, unquote

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.servers.s3_server import S3Server

_NAMESPACE = b' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
_ASKED = {"range", "if-match"}
_PASSED = {"etag", "last-modified", "content-length", "content-range", "content-type"}


def _as_signed(target: str) -> str:
    """Quoted as S3's signature wants it."""
    path, _, query = target.partition("?")
    pairs = sorted(parse_qsl(query, keep_blank_values=True))
    text = "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in pairs)
    return quote(unquote(path), safe="/-_.~") + (f"?{text}" if text else "")


class OssDialect:
    """Started by `with`, gone after it."""

    def __init__(self, behind: S3Server) -> None:
        host = behind.endpoint.partition("://")[2]
        keys = Credentials(behind.access_key, behind.secret_key)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                connection = http.client.HTTPConnection(host)
                headers = {k: v for k, v in self.headers.items() if k.lower() in _ASKED}
                path = _as_signed(self.path)
                request = AWSRequest(self.command, behind.endpoint + path, headers)
                S3SigV4Auth(keys, "s3", behind.region).add_auth(request)
                connection.request(self.command, path, headers=dict(request.headers.items()))
                answer = connection.getresponse()
                body = answer.read().replace(_NAMESPACE, b"")
                if b"<ListBucketResult" in body:
                    body = body.replace(b"</Size>", b"</Size><Type>Normal</Type>")
                    body = body.replace(b"+", b"%20")  # spaces in keys
                    body = re.sub(rb"(:\d\d)(\.\d+)?Z</Last", rb"\1.000Z</Last", body)
                connection.close()
                self.send_response(answer.status)
                self.send_header("x-oss-request-id", "1")
                for name, value in answer.getheaders():
                    if name.lower() in _PASSED and (name.lower() != "content-length" or not body):
                        self.send_header(name, value)
                if body:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *args: object) -> None:
                """Silence."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.block_on_close = False
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
