"""Every origin that wraps another one passes on all that `Origin` has."""

from typing import Any

import pytest
import trio

from cachefs.manifest.origin import ManifestOrigin, UnlistedOrigin
from cachefs.origin.base import Origin
from cachefs.origin.resilience import Resilience, ResilientOrigin
from cachefs.origin.wrapping import WrappingOrigin
from tests.memory_origin import MemoryOrigin

STATE_OF_READS = {"held_back_at", "progressed_at", "best_read_bytes", "quickest_s"}
"""`ResilientOrigin` has its own, and the cache asks nothing else."""
BY_OTHERS = {"stat_and_read", "stat_unlisted", "read_body", "read_in_turn", "reorder"}
"""`Origin` derives these from `stat` and `read`, so they need not be passed on. Only
`ResilientOrigin` has queues to `reorder`."""
OTHERWISE = {(ManifestOrigin, "lists_by_stat"): True}
WRAPPERS = [ManifestOrigin, ResilientOrigin, UnlistedOrigin]

MEMBERS = {name for name in (*vars(Origin), *Origin.__annotations__) if not name.startswith("_")}
METHODS = {name for name in MEMBERS if callable(getattr(Origin, name, None))}


class Told(MemoryOrigin):
    """An origin whose attributes all differ from the defaults."""

    tells_owners = True
    lists_by_stat = True
    lists_in_one_piece = True
    reads_many = True


def wrapped(kind: type[Origin], inner: Origin) -> Any:
    if kind is ResilientOrigin:
        return ResilientOrigin(inner, Resilience())
    return kind(inner, ())  # type: ignore[call-arg]


def test_all_wrappers_are_known() -> None:
    assert set(WrappingOrigin.__subclasses__()) == set(WRAPPERS)


@pytest.mark.parametrize("kind", WRAPPERS)
async def test_attributes(kind: type[Origin]) -> None:
    inner = Told()
    origin = wrapped(kind, inner)
    for name in MEMBERS - METHODS - STATE_OF_READS:
        told = getattr(inner, name)
        assert name in Origin.__annotations__ or told != getattr(Origin, name), "no default"
        assert getattr(origin, name) == OTHERWISE.get((kind, name), told), name
    await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("kind", WRAPPERS)
def test_methods(kind: type[Origin]) -> None:
    for name in METHODS - BY_OTHERS:
        assert getattr(kind, name) is not getattr(Origin, name), f"{kind.__name__}.{name}"
