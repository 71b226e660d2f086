"""What `cachefs set` can change on a running mount: the same names, forms and checks as the options
of `cachefs mount`."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from cachefs.config.fields import LIMITS, MAX_DOWNLOADS, RATE, absolute_path, nearest
from cachefs.config.load import explain
from cachefs.errors import UsageError

OFF = "off"


def _check_access_log(value: object) -> str:
    """Text: an absolute path, or "off"."""
    return OFF if value == OFF else str(absolute_path(value))


class Changes(BaseModel):
    """None, or nothing for a uid: as it is. Rates are bytes per second, 0 for no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_downloads: Annotated[int | None, MAX_DOWNLOADS] = None
    download_limit: Annotated[int | None, RATE] = None
    limit_uid: Annotated[dict[int, int], LIMITS] = {}
    access_log: Annotated[str | None, BeforeValidator(_check_access_log)] = None


def load_changes(values: Mapping[str, object]) -> Changes:
    """By field name. Raises `UsageError`: one line that names setting, value and fix."""
    for name in values:
        if name not in Changes.model_fields:
            known = ", ".join(_option(field) for field in Changes.model_fields)
            fix = nearest(name, Changes.model_fields, f"these can be changed: {known}")
            raise UsageError(f'"{_option(name)}" can\'t be changed while mounted; {fix}')
    try:
        return Changes.model_validate(values)
    except ValidationError as error:
        names = {field: _option(field) for field in Changes.model_fields}
        raise UsageError(": ".join(filter(None, explain(error, names)))) from error
    except UnicodeEncodeError:  # pydantic's texts are UTF-8
        raise UsageError("a setting has half a character") from None


def _option(field: str) -> str:
    return field.replace("_", "-")
