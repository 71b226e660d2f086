"""Handles, attributes and paths that the kubelet passes on from users (csi/volumes.py)."""

from pathlib import Path

from cachefs.csi.refusal import Refusal
from cachefs.csi.volumes import DIRECTORY, MOUNT, handle_of, parse_target, parse_volume
from tests.fuzz.targets._support import check_text, parts

_MOUNTS = Path("/mnt/cachefs")

GROWING = {
    "one name": lambda count: b"x" * count,
    "a deep directory": lambda count: b"a\n----\nm\n----\n" + b"a/" * (count // 2),
    "percent signs": lambda count: b"%" * count,
    "quoted": lambda count: b"m/" + b"%41" * (count // 3),
    "slashes": lambda count: b"/" * count,
    "no UTF-8": lambda count: b"\xff" * count,
}
"""Inputs of about so many bytes."""


def fuzz(data: bytes) -> None:
    texts = [part.decode("utf-8", "replace") for part in parts(data, 4)]
    attributes = dict(zip((MOUNT, DIRECTORY, "csi.storage.k8s.io/x"), texts[1:], strict=False))
    try:
        volume = parse_volume(texts[0], attributes)
    except Refusal as refusal:
        check_text(refusal)
    else:
        place = Path("/mounts", volume.mount, volume.directory)
        assert ".." not in place.parts
        assert len(place.parts) > 2
        assert parse_volume(handle_of(volume, texts[-1]), {}) == volume
    try:
        target = parse_target("/dev/null/" + texts[0], _MOUNTS)
    except Refusal as refusal:
        check_text(refusal)
    else:
        assert target.is_relative_to("/dev/null")
