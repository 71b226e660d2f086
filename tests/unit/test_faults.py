"""docs/FAULTS.md: every fault names a test, and the test exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\|(.+)\|$", re.MULTILINE)
TEST = re.compile(r" `(tests/[\w/]+\.py)::(test_\w+)` ")


def rows() -> list[list[str]]:
    found = [row.split("|") for row in ROW.findall((ROOT / "docs/FAULTS.md").read_text())]
    return [row for row in found if row[0].strip(" -") not in ("", "fault")]


def test_every_fault_says_who_sees_what_for_how_long() -> None:
    assert len(rows()) >= 60
    assert [row for row in rows() if len(row) != 4 or not all(cell.strip() for cell in row)] == []
    faults = [tuple(row[:2]) for row in rows()]
    assert len(set(faults)) == len(faults)


def test_every_test_that_is_named_exists() -> None:
    missing = []
    for row in rows():
        named = TEST.fullmatch(row[-1])
        file = ROOT / named[1] if named else ROOT
        text = file.read_text() if named and file.is_file() else ""
        if not named or not re.search(rf"^(async )?def {named[2]}\(", text, re.MULTILINE):
            missing.append(row[-1])
    assert missing == []
