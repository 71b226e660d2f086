"""The settings that `cachefs set` can change on a running mount: the `live` options of
`cachefs mount`, with the same names, forms and checks, and the access log."""

from collections.abc import Mapping
from typing import Any

from cachefs.config.address import OFF
from cachefs.config.fields import absolute_path, nearest
from cachefs.config.load import explain
from cachefs.config.model import MountConfig, flags
from cachefs.config.record import FieldError
from cachefs.errors import UsageError

LIVE = tuple(name for name, flag in flags().items() if flag.live)
"""Options that can be changed on a running mount, by field name."""

_ACCESS_LOG = "access_log"


def _check_access_log(value: object) -> str:
    """Return "off", or the value as the text of an absolute path. Raises `ValueError`."""
    return OFF if value == OFF else str(absolute_path(value))


def load_changes(values: Mapping[str, object]) -> dict[str, Any]:
    """Return the checked values by field name. Raises `UsageError`, one line that names setting,
    value and fix."""
    known = sorted((*LIVE, _ACCESS_LOG))
    for name in values:
        if name not in known:
            fix = f"these can be changed: {', '.join(map(_option, known))}"
            if name not in MountConfig.fields:
                fix = nearest(name, known, fix)
            raise UsageError(f'"{_option(name)}" can\'t be changed while mounted; {fix}')
    try:
        return {name: _checked(name, value) for name, value in values.items()}
    except FieldError as error:
        names = {field: _option(field) for field in known}
        raise UsageError(": ".join(filter(None, explain(error, names)))) from error


def _checked(name: str, value: object) -> Any:
    if name != _ACCESS_LOG:
        return MountConfig.fields[name].check(value, {})
    try:
        return _check_access_log(value)
    except ValueError as error:
        raise FieldError(str(error), (name,)) from error


def _option(field: str) -> str:
    return field.replace("_", "-")
