"""All figures, in the order of the table, and their measured values."""

import statistics
from collections import defaultdict
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table. A failure in `workload` explains an empty cell."""

    key: str
    workload: str
    title: str
    unit: str
    less_is_better: bool = False
    follows: bool = False
    """Whether it follows from another figure, and so tells nothing new about who is ahead."""


@dataclass(frozen=True, slots=True)
class Section:
    """Figures under one heading, with a description of their measurement for the reader."""

    title: str
    text: str
    figures: tuple[Figure, ...]


def _times(workload: str, *rows: tuple[str, str]) -> tuple[Figure, ...]:
    return tuple(Figure(f"{workload}.{key}", workload, title, "s", True) for key, title in rows)


def _cpu(key: str, workload: str, title: str) -> Figure:
    return Figure(f"cpu.{key}", workload, f"CPU, {title}", "s/GB", True)


def _busiest(key: str, workload: str, title: str, unit: str) -> Figure:
    return Figure(f"busiest.{key}", workload, f"busiest thread, {title}", unit, True)


def _most(key: str, workload: str, title: str, unit: str) -> Figure:
    return Figure(f"most.{key}", workload, f"one mount's most, {title}", unit, follows=True)


SECTIONS = (
    Section(
        "Small files",
        "Files of 20 to 180 KB, each read whole, in a shuffled order, by as many processes as "
        "there are readers. Cold: nothing cached and nothing known, the server's disk warm. Warm: "
        "in the kernel's page cache. Dropped: the page cache of the whole machine emptied, "
        "the blocks cached.",
        (
            Figure("cold.1", "cold", "cold, 1 reader", "files/s"),
            Figure("cold.16", "cold", "cold, 16 readers", "files/s"),
            Figure("cached.warm.1", "cached", "warm, 1 reader", "files/s"),
            Figure("cached.warm.4", "cached", "warm, 4 readers", "files/s"),
            Figure("cached.warm.python", "cached", "warm, 1 reader, Python's open()", "files/s"),
            Figure("cached.dropped.1", "cached", "dropped, cache on SSD, 1 reader", "files/s"),
            Figure("cached.dropped.4", "cached", "dropped, cache on SSD, 4 readers", "files/s"),
            Figure("memory.dropped.1", "memory", "dropped, cache on tmpfs, 1 reader", "files/s"),
            Figure("memory.dropped.4", "memory", "dropped, cache on tmpfs, 4 readers", "files/s"),
        ),
    ),
    Section(
        "One large file",
        "In order in pieces of 1 MiB, and at random in aligned pieces, the first 50 of them "
        "with nothing cached. Dropped: the page cache emptied.",
        (
            Figure("large.cold", "large", "in order, cold", "MB/s"),
            Figure("large.dropped", "large", "in order, cached, dropped", "MB/s"),
            Figure("large.warm", "large", "in order, page-cached", "MB/s"),
            Figure("large.cold.4k", "large", "random 4 KiB, first 50", "reads/s"),
            Figure("large.cold.128k", "large", "random 128 KiB, first 50", "reads/s"),
            Figure("large.dropped.4k", "large", "random 4 KiB, cached, dropped", "reads/s"),
            Figure("large.dropped.128k", "large", "random 128 KiB, cached, dropped", "reads/s"),
        ),
    ),
    Section(
        "LMDB",
        "Random gets of records of 10 KB over mmap, without read-ahead, one reader; the first 50 "
        "with nothing cached.",
        (
            Figure("lmdb.cold", "lmdb", "first 50", "gets/s"),
            Figure("lmdb.dropped", "lmdb", "cached, dropped", "gets/s"),
            Figure("lmdb.warm", "lmdb", "page-cached", "gets/s"),
        ),
    ),
    Section(
        "Python packages",
        "`import` of moto and all it needs, some 1,000 modules, each time in a new process; "
        "the standard library is local. For local, first is after dropping the page cache.",
        _times("import", ("first", "first import"), ("second", "second import")),
    ),
    Section(
        "Many names",
        "Directories of 1,000 files each, ten in a directory.",
        _times(
            "names",
            ("find.cold", "`find`, cold"),
            ("ls.cold", "`ls -lR`, cold"),
            ("find.warm", "`find`, again"),
            ("ls.warm", "`ls -lR`, again"),
        ),
    ),
    Section(
        "Warm-up",
        "`cachefs load` and `juicefs warmup -p 32` of everything, the whole command.",
        (
            Figure("warmup.small", "warmup", "the small files", "files/s"),
            Figure("warmup.large", "warmup", "the large file", "MB/s"),
        ),
    ),
    Section(
        "Epochs, room for 38.5 %",
        "The small files in a new order each epoch with a cache of 38.5 % of their size, 4 "
        "readers, the page cache dropped every 500 files; the first epoch is not counted. Hit "
        "ratio: 1 - GETs / files read, by the server's count of GETs; for JuiceFS, which sends "
        "several GETs for one file, the share of bytes from its cache by its own count. Bytes "
        "fetched: by the server's count.",
        (
            Figure("epochs.hits", "epochs", "hit ratio", ""),
            Figure("epochs.speed", "epochs", "speed", "files/s"),
            Figure("epochs.fetched", "epochs", "bytes fetched / bytes read", "", True),
        ),
    ),
    Section(
        "Cost",
        "CPU of all processes of the mount, user and system, the server's left out. RSS counts "
        "what they have mapped of files, too.",
        (
            _cpu("cold", "cold", "small files, cold, 16 readers"),
            _cpu("cached", "cached", "small files, dropped, cache on SSD, 4 readers"),
            _cpu("large.cold", "large", "large file in order, cold"),
            _cpu("large.dropped", "large", "large file in order, cached, dropped"),
            Figure("rss.cached", "cached", "RSS after reading the small files", "MB", True),
            Figure("rss.names", "names", "RSS after `ls -lR` of the many names", "MB", True),
        ),
    ),
    Section(
        "On many cores",
        "CPU of the busiest thread of each mount, and what one mount can reach at most with idle "
        "cores beside it: 1 / this CPU, if store and network can give so much. For cachefs it is "
        "the main thread, and more cores change nothing about that. The others divide the same "
        "work among more threads where there are more cores (Go's scheduler, one event loop for "
        "each core, or one thread for each request), so for them it is the least.",
        (
            _busiest("cold", "cold", "small files, cold, 16 readers", "ms/file"),
            _most("cold", "cold", "small files, cold, 16 readers", "files/s"),
            _busiest("large.cold", "large", "large file in order, cold", "s/GB"),
            _most("large.cold", "large", "large file in order, cold", "MB/s"),
        ),
    ),
)

FIGURES = {figure.key: figure for section in SECTIONS for figure in section.figures}


@dataclass(slots=True)
class Measures:
    """Values by figure and peer, one per round, and the reasons for missing values."""

    values: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    notes: dict[tuple[str, str], str] = field(default_factory=dict)
    """Notes by workload or figure, and peer."""

    def add(self, key: str, peer: str, value: float) -> None:
        assert key in FIGURES, key
        self.values[key, peer].append(value)

    def median(self, key: str, peer: str) -> float | None:
        found = self.values.get((key, peer))
        return statistics.median(found) if found else None

    def note(self, key: str, peer: str) -> str | None:
        """Return the note about a cell, if any."""
        return self.notes.get((key, peer)) or self.notes.get((FIGURES[key].workload, peer))
