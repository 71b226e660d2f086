"""The file NAME.env beside NAME.toml: variables with credentials, for mounts of fstab. For the
systemd unit, systemd reads it (EnvironmentFile=)."""

import os
import re
import stat
from pathlib import Path

from cachefs.errors import UsageError
from cachefs.trusted_path import open_file, warn_if_public

_MOST_CHARACTERS = 1 << 20
_LINE = re.compile(
    r"""\s*([A-Za-z_]\w*)\s*=\s*(?:'([^']*)'|"((?:[^"\\]|\\.)*)"|([^'"\\\s][^\\]*?)?)\s*""",
    re.ASCII,
)
"""What systemd and this parser understand in the same way: NAME=VALUE, with or without quotes."""


def read_variables(config_file: Path) -> dict[str, str]:
    """Return the variables in NAME.env beside NAME.toml. Nothing if there is no such file, or if
    `config_file` has another suffix.

    Raises `UsageError`, without any value, if the file can't be read, if others than root and this
    user can change it, or for a line that is not NAME=VALUE.
    """
    file = config_file.with_suffix(".env")
    if config_file.suffix != ".toml":
        return {}
    try:
        with os.fdopen(open_file(file), encoding="utf-8") as stream:
            _check_owner(file, os.fstat(stream.fileno()))
            warn_if_public(stream.fileno(), file)
            text = stream.read(_MOST_CHARACTERS + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"can't read {file}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8") from None  # the error has bytes of the file
    if len(text) > _MOST_CHARACTERS:
        raise UsageError(f"{file} has more than {_MOST_CHARACTERS} characters")
    return dict(
        _variable(file, number, line)
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip() and line.strip()[0] not in "#;"
    )


def _check_owner(file: Path, info: os.stat_result) -> None:
    if info.st_uid not in {0, os.geteuid()} or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        owner = "root" if os.geteuid() == 0 else "root or you"
        raise UsageError(
            f"{file} decides about credentials, and others than {owner} can change it; run: "
            f"chown {os.geteuid()} {file} && chmod 600 {file}"
        )


def _variable(file: Path, number: int, line: str) -> tuple[str, str]:
    found = _LINE.fullmatch(line)
    if found is None:
        raise UsageError(
            f"{file}, line {number}: it is not NAME=VALUE; put a VALUE with quotes or backslashes "
            "into single quotes"
        )
    name, single, double, plain = found.groups()
    if double is not None:
        return name, re.sub(r'\\(["\\$`])', r"\1", double)
    return name, single or plain or ""
