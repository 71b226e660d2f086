"""`cachefs top` shows the activity of the mounts, live in the terminal."""

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cachefs.cli import debug_option
from cachefs.cli.mounts.all_mounts import SERVING, collect
from cachefs.cli.views import top as top_view
from cachefs.cli.views.rates import complete_sample, rates_between
from cachefs.cli.views.top import MountView
from cachefs.control import api
from cachefs.control.client import ask
from cachefs.errors import CachefsError, UsageError
from cachefs.mounts import checked_mountpoint, not_mounted, served_on, socket_path

_TIMEOUT_S = 2.0
_ENDED = "ended"
_QUIT = "qQ\x03\x04"
_NEXT = "\tnj"
_SMALLEST = 20, 4


@click.command("top")
@click.argument("mountpoint", required=False)
@click.option(
    "-i",
    "--interval",
    "interval_s",
    metavar="SECONDS",
    type=click.FloatRange(0.2, 3600),
    default=1.0,
    help="The interval between two samples, in seconds. [1]",
)
@debug_option
def command(mountpoint: str | None, interval_s: float) -> None:
    """Show the activity of the mount on MOUNTPOINT, or of all mounts, until q or Ctrl-C.

    The screen shows reads and how long they take, where the bytes come from and the recent
    history of that, how full the tiers are, load jobs, and which users read most. Figures are per
    second.

    cachefs stats prints a line per interval, also without a terminal.
    """
    for name in ("COLUMNS", "LINES"):  # rich would use them even after the window has changed
        os.environ.pop(name, None)
    console = Console(markup=False, highlight=False, emoji=False)
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        raise UsageError("top needs a terminal; cachefs stats prints a line per interval anywhere")
    place = None if mountpoint is None else served_on(checked_mountpoint(mountpoint))
    watch = _Watch(place)
    watch.sample_all()
    if place is not None and not watch.views:
        raise not_mounted(place)
    with contextlib.suppress(KeyboardInterrupt), _keys() as keys, _looking(watch, interval_s, keys):
        _show(console, watch, keys)


def _show(console: Console, watch: "_Watch", keys: "_Keys") -> None:
    """Draw on each new sample or key, until the user quits. Raises the failure of the watch
    thread."""
    glyphs = top_view.ASCII if console.options.ascii_only else top_view.UNICODE
    chosen = ""
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            if watch.failure is not None:
                raise watch.failure
            views = watch.views
            places = [view.place for view in views]
            number = places.index(chosen) if chosen in places else 0
            live.update(Group(*_lines(console, views, number, glyphs)), refresh=True)
            for key in keys.wait():
                if key in _QUIT:
                    return
                number += key in _NEXT
            chosen = places[number % len(places)] if places else ""


def _lines(
    console: Console, views: list[MountView], number: int, glyphs: top_view.Glyphs
) -> list[Text]:
    width, height = console.size
    if width < _SMALLEST[0] or height < _SMALLEST[1]:
        return [Text("too small")]
    return top_view.screen(views, number, width, height, glyphs)


class _Watch:
    """Samples the mounts. `views` has the latest state, `failure` the error that ended sampling."""

    def __init__(self, place: Path | None) -> None:
        """Watches the mount on `place`, or all mounts."""
        self._place = None if place is None else str(place)
        self.views: list[MountView] = []
        self.failure: Exception | None = None

    def sample_all(self) -> None:
        """Sample all mounts. May take some seconds if a mount doesn't answer."""
        known = {view.place: view for view in self.views}
        rows = [row for row in collect() if self._place in (None, row["mountpoint"])]
        if self._place is not None and not rows and known:
            rows = [_ended(known[self._place].row)]
        self.views = [_sample(row, known.get(row["mountpoint"])) for row in rows]


def _ended(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "state": _ENDED,
        "mountpoint": row["mountpoint"],
        "source": row["source"],
        "pid": None,
        "problem": "it was unmounted; when it is mounted again, it is shown",
    }


def _sample(row: dict[str, Any], known: MountView | None) -> MountView:
    history = {} if known is None else known.history
    view = MountView(row, history=history)
    if row["state"] != SERVING:
        return view
    place = Path(row["mountpoint"])
    try:
        view.sample = complete_sample(place, row, _TIMEOUT_S)
        view.jobs = ask(socket_path(place), api.JOBS, None, _TIMEOUT_S)["jobs"]
    except CachefsError as error:
        view.row = {**_ended(row), "state": "not answering", "problem": str(error)}
        return view
    before = None if known is None else known.sample
    if before is not None and known is not None:
        view.rates = rates_between(before, view.sample)
        view.job_rates = _job_rates(known.jobs, view.jobs, view.rates.seconds)
        view.remember()
    return view


def _job_rates(
    before: list[dict[str, Any]], after: list[dict[str, Any]], seconds: float
) -> dict[str, float]:
    known = {job["id"]: job["progress"]["fetched_bytes"] for job in before}
    return {
        job["id"]: max(0, job["progress"]["fetched_bytes"] - known[job["id"]]) / seconds
        for job in after
        if job["id"] in known
    }


@contextlib.contextmanager
def _looking(watch: _Watch, interval_s: float, keys: "_Keys") -> Iterator[None]:
    """Sample in a thread, so that a mount that doesn't answer does not block the keys."""
    stopped = threading.Event()

    def run() -> None:
        due = time.monotonic()
        # Take the second sample soon, because rates need two samples.
        pause_s = min(0.3, interval_s)
        while not stopped.wait(max(0.0, due + pause_s - time.monotonic())):
            due, pause_s = time.monotonic(), interval_s
            try:
                watch.sample_all()
            except Exception as error:
                watch.failure = error
                stopped.set()
            keys.wake()

    threading.Thread(target=run, name="cachefs-top", daemon=True).start()
    try:
        yield
    finally:
        stopped.set()


class _Keys:
    """The user's keys and the other reasons to draw again."""

    def __init__(self, keyboard: int | None) -> None:
        self._keyboard = keyboard
        self._news, self._bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def bell(self) -> int:
        """The descriptor that makes `wait` return when a byte is written to it."""
        return self._bell

    def wake(self) -> None:
        """Let `wait` return. Any thread may call this."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._bell, b"!")

    def wait(self) -> str:
        """Wait for a wake-up or keys. Return the keys, if any."""
        sources = [self._news] if self._keyboard is None else [self._news, self._keyboard]
        ready, _, _ = select.select(sources, [], [])
        if self._news in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._news, 1024)
        if self._keyboard not in ready:
            return ""
        typed = os.read(self._keyboard or 0, 64)
        # End of file: the terminal is closed.
        return typed.decode("ascii", "replace") if typed else _QUIT


@contextlib.contextmanager
def _keys() -> Iterator[_Keys]:
    """Read keys one by one and without echo. Restores the terminal however the context ends."""
    keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
    keys = _Keys(keyboard)
    before = None if keyboard is None else termios.tcgetattr(keyboard)
    handlers = {
        signal.SIGWINCH: signal.signal(signal.SIGWINCH, lambda number, frame: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, _leave),
        signal.SIGHUP: signal.signal(signal.SIGHUP, _leave),
    }
    bell = signal.set_wakeup_fd(keys.bell, warn_on_full_buffer=False)
    try:
        if keyboard is not None:
            tty.setcbreak(keyboard)
            _forbid_suspending(keyboard)
        yield keys
    finally:
        signal.set_wakeup_fd(bell)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if keyboard is not None and before is not None:
            with contextlib.suppress(termios.error):  # the terminal is closed
                termios.tcsetattr(keyboard, termios.TCSAFLUSH, before)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _forbid_suspending(keyboard: int) -> None:
    """Disable Ctrl-Z, which would give the terminal to the shell in its changed state."""
    mode = termios.tcgetattr(keyboard)
    mode[6][termios.VSUSP] = b"\0"
    termios.tcsetattr(keyboard, termios.TCSANOW, mode)
