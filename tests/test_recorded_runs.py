"""Calm on recorded runs: the default profile in shadow over five well-set runs of the embedded task.

`data/healthy_well_set.jsonl.gz` holds the scalars of 5 x 60 rollouts with the controller off (seeds 11-15
of `experiments/quickstart/well_set_off.yaml`). Counted by trainer step (4 updates a rollout).
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from autotune.controller import Controller, ControlSettings
from autotune.decisions import Decision
from autotune.metrics import Reading, Snapshot
from autotune.recipe import load_recipe, recipe_facts

ROOT = Path(__file__).resolve().parent
UPDATES = 4
"""Trainer steps of one rollout."""


def recorded() -> dict[str, list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with gzip.open(ROOT / "data" / "healthy_well_set.jsonl.gz", "rt") as file:
        for line in file:
            row = json.loads(line)
            runs[row["run"]].append(row)
    return runs


def shadow(rows: list[dict[str, Any]], spoil: dict[int, float] | None = None) -> list[Decision]:
    """Decisions in shadow; `spoil` is rollout -> another mean reward."""
    recipe = load_recipe(ROOT.parent / "experiments" / "quickstart" / "well_set.yaml")
    controller = Controller(ControlSettings(mode="shadow"), recipe_facts(recipe))
    decisions = []
    for row in rows:
        metrics = row["metrics"] | (
            {"reward_mean": spoil[row["rollout"]]} if spoil and row["rollout"] in spoil else {}
        )
        readings = {name: Reading(value) for name, value in metrics.items()}
        decisions.append(controller.step(Snapshot(row["rollout"], row["knobs"], readings)))
    return decisions


def test_at_most_one_tuning_action_in_500_trainer_steps_and_no_emergency() -> None:
    runs = recorded()
    decisions = [d for rows in runs.values() for d in shadow(rows)]
    steps = UPDATES * len(decisions)
    assert (len(runs), steps) == (5, 1200)
    assert 500 * sum(len(d.changes) for d in decisions) / steps <= 1
    assert not [d for d in decisions if d.restore or d.stop]


def test_the_same_runs_with_a_collapse_written_into_them_are_not_calm() -> None:
    rows = recorded()["well_set-off-13"]
    decisions = shadow(rows, spoil=dict.fromkeys(range(40, 60), 0.0))
    restored = [d.rollout for d in decisions if d.restore]
    assert restored and restored[0] == 41
