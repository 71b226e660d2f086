"""Write the results as Markdown: bars, tables, figures in which others are ahead, footnotes,
command lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.peers.bars import Verdict, judge
from bench.peers.figures import FIGURES, SECTIONS, Figure, Measures
from bench.report import show

_INTRODUCTION = (
    "Written by `make bench-peers` (the code stands in `bench/peers`); don't edit. The figures are "
    "medians of rounds in which the peers take turns. **Bold**: the best of the mounts. A dash: "
    "see the footnote, or not measured. s3fs-fuse is Debian's (`apt-get install s3fs`); GEESEFS "
    "and MOUNTPOINT_S3 name the binaries of geesefs and mountpoint-s3."
)
_COMMAND_LINES = (
    "S3 keys are handed over by environment or a password file. For blocks in memory and for the "
    "epochs, size and place of the cache differ."
)
_AHEAD = 1.05
"""The least ratio at which another peer counts as ahead. Below it, rounds differ as much."""


@dataclass(slots=True)
class Footnotes:
    """Footnotes, numbered in the order of first use. The same text has one number."""

    texts: list[str] = field(default_factory=list)

    def mark(self, text: str | None) -> str:
        if text is None:
            return ""
        if text not in self.texts:
            self.texts.append(text)
        return f" [{self.texts.index(text) + 1}]"


def render(
    measures: Measures,
    peers: Sequence[str],
    facts: Sequence[str],
    versions: Mapping[str, str],
    command_lines: Mapping[str, str],
    plot: str,
    whole: bool = False,
) -> str:
    """Return the whole page. `facts` describe the machine and the method. After a `whole` run the
    page also lists bars without measurements."""
    notes = Footnotes()
    verdicts = [verdict for verdict in judge(measures) if whole or verdict.met is not None]
    lines = [
        "# cachefs beside its peers",
        "",
        _INTRODUCTION,
        "",
        *(f"- {fact}" for fact in facts),
        "",
        f"![cachefs and its peers, as bars]({plot})",
        "",
    ]
    if verdicts:
        met = sum(bool(verdict.met) for verdict in verdicts)
        lines += [f"## Bars: {met} of {len(verdicts)} met", "", *_bars(verdicts), ""]
    lines += ["## Where a peer is ahead of cachefs", "", *_ahead(measures, peers), ""]
    for section in SECTIONS:
        figures = [f for f in section.figures if any((f.key, p) in measures.values for p in peers)]
        if figures:
            lines += [f"## {section.title}", "", section.text, ""]
            lines += [*_table(figures, measures, peers, notes), ""]
    if notes.texts:
        lines += ["## Footnotes", ""]
        lines += [f"{number}. {text}" for number, text in enumerate(notes.texts, 1)] + [""]
    lines += ["## Versions", "", *(f"- {name} {text}" for name, text in versions.items()), ""]
    lines += ["## Command lines", ""]
    lines += [_COMMAND_LINES, "", "```"]
    lines += [text for text in command_lines.values() if text]
    lines += ["```", ""]
    return "\n".join(lines)


def _bars(verdicts: Sequence[Verdict]) -> list[str]:
    lines = [_row(["", "cachefs", "against", "", "ratio", "target", ""]), _row(["---"] * 7)]
    for verdict in verdicts:
        figure = FIGURES[verdict.bar.key]
        against = verdict.bar.against
        if verdict.bar.their_key:
            against += f", {FIGURES[verdict.bar.their_key].title}"
        ours, theirs, ratio = (
            "-" if value is None else text
            for value, text in (
                (verdict.ours, f"{show(verdict.ours or 0)} {figure.unit}".strip()),
                (verdict.theirs, show(verdict.theirs or 0)),
                (verdict.ratio, f"{verdict.ratio or 0:.2f}x"),
            )
        )
        words = {True: "met", False: "**missed**", None: "**not measured**"}
        lines.append(
            _row(
                [
                    title_of(figure),
                    ours,
                    against,
                    theirs,
                    ratio,
                    verdict.bar.target,
                    words[verdict.met],
                ]
            )
        )
    return lines


def _ahead(measures: Measures, peers: Sequence[str]) -> list[str]:
    """Return one line for each figure in which another mount beats cachefs."""
    lines = []
    for figure in FIGURES.values():
        ours = measures.median(figure.key, "cachefs")
        if ours is None or figure.follows:
            continue
        for peer in peers:
            theirs = measures.median(figure.key, peer)
            if peer in ("cachefs", "local") or theirs is None:
                continue
            better, worse = (ours, theirs) if figure.less_is_better else (theirs, ours)
            if better > worse * _AHEAD:
                by = f" ({better / worse:.2f}x)" if worse > 0 else ""
                text = f"{show(theirs)} against {show(ours)} {figure.unit}".strip()
                lines.append(f"- {title_of(figure)}: {peer}, {text}{by}")
    return lines or ["Nowhere in this run."]


def _table(
    figures: Sequence[Figure], measures: Measures, peers: Sequence[str], notes: Footnotes
) -> list[str]:
    lines = [_row(["", "unit", *peers]), _row(["---", "---", *["---:"] * len(peers)])]
    for figure in figures:
        medians = {peer: measures.median(figure.key, peer) for peer in peers}
        mounts = [value for peer, value in medians.items() if value is not None and peer != "local"]
        best = (min if figure.less_is_better else max)(mounts, default=None)
        cells = [figure.title, figure.unit]
        for peer, value in medians.items():
            text = "-" if value is None else show(value)
            if value is not None and value == best and peer != "local" and len(mounts) > 1:
                text = f"**{text}**"
            cells.append(text + notes.mark(measures.note(figure.key, peer)))
        lines.append(_row(cells))
    return lines


def title_of(figure: Figure) -> str:
    """Return the figure's title after its section's title."""
    section = next(section for section in SECTIONS if figure in section.figures)
    return f"{section.title}: {figure.title}"


def describe(machine: Mapping[str, Any]) -> list[str]:
    """Return facts about the machine."""
    return [
        "{cpu}, {cores} cores, {memory_gib} GiB, {virtualisation}; {system}, Linux {kernel}; "
        "caches on {cache_file_system}; load before: {load_before}".format(**machine),
        "origin: SeaweedFS {seaweedfs} on the same machine, over loopback".format(**machine),
        "idle virtual CPUs poll for {guest_halt_poll_ns_as_found} ns before they halt".format(
            **machine
        ),
    ]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
