"""Names and values of the node labels that say how much of a data set a node has cached.

The syntax of labels is that of Kubernetes ("Labels and Selectors", Syntax and character set): the
name after the prefix has at most 63 characters, `[A-Za-z0-9]` at both ends, and `-_.` between them.
A value is a whole number, because `Gt` and `Lt` of a node affinity compare whole numbers.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from cachefs.errors import UsageError

PREFIX = "cachefs.io/cached-"
STEP = 10
"""Percent are rounded down to a multiple of it, so that labels rarely change: each change of a Node
is sent to all that watch it."""

_MOST_NAME = 63 - len("cached-")
_NAME = re.compile(r"[A-Za-z0-9_.-]*[A-Za-z0-9]")
_FLUID = re.compile(r"/thin/(?P<namespace>[^/]+)/(?P<name>[^/]+)/thin-fuse(?P<below>/.*)?$")


def label_value(cached_bytes: int, size_bytes: int) -> str:
    """Return how many percent are cached, rounded down to a multiple of `STEP`. "100" means that
    all is cached. A data set without bytes has "0": it is no reason to prefer a node."""
    if size_bytes <= 0:
        return "0"
    percent = 100 * min(cached_bytes, size_bytes) // size_bytes
    return str(percent // STEP * STEP)


def checked_name(name: str) -> str:
    """Return the name of a data set as a user has written it. Raises `UsageError` if no label can
    have it."""
    if len(name) > _MOST_NAME or not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} can't be part of a label: up to {_MOST_NAME} letters, digits, '-', '_' and "
            "'.', the last one a letter or a digit"
        )
    return name


def names_of(places: list[Path]) -> dict[Path, str]:
    """Return a name for each place, by the last part of its path; for a mount of Fluid, namespace,
    Dataset and path. Names of which there would be two end with a hash of the path."""
    plain = {place: _plain_name(place) for place in places}
    counts = Counter(_fitting(name, name) for name in plain.values())
    return {
        place: _fitting(name, name) if counts[_fitting(name, name)] == 1 else _hashed(name, place)
        for place, name in plain.items()
    }


def _plain_name(place: Path) -> str:
    fluids = _FLUID.search(str(place))
    if fluids is None:
        return place.name
    below = (fluids["below"] or "").strip("/")
    return ".".join(filter(None, (fluids["namespace"], fluids["name"], below.replace("/", "."))))


def _fitting(name: str, origin: str) -> str:
    """Return `name` as part of a label. If it is too long or has nothing that fits, a hash of
    `origin` replaces the rest."""
    fits = re.sub(r"[^A-Za-z0-9_.-]", "-", name).strip("-_.")
    return fits if fits and len(fits) <= _MOST_NAME else _hashed(name, Path(origin))


def _hashed(name: str, place: Path) -> str:
    digest = hashlib.sha256(bytes(place)).hexdigest()[:8]
    fits = re.sub(r"[^A-Za-z0-9_.-]", "-", name).strip("-_.")[: _MOST_NAME - 9]
    return f"{fits}-{digest}" if fits else digest


def changes(
    present: Mapping[str, str], wanted: Mapping[str, str], *, complete: bool
) -> dict[str, str | None]:
    """Return what must change for a node with the labels `present` to have `wanted`. None removes
    a label of ours; if `wanted` is not `complete`, labels that it lacks stay."""
    changed: dict[str, str | None] = {
        key: value for key, value in wanted.items() if present.get(key) != value
    }
    if complete:
        gone = [key for key in present if key.startswith(PREFIX) and key not in wanted]
        changed |= dict.fromkeys(gone)
    return changed
