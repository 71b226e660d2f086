"""What a volume's handle and attributes say: which mount of the node, and which directory in it."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cachefs.csi.refusal import Refusal

MOUNT = "mount"
DIRECTORY = "directory"
_OF_KUBERNETES = ("csi.storage.k8s.io/", "storage.kubernetes.io/")
"""Prefixes of the attributes that Kubernetes adds. They have nothing to say to this plugin."""
_MOST_NAME_BYTES = 255
_MOST_PATH_BYTES = 4095
_MOST_READABLE_BYTES = 64


class Volume(NamedTuple):
    """The name of a mount below --mounts, and a directory in it ("" is the mount itself)."""

    mount: str
    directory: str

    def __str__(self) -> str:
        return "/".join(filter(None, self))


def parse_volume(handle: str, attributes: Mapping[str, str]) -> Volume:
    """Return the volume that the attributes `mount` and `directory` name.

    Without them, the handle does: "MOUNT" or "MOUNT/DIRECTORY", and perhaps "//" and a text that
    has no meaning, because Kubernetes wants another handle for each PersistentVolume. Raises
    `Refusal` if no volume can have that name, or if there are attributes of other names: a misspelt
    `directory` would show the whole mount.
    """
    for name in attributes:
        if name not in (MOUNT, DIRECTORY) and not name.startswith(_OF_KUBERNETES):
            raise Refusal(
                "INVALID_ARGUMENT",
                f"the volume has an attribute {name[:64]!r}; there are {MOUNT!r} and {DIRECTORY!r}",
            )
    if MOUNT in attributes:
        volume = Volume(attributes[MOUNT], attributes.get(DIRECTORY, ""))
    elif DIRECTORY in attributes:
        raise Refusal(
            "INVALID_ARGUMENT",
            f"the volume has an attribute {DIRECTORY!r} without {MOUNT!r}; add the name of a mount",
        )
    else:
        mount, separator, directory = handle.partition("//")[0].partition("/")
        if separator and not directory:
            raise _not_a("directory", directory)
        volume = Volume(mount, directory)
    if not _is_name(volume.mount):
        raise _not_a("mount", volume.mount)
    if volume.directory and not _is_below(volume.directory):
        raise _not_a("directory", volume.directory)
    return volume


def handle_of(volume: Volume, name: str) -> str:
    """Return the handle of the volume that Kubernetes calls `name`.

    Of long names it has a digest: a handle should not be longer than 128 bytes, which is the
    specification's limit for texts.
    """
    if len(name.encode()) > _MOST_READABLE_BYTES:
        name = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"{volume}//{name}"


def parse_target(text: str, mounts: Path) -> Path:
    """Return the canonical form of a path on which a volume is, or is to be, mounted.

    Its last part may not exist yet, and is not accessed. Raises `Refusal` if the path is not
    absolute, contains "..", or is above or below the mounts.
    """
    if len(text) > _MOST_PATH_BYTES:
        raise Refusal("INVALID_ARGUMENT", f"the path {text[:256]!r}... is too long")
    parts = text.split("/")
    if not text.startswith("/") or "\0" in text or {".", ".."} & set(parts):
        raise Refusal("INVALID_ARGUMENT", f"the path {text[:256]!r} is not absolute and plain")
    target = Path(text)
    _check_apart(target, mounts)  # before links are looked up, which would access a mount
    target = Path(os.path.realpath(target.parent)) / target.name
    _check_apart(target, mounts)
    return target


def _check_apart(target: Path, mounts: Path) -> None:
    if target.is_relative_to(mounts) or mounts.is_relative_to(target):
        raise Refusal(
            "INVALID_ARGUMENT", f"a volume on {target} would cover mounts of this node ({mounts})"
        )


def _is_name(text: str) -> bool:
    """Return whether `text` can be the name of one file."""
    return (
        text not in ("", ".", "..")
        and "/" not in text
        and text.isprintable()
        and len(text.encode()) <= _MOST_NAME_BYTES
    )


def _is_below(text: str) -> bool:
    """Return whether `text` is a relative path without "..", "." and empty parts."""
    return len(text.encode()) <= _MOST_PATH_BYTES and all(map(_is_name, text.split("/")))


def _not_a(kind: str, text: str) -> Refusal:
    form = "a name without '/'" if kind == "mount" else "a path such as 'train/images', no '..'"
    return Refusal("INVALID_ARGUMENT", f"{text[:256]!r} can't be the {kind} of a volume: {form}")
