"""For whom the present task changes the origin, and which directories it means.

A path alone says neither. Another user may rename a directory at the source, so that the path
leads to another one than the kernel has checked. Both are context variables: tasks and threads that
a task starts have the same values.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from cachefs.types import Caller

_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)
_places: ContextVar[Mapping[str, str]] = ContextVar("places")


def present_caller() -> Caller | None:
    """Return for whom this task acts; None: for cachefs itself."""
    return _caller.get()


@contextmanager
def acting_for(caller: Caller | None) -> Iterator[None]:
    """Act for this caller in the `with` block."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)


def expected_place(path: str) -> str:
    """Return the place (`types.Directory`) that the directory at `path` must have; "" if any."""
    return _places.get({}).get(path, "")


@contextmanager
def expecting(places: Mapping[str, str]) -> Iterator[None]:
    """Mean these directories in the `with` block: their places by path. If another directory has
    the path, the origin raises `ObjectChangedError`."""
    token = _places.set(places)
    try:
        yield
    finally:
        _places.reset(token)
