"""`make screenshots`: pictures of the console for docs/CONSOLE.md, of a mount at work.

`python -m bench.console --cost` measures instead what an open page costs: CPU time of the daemon
and speed of readers, with and without a page in turn, and the bytes and time of the first paint.

It starts its own S3 server on loopback. It needs chromium-headless-shell, and makes the pictures
smaller if pngquant is installed.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before the sandbox starts, nothing needs cleanup

from bench import sandbox

IMAGES = Path(__file__).resolve().parent.parent / "docs/images"
_SHARDS, _FILES = 6, 120
_WORK_S = 75
_WINDOW_S, _PAIRS = 12, 5


def main() -> None:
    """Parse the arguments and run in the sandbox."""
    parser = argparse.ArgumentParser(prog="python -m bench.console", description=__doc__)
    parser.add_argument("--cost", action="store_true", help="measure what an open page costs")
    parser.add_argument("--out", type=Path, default=IMAGES, help="where the pictures go")
    arguments = parser.parse_args()
    sandbox.run("console", lambda directory: _work(directory, arguments))


def _work(directory: Path, arguments: argparse.Namespace) -> int:
    from bench import rig
    from tests.servers.chromium import Browser

    noise = random.Random(1)
    objects = [
        (
            f"train/shard-{shard:02}/{number:04}.jpg",
            noise.randbytes(noise.randrange(40_000, 200_000)),
        )
        for shard in range(_SHARDS)
        for number in range(_FILES)
    ]
    objects += [(f"val/{number:04}.jpg", noise.randbytes(80_000)) for number in range(60)]
    objects += [("labels.parquet", noise.randbytes(3_000_000)), ("README.md", b"# Data\n" * 40)]
    options = (
        *("--cache-size", "256MiB", "--mem-size", "64MiB", "--mem-dir", str(directory / "memory")),
        *("--metrics", "127.0.0.1:0", "--prefetch", "off"),
    )
    with rig.server(directory / "server") as server:
        rig.upload(server.store(), objects)
        where = (f"s3://{rig.BUCKET}", server.environment, server.endpoint)
        mount = rig.Mount(directory / "imagenet", *where, options)
        with mount, Browser(directory / "browser") as browser:
            if arguments.cost:
                _measure(mount, browser)
            else:
                _take_pictures(mount, browser, arguments.out)
    return 0


class Readers:
    """Some threads that read random files of a mount, past the kernel's page cache."""

    def __init__(self, root: Path, names: list[str], count: int, pause_s: float) -> None:
        self.reads = 0
        self._names = [root / name for name in names]
        self._pause_s = pause_s
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=[n]) for n in range(count)]

    def _run(self, seed: int) -> None:
        random_one = random.Random(seed)
        while not self._stopped.is_set():
            fd = os.open(random_one.choice(self._names), os.O_RDONLY)
            try:
                while os.read(fd, 1 << 17):
                    pass
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
            self.reads += 1
            self._stopped.wait(self._pause_s * random_one.random())

    def __enter__(self) -> "Readers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()


def _train(shards: range) -> list[str]:
    return [f"train/shard-{s:02}/{number:04}.jpg" for s in shards for number in range(_FILES)]


def _link(mount: Any) -> str:
    return str(mount.command("console", str(mount.path), "--no-browser")).strip()


# -- pictures ------------------------------------------------------------------------------------


def _take_pictures(mount: Any, browser: Any, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (
        browser.page(1280, 1010) as page,
        _pages(mount, browser, page) as phone,
        Readers(mount.path, _train(range(3)), 4, 0.04),
    ):
        time.sleep(_WORK_S / 3)
        with Readers(mount.path, _train(range(2, 5)), 4, 0.1):
            time.sleep(_WORK_S / 3)
        mount.command("set", str(mount.path), "download-limit=400KiB")
        mount.command("pin", str(mount.path / "train/shard-00"))
        mount.command("load", str(mount.path / "val"), "--detach")
        mount.command("load", str(mount.path / "train/shard-05"), "--detach")
        page.evaluate("document.querySelector('#seconds').value = '5'")
        page.click("#profile-form button")
        time.sleep(_WORK_S / 4)
        page.click("#files tr:nth-child(3) button")
        page.wait("document.querySelector('#crumbs').innerText.includes('train')")
        page.click("#files tr:nth-child(5) input")
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
            time.sleep(1.5)
            _save(out / f"console-{scheme}.png", page.screenshot(whole=False))
        page.prefer("light")
        page.evaluate("document.querySelector('#jobs-title').scrollIntoView()")
        time.sleep(1.5)
        _save(out / "console-files.png", page.screenshot(whole=False))
        _save(out / "console-phone.png", phone.screenshot(whole=False))


@contextlib.contextmanager
def _pages(mount: Any, browser: Any, page: Any) -> Iterator[Any]:
    """Open the console on the page, and on a narrow one, which is yielded."""
    with browser.page(390, 1300, "dark") as phone:
        for each in (page, phone):
            each.open(_link(mount))
            each.wait("document.querySelectorAll('#files tr').length")
        yield phone


def _save(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    if shutil.which("pngquant"):
        command = ["pngquant", "--force", "--speed", "1", "--strip", "--output", path, "96", path]
        subprocess.run(command, check=True)
    print(f"wrote {path} ({path.stat().st_size:,} bytes)")


# -- cost ----------------------------------------------------------------------------------------


def _measure(mount: Any, browser: Any) -> None:
    pid = mount.status()["pid"]
    url = _link(mount).partition("#")[0]
    with browser.page() as page:
        page.open(url)
        page.wait("performance.getEntriesByName('first-contentful-paint').length")
        paint_ms = page.evaluate(
            "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        )
        print(f"first paint {paint_ms:.0f} ms, {page.received_bytes:,} bytes")
        names = _train(range(2))
        for name in names:
            (mount.path / name).read_bytes()
        print(f"nobody reads: {_in_turn(pid, page, url, lambda: 0)}")
        with Readers(mount.path, names, 2, 0.0) as readers:
            print(f"two readers: {_in_turn(pid, page, url, lambda: readers.reads)}")


def _in_turn(pid: int, page: Any, url: str, reads: Callable[[], int]) -> str:
    """Return the medians of CPU time and reads, with and without the page, and of the differences
    between neighbours."""
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(2 * _PAIRS):
        is_open = bool(number % 2)
        page.open(url if is_open else "about:blank")
        time.sleep(1)
        before = time.monotonic(), _cpu_s(pid), reads()
        time.sleep(_WINDOW_S)
        seconds = time.monotonic() - before[0]
        found[is_open].append(
            ((_cpu_s(pid) - before[1]) / seconds, (reads() - before[2]) / seconds)
        )
    without, with_page = (
        [statistics.median(values) for values in zip(*found[is_open], strict=True)]
        for is_open in (False, True)
    )
    pairs = zip(found[False], found[True], strict=True)
    more = statistics.median(having[0] - lacking[0] for lacking, having in pairs)
    return (
        f"daemon {without[0]:.2%} of a core without a page, {with_page[0]:.2%} with one "
        f"({more:+.2%}); {without[1]:,.0f} and {with_page[1]:,.0f} files/s"
    )


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
