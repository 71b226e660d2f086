"""Send a checked configuration as text to another process, which may have another version."""

import json
import logging
from enum import Enum
from pathlib import Path
from typing import Any

from cachefs.config.load import explain
from cachefs.config.model import MountConfig
from cachefs.config.record import FieldError, Record
from cachefs.config.tiers import TierConfig
from cachefs.errors import UsageError

_TIERS = "tier_tables"
_SPREAD = {"squash": ("uid", "gid")}
"""Fields that set other fields; a configuration must not contain both."""

_logger = logging.getLogger(__name__)


def to_json(config: MountConfig) -> str:
    """Return the given values as JSON, without defaults: the receiver applies its own."""
    values = config.given_values()
    for field, others in _SPREAD.items():
        if values.get(field) is not None:
            for other in others:
                values.pop(other, None)
    return json.dumps(values, default=_plain)


def _plain(value: object) -> object:
    match value:
        case Path():
            return str(value)
        case Record():
            return value.given_values()
        case Enum():
            return value.value
    raise TypeError(type(value).__name__)


def from_json(text: str) -> MountConfig:
    """Return the configuration in `text`. Skips options that this version does not have, with a
    warning in the log.

    Raises `UsageError` for values that this version refuses.
    """
    values: dict[str, Any] = json.loads(text)
    _drop_unknown(values, set(MountConfig.fields))
    keys = {field.key for field in TierConfig.fields.values()}
    for table in values.get(_TIERS, ()):
        _drop_unknown(table, keys)
    try:
        return MountConfig(values)
    except FieldError as error:
        raise UsageError(": ".join(filter(None, explain(error, {})))) from error


def _drop_unknown(values: dict[str, Any], known: set[str]) -> None:
    for name in sorted(values.keys() - known):
        del values[name]
        _logger.warning("this version does not know the option %s; it is left out", name)
