"""What another node knows, sent to a mount (control/routes/metadata.py, namespace/transfer.py)."""

import json

import trio

from cachefs.control.routes.metadata import MetadataRoutes
from cachefs.errors import CachefsError
from tests.fuzz.targets._namespace import look_at_all, running_tree


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


def fuzz(data: bytes) -> None:
    trio.run(_import, data)
