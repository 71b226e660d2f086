"""Measures the CPU time of a hit and of an S3 GET by themselves, without FUSE and local cache. Run
as a script in a process of its own:

    python calls.py URL ENDPOINT MEMBERS LIST ROUNDS

LIST has a name below URL on each line; the members have all these objects, each of one block. The
script reads all of them in turns, one after another: as the daemon asks the shared tier, and as it
asks the origin. It prints JSON: for both kinds the microseconds of CPU time of this process for
each block, one number per round, and how long the calls took.
"""

import json
import sys
import time
from pathlib import Path

import trio

from cachefs.config import MountConfig
from cachefs.daemon.settings import origin_options, resilience
from cachefs.format.object_id import object_id
from cachefs.origin.open_origin import open_origin
from cachefs.origin.resilience import ResilientOrigin
from cachefs.shared.tier import SharedTier
from cachefs.types import ObjectMeta, ObjectRef


async def _main() -> None:
    url, endpoint, members, list_file, rounds = sys.argv[1:]
    config = MountConfig({"source": url, "mountpoint": "/mnt", "endpoint": endpoint})
    origin = ResilientOrigin(open_origin(url, origin_options(config)), resilience(config))
    tier = SharedTier(origin.identity)
    tier.members.use(members)
    times: dict[str, list[float]] = {"hit": [], "get": [], "hit_took": [], "get_took": []}
    async with trio.open_nursery() as nursery:
        await nursery.start(origin.run)
        await nursery.start(tier.run)
        while not tier.is_on:  # noqa: ASYNC110 - there is no event for it
            await trio.sleep(0.01)
        refs = [await _ref(origin, name) for name in Path(list_file).read_text().split()]
        for _ in range(int(rounds)):
            for kind, read in (("hit", _hit), ("get", _get)):
                began, began_cpu = time.monotonic(), time.process_time()
                for ref in refs:
                    await read(tier, origin, ref)
                times[kind].append(1e6 * (time.process_time() - began_cpu) / len(refs))
                times[f"{kind}_took"].append(1e6 * (time.monotonic() - began) / len(refs))
        times["missed"] = [tier.counters.misses]
        nursery.cancel_scope.cancel()
    print(json.dumps(times))


async def _ref(origin: ResilientOrigin, name: str) -> ObjectRef:
    meta = await origin.stat(name)
    assert isinstance(meta, ObjectMeta)
    return ObjectRef(object_id(origin.identity, name, meta.version), name, meta)


async def _hit(tier: SharedTier, origin: ResilientOrigin, ref: ObjectRef) -> None:
    async def fetch(offset: int, length: int) -> memoryview:
        return memoryview(await origin.read(ref.path, ref.meta, offset, length))

    await tier.read(ref, 0, 1, fetch)


async def _get(_: SharedTier, origin: ResilientOrigin, ref: ObjectRef) -> None:
    await origin.read(ref.path, ref.meta, 0, ref.meta.size_bytes)


if __name__ == "__main__":
    trio.run(_main)
