"""The examples of README and docs: fenced and indented blocks, and the command lines in them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).parents[2]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?:(?: {4}).+\n)+")
_OURS = re.compile(r"(?:\.venv/bin/)?cachefs ")


class Example(NamedTuple):
    """`place` is FILE:LINE."""

    place: str
    language: str
    text: str

    def __str__(self) -> str:
        return self.place


def documents() -> list[Path]:
    return [TOP / "README.md", TOP / "CONTRIBUTING.md", *sorted((TOP / "docs").rglob("*.md"))]


def blocks(file: Path) -> Iterator[Example]:
    text = file.read_text()
    for pattern in (_FENCED, _INDENTED):
        for found in pattern.finditer(text):
            number = text.count("\n", 0, found.start()) + 1
            language = found[1] if pattern is _FENCED else ""
            inner = found[2] if pattern is _FENCED else re.sub("(?m)^ {4}", "", found[0])
            yield Example(f"{file.relative_to(TOP)}:{number}", language, inner)


def command_lines(file: Path) -> Iterator[Example]:
    """Lines that call cachefs, without comments."""
    for block in blocks(file):
        for line in block.text.splitlines():
            if _OURS.match(line):
                command = line.split("  #")[0].strip().removeprefix(".venv/bin/")
                yield Example(f"{block.place}: {command}", "sh", command)
