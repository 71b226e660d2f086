"""Requests to the control socket, as far as they are JSON and paths (control/).

An input is a line of method and path (with a query), and the body.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import trio

from cachefs.cache.block_cache import BlockCache
from cachefs.cache_dir.directory import CacheDirectory
from cachefs.config import MountConfig, TierConfig, load_mount_config
from cachefs.control.api import Handler, Route
from cachefs.control.routes.cache import CacheRoutes
from cachefs.control.routes.load import LoadRoutes
from cachefs.control.routes.metadata import MetadataRoutes
from cachefs.control.routes.names import NamesRoutes
from cachefs.control.routes.profile import ProfileRoutes
from cachefs.control.routes.set import SetRoutes, live_options
from cachefs.control.routes.tier import TierRoutes
from cachefs.control.server import application
from cachefs.errors import CacheDirError
from cachefs.fuse.access_log import AccessLog
from cachefs.fuse.observers import RequestObservers
from cachefs.fuse.uid_limits import UidLimits
from cachefs.load.job import JobContext
from cachefs.load.job_files import JobFiles
from cachefs.load.jobs import Jobs
from cachefs.load.paths import PathReader
from cachefs.load.throttle import LoadThrottle
from cachefs.log import is_debugging, set_debugging
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.prefetch.look_ups import LookUpReads
from cachefs.prefetch.prefetch import Prefetch
from cachefs.shared.tier import SharedTier
from tests.fuzz.targets._namespace import running_tree
from tests.namespace.harness import Tree, open_tier

_PATIENCE_S = 0.3
"""Some answers are streams that last; who asked leaves."""


@cache
def _config() -> MountConfig:
    return load_mount_config("s3://bucket", "/mnt/m", {})


def _no_tier(wanted: TierConfig) -> list[CacheDirectory]:
    raise CacheDirError("no disk here")


@asynccontextmanager
async def _handlers(tree: Tree, place: Path) -> AsyncIterator[dict[Route, Handler]]:
    namespace = tree.namespace
    tier = open_tier(place / "cache", tree.origin, 64 << 20)
    block_cache = BlockCache(tree.origin, [tier])
    origin = ResilientOrigin(tree.origin, Resilience())
    paths = PathReader("/mnt/m", "s3://bucket")
    jobs = Jobs(
        JobContext(namespace, block_cache, origin, JobFiles(place / "jobs"), paths, 1 << 20)
    )
    observers = RequestObservers()
    throttle = LoadThrottle(block_cache, origin, 1 << 20)
    was_debugging = is_debugging()
    async with trio.open_nursery() as nursery:
        prefetch = Prefetch(
            *(namespace, block_cache, nursery, LookUpReads(block_cache)),
            *(lambda: True, throttle, 0, "order"),
        )
        options = live_options(origin, UidLimits({}), namespace, prefetch, SharedTier("memory://"))
        all_routes = (
            CacheRoutes(
                namespace,
                block_cache,
                lambda parent, name: None,
                lambda ino: None,
                trio.lowlevel.checkpoint,
                lambda: False,
            ),
            NamesRoutes(namespace, block_cache),
            MetadataRoutes(namespace, tree.db, tree.origin, None),
            LoadRoutes(jobs),
            SetRoutes(options, AccessLog(observers), Path("/mnt/m")),
            TierRoutes(block_cache, _config(), _no_tier, [tier], tier),
            ProfileRoutes(namespace, origin, observers),
        )
        await nursery.start(block_cache.run)
        await nursery.start(jobs.run)
        yield {
            route: handler for routes in all_routes for route, handler in routes.handlers().items()
        }
        nursery.cancel_scope.cancel()
    set_debugging(was_debugging)
    block_cache.abandon()


async def _ask(data: bytes) -> None:
    line, _, body = data.partition(b"\n")
    method, _, url = line.decode("latin-1").partition(" ")
    path, _, query = url.partition("?")
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode("latin-1"),
        "query_string": query.encode("latin-1"), "headers": [], "root_path": "", "scheme": "http",
        "http_version": "1.1", "server": None, "client": None, "extensions": {},
    }  # fmt: skip
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    statuses: list[int] = []
    text = b""

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await trio.sleep_forever()
        raise AssertionError

    async def send(message: Any) -> None:
        nonlocal text
        await trio.lowlevel.checkpoint()
        statuses.extend([message["status"]] if "status" in message else [])
        text += message.get("body", b"")

    async with running_tree() as tree, _handlers(tree, tree.path.parent) as handlers:
        with trio.move_on_after(_PATIENCE_S) as waiting:
            await application(handlers)(scope, receive, send)
    if not waiting.cancelled_caught:
        assert statuses
        assert statuses[0] != 500, text
        assert b"internal error" not in text, text
        for answer in text.splitlines():
            json.loads(answer)


GROWING = {
    "a long path": lambda count: b"GET /v1/" + b"x" * count + b"\n",
    "a long query": lambda count: b"GET /v1/cache/info?" + b"path=a&" * (count // 7) + b"\n",
    "brackets": lambda count: b"POST /v1/load\n" + b"[" * count,
    "paths": lambda count: b'POST /v1/load\n{"paths":[' + b'"a",' * (count // 4) + b'"a"]}',
    "names": lambda count: b"POST /v1/load\n{" + b'"a":1,' * (count // 6) + b'"a":1}',
}
MOST_BYTES = 1 << 20
"""Inputs of about so many bytes."""


def fuzz(data: bytes) -> None:
    trio.run(_ask, data)
