"""The mounts of the node, as the console shows them."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trio

from cachefs.config import OFF
from cachefs.control import api
from cachefs.control.client import ask
from cachefs.errors import CachefsError, UsageError
from cachefs.mounts import RuntimeEntry, cachefs_mounts, entry_of, read_entries, socket_path

_LEAST_AGE_S = 5.0
_ANSWER_S = 1.0
_MOST_ASKED = 32
"""The most mounts whose daemons are asked for figures."""


class NodeMounts:
    """All mounts of the node. Other daemons of the same user are asked over their control sockets,
    at most once in five seconds, and only while a page is open."""

    def __init__(self, own: Path) -> None:
        """`own` is the mountpoint of this daemon."""
        self._own = own
        self._turn = trio.Lock()
        self._collected_at = -math.inf
        self._rows: list[dict[str, Any]] = []

    async def rows(self) -> list[dict[str, Any]]:
        """Return a row for each mount, by mountpoint. The figures of a mount without metrics
        (`--metrics off`) stay with its owner."""
        async with self._turn:
            if trio.current_time() - self._collected_at >= _LEAST_AGE_S:
                self._rows = await trio.to_thread.run_sync(_collect, self._own)
                self._collected_at = trio.current_time()
        return self._rows

    async def token(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Answer with a token for the console of the mount on `mountpoint`, of the same user."""
        wanted = arguments.get("mountpoint")
        if not isinstance(wanted, str):
            raise UsageError("mountpoint must be a text")
        return await trio.to_thread.run_sync(_token, wanted)


def _token(wanted: str) -> Mapping[str, object]:
    for entry in read_entries():
        if entry.alive and entry.mountpoint == wanted:
            return ask(socket_path(Path(wanted)), api.CONSOLE_TOKEN)
    raise CachefsError(f"no daemon of this user serves {wanted!r}")


def _collect(own: Path) -> list[dict[str, Any]]:
    """Return the rows. Blocks."""
    entries = [entry for entry in read_entries() if entry.alive]
    rows = [_row(entry, own, asked=number < _MOST_ASKED) for number, entry in enumerate(entries)]
    for mount in cachefs_mounts():
        if entry_of(mount, entries) is None:
            about = {"mountpoint": str(mount.mountpoint), "source": mount.source}
            rows.append({**about, "state": "no daemon of this user here", "address": None})
    return sorted(rows, key=lambda row: str(row["mountpoint"]))


def _row(entry: RuntimeEntry, own: Path, *, asked: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "mountpoint": entry.mountpoint,
        "source": entry.source,
        "state": "serving",
        "address": None,
    }
    if entry.mountpoint == str(own):
        return row | {"is_this": True}
    try:
        status = ask(socket_path(Path(entry.mountpoint)), timeout_s=_ANSWER_S) if asked else {}
    except CachefsError:
        return row | {"state": "not answering"}
    if (address := status.get("metrics")) in {None, OFF}:
        return row
    reads, tiers = status["reads"], status["tiers"]
    return row | {
        "address": address,
        "hits": reads["hits"],
        "misses": reads["misses"],
        "used_bytes": sum(tier["used_bytes"] for tier in tiers),
        "quota_bytes": sum(tier["quota_bytes"] for tier in tiers),
        "is_healthy": all(tier["health"] == "normal" for tier in tiers),
        "is_down": status["origin_health"]["down_since"] is not None,
    }
