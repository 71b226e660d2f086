"""Limits of a running mount."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cachefs.config import load_changes
from cachefs.config.changes import OFF
from cachefs.config.model import refuse_below_mountpoint
from cachefs.control import api
from cachefs.control.api import Handler, Route
from cachefs.control.report import LimitStatus
from cachefs.errors import UsageError
from cachefs.fuse.access_log import AccessLog
from cachefs.fuse.uid_limits import UidLimits
from cachefs.origin.resilience import ResilientOrigin

log = logging.getLogger(__name__)


class SetVerb:
    """Changes last until the mount ends: `daemon.changes` tells the next daemon of it."""

    def __init__(
        self, origin: ResilientOrigin, limits: UidLimits, access_log: AccessLog, mountpoint: Path
    ) -> None:
        self._origin = origin
        self._limits = limits
        self._access_log = access_log
        self._mountpoint = mountpoint

    def handlers(self) -> dict[Route, Handler]:
        """By route. They raise `CachefsError`s."""
        return {api.SETTINGS: self.get, api.SET: self.set}

    async def get(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """All that can be set, as it is now."""
        return {**self.settings()}

    async def set(self, arguments: dict[str, Any]) -> Mapping[str, object]:
        """Any fields of `config.Changes`. Answers `before` and `after`: all of them."""
        changes = load_changes(arguments)
        before = self.settings()
        if changes.access_log is not None:
            await self._access_log.switch(self._access_file(changes.access_log))
        try:
            for uid, bytes_per_s in changes.limit_uid.items():
                self._limits.set(uid, bytes_per_s)
        except ValueError as error:
            raise UsageError(f"limit-uid: {error}") from error
        if changes.max_downloads is not None:
            self._origin.max_downloads = changes.max_downloads
        if changes.download_limit is not None:
            self._origin.download_limit = changes.download_limit or None
        after = self.settings()
        log.info("settings were changed: %s", after)
        return {"before": before, "after": after}

    def settings(self) -> LimitStatus:
        """All that can be set, as it is now."""
        limits = self._limits.by_uid()
        return {
            "max_downloads": self._origin.max_downloads,
            "download_limit": int(self._origin.download_limit or 0),
            "limit_uid": {str(uid): limits[uid] for uid in sorted(limits)},
            "access_log": OFF if self._access_log.file is None else str(self._access_log.file),
        }

    def _access_file(self, wanted: str) -> Path | None:
        if wanted == OFF:
            return None
        try:
            refuse_below_mountpoint("access-log", Path(wanted), self._mountpoint)
        except ValueError as error:
            raise UsageError(str(error)) from error
        return Path(wanted)
