"""What another node knows, sent to a mount (control/routes/metadata.py, namespace/transfer.py)."""

import json
from contextlib import suppress
from functools import partial

import trio

from cachefs.control.routes.metadata import MetadataRoutes
from cachefs.errors import CachefsError
from tests.fuzz.targets._namespace import look_at_all, running_tree


async def _take(data: bytes) -> None:
    async with running_tree() as tree:
        routes = MetadataRoutes(tree.namespace, tree.db, tree.origin, None)
        with suppress(ValueError, RecursionError, CachefsError):
            arguments = json.loads(data)
            if isinstance(arguments, dict):
                await routes.take({"identity": tree.origin.identity, **arguments})


PARSERS = (partial(trio.run, _take),)
"""What is measured with `GROWING`."""


async def _import(data: bytes) -> None:
    try:
        arguments = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(arguments, dict):
        return
    async with running_tree() as tree:
        routes = MetadataRoutes(tree.namespace, tree.db, tree.origin, None)
        for _ in range(2):
            try:
                answer = await routes.take({"identity": tree.origin.identity, **arguments})
                json.dumps(answer)
            except CachefsError:
                pass
        await look_at_all(tree)
        json.dumps([line async for line in routes.export({})])
        await tree.restart()
        await look_at_all(tree)


_PIECE = b'{"path":"","after":"","is_last":true,"listed_at_ns":1,"entries":[%b]}'
_ROOT = b'{"root":["",true,0,1,"",0,0,493,0,1,2],"pieces":['
_ENTRY = b'["a%07x",false,5,1700000000000000000,"e",4294967295,4294967295,65535,1,null,null]'
GROWING = {
    "brackets": lambda count: b"[" * count,
    "numbers": lambda count: b'{"pieces":[' + b"1," * (count // 2) + b"1]}",
    "one text": lambda count: b'{"root":"' + b"x" * count + b'","pieces":[]}',
    "empty pieces": lambda count: (
        _ROOT + b",".join([_PIECE % b""] * (count // (len(_PIECE) - 1))) + b"]}"
    ),
    "entries": lambda count: (
        _ROOT + _PIECE % b",".join(_ENTRY % n for n in range(count // 82)) + b"]}"
    ),
    "a deep path": lambda count: (
        _ROOT + _PIECE.replace(b'""', b'"' + b"d/" * (count // 2) + b'd"', 1) % b"" + b"]}"
    ),
}
MOST_BYTES = 1 << 20
"""Inputs of about so many bytes."""


def fuzz(data: bytes) -> None:
    trio.run(_import, data)
