"""The catalogue is whole, has no second copy of anything, and the page is what the code prints."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from autotune.catalogue import BY_ID, CATALOGUE, Entry, Kind, page
from autotune.policies import BASELINES, POLICIES, PROFILES

ROOT = Path(__file__).parent.parent
DOCUMENTED = [
    "E1",
    "A1",
    "A2",
    "A3",
    "A4",
    "A5",
    "A6",
    "B1",
    "B2",
    "B3a",
    "B3b",
    "B3c",
    "B4a",
    "B4b",
    "B5a",
    "B5b",
    "B6",
    "B6p",
    "B7",
    "B8",
    "X1",
    "X2",
    "X3",
    "X4",
    "X5",
    "P1",
    "P2",
    "P3",
    "P4",
]


def test_every_documented_id_is_there_once() -> None:
    ids = [entry.id for entry in CATALOGUE]
    assert len(ids) == len(set(ids)) and set(DOCUMENTED) <= set(ids)
    optional = {"XC", "XE", "XL", "XM", "XR", "XT", "XZ"}
    assert set(ids) - set(DOCUMENTED) == optional | set(BASELINES) - {"fixed"}


def test_every_policy_has_its_row_and_speaks_for_itself() -> None:
    assert {e.id for e in CATALOGUE if e.policy} == set(POLICIES)
    for entry in (e for e in CATALOGUE if e.policy):
        cls = POLICIES[entry.id]
        assert (entry.policy, entry.source, entry.summary) == (cls, cls.source, cls.summary)


def test_profiles_are_those_of_the_rules() -> None:
    for name, rules in PROFILES.items():
        assert {e.id for e in CATALOGUE if e.policy and name in e.profiles} == set(rules)
    assert BY_ID["A5"].profiles == tuple(PROFILES) and BY_ID["XE"].profiles == ()


def names_in(file: Path) -> set[str]:
    return {
        n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef | ast.ClassDef)
    }


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda e: e.id)
def test_where_it_lives_is_true(entry: Entry) -> None:
    for place in filter(None, (entry.home, entry.also)):
        file, _, names = place.partition(": ")
        assert (ROOT / file).is_file(), place
        wanted = set(names.split(", ")) if names else set()
        assert wanted <= names_in(ROOT / file), place


def test_invariants_name_tests_that_exist() -> None:
    invariants = [e for e in CATALOGUE if e.kind is Kind.INVARIANT]
    assert {e.id for e in invariants} == {"A5", "A6"} and all(e.tests for e in invariants)
    for test in (t for e in invariants for t in e.tests):
        file, _, name = test.partition("::")
        assert name in names_in(ROOT / file), test


def test_the_page_in_docs_is_what_the_code_prints() -> None:
    assert (ROOT / "docs" / "rules.md").read_text(encoding="utf-8") == page(), (
        "run: python -m autotune.catalogue > docs/rules.md"
    )


def test_the_page_has_every_id_every_parameter_and_every_default() -> None:
    text = page()
    for entry in CATALOGUE:
        section = text.split(f"\n### {entry.id}\n")[1].split("\n### ")[0]
        assert f"- source: {entry.source}" in section and entry.home in section
        for field in dataclasses.fields(entry.policy) if entry.policy else ():
            row = re.search(rf"^\| `{field.name}` \| (\S+) \|", section, re.M)
            assert row and float(row[1]) == pytest.approx(field.default, rel=1e-3), field.name
        for metric in entry.policy.needs if entry.policy else ():
            assert f"`{metric}`" in section
        for knob in entry.policy.moves if entry.policy else ():
            assert f"`{knob}`" in section


def test_the_page_says_when_a_rule_is_silent() -> None:
    text = page()

    def silent(id: str) -> str:
        return text.split(f"\n### {id}\n")[1].split("- silent: ")[1].split("\n")[0]

    assert "one update per rollout" in silent("A3") and "one update" not in silent("A4")
    assert "there is no critic" in silent("B5b")
    assert "no reference model" in silent("B3c") and "kl_coef pinned" in silent("B3c")


def test_no_stray_markup() -> None:
    """No `<` that Markdown could take for a tag outside code, and tables with equal columns."""
    rows = [line for line in page().splitlines() if line.startswith("|")]
    assert all(row.replace("\\|", "").count("|") in (4, 6) for row in rows)
    assert not any(re.search(r"<[a-zA-Z]", row) for row in rows)
