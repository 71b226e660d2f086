"""Merge a TOML file and a command line into one checked `MountConfig`."""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cachefs.config.fields import (
    FILE_OR_URL,
    MODE,
    OPTIONAL_PATH,
    PATH,
    PATHS,
    absolute_path,
    nearest,
    show,
)
from cachefs.config.model import MountConfig, flags, refuse_below_mountpoint
from cachefs.config.record import FieldError
from cachefs.config.tiers import TierConfig
from cachefs.errors import UsageError
from cachefs.trusted_path import read_file

SECRET = re.compile(
    r"secret|passw|token|credential|(access|private|api|account|encryption)_?key|key_?id"
    r"|^(key|auth|sas)$",
    re.IGNORECASE,
)
_ARGUMENTS = {"source": "SOURCE", "mountpoint": "MOUNTPOINT"}
_OTHER_TABLES = ("load",)
"""Tables of an instance's file that other commands read."""
_PATH_CHECKS = {PATH: "", OPTIONAL_PATH: "", FILE_OR_URL: "", PATHS: ":"}
"""The checks of options whose values are paths, with the separators between several paths."""
_MOST_BYTES = 1 << 20
"""The most bytes of a configuration file."""
_TEXTS = re.compile(
    r'''"""(?:[^\\]|\\.)*?(?:"""|\Z)|"(?:[^"\\\n]|\\.)*"?'''
    r"""|'''.*?(?:'''|\Z)|'[^'\n]*'?|#[^\n]*""",
    re.DOTALL,
)
"""Texts and comments of TOML. A text without an end matches, too: else each of its quotes would
be tried."""
_DEEP_KEY = re.compile(r"(?:\.[^.=,\[\]{}\n]*){32}")
"""A key of more than 32 parts. No option has more than three."""
_TIER_TABLES = "tier"
_TIER_TABLES_ELSEWHERE = ("tieredstore", "level", "levels", "tiers")


def load_mount_config(
    source: str | None,
    mountpoint: str | None,
    options: Mapping[str, object],
    file: Path | None = None,
) -> MountConfig:
    """Return the configuration of one mount. The arguments and `options` (by field name) win over
    `file`.

    Raises `UsageError`, one line that names the option (or the file and its key), the value and
    the fix.
    """
    values = {} if file is None else _read_toml(file)
    arguments = {"source": source, "mountpoint": mountpoint}
    given = {field: value for field, value in arguments.items() if value is not None}
    names = {field: f"{file}: {key}" for key, field in _fields_by_key().items()}
    names |= {field: flag.option for field, flag in flags().items() if field in options}
    names |= {field: _ARGUMENTS[field] for field in given}
    for field, argument in _ARGUMENTS.items():
        if field not in values and field not in given:
            raise UsageError(
                f"there is no {field}; name one on the command line ({argument}) or in the file "
                f"of --config ({field} = ...)"
            )
    try:
        return MountConfig({**values, **options, **given})
    except FieldError as error:
        raise UsageError(_one_line(error, names, file)) from error


def mountpoint_in(file: Path) -> Path:
    """Return the mountpoint of the instance that `file` describes. Raises `UsageError`."""
    place = _read_toml(file).get("mountpoint")
    if place is None:
        raise UsageError(
            f"there is no mountpoint; name one on the command line or in {file} (mountpoint = ...)"
        )
    if not isinstance(place, str) or not place.startswith(("/", "~")):
        raise UsageError(f"{file}: mountpoint: {show(place)} is not an absolute path")
    try:
        return absolute_path(place)
    except ValueError as error:
        raise UsageError(f"{file}: mountpoint: {error}") from None


def load_table_in(file: Path) -> dict[str, Any]:
    """Return the `[load]` table of the instance that `file` describes, {} if it has none. Raises
    `UsageError`."""
    _read_toml(file)  # raises for errors in the rest of the file
    table = _parsed(file).get("load", {})
    if not isinstance(table, dict):
        raise UsageError(f"{file}: load: a table is wanted: [load]")
    return table


def load_tier(config: MountConfig, table: Mapping[str, object]) -> TierConfig:
    """Return a tier for a running mount, from the keys of a `[[tier]]` table.

    Raises `UsageError`, one line that names the key, the value and the fix.
    """
    try:
        tier = config.tier_from(table)
        for path in tier.paths:
            refuse_below_mountpoint("cache directory", path, config.mountpoint)
    except FieldError as error:
        raise UsageError(": ".join(filter(None, explain(error, {})))) from error
    except ValueError as error:
        raise UsageError(str(error)) from error
    return tier


def _one_line(error: FieldError, names: Mapping[str, str], file: Path | None) -> str:
    """Return the error as one line: its place, and the text of the check."""
    where, text = explain(error, names)
    if not where:
        return text if file is None else f"{text} (options come from {file} too)"
    return f"{where}: {text}"


def explain(error: FieldError, names: Mapping[str, str]) -> tuple[str, str]:
    """Return the place of the error, in words of `names` (by field; "" if it concerns all
    fields), and the text of the check."""
    where = ""
    for step in error.place:
        if isinstance(step, int):
            where += f" {step + 1}"
        else:
            where += f": {step}" if where else names.get(step, step)
    return where, str(error)


def _fields_by_key() -> dict[str, str]:
    """Return the keys of a TOML file with the fields that they set."""
    options = {flag.key: field for field, flag in flags().items()}
    return options | {_TIER_TABLES: "tier_tables"} | {name: name for name in _ARGUMENTS}


def _read_toml(file: Path) -> dict[str, Any]:
    """Return the file's values by field name. Raises `UsageError` for an unreadable file or a key
    that is no option."""
    values = _parsed(file)
    fields = _fields_by_key()
    for key in _OTHER_TABLES:
        values.pop(key, None)
    for key in values:
        if key not in fields:
            raise UsageError(f"{file}: {_explain_unknown(key, list(fields))}")
    for table in values.get(_TIER_TABLES, ()) if isinstance(values.get(_TIER_TABLES), list) else ():
        if isinstance(table, dict) and "path" in table:
            table["path"] = _anchored(table["path"], file, ":,")
    for field, flag in flags().items():
        if (key := flag.key) in values:
            for check in MountConfig.fields[field].metadata:
                if check is MODE and not isinstance(values[key], str):
                    raise UsageError(
                        f"{file}: {key}: {show(values[key])} is ambiguous; write three octal "
                        'digits in quotes, such as "644"'
                    )
                if check in _PATH_CHECKS:
                    values[key] = _anchored(values[key], file, _PATH_CHECKS[check])
    return {fields[key]: value for key, value in values.items()}


def _parsed(file: Path) -> dict[str, Any]:
    try:
        text = read_file(file, _MOST_BYTES).decode()
        if _DEEP_KEY.search(_TEXTS.sub("", text)):
            raise ValueError("a key has too many parts")  # the parser's time grows with the square
        return tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"can't read the configuration file {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # wrong bytes, TOML or numbers; deep nesting
        raise UsageError(f"{file} is not valid TOML: {error}") from error


def _anchored(value: object, file: Path, separators: str) -> object:
    """Return one or several paths from `file`, with relative ones resolved against its
    directory."""
    if isinstance(value, list):
        return [_anchored(part, file, "") for part in value]
    if not isinstance(value, str) or not value or "://" in value:
        return value
    parts = re.split(f"([{separators}])", value) if separators else [value]
    for number, part in enumerate(parts):
        if number % 2 == 0 and part.strip() and not part.strip().startswith("~"):
            parts[number] = os.path.join(os.path.abspath(file.parent), part.strip())
    return "".join(parts)


def _explain_unknown(key: str, known: list[str]) -> str:
    if SECRET.search(key):
        return (
            f"{show(key)} looks like a credential, and configuration files must not hold any; set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use ~/.aws/credentials"
        )
    if key.lower() in _TIER_TABLES_ELSEWHERE:
        return f"unknown key {show(key)}; did you mean [[tier]], once for each medium?"
    fix = nearest(key, known, "see cachefs mount --help for the options")
    return f"unknown key {show(key)}; {fix}"
