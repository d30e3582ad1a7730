"""Replay: bit-equal under the same rules, no echo, and what other rules would have said."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.controller import Controller, ControlSettings
from autotune.decisions import to_json
from autotune.errors import InputError, JournalError
from autotune.hooks.loop import ControlLoop
from autotune.journal import Journal, read_journal
from autotune.recipe import ControlSection, load_recipe
from autotune.replay import differences, numbers, replay, report
from autotune.testing import FakeTrainer

ROLLOUTS = 40


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return record(tmp_path, {"mode": "act"})


def record(folder: Path, control: dict[str, Any], knobs: dict[str, float] | None = None) -> Path:
    """A journal of a bold run on the plant, with the header that `run.py` writes."""
    (folder / "r.yaml").write_text(json.dumps({"control": control}))
    recipe = load_recipe(folder / "r.yaml")
    knobs = knobs or {"actor_learning_rate": 2e-3, "ppo_mini_batch_size": 4}
    trainer = FakeTrainer(knobs, seed=5, rollouts=ROLLOUTS)
    settings = ControlSettings(**recipe.control.model_dump())
    controller = None if settings.mode == "off" else Controller(settings, trainer.facts())
    path = folder / "journal.jsonl"
    with Journal(path) as journal:
        header = {"recipe": recipe.model_dump(mode="json"), "facts": to_json(trainer.facts())}
        journal.append("header", -1, header)
        trainer.run(ControlLoop(trainer, controller, journal).on_rollout)
    return path


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> Path:
    """Change lines and bind them into a new, unbroken chain: only the rules can tell."""
    lines = read_journal(path)
    change(lines)
    prev, texts = "0" * 64, []
    for line in lines:
        texts.append(json.dumps({**line, "prev": prev}, separators=(",", ":"), ensure_ascii=False))
        prev = hashlib.sha256(texts[-1].encode()).hexdigest()
    forged = path.with_name("forged.jsonl")
    forged.write_text("\n".join(texts) + "\n")
    return forged


def test_the_same_rules_decide_the_same(recorded: Path) -> None:
    result = replay(recorded)
    assert result.equal and len(result.pairs) == ROLLOUTS
    assert sum(bool(p.recomputed["changes"]) for p in result.pairs) >= 3
    assert replay(recorded.parent).equal, "a run's folder stands for its journal"


@pytest.mark.parametrize("profile", ["documented", "literal", "recommended"])
@pytest.mark.parametrize("mode", ["act", "shadow"])
def test_every_profile_and_mode_replays(tmp_path: Path, mode: str, profile: str) -> None:
    assert replay(record(tmp_path, {"mode": mode, "profile": profile})).equal


def test_an_altered_metric_changes_a_decision(recorded: Path) -> None:
    first = next(p.rollout for p in replay(recorded).pairs if p.recomputed["changes"])

    def calm(lines: list[dict[str, Any]]) -> None:
        lines[first + 1]["snapshot"]["metrics"]["kl_step"] = 0.01

    result = replay(rewrite(recorded, calm))
    assert not result.altered, "the chain was forged well: only the rules can tell"
    difference = result.first_difference
    assert difference is not None and difference.rollout == first
    assert not result.equal and report(result)["differing_rollouts"][0] == first


def test_an_altered_decision_is_found_with_its_place(recorded: Path) -> None:
    first = next(p.rollout for p in replay(recorded).pairs if p.recomputed["changes"])

    def nudge(lines: list[dict[str, Any]]) -> None:
        change = lines[first + 1]["decision"]["changes"][0]
        change["after"] = math.nextafter(change["after"], math.inf)

    difference = replay(rewrite(recorded, nudge)).first_difference
    assert difference is not None
    assert (difference.rollout, difference.path) == (first, "changes.0.after")


def test_what_was_read_back_is_fed_and_not_what_was_decided(recorded: Path) -> None:
    def disobey(lines: list[dict[str, Any]]) -> None:
        item = next(ln for ln in lines if ln.get("applied"))["applied"][0]
        item.update(read_back=item["requested"] * 2, error="the trainer refused")

    assert not replay(rewrite(recorded, disobey)).equal


def test_a_broken_chain_is_told_and_still_replayed(recorded: Path) -> None:
    lines = recorded.read_text().splitlines(keepends=True)
    recorded.write_text("".join([*lines[:5], *lines[6:]]))
    result = replay(recorded)
    assert "missing" in result.altered and not result.equal and len(result.pairs) == ROLLOUTS - 1


def test_a_torn_line_is_left_out_with_a_word(recorded: Path) -> None:
    recorded.write_bytes(recorded.read_bytes()[:-20])
    result = replay(recorded)
    assert result.equal and "torn" in result.warnings[0] and len(result.pairs) == ROLLOUTS - 1


def test_other_rules_are_asked_in_shadow(recorded: Path) -> None:
    result = replay(recorded, ControlSection(policies={"X1": "off", "X2": "off"}))
    assert result.other_rules and result.settings.mode == "shadow"
    told = {c["rule"] for p in result.pairs for c in p.recomputed["changes"]}
    assert not told & {"X1", "X2"}
    assert report(result)["changes"]


def test_a_run_without_a_controller(tmp_path: Path) -> None:
    path = record(tmp_path, {"mode": "off"})
    with pytest.raises(InputError, match="--control"):
        replay(path)
    result = replay(path, ControlSection())
    assert any(p.recomputed["changes"] for p in result.pairs)


def test_a_journal_without_a_header(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append("end", 0, {})
    with pytest.raises(JournalError, match="has no header"):
        replay(tmp_path)


def test_numbers_that_are_not_finite_come_back_as_numbers() -> None:
    seen = numbers({"per_update": {"x": ["nan", 1.0, "-inf"]}, "reason": "nan", "name": "warmup"})
    assert math.isnan(seen["per_update"]["x"][0]) and seen["per_update"]["x"][2] == -math.inf
    assert (seen["reason"], seen["name"]) == ("nan", "warmup")


def test_differences_reach_every_leaf() -> None:
    old = {"a": [1, {"b": 2}], "c": None, "gone": 1}
    new = {"a": [1, {"b": 3}, 4], "c": 0}
    assert list(differences(old, new)) == [
        ("a.1.b", 2, 3), ("a.2", None, 4), ("c", None, 0), ("gone", 1, None),
    ]  # fmt: skip
    assert list(differences(old, old)) == []
