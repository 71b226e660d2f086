"""docs/SEMANTICS.md: every claim names a test, and the test exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (S\d+) \|.*\| `(tests/[\w/]+\.py)::(test_\w+)` \|$", re.MULTILINE)


def test_every_claim_has_a_test_that_exists() -> None:
    text = (ROOT / "docs/SEMANTICS.md").read_text()
    claims = ROW.findall(text)
    numbers = [number for number, _, _ in claims]
    assert numbers == [f"S{index}" for index in range(1, len(numbers) + 1)]
    assert len(numbers) == len(re.findall(r"^\| S\d+ ", text, re.MULTILINE)) >= 40
    missing = [
        (number, test)
        for number, file, test in claims
        if not re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE)
    ]
    assert missing == []


def test_the_documented_object_ids_are_right() -> None:
    from cachefs.format.object_id import object_id

    text = (ROOT / "docs/formats/object_id.md").read_text()
    rows = re.findall(r"^\| (.*) \| (.*) \| (.*) \| `([0-9a-f]{32})` \|$", text, re.MULTILINE)
    assert len(rows) == 4 - 1, "all but the empty one"
    for *parts, digest in rows:
        plain = [part.strip("`").replace("byte FF", "\udcff") for part in parts]
        assert object_id(*plain).hex() == digest
