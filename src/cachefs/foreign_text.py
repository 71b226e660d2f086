"""Makes texts of other programs, such as the sentence of a store, fit for messages and logs."""

import re

MOST_CHARACTERS = 240
_LONG_WORD = re.compile(r"[A-Za-z0-9+/=%_~-]{40,}")
"""Could be a signature or a session token that the store repeats. Names of files are cut as well:
the message names the file itself."""
_GAPS = re.compile(r"\s+")


def escaped(text: str) -> str:
    """Return `text` on one line, with each character that is not printable as Python writes it:
    `\\x1b`, `\\n`, `\\u202e`. A byte that is no UTF-8 becomes `\\udcXX`."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else _escape(mark) for mark in text)


def _escape(mark: str) -> str:
    return mark.encode("unicode_escape").decode("ascii")


def said(text: str, most_characters: int = MOST_CHARACTERS) -> str:
    """Return one line of at most `most_characters` printable characters, without anything that
    looks like a secret. The result may be empty."""
    line = _GAPS.sub(" ", text[: 4 * most_characters]).strip()
    line = "".join(char if char.isprintable() else "?" for char in line)
    line = _LONG_WORD.sub("(...)", line)
    return line if len(line) <= most_characters else line[: most_characters - 3] + "..."
