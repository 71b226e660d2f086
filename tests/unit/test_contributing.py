"""CONTRIBUTING.md, "How to add things": what it names exists, and no step was forgotten.

`tests/unit/test_metrics.py` does this for metrics, `tests/unit/test_cli_set.py` and
`tests/mount/test_supervisor.py` for live options.
"""

import re
from pathlib import Path
from typing import get_args

import pytest

from bench.engine import hit_ratio
from cachefs.cache.policies import POLICIES
from cachefs.cli import _VERBS
from cachefs.config import MountConfig, flags
from tests.origin.test_contract import BACKENDS

TOP = Path(__file__).parents[2]
SOURCE = TOP / "src/cachefs"
STEPS = (TOP / "CONTRIBUTING.md").read_text().partition("## How to add things")[2]
NAMED = re.compile(r"`([\w/.]+\.(?:py|md|json))`(?:\s+`(\w+)`)?")


def words_of(*paths: Path) -> str:
    return "\n".join(path.read_text() for path in paths)


DOCS = words_of(*sorted((TOP / "docs").glob("*.md")), TOP / "README.md")
TESTS = words_of(*sorted((TOP / "tests").rglob("*.py")))


def path_of(name: str) -> Path:
    return (TOP if name.startswith(("tests/", "docs/", "bench/")) else SOURCE) / name


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED.findall(STEPS))))
def test_what_is_named_exists(file: str, name: str) -> None:
    assert re.search(rf"\b{name}\b", path_of(file).read_text())


def test_enough_is_named() -> None:
    assert len(NAMED.findall(STEPS)) > 20


@pytest.mark.parametrize("option", sorted(flag.option for flag in flags().values()))
def test_every_option_is_in_the_document(option: str) -> None:
    assert re.search(rf"{option}(?![\w-])", (TOP / "docs/OPTIONS.md").read_text())


def test_every_verb_has_a_module_and_every_module_a_verb() -> None:
    """What is no verb lies in a folder of `cli/`."""
    modules = {path.stem.replace("_", "-") for path in (SOURCE / "cli").glob("[!_]*.py")}
    assert modules - {"mount-helper"} == set(_VERBS)


@pytest.mark.parametrize("verb", sorted(_VERBS))
def test_every_verb_is_documented_and_tested(verb: str) -> None:
    assert re.search(rf"cachefs {verb}(?![\w-])", DOCS)
    assert f'"{verb}"' in TESTS


def test_every_policy_can_be_chosen_and_is_measured() -> None:
    words = get_args(MountConfig.fields["cache_eviction"].annotation)
    assert set(words) == set(POLICIES) == set(hit_ratio.POLICIES)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_is_documented(policy: str) -> None:
    for name in ("OPTIONS.md", "GLOSSARY.md"):
        rows = [
            line for line in (TOP / "docs" / name).read_text().splitlines() if "viction" in line
        ]
        assert re.search(rf"(?<![\w-]){policy}(?![\w-])", "\n".join(rows))


def origins() -> set[str]:
    """The names of all functions `open_NAME` in the folders of `origin/` that return an origin."""
    text = words_of(*(SOURCE / "origin").glob("*/*.py"))
    return set(re.findall(r"^def open_(\w+)\([^)]*\) -> \W?\w*Origin\b", text, re.MULTILINE))


def test_origins_are_found() -> None:
    assert {"s3", "hdfs", "fsspec"} <= origins()


@pytest.mark.parametrize("name", sorted(origins()))
def test_every_origin_can_be_opened_is_documented_and_fulfils_the_contract(name: str) -> None:
    assert f"open_{name}(" in (SOURCE / "origin/open_origin.py").read_text()
    assert re.search(rf"\b{name}\b", (TOP / "docs/ORIGINS.md").read_text())
    assert f'name = "{name}' in (TOP / "tests/origin/backends.py").read_text()
    assert [backend for backend in map(str, BACKENDS) if name in backend]
