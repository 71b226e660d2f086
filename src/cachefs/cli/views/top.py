"""Make the lines of the screen of `cachefs top` from the samples of the mounts."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.text import Text

from cachefs.cli.mounts.all_mounts import SERVING
from cachefs.cli.output.text import shown
from cachefs.cli.views.rates import Rates, Sample, SharedRates
from cachefs.cli.views.short_numbers import short_bytes, short_count, short_share, short_time
from cachefs.cli.views.tiers import HEALTHY, IN_USE, notices, short_names
from cachefs.units import format_bytes, format_duration

ORIGIN, SHARED = "origin", "shared"
_HISTORY = 200
_NARROW_COLUMNS = 70
_WIDE_COLUMNS = 120
_LONGEST_CURVE = 100
_FINAL = ("done", "incomplete", "failed", "cancelled")
_STATES = {SERVING: "bold green"}


class Glyphs(NamedTuple):
    """The characters of bars and curves."""

    levels: str
    full: str
    empty: str


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "█", "░")
ASCII = Glyphs("_.:-=+*#", "#", ".")


@dataclass(slots=True)
class MountView:
    """The state of one mount. `row` comes from `all_mounts.collect`. `rates` is None before the
    second sample and when the mount isn't serving."""

    row: dict[str, Any]
    sample: Sample | None = None
    rates: Rates | None = None
    jobs: list[dict[str, Any]] = field(default_factory=list)
    job_rates: dict[str, float] = field(default_factory=dict)
    """Bytes per second of the running jobs, by id."""
    history: dict[str, deque[float]] = field(default_factory=dict)
    """Bytes per second, the newest last, by tier path, and for `SHARED` and `ORIGIN`."""

    @property
    def place(self) -> str:
        """The mountpoint."""
        return str(self.row["mountpoint"])

    def remember(self) -> None:
        """Add the rates to the history."""
        if self.rates is not None:
            seen = {tier.path: tier.bytes_per_s for tier in self.rates.tiers}
            seen[ORIGIN] = self.rates.origin_bytes_per_s
            if self.rates.shared is not None:
                seen[SHARED] = self.rates.shared.bytes_per_s
            for name, bytes_per_s in seen.items():
                self.history.setdefault(name, deque(maxlen=_HISTORY)).append(bytes_per_s)


class Section(NamedTuple):
    """Lines that belong together. Each section shows `at_least` lines before another section gets
    more."""

    lines: list[Text]
    at_least: int


def screen(
    views: Sequence[MountView], chosen: int, width: int, height: int, glyphs: Glyphs = UNICODE
) -> list[Text]:
    """Return the lines of a terminal of that size: a list of the mounts if there are several, and
    details of the chosen one."""
    head = [_title(width)]
    sections = []
    if len(views) > 1:
        lines = _mounts(views, chosen, max(2, height // 4), width)
        sections.append(Section(lines, len(lines)))
    if views:
        sections += _details(views[chosen], width, glyphs)
    else:
        sections.append(Section([Text("nothing is mounted by cachefs")], 1))
    foot = Text("q quit" + "   Tab next mount" * (len(views) > 1), style="dim")
    body = fit(sections, height - len(head) - 1)
    lines = [*head, *body]
    lines += [Text("")] * (height - len(lines) - 1) + [foot]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def fit(sections: Sequence[Section], height: int) -> list[Text]:
    """Return as many lines as fit into `height`; earlier sections have priority. Empty lines
    separate the sections if all lines fit with them."""
    counts, room = [], height
    for section in sections:
        counts.append(max(0, min(section.at_least, len(section.lines), room)))
        room -= counts[-1]
    for number, section in enumerate(sections):
        more = min(len(section.lines) - counts[number], room)
        counts[number] += more
        room -= more
    lines: list[Text] = []
    for count, section in zip(counts, sections, strict=True):
        if lines and count and room > 0:
            lines.append(Text(""))
            room -= 1
        lines += section.lines[:count]
    return lines


def _title(width: int) -> Text:
    clock = time.strftime("%H:%M:%S")
    return Text("cachefs top".ljust(width - len(clock)) + clock, style="bold")


def _mounts(views: Sequence[MountView], chosen: int, most: int, width: int) -> list[Text]:
    """Return a line for each mount; if there are more than `most`, for those around the chosen
    one."""
    lines = [_heading(f"  READ  B/s ORIG  HIT  {'STATE':<14} MOUNTPOINT")]
    first = max(0, min(chosen - most // 2, len(views) - most))
    for number, view in enumerate(views[first : first + most], first):
        rates = view.rates
        cells = ["-"] * 4
        if rates is not None:
            cells = [
                short_count(rates.reads_per_s),
                short_bytes(rates.read_bytes_per_s),
                short_bytes(rates.origin_bytes_per_s),
                short_share(rates.hit_ratio),
            ]
        mark = ">" if number == chosen else " "
        text = Text(f"{mark} {' '.join(f'{cell:>4}' for cell in cells)}  ")
        state = _state(view)
        text.append(f"{state:<14}", style=_STATES.get(state, "bold red"))
        text.append(f" {tail(shown(view.place), width - len(text) - 1)}")
        lines.append(text)
    return lines


def _details(view: MountView, width: int, glyphs: Glyphs) -> list[Section]:
    head = Section(_head(view, width), 2)
    if view.sample is None or view.rates is None:
        return [head]
    activity = _activity(view.rates, width)
    sources = _sources(view, view.rates, width, glyphs)
    sections = [head, Section(activity, len(activity)), Section(sources, len(sources))]
    jobs, users = _jobs(view, width, glyphs), _users(view, view.sample, view.rates)
    sections.append(Section(jobs, min(3, len(jobs))))
    sections.append(Section(users, min(3, len(users))))
    return sections


def _state(view: MountView) -> str:
    row = view.row
    if row["state"] == SERVING:
        if row["origin_health"]["down_since"] is not None:
            return "origin down"
        if row["stale"]:
            return "stale names"
    return str(row["state"])


def _head(view: MountView, width: int) -> list[Text]:
    """Return the lines that identify the mount and name its problems."""
    row, state = view.row, _state(view)
    text = Text(tail(shown(view.place), width // 2), style="bold")
    text.append("  ")
    text.append(state, style=_STATES.get(state, "bold red"))
    if row["state"] == SERVING:
        lasts = format_duration(max(0.0, time.time() - row["started_at"]))
        text.append(f", up {lasts}, pid {row['pid']}", style="not bold")
    text.append(f"  {shown(str(row['source']))}", style="dim not bold")
    lines = notices(row) if row["state"] == SERVING else [row["problem"]]
    return [text, *(Text(shown(line), style="bold red") for line in lines if line)]


def _activity(rates: Rates, width: int) -> list[Text]:
    """Return lines about reads, names and requests to the origin."""
    rss = "-" if rates.rss_bytes is None else short_bytes(rates.rss_bytes)
    reads = [
        ("reads", f"{short_count(rates.reads_per_s)}/s"),
        ("", f"{short_bytes(rates.read_bytes_per_s)}/s"),
        ("hit", short_share(rates.hit_ratio)),
        ("p50", short_time(rates.read_p50_s)),
        ("p99", short_time(rates.read_p99_s)),
        ("wait", short_count(rates.waiting)),
    ]
    names = [
        ("look-ups", f"{short_count(rates.lookups_per_s)}/s"),
        ("evicted", f"{short_count(rates.evicted_per_s)}/s"),
        ("cpu", short_share(rates.cpu_ratio)),
        ("memory", rss),
    ]
    origin = [
        ("GET", f"{short_count(rates.origin_gets_per_s)}/s"),
        ("HEAD", f"{short_count(rates.origin_heads_per_s)}/s"),
        ("LIST", f"{short_count(rates.origin_lists_per_s)}/s"),
        ("errors", f"{short_count(rates.origin_errors_per_s)}/s"),
    ]
    writes = []
    if rates.writes is not None:
        writes = [
            ("sent", f"{short_bytes(rates.writes.sent_bytes_per_s)}/s"),
            ("PUT", f"{short_count(rates.writes.puts_per_s)}/s"),
            ("unsent", short_count(rates.writes.unsent_files)),
            ("", short_bytes(rates.writes.unsent_bytes)),
        ]
    gap = 1 if width < _NARROW_COLUMNS else 3
    return [_pairs(pairs, gap) for pairs in (reads, names, origin, writes) if pairs]


def _pairs(pairs: Iterable[tuple[str, str]], gap: int) -> Text:
    """Put the pairs in the same columns each time, so that nothing moves on the screen."""
    text = Text()
    for title, value in pairs:
        if title:
            text.append(" " * gap * bool(text))
            text.append(f"{title} ", style="dim")
        else:
            text.append(" ")
        is_trouble = title == "errors" and value != "0/s"
        width = 6 if value.endswith("/s") else 5
        text.append(f"{value:<{width}}", style="bold red" if is_trouble else "")
    return text


# -- where the bytes come from -------------------------------------------------------------------


def _sources(view: MountView, rates: Rates, width: int, glyphs: Glyphs) -> list[Text]:
    """Return a line for each tier, for the shared tier and for the origin."""
    bar_width = 6 if width < _NARROW_COLUMNS else 12
    rest = width - len("origin  B/s REQ/s  ") - len("  ") - bar_width - len(" 100% of 1023.9 GiB")
    paths = 0
    if width >= _WIDE_COLUMNS:
        paths = min(40, 2 + max((len(tier["path"]) for tier in view.row["tiers"]), default=0))
    curve_width = max(0, min(_LONGEST_CURVE, rest - paths))
    titles = f"{'FROM':<6}  B/s REQ/s  {'LATELY':<{curve_width}}  USED"
    lines = [_heading(titles)]
    known = {tier.path: tier for tier in rates.tiers}
    tiers = view.row["tiers"]
    for label, tier in zip(short_names(tiers), tiers, strict=True):
        seen = known.get(tier["path"])
        curve = _curve(view, tier["path"], curve_width, glyphs)
        line = _source(
            label, seen.bytes_per_s if seen else 0, seen.reads_per_s if seen else 0, curve
        )
        line.append_text(_room(tier, bar_width, glyphs))
        if paths:
            line.append(f"  {shown(tier['path'])}", style="dim")
        lines.append(line)
    if rates.shared is not None:
        curve = _curve(view, SHARED, curve_width, glyphs)
        line = _source(SHARED, rates.shared.bytes_per_s, rates.shared.hits_per_s, curve)
        line.append_text(_shared(view.row["shared"], rates.shared))
        lines.append(line)
    curve = _curve(view, ORIGIN, curve_width, glyphs)
    line = _source(ORIGIN, rates.origin_bytes_per_s, rates.origin_requests_per_s, curve)
    line.append_text(_origin(view.row))
    return [*lines, line]


def _source(label: str, bytes_per_s: float, per_s: float, curve: str) -> Text:
    text = Text(f"{label:<6} {short_bytes(bytes_per_s):>4} {short_count(per_s):>5}  ")
    text.append(curve, style="cyan")
    text.append("  ")
    return text


def _curve(view: MountView, name: str, width: int, glyphs: Glyphs) -> str:
    """Draw the history of `name`, the newest on the right, scaled to its own maximum."""
    values = list(view.history.get(name, ()))[-width:] if width else []
    top = max(values, default=0.0)
    most = len(glyphs.levels) - 1
    marks = [glyphs.levels[round(value / top * most) if top else 0] for value in values]
    return "".join(marks).rjust(width)


def bar(share: float, width: int, glyphs: Glyphs) -> str:
    """Draw a bar. It is completely filled only at a share of 1."""
    full = min(width, int(max(0.0, share) * width))
    return glyphs.full * full + glyphs.empty * (width - full)


def _room(tier: dict[str, Any], width: int, glyphs: Glyphs) -> Text:
    share = tier["used_bytes"] / max(1, tier["quota_bytes"])
    is_well = tier["health"] == HEALTHY
    text = Text(bar(share, width, glyphs), style="green" if is_well else "red")
    text.append(f" {share:>4.0%} of {format_bytes(tier['quota_bytes'])}", style="default")
    if not is_well:
        text.append(f" {tier['health'].upper()}", style="bold red")
    return text


def _shared(report: dict[str, Any], rates: SharedRates) -> Text:
    if report["state"] != IN_USE:
        return Text(report["state"].upper(), style="bold yellow")
    members = report["members"]
    used = sum(member["state"] == "in" for member in members)
    style = "default" if used == len(members) else "yellow"
    return Text(f"{short_share(rates.hit_ratio)} hit, {used} of {len(members)} members", style)


def _origin(row: dict[str, Any]) -> Text:
    health = row["origin_health"]
    if health["down_since"] is not None:
        lasts = format_duration(max(0.0, time.time() - health["down_since"]))
        return Text(f"DOWN for {lasts}", style="bold red")
    queued = f", {health['queued']} queued" if health["queued"] else ""
    return Text(f"{health['in_flight']} of {health['limit']} under way{queued}", style="default")


# -- jobs and users ------------------------------------------------------------------------------


def _jobs(view: MountView, width: int, glyphs: Glyphs) -> list[Text]:
    """Return lines about the running jobs and the last ended one; an empty list without jobs."""
    ended = [job for job in view.jobs if job["state"] in _FINAL]
    ended.sort(key=lambda job: job["ended_at"] or job["created_at"])
    jobs = [job for job in view.jobs if job["state"] not in _FINAL]
    jobs.sort(key=lambda job: -job["created_at"])
    jobs += ended[-1:]
    if not jobs:
        return []
    bar_width = 8 if width < _NARROW_COLUMNS else 16
    lines = [_heading(f"{'JOB':<9}{'STATE':<11}{'PROGRESS':<{bar_width + 7}}{'B/s':>4}  FILES")]
    lines += [_job(job, view.job_rates.get(job["id"]), bar_width, glyphs) for job in jobs]
    return lines


def _job(job: dict[str, Any], bytes_per_s: float | None, bar_width: int, glyphs: Glyphs) -> Text:
    progress, state = job["progress"], job["state"]
    text = Text(f"{job['id']:<9}")
    text.append(f"{state:<11}", style="" if state not in ("failed", "incomplete") else "bold red")
    share = _done(job)
    drawn = "" if share is None else f"{bar(share, bar_width, glyphs)} {short_share(share):>4}"
    text.append(f"{drawn:<{bar_width + 7}}", style="green")
    rate = "" if bytes_per_s is None or state in _FINAL else short_bytes(bytes_per_s)
    text.append(f"{rate:>4}  ")
    if state == "loading":
        wanted = progress["wanted_files"] - progress["excess_files"]
        text.append(f"{progress['fetched_files']:,} of {wanted:,}")
    else:
        text.append(f"{progress['files']:,}")
    if progress["failed_files"]:
        text.append(f", {progress['failed_files']:,} failed", style="bold red")
    if state in _FINAL and job["ended_at"]:
        ago = format_duration(max(0, round(time.time() - job["ended_at"])))
        text.append(f", {ago} ago", style="dim")
    elif progress["waiting_for"]:
        text.append(f", waiting: {shown(progress['waiting_for'])}", style="yellow")
    elif bytes_per_s and state == "loading":
        left = progress["wanted_bytes"] - progress["excess_bytes"] - progress["fetched_bytes"]
        text.append(f", {format_duration(round(max(0, left) / bytes_per_s))} left")
    return text


def _done(job: dict[str, Any]) -> float | None:
    """Return the completed share of the job, or None while it is unknown."""
    progress, state = job["progress"], job["state"]
    if state in ("done", "verifying"):
        return 1.0
    wanted = progress["wanted_bytes"] - progress["excess_bytes"]
    if state in ("new", "queued", "expanding") or not wanted:
        return None
    return min(1.0, float(progress["fetched_bytes"] / wanted))


def _users(view: MountView, sample: Sample, rates: Rates) -> list[Text]:
    """Return a line for each user, sorted by current read rate, then by bytes read in total."""
    totals = {user["uid"]: user for user in sample.requests["users"]}
    users = sorted(
        rates.users,
        key=lambda user: (user.bytes_per_s, totals[user.uid]["read_bytes"]),
        reverse=True,
    )
    if not users:
        return []
    limits = view.row["limits"]["limit_uid"]
    lines = [_heading(f"{'USER':<9}{'B/s':>4}  {'IN ALL':>10}  {'STALLED':>7}  LIMIT")]
    for user in users:
        uid = "others" if user.uid is None else str(user.uid)
        limit = limits.get(uid)
        lines.append(
            Text(
                f"{uid:<9}{short_bytes(user.bytes_per_s):>4}  "
                f"{format_bytes(totals[user.uid]['read_bytes']):>10}  "
                f"{short_share(user.stalled_share):>7}  "
                f"{format_bytes(limit) + '/s' if limit else '-'}"
            )
        )
    return lines


def _heading(text: str) -> Text:
    return Text(text, style="bold dim")


def tail(text: str, width: int) -> str:
    """Return the end of `text` if `width` has no room for all of it; the end says more than the
    beginning."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]
