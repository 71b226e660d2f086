"""Read the config.json that Fluid gives to the FUSE container of a ThinRuntime.

Fluid's controller writes the file (`Config` in its pkg/ddc/thin/type.go), but the mounts in it are
as users have written them in a Dataset. So types, sizes and paths are checked here. Fields that
cachefs doesn't use are ignored, because newer versions of Fluid may add some.
"""

import json
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from cachefs.errors import UsageError

MOST_BYTES = 1 << 20
"""The most bytes of the file: Kubernetes limits a ConfigMap to 1 MiB."""
MOST_MOUNTS = 64
_MOST_OPTIONS = 200
_MOST_CHARACTERS = 4096
_MOST_NAME_BYTES = 255
_MOST_DEPTH = 8
_WRITABLE_MODES = frozenset({"ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"})
_READ_ONLY_MODE = "ReadOnlyMany"


class FluidMount(NamedTuple):
    """One mount of a Dataset. `below` are the directories from the target path to the mountpoint;
    none means the target path itself. `read_only` is the mount's own `readOnly`."""

    source: str
    below: tuple[str, ...]
    name: str
    options: dict[str, str]
    read_only: bool

    @property
    def shown(self) -> str:
        """The mount in a message, without its source, which may contain a credential."""
        return f"mount {self.name or '/'.join(self.below) or '/'!r}"


class FluidConfig(NamedTuple):
    """The content of config.json. `options` are those of the ThinRuntime, for all mounts.
    `writable` says that the access modes of the Dataset allow writes."""

    target: PurePosixPath
    mounts: tuple[FluidMount, ...]
    options: dict[str, str]
    writable: bool


def parse_config(content: bytes) -> FluidConfig:
    """Return the checked content of a config.json. Raises `UsageError`, one line without any value
    of an option."""
    if len(content) > MOST_BYTES:
        raise UsageError(f"it has more than {MOST_BYTES >> 20} MiB")
    try:
        table = json.loads(content)
    except (ValueError, RecursionError) as error:
        what = str(error) if isinstance(error, json.JSONDecodeError) else "wrong bytes or nesting"
        raise UsageError(f"it is no valid JSON: {what}") from None
    if not isinstance(table, dict):
        raise UsageError("it must be a JSON object")
    rows = table.get("mounts")
    rows = [] if rows is None else rows
    if not isinstance(rows, list) or len(rows) > MOST_MOUNTS:
        raise UsageError(f"mounts must be a list of at most {MOST_MOUNTS} mounts")
    mounts = tuple(_mount(row, number, len(rows)) for number, row in enumerate(rows, 1))
    _refuse_nested(mounts)
    modes = table.get("accessModes") or []
    if not isinstance(modes, list) or not all(isinstance(mode, str) for mode in modes):
        raise UsageError("accessModes must be a list of words")
    writable = bool(_WRITABLE_MODES & set(modes)) and _READ_ONLY_MODE not in modes
    options = _options(table.get("runtimeOptions"), "runtimeOptions")
    return FluidConfig(_target(table.get("targetPath")), mounts, options, writable)


def _target(value: object) -> PurePosixPath:
    text = _text(value, "targetPath")
    if not text.startswith("/") or not _parts(text, "targetPath"):
        raise UsageError("targetPath must be an absolute path, and not /")
    return PurePosixPath("/", *_parts(text, "targetPath"))


def _mount(row: object, number: int, of: int) -> FluidMount:
    where = f"mount {number}"
    if not isinstance(row, dict):
        raise UsageError(f"{where} must be a JSON object")
    name = _text(row.get("name") or "", f"{where}: name")
    if name and len(_parts(name, f"{where}: name")) != 1:
        raise UsageError(f"{where}: a name contains no /; give it a path instead")
    path = _text(row.get("path") or "", f"{where}: path")
    below = _parts(path, f"{where}: path")
    if of > 1 and not path:
        if not name:
            raise UsageError(f"{where} has neither name nor path; with several mounts give it one")
        below = (name,)
    if len(below) > _MOST_DEPTH:
        raise UsageError(f"{where}: a path has at most {_MOST_DEPTH} directories")
    return FluidMount(
        _text(row.get("mountPoint"), f"{where}: mountPoint"),
        below,
        name,
        _options(row.get("options"), f"{where}: options"),
        _flag(row.get("readOnly"), f"{where}: readOnly"),
    )


def _refuse_nested(mounts: tuple[FluidMount, ...]) -> None:
    for one in mounts:
        for other in mounts:
            if other is not one and other.below[: len(one.below)] == one.below:
                what = "has the same place as" if other.below == one.below else "lies in"
                raise UsageError(f"{other.shown} {what} {one.shown}; give them different paths")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where} must be a text")
    if len(value) > _MOST_CHARACTERS:
        raise UsageError(f"{where} has more than {_MOST_CHARACTERS} characters")
    if any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise UsageError(f"{where} has a control character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{where} is not valid Unicode") from None
    return value


def _parts(path: str, where: str) -> tuple[str, ...]:
    """Return the directories of a path, which must not lead out of the place where it begins."""
    parts = tuple(part for part in path.split("/") if part)
    for part in parts:
        if part in {".", ".."}:
            raise UsageError(f"{where} must not contain {part!r}")
        if len(part.encode()) > _MOST_NAME_BYTES:
            raise UsageError(f"{where} has a name of more than {_MOST_NAME_BYTES} bytes")
    return parts


def _flag(value: Any, where: str) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise UsageError(f"{where} must be true or false")
    return value


def _options(value: object, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > _MOST_OPTIONS:
        raise UsageError(f"{where} must be an object with at most {_MOST_OPTIONS} options")
    return {_text(name, where): _text(text, f"{where}: {name!r}") for name, text in value.items()}
