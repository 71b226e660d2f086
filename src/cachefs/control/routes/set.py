"""Routes that read and change the settings of a running mount."""

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cachefs.config import load_changes
from cachefs.config.changes import OFF
from cachefs.config.model import refuse_below_mountpoint
from cachefs.control import api
from cachefs.control.api import Handler, Route
from cachefs.errors import UsageError
from cachefs.fuse.access_log import AccessLog
from cachefs.fuse.uid_limits import UidLimits
from cachefs.origin.resilience import ResilientOrigin

INDEFINITE = "indefinite"

log = logging.getLogger(__name__)


class SetVerb:
    """The settings of one mount that can change while it runs.

    A change lasts until the mount ends: `daemon.changes` passes it to the mount's next daemon.
    `add` registers further settings when their owners exist.
    """

    def __init__(
        self, origin: ResilientOrigin, limits: UidLimits, access_log: AccessLog, mountpoint: Path
    ) -> None:
        self._limits = limits
        self._access_log = access_log
        self._mountpoint = mountpoint
        self._live: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        self.add_attribute("max_downloads", origin)
        self.add(
            "download_limit",
            lambda: int(origin.download_limit or 0),
            lambda bytes_per_s: setattr(origin, "download_limit", bytes_per_s or None),
        )
        self.add("limit_uid", self._uid_limits, self._set_uid_limits)
        self.add_attribute("hedge", origin)

    def add(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """Register a field of `config.LIVE`: `get` returns its value, and `put` changes it."""
        self._live[name] = get, put

    def add_attribute(self, name: str, owner: object, attribute: str = "") -> None:
        """Do the same as `add` for an attribute of `owner`, by default with the same name."""
        place = attribute or name
        self.add(name, partial(getattr, owner, place), partial(setattr, owner, place))

    def handlers(self) -> dict[Route, Handler]:
        """Return the handlers by route. They raise `CachefsError`s."""
        return {api.SETTINGS: self.get, api.SET: self.set}

    async def get(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Answer with all settings and their present values."""
        return self.settings()

    async def set(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Change settings: the arguments are any fields that `config.load_changes` accepts. Answer
        with all settings `before` and `after`."""
        changes = load_changes(arguments)
        before = self.settings()
        access_log = changes.pop("access_log", None)
        if access_log is not None:
            await self._access_log.switch(self._access_file(access_log))
        for name, value in changes.items():
            self._live[name][1](value)
        after = self.settings()
        log.info("settings were changed: %s", after)
        return {"before": before, "after": after}

    def settings(self) -> dict[str, Any]:
        """Return all settings and their present values. Rates are in bytes per second, 0 for no
        limit. Times are in seconds, or "indefinite". `access_log` is a path or "off"."""
        now = {name: get() for name, (get, _) in self._live.items()}
        plain = {name: INDEFINITE if value == math.inf else value for name, value in now.items()}
        file = self._access_log.file
        return {**plain, "access_log": OFF if file is None else str(file)}

    def _uid_limits(self) -> dict[str, int]:
        limits = self._limits.by_uid()
        return {str(uid): limits[uid] for uid in sorted(limits)}

    def _set_uid_limits(self, limits: dict[int, int]) -> None:
        try:
            for uid, bytes_per_s in limits.items():
                self._limits.set(uid, bytes_per_s)
        except ValueError as error:
            raise UsageError(f"limit-uid: {error}") from error

    def _access_file(self, wanted: str) -> Path | None:
        if wanted == OFF:
            return None
        try:
            refuse_below_mountpoint("access-log", Path(wanted), self._mountpoint)
        except ValueError as error:
            raise UsageError(str(error)) from error
        return Path(wanted)
