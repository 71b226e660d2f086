"""Routes that read and change the settings of a running mount."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cachefs.config import OFF, load_changes
from cachefs.config.model import refuse_below_mountpoint
from cachefs.control import api
from cachefs.control.api import Handler, Route
from cachefs.errors import UsageError
from cachefs.fuse.access_log import AccessLog
from cachefs.fuse.uid_limits import UidLimits
from cachefs.log import is_debugging, set_debugging
from cachefs.namespace.namespace import Namespace
from cachefs.origin.resilience import ResilientOrigin
from cachefs.prefetch.prefetch import Prefetch
from cachefs.shared.tier import SharedTier

INDEFINITE = "indefinite"

log = logging.getLogger(__name__)


class LiveOption(NamedTuple):
    """How one option is read and changed while mounted."""

    get: Callable[[], Any]
    put: Callable[[Any], None]


def live_options(
    origin: ResilientOrigin,
    limits: UidLimits,
    namespace: Namespace,
    prefetch: Prefetch,
    shared: SharedTier,
) -> dict[str, LiveOption]:
    """Return how each option of `config.LIVE` is applied, by field name."""

    def ttl(name: str) -> LiveOption:
        def put(value: float) -> None:
            namespace.ttls = replace(namespace.ttls, **{name: value})

        return LiveOption(lambda: getattr(namespace.ttls, name), put)

    return {
        "max_downloads": _attribute(origin, "max_downloads"),
        "download_limit": LiveOption(
            lambda: int(origin.download_limit or 0),
            lambda bytes_per_s: setattr(origin, "download_limit", bytes_per_s or None),
        ),
        "limit_uid": LiveOption(partial(_uid_limits, limits), partial(_set_uid_limits, limits)),
        "hedge": _attribute(origin, "hedge"),
        "attr_ttl": ttl("attr_s"),
        "entry_ttl": ttl("entry_s"),
        "negative_ttl": ttl("negative_s"),
        "list_ttl": ttl("list_s"),
        "stale_if_error": ttl("stale_if_error_s"),
        "readahead": _attribute(prefetch.readers, "readahead"),
        "prefetch": _attribute(prefetch, "mode"),
        "shared": LiveOption(lambda: shared.members.option, shared.members.use),
        "shared_size": _attribute(shared.demand, "limit_bytes"),
        "debug": LiveOption(is_debugging, set_debugging),
    }


def _attribute(owner: object, name: str) -> LiveOption:
    return LiveOption(partial(getattr, owner, name), partial(setattr, owner, name))


def _uid_limits(limits: UidLimits) -> dict[str, int]:
    found = limits.by_uid()
    return {str(uid): found[uid] for uid in sorted(found)}


def _set_uid_limits(limits: UidLimits, changed: Mapping[int, int]) -> None:
    try:
        for uid, bytes_per_s in changed.items():
            limits.set(uid, bytes_per_s)
    except ValueError as error:
        raise UsageError(f"limit-uid: {error}") from error


class SetRoutes:
    """The settings of one mount that can change while it runs: the live options and the access log.

    A change lasts until the mount ends: `daemon.live_changes` passes it to the mount's next daemon.
    """

    def __init__(
        self, options: Mapping[str, LiveOption], access_log: AccessLog, mountpoint: Path
    ) -> None:
        self._options = options
        self._access_log = access_log
        self._mountpoint = mountpoint

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
            self._options[name].put(value)
        after = self.settings()
        log.info("settings were changed: %s", after)
        return {"before": before, "after": after}

    def settings(self) -> dict[str, Any]:
        """Return all settings and their present values. Rates are in bytes per second, 0 for no
        limit. Times are in seconds, or "indefinite". `access_log` is a path or "off"."""
        now = {name: option.get() for name, option in self._options.items()}
        plain = {name: INDEFINITE if value == math.inf else value for name, value in now.items()}
        file = self._access_log.file
        return {**plain, "access_log": OFF if file is None else str(file)}

    def _access_file(self, wanted: str) -> Path | None:
        if wanted == OFF:
            return None
        try:
            refuse_below_mountpoint("access-log", Path(wanted), self._mountpoint)
        except ValueError as error:
            raise UsageError(str(error)) from error
        return Path(wanted)
