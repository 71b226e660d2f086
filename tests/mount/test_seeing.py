"""`cachefs stats`, `top` and `profile`, as a user runs them."""

import contextlib
import fcntl
import json
import os
import pty
import random
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mount.harness import CLI, PATIENCE_S, Site, drop_pages, eventually

FILES = 20
FILE_BYTES = 50_000
ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
CLEAR = "\x1b[2J"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def mounted(site: Site) -> Site:
    noise = random.Random(3)
    (site.files / "dir").mkdir()
    for number in range(FILES):
        (site.files / f"dir/file-{number:02}").write_bytes(noise.randbytes(FILE_BYTES))
    site.mount()
    return site


def read_all(site: Site) -> None:
    """Through the daemon, not from the page cache."""
    for path in sorted((site.mountpoint / "dir").iterdir()):
        path.read_bytes()
        drop_pages(path)


@contextlib.contextmanager
def running(*args: object) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [*CLI, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, columns: int, rows: int, *args: object) -> None:
        self._master, slave = pty.openpty()
        self._slave = slave
        self.resize(columns, rows)
        self.modes = termios.tcgetattr(slave)
        self._text = ""
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *CLI, *map(str, args)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "33", "LINES": "7"},
        )
        self._thread = threading.Thread(target=self._collect)
        self._thread.start()

    def _collect(self) -> None:
        with contextlib.suppress(OSError):  # EIO: nobody has the terminal open any more
            while data := os.read(self._master, 1 << 16):
                self._text += data.decode("utf-8", "replace")

    @property
    def raw(self) -> str:
        """All that was written so far."""
        return self._text

    @property
    def screens(self) -> list[list[str]]:
        """What was drawn so far, each time anew; the last may not be complete."""
        drawn = self._text.split("cachefs top ")[1:]
        return [("cachefs top " + ESCAPES.sub("", text)).splitlines() for text in drawn]

    def shows(self, text: str) -> bool:
        """Whether the last complete screen has it."""
        return len(self.screens) > 1 and text in "\n".join(self.screens[-2])

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(timeout=PATIENCE_S)

    def are_modes_restored(self) -> bool:
        return termios.tcgetattr(self._slave) == self.modes

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._slave)
        self._thread.join()
        os.close(self._master)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


# -- stats ---------------------------------------------------------------------------------------


def test_stats_are_rates_of_what_was_done(mounted: Site) -> None:
    with running("stats", mounted.mountpoint, "-i", "0.5", "--json") as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline())]

        def total(name: str) -> int:
            """The count that the rates were computed from."""
            return sum(round(line[name] * line["seconds"]) for line in lines)

        def of_tiers(name: str) -> int:
            return sum(round(line["tiers"][0][name] * line["seconds"]) for line in lines)

        read_all(mounted)
        mounted.wait_until_stored(FILES)
        read_all(mounted)
        deadline = time.monotonic() + PATIENCE_S
        while total("read_bytes_per_s") < 2 * FILES * FILE_BYTES or not of_tiers("bytes_per_s"):
            assert time.monotonic() < deadline, lines
            lines.append(json.loads(process.stdout.readline()))

    assert all(line["mountpoint"] == str(mounted.mountpoint) for line in lines)
    assert total("read_bytes_per_s") == 2 * FILES * FILE_BYTES
    assert total("reads_per_s") >= 2 * FILES
    assert total("origin_gets_per_s") >= FILES
    assert total("origin_bytes_per_s") == total("origin_gets_per_s") * FILE_BYTES
    # Files that were fetched ahead come from the tier in the first round, too.
    assert 0 < of_tiers("bytes_per_s") <= 2 * FILES * FILE_BYTES
    assert total("lookups_per_s") >= 1
    busy = [line for line in lines if line["reads_per_s"]]
    assert all(0 < line["read_p50_s"] <= line["read_p99_s"] for line in busy)
    assert busy[-1]["users"][0]["uid"] == os.getuid()
    assert all(line["rss_bytes"] > 10 << 20 for line in lines)
    assert all(line["cpu_ratio"] >= 0 for line in lines)


def test_stats_end_after_so_many_lines(mounted: Site) -> None:
    head, *lines = mounted.cli("stats", mounted.mountpoint, "-i", "0.1", "-n", "3").stdout.split(
        "\n"
    )
    assert head.split()[:3] == ["TIME", "READ", "B/s"]
    assert "SSD" in head
    assert "HDD" not in head
    assert len(lines) == 4
    assert all(len(line) == len(head) for line in lines[:3])


def test_stats_fit_the_terminal(mounted: Site, terminals: list[Terminal]) -> None:
    args = ("stats", mounted.mountpoint, "-i", "0.1", "-n", "12")
    terminals += [Terminal(80, 6, *args), Terminal(130, 24, *args)]
    assert [terminal.wait() for terminal in terminals] == [0, 0]
    eventually(lambda: all(terminal.raw.count("\n") >= 13 for terminal in terminals))
    narrow, wide = (terminal.raw.splitlines() for terminal in terminals)
    assert all(len(line) < 80 for line in narrow)
    assert sum("READ" in line for line in narrow) == 3  # on top of each screenful
    assert "TIME" not in narrow[0]
    assert sum("TIME" in line for line in wide) == 1


def test_stats_end_with_the_mount(mounted: Site) -> None:
    with running("stats", mounted.mountpoint, "-i", "0.2") as process:
        assert process.stdout is not None
        process.stdout.readline()
        mounted.umount()
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert said == f"cachefs: error: {mounted.mountpoint}: the mount has ended\n"
    said = mounted.cli("stats", mounted.mountpoint, code=1).stderr
    assert "is not mounted by cachefs" in said


def test_stats_and_ctrl_c(mounted: Site) -> None:
    with running("stats", mounted.mountpoint) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, said) == (130, "")


def test_stats_into_a_pipe_that_is_closed(mounted: Site) -> None:
    with running("stats", mounted.mountpoint, "-i", "0.1") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
        process.wait(timeout=PATIENCE_S)
    assert (process.returncode, said) == (1, "")


# -- top -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [b"q", b"\x03"])
def test_top_is_live_and_leaves_the_terminal_as_it_was(
    mounted: Site, terminals: list[Terminal], end: bytes
) -> None:
    terminal = Terminal(80, 24, "top", mounted.mountpoint, "-i", "0.3")
    terminals.append(terminal)
    eventually(lambda: terminal.shows("origin"))
    assert not terminal.are_modes_restored()
    read_all(mounted)
    eventually(lambda: terminal.shows(f"{os.getuid()} "))
    job = mounted.cli("load", mounted.mountpoint, "--detach").stdout.strip()
    eventually(lambda: terminal.shows(f"{job:<9}done"))
    text = "\n".join(terminal.screens[-2])
    for part in ("serving", "hit", "p99", "SSD", "of 256 MiB", "q quit"):
        assert part in text, part
    for screen in terminal.screens[:-1]:
        assert len(screen) == 24
        assert all(len(line) <= 80 for line in screen)
    assert terminal.raw.count(ENTER_SCREEN) == 1
    drawn = terminal.raw.partition(ENTER_SCREEN)[2]
    assert CLEAR not in drawn  # that would flicker

    terminal.type(end)
    assert terminal.wait() == 0
    eventually(lambda: LEAVE_SCREEN in terminal.raw)
    rest = terminal.raw.partition(LEAVE_SCREEN)[2]
    assert ESCAPES.sub("", rest).strip() == ""
    assert terminal.raw.rindex(SHOW_CURSOR) > terminal.raw.rindex(HIDE_CURSOR)
    assert terminal.are_modes_restored()


def test_top_follows_the_size_of_the_terminal(mounted: Site, terminals: list[Terminal]) -> None:
    terminal = Terminal(80, 24, "top", mounted.mountpoint)
    terminals.append(terminal)
    eventually(lambda: terminal.shows("origin"))
    for columns, rows in ((60, 15), (130, 40), (30, 5)):
        terminal.resize(columns, rows)

        def fits(columns: int = columns, rows: int = rows) -> bool:
            screen = terminal.screens[-2]
            return len(screen) == rows and max(map(len, screen)) in range(columns - 9, columns + 1)

        eventually(fits)
    terminal.resize(10, 2)
    eventually(lambda: "too small" in ESCAPES.sub("", terminal.raw))
    terminal.type(b"q")
    assert terminal.wait() == 0


def test_top_shows_the_end_of_a_daemon_and_the_next(
    mounted: Site, terminals: list[Terminal]
) -> None:
    mounted.expected_trouble = ("which a dead cachefs had left",)
    terminal = Terminal(80, 24, "top", mounted.mountpoint, "-i", "0.3")
    terminals.append(terminal)
    eventually(lambda: terminal.shows("serving"))
    mounted.crash()
    eventually(lambda: terminal.shows("its daemon is gone"))
    mounted.mount()
    eventually(lambda: terminal.shows("serving"))
    mounted.umount()
    eventually(lambda: terminal.shows("ended"))
    terminal.type(b"q")
    assert terminal.wait() == 0


def test_top_that_is_terminated_leaves_the_terminal_as_it_was(
    mounted: Site, terminals: list[Terminal]
) -> None:
    terminal = Terminal(80, 24, "top", mounted.mountpoint)
    terminals.append(terminal)
    eventually(lambda: terminal.shows("serving"))
    (child,) = Path(f"/proc/{terminal.process.pid}/task/{terminal.process.pid}/children").read_text(
    ).split() or [str(terminal.process.pid)]  # fmt: skip
    os.kill(int(child), signal.SIGTERM)
    assert terminal.wait() == 143
    eventually(lambda: LEAVE_SCREEN in terminal.raw)
    assert terminal.are_modes_restored()


def test_top_without_a_terminal_or_a_mount(site: Site, terminals: list[Terminal]) -> None:
    said = site.cli("top", code=2).stderr
    assert "cachefs stats" in said
    assert said.count("\n") == 1
    terminal = Terminal(80, 24, "top", site.mountpoint)
    terminals.append(terminal)
    assert terminal.wait() == 1
    eventually(lambda: "is not mounted by cachefs" in terminal.raw)
    assert ENTER_SCREEN not in terminal.raw


# -- profile -------------------------------------------------------------------------------------


@contextlib.contextmanager
def profiling(site: Site, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """`cachefs profile`, begun, with a window in which much can be done, even on a busy machine."""
    began = time.monotonic()
    site.status()
    window_s = 4 + 10 * (time.monotonic() - began)
    with running("profile", site.mountpoint, "-w", f"{window_s:.1f}", *options) as process:
        eventually(lambda: has_asked(process.pid))
        site.status()  # the daemon answers in turn
        yield process


def has_asked(pid: int) -> bool:
    """Whether the process has a connection to a daemon, and sleeps: it waits for the answer."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            if os.readlink(path).startswith("socket:"):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                return state == "S"
    return False


def test_profile_tells_what_was_asked_for(mounted: Site) -> None:
    (mounted.files / "before").write_text("")
    assert (mounted.mountpoint / "before").read_text() == ""
    hot = mounted.mountpoint / "dir/file-07"
    with profiling(mounted, "--top", "5", "--json") as process:
        read_all(mounted)
        for _ in range(10):
            hot.read_bytes()
            drop_pages(hot)
        assert not (mounted.mountpoint / "dir/absent").exists()
        out, said = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, said) == (0, "")
    report: dict[str, Any] = json.loads(out)
    assert report["mountpoint"] == str(mounted.mountpoint)
    assert report["origin"]["gets"] >= FILES
    assert report["origin"]["get_bytes"] >= FILES * FILE_BYTES
    counts = {(row["operation"], row["outcome"]): row["count"] for row in report["operations"]}
    assert counts["read", "wait"] + counts.get(("read", "hit"), 0) >= FILES + 10
    if mounted.status()["data_path"]["name"] != "relay":  # there the kernel opens by itself
        assert counts["open", "ok"] >= FILES + 10
    assert sum(counts.values()) == report["requests"]
    times = [row["seconds"] for row in report["slowest"]]
    assert times == sorted(times, reverse=True)
    assert len(times) == 5
    assert all(row["path"].startswith("/") for row in report["slowest"])
    for rank in ("requests", "bytes"):
        assert report["hottest"][rank][0]["path"] == "/dir/file-07"
        assert len(report["hottest"][rank]) == 5
    assert report["hottest"]["bytes"][0]["bytes"] >= 10 * FILE_BYTES
    assert report["missed"]["requests"] == 0
    assert "before" not in out


def test_profile_as_text(mounted: Site) -> None:
    said = mounted.cli("profile", mounted.mountpoint, "-w", "0.2").stdout
    assert said.startswith(f"0 requests in 0.2 s on {mounted.mountpoint}\n")
    with profiling(mounted) as process:
        read_all(mounted)
        out, _ = process.communicate(timeout=PATIENCE_S)
    for part in ("OPERATION", "SLOWEST", "PATHS WITH MOST BYTES"):
        assert part in out, part
    assert re.search(r"\b[1-9]\d* GET", out), out  # on a busy machine some come after the window
    assert re.search(r"/dir/file-\d\d \(.* KiB at 0 B\)", out)


def test_several_profiles_at_once(mounted: Site) -> None:
    def begin(stack: contextlib.ExitStack, window_s: float) -> "subprocess.Popen[str]":
        return stack.enter_context(running("profile", mounted.mountpoint, "-w", window_s))

    with contextlib.ExitStack() as stack:
        many = [begin(stack, 600) for _ in range(5)]
        eventually(lambda: any(process.poll() is not None for process in many))
        (refused,) = (process for process in many if process.poll() is not None)
        assert refused.returncode == 1
        said = refused.communicate()[1]
        assert said.startswith("cachefs: error: 4 profiles are being taken already")
        assert said.count("\n") == 1
        many.remove(refused)
        # Those who leave make room.
        many[0].send_signal(signal.SIGINT)
        assert "interrupted" in many[0].communicate(timeout=PATIENCE_S)[1]
        assert many[0].returncode == 130
        for process in many[1:]:
            process.kill()
            process.wait()
        eventually(lambda: begin(stack, 0.1).wait(timeout=PATIENCE_S) == 0)
    with profiling(mounted, "--json") as process:
        read_all(mounted)
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert json.loads(out)["requests"] > 0


def test_profile_of_a_mount_that_ends(mounted: Site) -> None:
    with running("profile", mounted.mountpoint, "-w", "600") as process:
        eventually(lambda: has_asked(process.pid))
        mounted.umount()
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert said == f"cachefs: error: {mounted.mountpoint}: the mount has ended\n"
