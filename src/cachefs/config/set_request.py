"""The settings that `cachefs set` can change on a running mount: the `live` options of
`cachefs mount`, with the same names, forms and checks, and the access log."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, create_model

from cachefs.config.address import OFF
from cachefs.config.fields import absolute_path, nearest
from cachefs.config.load import explain
from cachefs.config.model import MountConfig, flags
from cachefs.errors import UsageError

LIVE = tuple(name for name, flag in flags().items() if flag.live)
"""Options that can be changed on a running mount, by field name."""


def _check_access_log(value: object) -> str:
    """Return "off", or the value as the text of an absolute path. Raises `ValueError`."""
    return OFF if value == OFF else str(absolute_path(value))


def _like_the_option(name: str) -> Any:
    field = MountConfig.model_fields[name]
    return Annotated[field.annotation, *field.metadata], None


_SetRequest: type[BaseModel] = create_model(
    "SetRequest",
    __config__=ConfigDict(frozen=True, extra="forbid"),
    access_log=(Annotated[str, BeforeValidator(_check_access_log)], None),
    **{name: _like_the_option(name) for name in LIVE},
)


def load_changes(values: Mapping[str, object]) -> dict[str, Any]:
    """Return the checked values by field name. Raises `UsageError`, one line that names setting,
    value and fix."""
    known = sorted(_SetRequest.model_fields)
    for name in values:
        if name not in known:
            fix = f"these can be changed: {', '.join(map(_option, known))}"
            if name not in MountConfig.model_fields:
                fix = nearest(name, known, fix)
            raise UsageError(f'"{_option(name)}" can\'t be changed while mounted; {fix}')
    try:
        return _SetRequest.model_validate(values).model_dump(exclude_unset=True)
    except ValidationError as error:
        names = {field: _option(field) for field in known}
        raise UsageError(": ".join(filter(None, explain(error, names)))) from error
    except UnicodeEncodeError:  # pydantic encodes texts as UTF-8
        raise UsageError("a setting is not valid Unicode") from None


def _option(field: str) -> str:
    return field.replace("_", "-")
