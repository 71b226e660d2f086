"""Finds the links of an index page of a web server, in one pass.

Python's own parser of HTML needs quadratic time for some pages, depending on the Python version.
"""

import html
from collections.abc import Iterator

_MOST_ATTRIBUTES = 20
"""Of one tag. After more of them no `href` is looked for."""
_SPACE = " \t\r\n\f"
_MOST_LINK_CHARACTERS = 4096
"""The longest path; Python refuses numbers of 4,301 digits."""


def links_in(page: str) -> Iterator[str]:
    """Yield the targets of the `<a href="...">` of a page as they are written, but unescaped."""
    start = page.find("<")
    while start >= 0:
        following = page.find("<", start + 1)
        end = len(page) if following < 0 else following
        # The next tag begins at the next `<`, so that each character is looked at once.
        if page[start + 1 : start + 2] in ("a", "A") and page[start + 2 : start + 3] in _SPACE:
            link = _target(page, start + 2, end)
            if link is not None:
                yield link
        start = following


def _target(page: str, start: int, end: int) -> str | None:
    """Return the value of `href` among the attributes in `page[start:end]`, or None."""
    for _ in range(_MOST_ATTRIBUTES):
        equals = page.find("=", start, end)
        if equals < 0:
            return None
        before = page[start:equals]
        if ">" in before:
            return None
        words = before.split()
        first = equals + 1
        while first < end and page[first] in _SPACE:
            first += 1
        if first >= end or page[first] not in "\"'":  # the value has no quotes
            start = first
            continue
        last = page.find(page[first], first + 1, end)
        if last < 0:
            return None
        if words and words[-1].lower() == "href":
            return _unescaped(page[first + 1 : last])
        start = last + 1
    return None


def _unescaped(text: str) -> str | None:
    """Return None if the text is too long for a path."""
    return html.unescape(text).strip() if len(text) <= _MOST_LINK_CHARACTERS else None
