"""Draw the plot as SVG: a panel of horizontal bars for each of the main figures."""

from collections.abc import Sequence
from html import escape

from bench.peers.figures import FIGURES, Measures
from bench.peers.markdown import title_of
from bench.report import show

_PANELS = (
    "cold.1", "cold.16", "cached.warm.1", "cached.warm.4", "cached.dropped.4",
    "memory.dropped.4", "large.cold", "large.dropped", "large.cold.4k", "lmdb.dropped",
    "names.ls.warm", "names.find.warm", "import.first", "import.second", "epochs.hits",
)  # fmt: skip
_COLOURS = {
    "cachefs": "#d9480f", "JuiceFS": "#2f6f9f", "rclone": "#6a8caf", "s3fs": "#9db4c8",
    "geesefs": "#5b8c7a", "mountpoint": "#8f7fb5", "local": "#b8b8b8",
}  # fmt: skip
_FONTS = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
_COLUMNS, _WIDTH, _GAP, _MARGIN = 3, 340, 24, 20
_HEAD, _STEP, _BAR = 44, 19, 13
_LABEL, _VALUE = 72, 62
"""The room for the name before a bar, and for the figure after it."""
_TOP = 62


def draw(measures: Measures, peers: Sequence[str]) -> str:
    """Return the text of the SVG, without panels that have no figure."""
    keys = [key for key in _PANELS if any(measures.median(key, peer) is not None for peer in peers)]
    height = _HEAD + _STEP * len(peers) + 12
    rows = -(-len(keys) // _COLUMNS)
    width = 2 * _MARGIN + _COLUMNS * _WIDTH + (_COLUMNS - 1) * _GAP
    total = _TOP + rows * height + _MARGIN
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" '
            f'width="{width}" height="{total}" font-family="{_FONTS}">'
        ),
        f'<rect width="{width}" height="{total}" fill="#ffffff"/>',
        _text(_MARGIN, 32, "cachefs beside its peers", 19, bold=True),
        _text(_MARGIN, 50, "Medians; every panel has its own scale.", 12, "#555555"),
    ]
    for number, key in enumerate(keys):
        column, row = number % _COLUMNS, number // _COLUMNS
        x, y = _MARGIN + column * (_WIDTH + _GAP), _TOP + row * height
        parts += _panel(measures, peers, key, x, y)
    return "\n".join([*parts, "</svg>", ""])


def _panel(measures: Measures, peers: Sequence[str], key: str, x: int, y: int) -> list[str]:
    figure = FIGURES[key]
    medians = {peer: measures.median(key, peer) for peer in peers}
    largest = max(value for value in medians.values() if value is not None) or 1
    unit = f"{figure.unit}, less is better" if figure.less_is_better else figure.unit
    title = title_of(figure).replace("`", "")
    parts = [_text(x, y + 20, title, 12, bold=True), _text(x, y + 35, unit, 11, "#555555")]
    room = _WIDTH - _LABEL - _VALUE
    for number, (peer, value) in enumerate(medians.items()):
        top = y + _HEAD + number * _STEP
        parts.append(_text(x + _LABEL - 6, top + 11, peer, 11, anchor="end"))
        length = 0.0 if value is None else max(room * value / largest, 1)
        parts.append(
            f'<rect x="{x + _LABEL}" y="{top}" width="{length:.1f}" height="{_BAR}" '
            f'fill="{_COLOURS.get(peer, "#f0a882")}"/>'
        )
        shown = "-" if value is None else show(value)
        end = x + _LABEL + length + 5
        parts.append(_text(end, top + 11, shown, 11, bold=peer == "cachefs"))
    return parts


def _text(
    x: float,
    y: float,
    text: str,
    size: float,
    colour: str = "#1a1a1a",
    *,
    bold: bool = False,
    anchor: str = "start",
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}"{weight}>{escape(text)}</text>'
    )
