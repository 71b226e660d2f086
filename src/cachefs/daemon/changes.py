"""What was changed while mounted (`cachefs set`, `cachefs tier`), for the daemon that may come
after this one: it must not come back with a limit that was lifted, or a disk that was taken out."""

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from cachefs.config import LIVE, MountConfig, TierConfig, from_json, load_tier, to_json
from cachefs.control import api
from cachefs.control.api import Handler, Route
from cachefs.supervisor.link import Link

_SHORTHANDS = ("cache_dirs", "cache_size", "mem_size", "mem_dir")


class Changes:
    """Hears of every change, and tells the supervisor of all of them together."""

    def __init__(self, config: MountConfig, link: Link) -> None:
        """`config` has the changes of the daemon before."""
        self._config = config
        self._link = link
        self._tiers = {
            str(path): _table(tier, path, quota_bytes)
            for tier in config.tiers
            for path, quota_bytes in zip(tier.paths, tier.quotas, strict=True)
        }
        self._settings: Mapping[str, object] = link.changes.get("settings") or {}

    def heard_in(self, handlers: Mapping[Route, Handler]) -> dict[Route, Handler]:
        """`handlers`, of which those that change something tell it here."""
        listeners = {
            api.SET: self._note_settings,
            api.TIER_ADD: self._note_added,
            api.TIER_RESIZE: self._note_resized,
            api.TIER_REMOVE: self._note_removed,
        }
        heard = dict(handlers)
        for route, listener in listeners.items():
            heard[route] = self._heard(handlers[route], listener)
        return heard

    def _heard(
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
        ratios = {key: arguments[key] for key in _RATIOS if key in arguments}
        table = {"medium": after["medium"], "path": [after["path"]], "quota": after["quota_bytes"]}
        tier = load_tier(self._config, {**ratios, **table})
        self._tiers[after["path"]] = _table(tier, tier.paths[0], tier.quotas[0])

    def _note_resized(self, arguments: dict[str, Any], result: Mapping[str, Any]) -> None:
        after = result["after"]
        self._tiers[after["path"]]["quota"] = [after["quota_bytes"]]

    def _note_removed(self, arguments: dict[str, Any], result: Mapping[str, Any]) -> None:
        del self._tiers[result["before"]["path"]]


_RATIOS = ("high", "low", "free_space_ratio", "pin_limit")


def _table(tier: TierConfig, path: Path, quota_bytes: int) -> dict[str, Any]:
    """One directory, as a `[[tier]]` has it; lists, so that a comma in its name divides nothing."""
    ratios = {key: getattr(tier, key) for key in _RATIOS}
    return {"medium": tier.medium.value, "path": [str(path)], "quota": [quota_bytes], **ratios}


def with_changes(config: MountConfig, changes: Mapping[str, Any]) -> MountConfig:
    """What the mount had become. Raises `UsageError`."""
    values = json.loads(to_json(config))
    settings = changes.get("settings") or {}
    values |= {name: settings[name] for name in LIVE if name in settings}
    if changes.get("tiers"):
        for name in _SHORTHANDS:
            values.pop(name, None)
        values["tier_tables"] = changes["tiers"]
    return from_json(json.dumps(values))


def access_log_in(changes: Mapping[str, Any]) -> Path | None:
    """The access log that was on, if one was."""
    file = (changes.get("settings") or {}).get("access_log", "off")
    return None if file == "off" else Path(file)
