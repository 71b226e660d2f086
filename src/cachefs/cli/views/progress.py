"""Show on a terminal that a command is at work, in a line that is removed at the end."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_INTERVAL_S = 0.2


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show `text`, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True, highlight=False).status(text):
        yield


@contextmanager
def telling(text: str) -> Iterator[Callable[[str], None]]:
    """Show `text`, if stderr is a terminal, and yield a function that replaces it."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True, markup=False, highlight=False).status(text) as status:
        yield status.update


@contextmanager
def counting(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows how many of `total` there are so far. It shows nothing if stderr
    is no terminal."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console

    of = "" if total is None else f" of {total:,}"
    began = shown_at = time.monotonic()
    with Console(stderr=True, highlight=False).status(f"0{of} {what}") as status:

        def note(count: int) -> None:
            nonlocal shown_at
            now = time.monotonic()
            if now - shown_at >= _INTERVAL_S:
                shown_at = now
                status.update(f"{count:,}{of} {what}, {count / (now - began):,.0f}/s")

        yield note
