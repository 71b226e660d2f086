"""The files of the page, compressed and in memory from their first use."""

import gzip
import hashlib
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_STATIC = Path(__file__).with_name("static")
_KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


def asset(request: Request) -> Response:
    """Answer with a file of `static/`; 404 if there is none of this name."""
    return _answer(request, request.path_params["name"])


def page(request: Request) -> Response:
    """Answer with the page."""
    return _answer(request, "index.html")


@cache
def _files() -> dict[str, tuple[bytes, bytes, str, str]]:
    """Return all files by name: content, compressed content, type and ETag."""
    files = {}
    for path in _STATIC.iterdir():
        if kind := _KINDS.get(path.suffix):
            content = path.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
            files[path.name] = (content, gzip.compress(content, mtime=0), kind, tag)
    return files


def _answer(request: Request, name: str) -> Response:
    if name not in _files():
        return Response(status_code=404)
    content, compressed, kind, tag = _files()[name]
    headers = {"ETag": tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        content = compressed
    return Response(content, media_type=f"{kind}; charset=utf-8", headers=headers)
