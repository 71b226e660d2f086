"""Rates from two looks at a mount, and how they are written and drawn."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.text import Text

from cachefs.cli.views import top as top_view
from cachefs.cli.views.rates import Sample, quantile, rates_between
from cachefs.cli.views.short_numbers import short_bytes, short_count, short_share, short_time
from cachefs.cli.views.top import MountView, Section, fit, screen
from cachefs.metrics import BOUNDS_S, Histogram

MIB = 1 << 20


def tier(path: str, medium: str, hits: int, evicted: int = 0) -> dict[str, Any]:
    names = ("quota_bytes", "high_bytes", "low_bytes", "bad_slabs")
    return {
        **dict.fromkeys(names, 1 << 30),
        "bad_slabs": 0,
        "path": path,
        "medium": medium,
        "health": "normal",
        "used_bytes": 1 << 29,
        "hits": hits,
        "hit_bytes": hits * MIB,
        "evicted": evicted,
    }


def status(pid: int = 7, started_at: float = 100.0, **changes: Any) -> dict[str, Any]:
    return {
        "state": "serving",
        "mountpoint": "/mnt/data",
        "source": "s3://bucket",
        "pid": pid,
        "started_at": started_at,
        "stale": False,
        "reads": {"hits": 0, "misses": 0},
        "origin": dict.fromkeys(("gets", "heads", "lists", "get_bytes", "errors"), 0),
        "origin_health": {"down_since": None, "in_flight": 3, "limit": 64, "queued": 0},
        "limits": {"limit_uid": {"1000": 1 << 20}},
        "tiers": [],
        **changes,
    }


def requests(
    reads: Histogram | None = None, waits: Histogram | None = None, **users: int
) -> dict[str, Any]:
    """Users by name: "u1000" is uid 1000, what they have read."""
    found = [("hit", reads), ("wait", waits)]
    return {
        "bounds_s": list(BOUNDS_S),
        "waiting": 2,
        "requests": [
            {
                "operation": "read",
                "outcome": outcome,
                "count": histogram.count,
                "seconds": histogram.sum_ns / 1e9,
                "cumulated": histogram.cumulated()[:-1],
            }
            for outcome, histogram in found
            if histogram is not None
        ],
        "users": [
            {"uid": int(name[1:]), "read_bytes": read_bytes, "stalled_s": 0.0}
            for name, read_bytes in users.items()
        ],
    }


def histogram(*times_ns: int) -> Histogram:
    found = Histogram()
    for time_ns in times_ns:
        found.note(time_ns)
    return found


def test_what_happened_between_two_looks() -> None:
    before = Sample(
        1000.0,
        status(
            reads={"hits": 10, "misses": 10},
            origin={"gets": 5, "heads": 1, "lists": 1, "get_bytes": MIB, "errors": 0},
            tiers=[tier("/m", "MEM", 5), tier("/s1", "SSD", 5, 1)],
        ),
        requests(histogram(*[1_000_000_000] * 50), u1000=100),
        cpu_s=3.0,
    )
    after = Sample(
        1002.0,
        status(
            reads={"hits": 40, "misses": 20},
            origin={"gets": 15, "heads": 3, "lists": 1, "get_bytes": 5 * MIB, "errors": 4},
            tiers=[tier("/m", "MEM", 15), tier("/s1", "SSD", 9, 7), tier("/s2", "SSD", 2)],
        ),
        requests(
            histogram(*[1_000_000_000] * 50, *[20_000] * 90), histogram(*[5_000_000] * 10),
            u1000=300, u2000=4000,
        ),
        cpu_s=4.0,
        rss_bytes=99,
    )  # fmt: skip
    rates = rates_between(before, after)
    assert rates.seconds == 2.0
    assert rates.reads_per_s == 50
    assert rates.read_bytes_per_s == 2100
    assert rates.hit_ratio == 0.75
    assert rates.read_p50_s is not None
    assert 16e-6 < rates.read_p50_s < 33e-6  # what took a second was before
    assert rates.read_p99_s is not None
    assert 4e-3 < rates.read_p99_s < 9e-3
    assert (rates.origin_gets_per_s, rates.origin_heads_per_s, rates.origin_lists_per_s) == (
        5,
        1,
        0,
    )
    assert rates.origin_requests_per_s == 6
    assert rates.origin_errors_per_s == 2
    assert rates.origin_bytes_per_s == 2 * MIB
    assert rates.of_medium("MEM") == 5 * MIB
    assert rates.of_medium("SSD") == 3 * MIB  # with one that was added meanwhile
    assert rates.evicted_per_s == 3
    assert (rates.cpu_ratio, rates.rss_bytes, rates.waiting) == (0.5, 99, 2)
    assert [(user.uid, user.bytes_per_s) for user in rates.users] == [(2000, 2000), (1000, 100)]


def test_nothing_happened() -> None:
    sample = Sample(1000.0, status(), requests())
    rates = rates_between(sample, replace(sample, at_s=1001.0))
    assert rates.reads_per_s == rates.lookups_per_s == rates.read_bytes_per_s == 0
    assert rates.hit_ratio is rates.read_p50_s is rates.read_p99_s is rates.cpu_ratio is None


def test_a_new_daemon_counts_from_its_start() -> None:
    before = Sample(1000.0, status(reads={"hits": 500, "misses": 0}), requests(u1=10**9), 50.0)
    new = status(pid=8, started_at=1008.0, reads={"hits": 10, "misses": 10})
    after = Sample(1010.0, new, requests(histogram(*[1000] * 20), u1=200), 1.0)
    rates = rates_between(before, after)
    assert rates.seconds == 2.0
    assert (rates.reads_per_s, rates.read_bytes_per_s, rates.cpu_ratio) == (10, 100, 0.5)


def test_a_tier_that_was_removed_and_added_again() -> None:
    before = Sample(0.0, status(tiers=[tier("/s", "SSD", 500)]), requests())
    after = Sample(1.0, status(tiers=[tier("/s", "SSD", 3)]), requests())
    assert rates_between(before, after).tiers[0].reads_per_s == 3


def test_quantiles() -> None:
    bounds = [1.0, 2.0, 4.0]
    assert quantile(bounds, [0, 0, 0, 0], 0.5) is None
    assert quantile(bounds, [0, 100, 100, 100], 0.5) == 1.5
    assert quantile(bounds, [50, 100, 100, 100], 0.5) == 1.0
    assert quantile(bounds, [0, 0, 0, 10], 0.99) == 4.0  # slower than all bounds


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (short_count, 0, "0"),
        (short_count, 0.02, "0.1"),
        (short_count, 0.97, "1"),
        (short_count, 999.4, "999"),
        (short_count, 999.6, "1.0k"),
        (short_count, 9_960, "10k"),
        (short_count, 123_456_789, "123M"),
        (short_bytes, 999, "999"),
        (short_bytes, 1023, "1.0K"),
        (short_bytes, 100 << 20, "100M"),
        (short_bytes, 1 << 40, "1.0T"),
        (short_time, None, "-"),
        (short_time, 0, "0us"),
        (short_time, 131e-6, "131us"),
        (short_time, 999.7e-6, "1.0ms"),
        (short_time, 0.0123, "12ms"),
        (short_time, 0.9996, "1.0s"),
        (short_time, 17.2, "17s"),
        (short_share, None, "-"),
        (short_share, 0.9999, "99%"),
        (short_share, 1, "100%"),
        (short_share, 1.806, "181%"),
    ],
)
def test_figures(show: Callable[[Any], str], value: Any, text: str) -> None:
    assert show(value) == text


def test_figures_keep_to_their_columns() -> None:
    for power in range(150):
        value = 1.3**power / 100
        if value < 1e17:
            assert len(short_count(value)) <= 4, value
            assert len(short_bytes(value)) <= 4, value
        if value < 1e4:
            assert len(short_time(value / 1e3)) <= 5, value


def writes(**changes: Any) -> dict[str, Any]:
    states = dict.fromkeys(("open", "waiting", "sending", "failed", "conflict", "held"), 0)
    counts = ("puts", "parts", "sent_bytes", "errors", "unsent_files", "unsent_bytes")
    spool = {"spool": "/spool", "spool_bytes": 0, "spool_limit_bytes": 1 << 30}
    return {**dict.fromkeys(counts, 0), **spool, "states": states, **changes}


def test_what_a_writable_mount_sends() -> None:
    before = Sample(100.0, status(writes=writes(puts=5, parts=10, sent_bytes=MIB)), requests())
    now = writes(puts=9, parts=20, sent_bytes=9 * MIB, errors=2, unsent_files=3, unsent_bytes=70)
    found = rates_between(before, Sample(102.0, status(writes=now), requests())).writes
    assert found is not None
    assert (found.puts_per_s, found.sent_bytes_per_s, found.errors_per_s) == (7, 4 * MIB, 1)
    assert (found.unsent_files, found.unsent_bytes) == (3, 70)
    assert rates_between(before, Sample(102.0, status(), requests())).writes is None


# -- the screen ----------------------------------------------------------------------------------


def job(number: int, state: str = "loading", **progress: Any) -> dict[str, Any]:
    names = ("files", "bytes", "wanted_files", "wanted_bytes", "excess_files", "excess_bytes")
    names += ("fetched_files", "fetched_bytes", "failed_files")
    return {
        "id": f"job{number}",
        "state": state,
        "created_at": number,
        "ended_at": number if state == "done" else None,
        "progress": {**dict.fromkeys(names, 0), "waiting_for": None, **progress},
    }


def mount(place: str = "/mnt/data", tiers: int = 2, users: int = 2, jobs: int = 1) -> MountView:
    dice = random.Random(1)
    directories = [tier(f"/disk{number}", "SSD", 100 * number) for number in range(tiers)]
    row = status(mountpoint=place, tiers=directories)
    sample = Sample(10.0, row, requests(**{f"u{1000 + n}": n << 30 for n in range(users)}))
    view = MountView(row, sample, rates_between(replace(sample, at_s=8.0), sample))
    for _ in range(30):
        view.rates = replace(view.rates, origin_bytes_per_s=dice.random() * 1e9)  # type: ignore[type-var]
        view.remember()
    view.jobs = [job(n, wanted_bytes=1000, fetched_bytes=500) for n in range(jobs)]
    return view


@pytest.mark.parametrize("size", [(80, 24), (60, 15), (200, 50), (20, 4), (81, 9)])
@pytest.mark.parametrize("mounts", [0, 1, 2, 30])
@pytest.mark.parametrize("many", [1, 40])
def test_it_fits_every_terminal(size: tuple[int, int], mounts: int, many: int) -> None:
    width, height = size
    views = [mount(f"/mnt/{'x' * number * 7}", many, many, many) for number in range(mounts)]
    for chosen in {0, max(0, mounts - 1)}:
        lines = screen(views, chosen, width, height)
        assert len(lines) == height
        assert all(cell_len(line.plain) <= width for line in lines)
        assert "q quit" in lines[-1].plain
        if mounts > 1 and height > 8:
            assert any(line.plain.startswith(">") for line in lines)


def test_all_that_matters_is_on_80x24() -> None:
    text = "\n".join(line.plain for line in screen([mount()], 0, 80, 24))
    for part in ("/mnt/data", "serving", "hit", "p99", "SSD1", "SSD2", "origin", "job0", "50%"):
        assert part in text, part
    for part in ("1000", "3 of 64 under way", "1 MiB/s", "50% of 1 GiB"):
        assert part in text, part
    assert "░" in text
    assert screen([mount()], 0, 80, 24, top_view.ASCII)[8].plain.isascii() is not False


def test_jobs_that_have_ended_take_one_line() -> None:
    view = mount()
    view.jobs = [job(0), *(job(number, "done") for number in range(1, 9))]
    lines = [line.plain for line in screen([view], 0, 80, 24)]
    assert [line.split()[0] for line in lines if line.startswith("job")] == ["job0", "job8"]


def test_what_is_wrong_is_on_top() -> None:
    view = mount()
    view.row["origin_health"] |= {"down_since": 1.0, "problem": "connection\x1b[2J refused"}
    view.row["tiers"][1]["health"] = "down"
    text = [line.plain for line in screen([view], 0, 80, 15)]
    assert "origin down" in text[1]
    assert "the origin is DOWN" in text[2]
    assert "\x1b" not in "".join(text)
    assert any("DOWN" in line and line.startswith("SSD2") for line in text)
    dead = MountView({**view.row, "state": "stale", "problem": "its daemon is gone"})
    text = [line.plain for line in screen([dead], 0, 80, 15)]
    assert "stale" in text[1]
    assert text[2] == "its daemon is gone"


def test_writable_mounts_show_what_is_unsent() -> None:
    view = mount()
    assert "unsent" not in "".join(line.plain for line in screen([view], 0, 80, 24))
    now = writes(unsent_files=5, unsent_bytes=7 << 20, spool_bytes=1 << 30)
    now["states"] |= {"failed": 1, "held": 2, "conflict": 2}
    sample = Sample(10.0, {**view.row, "writes": now}, requests())
    view = replace(view, row=sample.status, sample=sample, rates=rates_between(sample, sample))
    text = [line.plain for line in screen([view], 0, 80, 24)]
    assert "1 file could not be sent: see cachefs writes" in text
    assert "4 unsent files wait for you: see cachefs writes" in text
    assert any(line.startswith("the spool is nearly full") for line in text)
    assert any("sent 0/s" in line and "unsent 5" in line and "7.0M" in line for line in text)


def test_important_lines_come_first() -> None:
    def lines(letter: str, count: int) -> list[Text]:
        return [Text(letter) for _ in range(count)]

    sections = [Section(lines("a", 2), 2), Section(lines("b", 9), 2), Section(lines("c", 9), 1)]
    shown = ["".join(line.plain for line in fit(sections, height)) for height in (1, 3, 5, 8, 99)]
    assert shown == ["a", "aab", "aabbc", "aabbbbbc", "aa" + "b" * 9 + "c" * 9]
    assert [line.plain for line in fit(sections, 99)].count("") == 2
