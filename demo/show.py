"""The steps (acts) of the demo. Runs inside the sandbox that `demo.py` sets up."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dataset import Dataset, SourceFile, collect, make_large_files, sha256_of
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench import rig

PREFIX = "demo"
LARGE_BYTES = 256 << 20
READERS = 2
UPLOADS = 32
COMPARERS = 16
LEAST_FILES = 5_000
EPOCH_FILES = 5_000
LEAST_FREE_BYTES = 4 << 30
LEAST_SPEED_UP = 10.0
"""The second epoch must be at least this many times as fast as the first."""


class CheckFailed(Exception):
    """A check of the demo has failed."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over the small files. `gets` counts the GETs that reached the server during it."""

    name: str
    reading: rig.Reading
    gets: int

    @property
    def hit_ratio(self) -> float:
        return max(0.0, 1 - self.gets / self.reading.files)


class Show:
    """Runs the acts in their order, and checks their results."""

    def __init__(self, directory: Path) -> None:
        self._dir = directory
        self._console = Console(highlight=False)
        # Some paths are longer than 80 columns; a wrapped path could not be copied from a log.
        self._width = min(self._console.width, 100) if self._console.is_terminal else 80
        self._acts = 0
        self._checks = 0
        self._began = time.monotonic()

    def run(self) -> int:
        """Run all acts. Return 0 if all checks held, else 1 and a line with the failed check."""
        self._console.print(
            "[bold]cachefs[/]: a bucket as files, cached on local disk.\n"
            "A real server and real files; nothing is left behind. Ctrl-C at any time."
        )
        try:
            with ExitStack() as stack:
                self._play(stack)
        except CheckFailed as failure:
            self._console.print(f"\n[bold red]check failed:[/] {escape(str(failure))}")
            return 1
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            self._console.print(f"\n[bold red]error:[/] {escape(str(error))}")
            return 1
        self._console.print(
            f"\n[bold green]All {self._checks} checks held.[/] "
            f"{time.monotonic() - self._began:.0f} s in all."
        )
        return 0

    def _play(self, stack: ExitStack) -> None:
        self._check_space()
        with self._act("Start an S3 server (SeaweedFS) on this machine"):
            server = stack.enter_context(rig.server(self._dir / "server"))
            self._say(f"{server.endpoint}, bucket {rig.BUCKET!r}")
            self._say(f"all files of this demo are in {self._dir}")
        with self._act("Upload real files to it (cachefs has no part in this)"):
            data = self._upload(server)
        with self._act("Mount the bucket"):
            mount = self._mount(stack, "a", server)
        with self._act("Compare every file in the mount with its source"):
            self._compare(mount, data)
        with self._act("Import Python packages from the mount, and use them"):
            self._import(mount)
            mount.unmount()
        with self._act(f"Train: three shuffled epochs, {READERS} readers, from a cold start"):
            fresh = self._mount(stack, "b", server)
            self._say("a new, empty cache directory: all that epoch 1 reads comes from the server")
            chosen = random.Random("training set").sample(data.small, EPOCH_FILES)
            self._say(f"training set: {len(chosen):,} of the files of up to 1 MiB, by chance")
            self._train(fresh, server, chosen)
        with self._act("Unmount, stop the server, remove all files"):
            stack.close()
            shutil.rmtree(self._dir)

    def _check_space(self) -> None:
        free = shutil.disk_usage(self._dir).free
        if free < LEAST_FREE_BYTES:
            raise RuntimeError(
                f"{self._dir.parent} has {free / 1e9:.1f} GB free, but the demo needs "
                f"{LEAST_FREE_BYTES / 1e9:.1f} GB; set TMPDIR to a directory with more"
            )

    # -- the acts ------------------------------------------------------------------------------

    def _upload(self, server: rig.Server) -> Dataset:
        data = collect(make_large_files(self._dir / "large", 2, LARGE_BYTES))
        self._say(
            f"{len(data.files):,} files, {data.bytes / 1e6:,.0f} MB: Python's standard library, "
            "the packages of"
        )
        self._say(f"this environment, and 2 large files of {LARGE_BYTES >> 20} MiB")
        if len(data.small) < LEAST_FILES:
            raise CheckFailed(f"there are {len(data.small):,} small files, not {LEAST_FILES:,}")
        # The largest files come first: at the end, each would run alone while the others wait.
        files = sorted(data.files, key=lambda file: -file.size_bytes)
        with self._bars() as bars:
            bar = bars.add_task("upload", total=data.bytes)
            rig.upload(
                server.store(),
                ((f"{PREFIX}/{file.key}", file.path) for file in files),
                UPLOADS,
                lambda count: bars.advance(bar, count),
            )
        return data

    def _mount(self, stack: ExitStack, name: str, server: rig.Server) -> rig.Mount:
        mount = rig.Mount(
            self._dir / name,
            f"s3://{rig.BUCKET}/{PREFIX}",
            server.environment,
            server.endpoint,
            ["--cache-size", "4GiB"],
        )
        shown = (
            " ".join(mount.arguments).replace(f"{self._dir}/", "").replace(" --", " \\\n      --")
        )
        self._console.print(f"  [cyan]$ cachefs {escape(shown)}[/]")
        try:
            stack.enter_context(mount)
        except RuntimeError:
            self._console.print(escape(mount.daemon_log()))
            raise
        return mount

    def _compare(self, mount: rig.Mount, data: Dataset) -> None:
        wanted = {file.key: file.path for file in data.files}
        found = {
            os.path.relpath(os.path.join(directory, name), mount.path)
            for directory, _, names in os.walk(mount.path)
            for name in names
        }
        if missing := wanted.keys() - found:
            raise CheckFailed(f"{len(missing)} files are missing, such as {min(missing)}")
        if surplus := found - wanted.keys():
            raise CheckFailed(f"{len(surplus)} files are too many, such as {min(surplus)}")

        def is_equal(key: str) -> bool:
            return sha256_of(mount.path / key) == sha256_of(wanted[key])

        different = []
        with self._bars() as bars, ThreadPoolExecutor(COMPARERS) as pool:
            bar = bars.add_task("compare", total=len(wanted))
            for key, equal in zip(wanted, pool.map(is_equal, wanted), strict=True):
                bars.advance(bar)
                if not equal:
                    different.append(key)
        if different:
            raise CheckFailed(f"{len(different)} files differ, such as {different[0]}")
        self._pass(f"all {len(wanted):,} names and SHA-256 hashes are equal")

    def _import(self, mount: rig.Mount) -> None:
        script = Path(__file__).with_name("imported.py")
        result = subprocess.run(
            [sys.executable, "-I", "-S", "-B", script, mount.path, str(self._width - 4)],
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            encoding="utf-8",
            timeout=120,
            check=False,
        )
        if result.returncode:
            raise CheckFailed(f"the import from the mount failed:\n{result.stderr.strip()}")
        *drawing, facts = result.stdout.splitlines()
        report = json.loads(facts)
        for line in drawing:
            self._console.print(escape(f"  {line}"))
        self._say(f"Where these came from, below {os.path.relpath(mount.path, self._dir)}:")
        for file in report["files"]:
            self._say(f"  {os.path.relpath(file, mount.path)}")
            if not Path(file).is_relative_to(mount.path):
                raise CheckFailed(f"{file} did not come from the mount")
        if report["elsewhere"]:
            raise CheckFailed(f"{report['elsewhere'][0]} did not come from the mount")
        self._pass(
            f"{report['modules']} modules were read from the mount, "
            f"{report['libraries']} of them shared libraries"
        )

    def _train(self, mount: rig.Mount, server: rig.Server, files: list[SourceFile]) -> None:
        with self._bars() as bars:
            epochs = [self._epoch(name, mount, server, files, bars) for name in ("1", "2", "3")]
            if rig.can_drop_caches():
                rig.drop_page_cache()
                epochs.append(self._epoch("again*", mount, server, files, bars))
        self._console.print(Padding(_table(epochs), (0, 2)))
        self._say("Epochs 2 and 3 are answered by the kernel's page cache, where cachefs keeps")
        self._say("what was read. GETs: those that SeaweedFS itself counted.")
        if len(epochs) > 3:
            self._say("* after dropping the page cache: from cachefs's blocks on disk")
        self._judge(epochs)

    def _epoch(
        self,
        name: str,
        mount: rig.Mount,
        server: rig.Server,
        files: list[SourceFile],
        bars: Progress,
    ) -> Epoch:
        keys = [file.key for file in files]
        random.Random(name).shuffle(keys)
        bar = bars.add_task(f"epoch {name}", total=len(keys))
        gets = server.object_gets()
        reading = rig.read_files(
            mount.path,
            keys,
            READERS,
            list_file=self._dir / "epoch.list",
            on_progress=lambda count: bars.update(bar, completed=count),
        )
        bars.update(bar, completed=len(keys))
        wanted = sum(file.size_bytes for file in files)
        if reading.bytes != wanted:
            raise CheckFailed(f"epoch {name} read {reading.bytes:,} bytes instead of {wanted:,}")
        return Epoch(name, reading, server.object_gets() - gets)

    def _judge(self, epochs: list[Epoch]) -> None:
        first, second, third, *_ = epochs
        for epoch in (second, third):
            if epoch.gets:
                raise CheckFailed(f"epoch {epoch.name} sent {epoch.gets} GETs instead of none")
        self._pass("epochs 2 and 3 sent no GET to the server")
        ratio = second.reading.files_s / first.reading.files_s
        if ratio < LEAST_SPEED_UP:
            raise CheckFailed(
                f"epoch 2 was {ratio:.1f} times as fast as epoch 1, not {LEAST_SPEED_UP:.0f}"
            )
        self._pass(f"epoch 2 was {ratio:.0f} times as fast as epoch 1")

    # -- how it looks --------------------------------------------------------------------------

    @contextmanager
    def _act(self, title: str) -> Iterator[None]:
        self._acts += 1
        self._console.print(f"\n[bold]{self._acts}. {escape(title)}[/]")
        began = time.monotonic()
        yield
        self._console.print(f"  [dim]{time.monotonic() - began:.1f} s[/]")

    def _say(self, text: str) -> None:
        self._console.print(f"  {escape(text)}", soft_wrap=True)

    def _pass(self, text: str) -> None:
        self._checks += 1
        self._console.print(f"  [green]ok:[/] {escape(text)}", soft_wrap=True)

    def _bars(self) -> Progress:
        """Progress bars that vanish when full; none if the output is not a terminal."""
        return Progress(
            TextColumn("  {task.description}"),
            BarColumn(40),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )


def _table(epochs: list[Epoch]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("epoch", "files/s", "MB/s", "hit ratio", "GETs at the server", "seconds"):
        table.add_column(column, justify="right")
    for epoch in epochs:
        reading = epoch.reading
        table.add_row(
            epoch.name,
            f"{reading.files_s:,.0f}",
            f"{reading.mb_s:,.0f}",
            f"{epoch.hit_ratio:.1%}",
            f"{epoch.gets:,}",
            f"{reading.seconds:.1f}",
        )
    return table
