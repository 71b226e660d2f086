"""Passes changes made while mounted (`cachefs set`, `cachefs tier`) to the next daemon.

Otherwise that daemon would restore a limit that was lifted, or use a disk that was removed.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from cachefs.config import (
    LIVE,
    OFF,
    TIER_RATIOS,
    TIER_SHORTHANDS,
    MountConfig,
    TierConfig,
    from_json,
    load_tier,
    to_json,
)
from cachefs.control import api
from cachefs.control.api import Handler, Route
from cachefs.supervisor.link import Link


class LiveChanges:
    """Records every change at run time, and sends all of them to the supervisor after each one."""

    def __init__(self, config: MountConfig, link: Link) -> None:
        """`config` must already contain the changes of the previous daemon (`with_changes`)."""
        self._config = config
        self._link = link
        self._tiers = {
            str(path): _table(tier, path, quota_bytes)
            for tier in config.tiers
            for path, quota_bytes in zip(tier.paths, tier.quotas, strict=True)
        }
        self._settings = _settings_in(link.changes)

    def recorded(self, handlers: Mapping[Route, Handler]) -> dict[Route, Handler]:
        """Return `handlers`, with those that change something wrapped so that they record it."""
        notes = {
            api.SET: self._note_settings,
            api.TIER_ADD: self._note_added,
            api.TIER_RESIZE: self._note_resized,
            api.TIER_REMOVE: self._note_removed,
        }
        recorded = {route: self._recorded(handlers[route], note) for route, note in notes.items()}
        return {**handlers, **recorded}

    def _recorded(
        self, handler: Handler, note: Callable[[dict[str, Any], Mapping[str, Any]], None]
    ) -> Handler:
        async def answer(arguments: dict[str, Any]) -> Mapping[str, object]:
            answering = handler(arguments)
            assert isinstance(answering, Awaitable)
            result = await answering
            note(arguments, result)
            tiers = list(self._tiers.values())
            self._link.changed({"tiers": tiers, "settings": self._settings})
            return result

        return answer

    def _note_settings(self, arguments: dict[str, Any], result: Mapping[str, Any]) -> None:
        self._settings = result["after"]

    def _note_added(self, arguments: dict[str, Any], result: Mapping[str, Any]) -> None:
        after = result["after"]
        ratios = {key: arguments[key] for key in TIER_RATIOS if key in arguments}
        table = {"medium": after["medium"], "path": [after["path"]], "quota": after["quota_bytes"]}
        tier = load_tier(self._config, {**ratios, **table})
        self._tiers[after["path"]] = _table(tier, tier.paths[0], tier.quotas[0])

    def _note_resized(self, arguments: dict[str, Any], result: Mapping[str, Any]) -> None:
        after = result["after"]
        self._tiers[after["path"]]["quota"] = [after["quota_bytes"]]

    def _note_removed(self, arguments: dict[str, Any], result: Mapping[str, Any]) -> None:
        del self._tiers[result["before"]["path"]]


def _table(tier: TierConfig, path: Path, quota_bytes: int) -> dict[str, Any]:
    """Return one directory as a `[[tier]]` table. Path and quota are lists, so that a comma in the
    path does not split it."""
    ratios = {key: getattr(tier, key) for key in TIER_RATIOS}
    return {"medium": tier.medium.value, "path": [str(path)], "quota": [quota_bytes], **ratios}


def with_changes(config: MountConfig, changes: Mapping[str, Any]) -> MountConfig:
    """Return the configuration with the changes of earlier daemons. Raises `UsageError`."""
    values = json.loads(to_json(config))
    settings = _settings_in(changes)
    values |= {name: settings[name] for name in LIVE if name in settings}
    if changes.get("tiers"):
        for name in TIER_SHORTHANDS:
            values.pop(name, None)
        values["tier_tables"] = changes["tiers"]
    return from_json(json.dumps(values))


def access_log_in(changes: Mapping[str, Any]) -> Path | None:
    """Return the file of the access log that was switched on, or None if it was off."""
    file = _settings_in(changes).get("access_log", OFF)
    return None if file == OFF else Path(file)


def _settings_in(changes: Mapping[str, Any]) -> Mapping[str, Any]:
    return changes.get("settings") or {}
