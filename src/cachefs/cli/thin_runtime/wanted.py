"""Decide from Fluid's config.json and the environment which mounts there must be."""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cachefs.cli.thin_runtime.config_json import FluidConfig, FluidMount, parse_config
from cachefs.cli.thin_runtime.options import (
    SECRETS,
    MountOptions,
    arguments_of,
    merge_options,
    parse_words,
)
from cachefs.config import flags, load_mount_config
from cachefs.errors import UsageError

CACHE_DIR_VARIABLE = "CACHEFS_CACHE_DIR"
"""Names the directory of the tier. Fluid mounts `tieredstore.levels[0].path` into the container,
but names it nowhere (pkg/ddc/thin/transform_fuse.go)."""
_OPTIONS_VARIABLE = "MOUNT_OPTIONS"
_NO_NAME = "data"
_WITH_CREDENTIALS = ("s3://", "oss://")
_FLUIDS_SCHEMES = ("pvc://", "local://")
_SHARED_SECRET = "shared_secret_file"


class WantedMount(NamedTuple):
    """One mount that there must be. `source` and `arguments` are those of `cachefs mount`.

    `secrets` are the files of `secrets_dir`: by name a link to a file of a Secret, or a value
    (`SecretFile`). Two mounts are equal if the same `cachefs mount` serves both; other credentials
    need no new mount, because the daemon reads their files again.
    """

    place: Path
    source: str
    arguments: tuple[str, ...]
    secrets_dir: Path
    secrets: dict[str, "SecretFile"]

    def is_served_by(self, other: "WantedMount") -> bool:
        """Return whether a process that was started for `other` serves this mount, too."""
        if self[:4] != other[:4] or self.secrets.keys() != other.secrets.keys():
            return False
        return self.secrets.get(_SHARED_SECRET) == other.secrets.get(_SHARED_SECRET)


class SecretFile(NamedTuple):
    """A file with a secret: the text is the target of a link (`is_link`), or the content."""

    text: str
    is_link: bool

    def __repr__(self) -> str:
        return f"SecretFile({self.text if self.is_link else '...'!r})"


class Wanted(NamedTuple):
    """All mounts by place, and the directory at or below which they are."""

    target: Path
    mounts: dict[Path, WantedMount]


def wanted_mounts(
    content: bytes, environment: Mapping[str, str], secrets_dir: Path, private_dir: Path
) -> Wanted:
    """Return the mounts that a config.json describes. `secrets_dir` is where Fluid mounts Secrets,
    `private_dir` a directory for the credentials of the mounts; nothing is written.

    Raises `UsageError`, one line without a secret, if one of the mounts is not possible.
    """
    config = parse_config(content)
    shared: dict[str, Mapping[str, str]] = {}
    if cache_dir := _variable(environment, CACHE_DIR_VARIABLE):
        shared[CACHE_DIR_VARIABLE] = {"cache_dir": cache_dir}
    shared[_OPTIONS_VARIABLE] = parse_words(_variable(environment, _OPTIONS_VARIABLE))
    shared["runtimeOptions"] = config.options
    target = Path(os.path.realpath(config.target.parent), config.target.name)
    mounts: dict[Path, WantedMount] = {}
    cache_names: set[str] = set()
    for mount in config.mounts:
        place = target.joinpath(*mount.below)
        options = merge_options({**shared, f"{mount.shown}: options": mount.options})
        cache_name = _cache_name(mount, cache_names)
        try:
            mounts[place] = _wanted(
                mount, place, config, options, cache_name, secrets_dir, private_dir
            )
        except UsageError as error:
            raise UsageError(f"{mount.shown}: {error}") from None
    return Wanted(target, mounts)


def _variable(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "")
    if not value.isprintable():  # a byte that is no UTF-8 is a surrogate
        raise UsageError(f"the variable {name} has a control character or is not UTF-8")
    return value


def _wanted(
    mount: FluidMount,
    place: Path,
    config: FluidConfig,
    options: MountOptions,
    cache_name: str,
    secrets_dir: Path,
    private_dir: Path,
) -> WantedMount:
    if mount.source.startswith(_FLUIDS_SCHEMES):
        raise UsageError(
            "cachefs reads object stores, and directories as file:///DIR; volumes of Kubernetes "
            "(pvc://, local://) are not possible"
        )
    if mount.source.startswith("-"):
        raise UsageError("mountPoint is no URL")
    fields = {**options.fields, "read_only": mount.read_only or not config.writable}
    own_dir = private_dir / hashlib.sha256(os.fsencode(place)).hexdigest()[:16]
    secrets = _secrets(options.secrets, mount.source, secrets_dir)
    if "secret_access_key" in secrets:
        fields["credentials_dir"] = str(own_dir)
    if _SHARED_SECRET in secrets:
        fields[_SHARED_SECRET] = str(own_dir / "..data" / _SHARED_SECRET)
    if "cache_dirs" in fields:
        fields["cache_dirs"] = _cache_dirs(str(fields["cache_dirs"]), cache_name)
    load_mount_config(mount.source, str(place), fields)
    return WantedMount(place, mount.source, arguments_of(fields, flags()), own_dir, secrets)


def _secrets(given: Mapping[str, str], source: str, secrets_dir: Path) -> dict[str, SecretFile]:
    found = {name: _secret(name, text, secrets_dir) for name, text in given.items()}
    keys = [name for name in SECRETS if name in found]
    if not source.startswith(_WITH_CREDENTIALS):
        return {name: file for name, file in found.items() if name not in SECRETS}
    if keys and not {"access_key_id", "secret_access_key"} <= set(keys):
        raise UsageError(
            f"there is {keys[0]} alone; give both access_key_id and secret_access_key as "
            "encryptOptions"
        )
    return found


def _secret(name: str, text: str, secrets_dir: Path) -> SecretFile:
    if not text:
        raise UsageError(f"{name} is empty; give it as one of encryptOptions")
    if text.startswith(f"{secrets_dir}/"):
        parts = text.removeprefix(f"{secrets_dir}/").split("/")
        if len(parts) != 2 or not all(parts) or {".", ".."} & set(parts):
            raise UsageError(f"{name} must be a file {secrets_dir}/SECRET/KEY")
        return SecretFile(text, is_link=True)
    is_link = name == _SHARED_SECRET and text.startswith("/")
    return SecretFile(text, is_link=is_link)


def _cache_name(mount: FluidMount, taken: set[str]) -> str:
    """Return the name of the mount's own directory below each cache directory. It depends on the
    path and name of the mount alone, so that the cache is found again."""
    exact = "/".join(mount.below) or mount.name or _NO_NAME
    name = re.sub(r"[^A-Za-z0-9._-]", "-", exact).lstrip(".")[:100]
    if name != exact or name in taken:
        name += f"-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"
    taken.add(name)
    return name


def _cache_dirs(text: str, name: str) -> str:
    """Return the mount's own directories below those of an option, which has them with `:` between
    them. Each cache directory serves one mount at a time."""
    directories = [part.strip() for part in text.split(":")]
    if not all(part.startswith("/") for part in directories):
        raise UsageError("cache_dir must be absolute paths, with : between several")
    return ":".join(f"{part.rstrip('/')}/{name}" for part in directories)
