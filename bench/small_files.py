"""Read many files of 20 to 180 KB: warm, with the page cache dropped, and cold."""

from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from bench import direct, machine, rig
from bench.case import Bench, discard, shuffled
from bench.report import Row, ratio_row
from cachefs.halt_polling import POLL_NS, halt_poll_ns

WARM_BAR = 0.17
DROPPED_BAR = 0.4
COLD_BAR = 0.4
TLS_BAR = 0.8
COLD_READERS = 16
DIRECT_IN_FLIGHT = 32


def cached(bench: Bench) -> list[Row]:
    """Compare repeated reads with reads of the same files on the local file system."""
    names = bench.small_files()
    settings: dict[str, int | None] = {"as found": None}
    if machine.can_set_halt_poll() and halt_poll_ns() != POLL_NS:
        settings["polling"] = POLL_NS
    rows = []
    with bench.mount("small") as mount:
        bench.say("filling the cache")
        _read(bench, mount.path, names, 8)
        for setting, poll_ns in settings.items():
            with machine.halt_polling(poll_ns):
                rows += _cached_rows(bench, mount, names, setting if len(settings) > 1 else "")
    discard(mount)
    return rows


def _cached_rows(bench: Bench, mount: rig.Mount, names: list[str], setting: str) -> list[Row]:
    sides = {"cachefs": mount.path, "local": bench.local / "small"}
    measured: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for turn in range(bench.scale.rounds):
        bench.say(f"cached {setting or 'small files'}: round {turn + 1} of {bench.scale.rounds}")
        order = shuffled(names, turn)
        for path in sides.values():
            _read(bench, path, order, 4)
        for readers in (1, 4):
            for side, path in sides.items():
                reading = _read(bench, path, order, readers, bench.scale.warm_passes)
                measured["warm", readers, side].append(reading.files_s)
        if rig.can_drop_caches():
            for readers in (1, 4):
                for side, path in sides.items():
                    rig.drop_page_cache()
                    measured["dropped", readers, side].append(
                        _read(bench, path, order, readers).files_s
                    )
    bars = {("warm", 1): WARM_BAR, ("dropped", 1): DROPPED_BAR}
    titles = {"warm": "warm", "dropped": "page cache dropped"}
    return [
        ratio_row(
            f"{len(names):,} files of 20-180 KB, cached" + (f", {setting}" if setting else ""),
            f"{titles[state]}, {readers} reader{'s' if readers > 1 else ''}",
            "files/s",
            measured[state, readers, "cachefs"],
            measured[state, readers, "local"],
            "local",
            at_least=bars.get((state, readers)),
        )
        for state in ("warm", "dropped")
        for readers in (1, 4)
        if (state, readers, "cachefs") in measured
    ]


def cold(bench: Bench) -> list[Row]:
    """Compare first reads with the same GETs without cachefs."""
    names = bench.small_files()
    keys = [f"small/{name}" for name in names]
    direct.get_all(bench.store, keys, DIRECT_IN_FLIGHT)  # warm up the server's page cache
    measured: dict[str, list[float]] = defaultdict(list)
    requests: list[dict[str, int]] = []
    for turn in range(bench.scale.rounds):
        bench.say(f"cold small files: round {turn + 1} of {bench.scale.rounds}")
        order = shuffled(names, turn)
        reading = direct.get_all(bench.store, [f"small/{name}" for name in order], DIRECT_IN_FLIGHT)
        measured["direct"].append(reading.files_s)
        for figure, listed in (("unlisted", False), ("listed", True)):
            with ExitStack() as stack:
                mount = stack.enter_context(bench.mount("small"))
                if listed:
                    rig.list_directory(mount.path)
                measured[figure].append(_read(bench, mount.path, order, COLD_READERS).files_s)
                requests.append(mount.status()["origin"])
            mount.remove()
    case = f"{len(names):,} files of 20-180 KB, cold; obstore with {DIRECT_IN_FLIGHT} in flight"
    rows = [
        ratio_row(
            case,
            f"{COLD_READERS} readers, {title}",
            "files/s",
            measured[figure],
            measured["direct"],
            "obstore",
            at_least=COLD_BAR if figure == "unlisted" else None,
        )
        for figure, title in (("unlisted", "nothing known"), ("listed", "after ls"))
    ]
    for kind, reference in (("gets", len(names)), ("heads", None), ("lists", None)):
        rows.append(
            Row(
                case,
                f"{kind[:-1].upper()}s sent, nothing known",
                "",
                float(requests[0][kind]),
                reference,
                "obstore",
            )
        )
    return rows


def tls(bench: Bench) -> list[Row]:
    """Compare first reads over TLS with those over plain HTTP, of the same server."""
    names = bench.small_files()
    sides: dict[str, tuple[str, list[str]]] = {
        "plain": (bench.server.endpoint, []),
        "tls": (bench.server.tls_endpoint, bench.server.tls_options),
    }
    measured: dict[str, list[float]] = defaultdict(list)
    for turn in range(bench.scale.rounds):
        bench.say(f"cold small files over TLS: round {turn + 1} of {bench.scale.rounds}")
        order = shuffled(names, turn)
        for side in sorted(sides, reverse=bool(turn % 2)):
            endpoint, options = sides[side]
            with bench.mount("small", *options, endpoint=endpoint) as mount:
                measured[side].append(_read(bench, mount.path, order, COLD_READERS).files_s)
            mount.remove()
    return [
        ratio_row(
            f"{len(names):,} files of 20-180 KB, cold",
            f"{COLD_READERS} readers, TLS",
            "files/s",
            measured["tls"],
            measured["plain"],
            "plain HTTP",
            at_least=TLS_BAR,
        )
    ]


def herd(bench: Bench) -> list[Row]:
    """Count the GETs that reach the server when many processes read one cold file at once."""
    names = bench.small_files()[: bench.scale.rounds]
    counts = []
    with bench.mount("small") as mount:
        for name in names:
            bench.say("64 readers of one cold file")
            before = bench.server.object_gets()
            _read(bench, mount.path, [name], 64, everyone_all=True)
            counts.append(float(bench.server.object_gets() - before))
    discard(mount)
    return [
        Row(
            "64 processes, one cold file of 20-180 KB",
            "GETs that reached the server",
            "",
            max(counts),
            1.0,
            "best",
            None,
            "= 1",
            all(count == 1 for count in counts),
            {"cachefs": counts},
        )
    ]


def _read(
    bench: Bench,
    root: Path,
    names: list[str],
    readers: int,
    passes: int = 1,
    everyone_all: bool = False,
) -> rig.Reading:
    return rig.read_files(
        root,
        names,
        readers,
        passes=passes,
        everyone_all=everyone_all,
        list_file=bench.list_file,
        timeout_s=120,
    )
