"""The options of a mount of Fluid: their names, and which of them are secrets.

Options have the names of `cachefs mount`, with `_` or `-`. Some names that Fluid's documents use
for other runtimes, or Hadoop for S3, have the same meaning here (`SYNONYMS`; docs/FLUID.md lists
them). All other names are refused.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from cachefs.cli.mounting.mount_words import known_options
from cachefs.config import Flag, nearest
from cachefs.errors import UsageError

SECRETS = ("access_key_id", "secret_access_key", "session_token")
"""The options that are credentials. They become files of a `--credentials-dir`."""

SYNONYMS = {
    "alluxio.underfs.s3.endpoint": "endpoint",
    "alluxio.underfs.s3.endpoint.region": "region",
    "alluxio.underfs.s3.region": "region",
    "aws.accessKeyId": "access_key_id",
    "aws.secretKey": "secret_access_key",
    "fs.s3a.access.key": "access_key_id",
    "fs.s3a.endpoint": "endpoint",
    "fs.s3a.endpoint.region": "region",
    "fs.s3a.secret.key": "secret_access_key",
    "fs.s3a.session.token": "session_token",
}
"""Names of Alluxio (docs/en/samples/s3_configuration.md of Fluid) and of Hadoop (hadoop-aws)."""

_SECRET_FILE = "shared_secret_file"
_IGNORED = frozenset({"ro", "fluid.fuse.hostvolume"})
"""Fluid writes "ro" into MOUNT_OPTIONS for a read-only Dataset, and reads the other one itself."""
_REFUSED = {
    "rw": "the accessModes of the Dataset and readOnly of the mount decide that",
    "read_only": "the accessModes of the Dataset and readOnly of the mount decide that",
    "foreground": "the container always runs in the foreground",
    "log_file": "the log is the log of the container",
    "credentials_dir": "give access_key_id and secret_access_key as encryptOptions",
}
_WORD = re.compile(r"[A-Za-z][\w.-]*(=|$)")


class MountOptions(NamedTuple):
    """Checked names with their values. `fields` are by field of `MountConfig`, `secrets` by name
    of the file (`SECRETS`, or the name of an option whose value is a file with a secret)."""

    fields: dict[str, object]
    secrets: dict[str, str]


def parse_words(words: str) -> dict[str, str]:
    """Return the options in MOUNT_OPTIONS, such as "ro,cache_size=1GiB". A switch without a value
    is "true".

    Fluid joins the options by commas, and doesn't escape commas in values. So a word that is no
    name of an option continues the value before it: "shared=a:11211,b:11211".
    """
    found: dict[str, str] = {}
    last = ""
    for word in words.split(","):
        if _WORD.match(word):
            last, equals, value = word.partition("=")
            found[last] = value if equals else "true"
        elif word.strip() and last:
            found[last] += f",{word}"
        elif word.strip():
            raise UsageError("MOUNT_OPTIONS does not begin with the name of an option")
    return found


def merge_options(layers: Mapping[str, Mapping[str, str]]) -> MountOptions:
    """Return the options of one mount. `layers` are options by the place that they come from; later
    places win.

    Raises `UsageError` for a name that is unknown or stands twice in one place. The message
    contains no value.
    """
    known = known_options()
    fields: dict[str, object] = {}
    secrets: dict[str, str] = {}
    for place, options in layers.items():
        names: dict[str, str] = {}
        for name, value in options.items():
            plain = SYNONYMS.get(name) or name.replace("-", "_")
            if name in _IGNORED:
                continue
            if plain in names:
                raise UsageError(f"{place}: {names[plain]} and {name} mean the same; keep one")
            names[plain] = name
            if plain in _REFUSED:
                raise UsageError(f"{place}: {name} is no option here: {_REFUSED[plain]}")
            if plain in SECRETS:
                secrets[plain] = value
            elif plain in known:
                _set(*known[plain], value, fields, secrets, f"{place}: {name}")
            else:
                advice = nearest(plain, [*known, *SECRETS], "see cachefs mount --help")
                raise UsageError(f"{place}: unknown option {name[:80]!r}; {advice}")
    return MountOptions(fields, secrets)


def _set(
    field: str,
    flag: Flag,
    value: str,
    fields: dict[str, object],
    secrets: dict[str, str],
    where: str,
) -> None:
    if field == _SECRET_FILE:
        secrets[field] = value
    elif flag.metavar is None:
        if value not in {"true", "false"}:
            raise UsageError(f'{where} is a switch; write "true" or "false"')
        fields[field] = value == "true"
    elif flag.multiple:
        fields[field] = tuple(filter(None, value.split(",")))
    elif not value:
        raise UsageError(f"{where} needs a value: {flag.metavar}")
    else:
        fields[field] = value


def arguments_of(fields: Mapping[str, object], flags: Mapping[str, Flag]) -> tuple[str, ...]:
    """Return fields of `MountConfig` as arguments of `cachefs mount`."""
    arguments: list[str] = []
    for field, value in fields.items():
        option = flags[field].option
        if value is True:
            arguments.append(option)
        elif value is False:
            long_names = [name for name in flags[field].names if name.startswith(f"{option}/")]
            arguments += [name.partition("/")[2] for name in long_names]
        elif isinstance(value, tuple):
            arguments += [f"{option}={part}" for part in value]
        else:
            arguments.append(f"{option}={value}")
    return tuple(arguments)
