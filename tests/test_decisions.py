"""Decisions: plain JSON, and what counts as obeyed."""

from __future__ import annotations

import json

import pytest

from autotune.decisions import (
    Applied,
    Change,
    Decision,
    Kind,
    Outcome,
    Proposal,
    Restore,
    State,
    Verdict,
    Veto,
    applied_from_json,
    to_json,
)
from tests.series import facts

PROPOSAL = Proposal("X1", "actor_learning_rate", 1e-4, "too far", Kind.REGULATOR, {"kl_step": 0.1})
CHANGE = Change(
    "A4",
    "ppo_mini_batch_size",
    16,
    32,
    "why",
    Kind.INTERVENTION,
    {"ppo_mini_batch_size": 32, "micro_batch_size": 128},
)


def test_a_decision_is_plain_json() -> None:
    decision = Decision(
        rollout=7,
        state=State.SETTLE,
        epoch=2,
        proposals=(PROPOSAL,),
        vetoes=(Veto(PROPOSAL, "cooled_down", "soon"),),
        changes=(CHANGE,),
        verdicts=(Verdict("A1", "ppo_mini_batch_size", Outcome.KEPT, "ok", 3, {"difference_sd": 2.5}),),
        restore=Restore("undo", 7, "drift"),
        silent={"B3a": "no reference"},
    )
    line = to_json(decision)
    assert json.loads(json.dumps(line, allow_nan=False)) == line
    assert line["state"] == "settle" and type(line["state"]) is str
    assert line["vetoes"][0]["proposal"]["kind"] == "regulator"
    assert line["restore"] == {"kind": "undo", "before_rollout": 7, "reason": "drift"}


def test_values_are_the_real_knobs_of_all_changes() -> None:
    decision = Decision(0, State.OBSERVE, 0, changes=(CHANGE,))
    assert decision.values == {"ppo_mini_batch_size": 32, "micro_batch_size": 128}
    assert Decision(0, State.OBSERVE, 0).values == {}


@pytest.mark.parametrize(
    ("requested", "read_back", "error", "ok"),
    [
        (3e-4, 3e-4, "", True),
        (3e-4, 3e-4 * (1 + 5e-7), "", True),  # float32 inside the trainer is close enough
        (3e-4, 3e-4 * (1 + 2e-6), "", False),
        (3e-4, 1e-4, "", False),
        (0.0, 0.0, "", True),
        (3e-4, 3e-4, "rank 1 did not answer", False),
        (3e-4, float("nan"), "", False),
    ],
)
def test_obeyed_means_read_back(requested: float, read_back: float, error: str, ok: bool) -> None:
    applied = Applied("actor_learning_rate", requested, read_back, 8, error)
    assert applied.ok == ok
    assert applied_from_json(to_json(applied)).knob == applied.knob


def test_applied_survives_json() -> None:
    applied = Applied("kl_coef", 0.1, 0.1, 8, "why")
    assert applied_from_json(json.loads(json.dumps(to_json(applied)))) == applied


def test_facts_know_which_knobs_move() -> None:
    of = facts(immovable={"kl_coef": "there is no reference"})
    assert of.can_move("actor_learning_rate")
    assert not of.can_move("kl_coef") and not of.can_move("warp_factor")
