"""What the rules are measured against, with its known faults; and that the KL law B3c has none of them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.controller import Controller, ControlSettings
from autotune.decisions import Applied, Decision
from autotune.policies import BASELINES, PROFILES, UNGUARDED
from autotune.policies.baselines import AdaptiveEntropy, AdaptiveKl, RandomMoves, draw, ziegler
from autotune.testing.fake import FakeTrainer
from tests.series import FLAT, QUICK, TREND, ask, facts, run, snapshot, wants

B3C_ALONE = {rule: "off" for rule in PROFILES["documented"] if rule != "B3c"}


@dataclass
class Loop:
    """A controller with one KL law on the textbook plant: KL = strength / kl_coef, with a lag."""

    profile: str
    strength: float
    start: float = 0.1
    batch: int = 64
    lag: float = 0.6
    reward: Callable[[float, int], float] = lambda kl, t: 0.5
    noise: Callable[[int], float] = lambda t: 0.0
    coef: float = 0.0
    kl: float = -1.0
    rollout: int = 0
    moves: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coef = self.coef or self.start
        self.kl = self.strength / self.coef if self.kl < 0 else self.kl
        off = B3C_ALONE if self.profile == "documented" else {}
        of = facts(knobs={"kl_coef": self.start, "train_batch_size": self.batch})
        self.controller = Controller(ControlSettings(profile=self.profile, policies=off), of)

    def step(self) -> Decision:
        t = self.rollout
        self.kl += self.lag * (self.strength / self.coef - self.kl)
        knobs = {"kl_coef": self.coef, "train_batch_size": self.batch}
        shown = self.kl * math.exp(self.noise(t))
        snap = snapshot(t, knobs, kl_ref=shown, reward_mean=self.reward(self.kl, t))
        decision = self.controller.step(snap)
        applied = []
        for knob, value in decision.values.items():
            self.moves.append(value / self.coef)
            self.coef = value
            applied.append(Applied(knob, value, value, t + 1))
        self.controller.confirm(applied, None)
        self.rollout += 1
        return decision

    def until(self, inside: Callable[[float], bool], most: int = 3000) -> int:
        """Moves until KL is where it should be."""
        for _ in range(most):
            if inside(self.kl):
                return len(self.moves)
            self.step()
        raise AssertionError(f"KL is still {self.kl:.3g} after {most} rollouts")


def harmed(kl: float, t: int) -> float:
    """A reward that falls while KL is above the band, and rests below it."""
    return 0.5 - 0.02 * t if kl > 0.08 else 0.5


# --------------------------------------------------------------------- the KL law against Ziegler's


def evaluations(profile: str, batch: int) -> int:
    """Moves to bring a KL of ten times the upper edge (or target) back."""
    edge = 0.08 if profile == "documented" else 0.1
    loop = Loop(profile, strength=10 * edge * 0.1, batch=batch, lag=1.0, reward=harmed)
    return loop.until(lambda kl: kl <= edge * 1.01)


def test_b3c_corrects_a_tenfold_error_in_as_many_moves_at_any_batch() -> None:
    assert evaluations("documented", 256) == evaluations("documented", 8192) <= 12
    assert evaluations("adaptive_kl", 256) > 10 * evaluations("adaptive_kl", 8192)


@settings(QUICK, max_examples=25)
@given(st.floats(1e-4, 1e3), st.floats(1e-3, 1.0), st.sampled_from([64, 8192, 65536]))
def test_b3c_is_always_positive(strength: float, start: float, batch: int) -> None:
    loop = Loop("documented", strength, start=start, batch=batch, reward=harmed)
    for _ in range(40):
        loop.step()
        assert start / 10 * (1 - 1e-9) <= loop.coef <= start * 10 * (1 + 1e-9)


def test_ziegler_turns_negative_with_a_large_batch() -> None:
    assert ziegler(0.1, kl=0.0, target=0.1, n_steps=65536, horizon=10_000) < 0
    knobs = {"kl_coef": 0.1, "train_batch_size": 8192}
    answer = wants(ask(AdaptiveKl(), run(1, knobs=knobs, kl_ref=0.0), of=facts(knobs=knobs)))
    assert answer is not None and answer[1] < 0


def test_b3c_recovers_from_its_floor_and_ziegler_not_from_zero() -> None:
    loop = Loop("documented", strength=0.006, start=0.1, coef=0.01, reward=harmed)
    assert loop.until(lambda kl: kl <= 0.08) > 0 and loop.kl >= 0.03
    assert ziegler(0.0, kl=5.0, target=0.1, n_steps=512, horizon=10_000) == 0.0


def climbs(profile: str) -> Loop:
    """A young run: KL rises from 0 by itself for 100 rollouts, and the reward with it."""
    loop = Loop(profile, strength=0.005, kl=0.0, lag=0.02, reward=lambda kl, t: 0.2 + 0.004 * t)
    for _ in range(100):
        loop.step()
    return loop


def test_b3c_does_not_wind_down_while_kl_rises_from_zero() -> None:
    """The reward rises too slowly for a short window: only KL's own climb says that the run is young."""
    assert climbs("documented").coef == 0.1
    assert climbs("adaptive_kl").coef < 0.06


@settings(QUICK, max_examples=12)
@given(st.floats(0.0008, 0.04), st.floats(0.3, 1.0), st.floats(0.0, 0.35), st.integers(0, 999))
def test_b3c_has_no_limit_cycle_under_noise(strength: float, lag: float, sd: float, seed: int) -> None:
    """At most one change of direction in 200 rollouts once it has settled, wherever it began."""
    noise = np.random.default_rng(seed).normal(0.0, sd, size=400).tolist()
    loop = Loop("documented", strength, lag=lag, reward=harmed, noise=noise.__getitem__)
    for _ in range(200):
        loop.step()
    settled = len(loop.moves)
    for _ in range(200):
        loop.step()
    late = loop.moves[settled:]
    assert sum((a > 1) != (b > 1) for a, b in itertools.pairwise(late)) <= 1


@pytest.mark.parametrize("stop", [9, 12, 17])
def test_b3c_goes_on_after_a_save_and_load_as_if_nothing_had_been(stop: int) -> None:
    loop = Loop("documented", strength=0.08, reward=harmed)
    for _ in range(stop):
        loop.step()
    assert loop.controller.ledger.engagements, "saved in the middle of its work"
    other = Loop("documented", 0.08, coef=loop.coef, kl=loop.kl, rollout=stop, reward=harmed)
    other.controller.load_state_dict(json.loads(json.dumps(loop.controller.state_dict())))
    assert [loop.step() for _ in range(30)] == [other.step() for _ in range(30)]


# ----------------------------------------------------------------------------------- adaptive_kl


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (0.1, None),  # at its target
        (0.11, 1 + 0.1 * 0.0512),
        (0.12, 1 + 0.2 * 0.0512),
        (0.13, 1 + 0.2 * 0.0512),  # the error is clipped
        (0.08, 1 - 0.2 * 0.0512),
        (0.0, 1 - 0.2 * 0.0512),
    ],
)
def test_adaptive_kl_is_the_classic_formula(kl: float, factor: float | None) -> None:
    """64 prompts x 8 responses against a horizon of 10,000."""
    knobs = {"kl_coef": 0.1}
    answer = wants(ask(AdaptiveKl(), run(1, knobs=knobs, kl_ref=kl), of=facts(knobs=knobs)))
    assert answer == (None if factor is None else ("kl_coef", pytest.approx(0.1 * factor)))


def test_adaptive_kl_acts_from_the_first_rollout_on() -> None:
    loop = Loop("adaptive_kl", strength=0.05)
    assert [bool(loop.step().changes) for _ in range(3)] == [True] * 3


# ------------------------------------------------------------------------------ adaptive_entropy


def entropy_run(values: list[float], save_at: int | None = None) -> list[float]:
    """entropy_coef after each rollout; saved and loaded into a fresh controller before `save_at`."""
    settings_ = ControlSettings(profile="adaptive_entropy")
    controller, coefs, coef = Controller(settings_, facts()), [], 0.0
    for t, entropy in enumerate(values):
        if t == save_at:
            state = json.loads(json.dumps(controller.state_dict()))
            controller = Controller(settings_, facts())
            controller.load_state_dict(state)
        decision = controller.step(snapshot(t, {"entropy_coef": coef}, entropy=entropy))
        coef = decision.values.get("entropy_coef", coef)
        controller.confirm([Applied(k, v, v, t + 1) for k, v in decision.values.items()], None)
        coefs.append(coef)
    return coefs


def test_adaptive_entropy_walks_by_delta_behind_a_one_sided_gate() -> None:
    low, high = 0.1, 0.4
    coefs = entropy_run([low, low, low, high, low, 0.2, 0.2001, high, high, high, low])
    expected = [0.005, 0.010, 0.015, 0.0, 0.015, 0.020, 0.0, 0.0, 0.0, 0.0, 0.005]
    assert coefs == pytest.approx(expected)


@pytest.mark.parametrize("save_at", range(1, 8))
def test_adaptive_entropy_keeps_its_hidden_coefficient_over_a_restart(save_at: int) -> None:
    values = [0.1, 0.1, 0.1, 0.4, 0.1, 0.3, 0.1, 0.1]
    assert entropy_run(values, save_at) == entropy_run(values)


def test_adaptive_entropy_ignores_what_was_not_measured() -> None:
    nothing = run(1, entropy=None)
    assert AdaptiveEntropy().remember(_context(nothing)) == 0.0
    assert ask(AdaptiveEntropy(), nothing) is None


def _context(snapshots: list[Any]) -> Any:
    from tests.series import context

    return context(snapshots)


# ---------------------------------------------------------------------------------------- random


def test_the_lot_depends_on_seed_rollout_and_use_alone() -> None:
    assert draw(1, 2, 3) == draw(1, 2, 3) == pytest.approx(0.8779307342756412, rel=1e-15)
    values = [draw(seed, t, use) for seed in range(10) for t in range(100) for use in range(3)]
    assert len(set(values)) == 3000 and all(0 <= v < 1 for v in values)
    assert np.mean(values) == pytest.approx(0.5, abs=0.02)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.06


def lots(seed: int, rate: float = 0.5, knobs: dict[str, float] | None = None) -> list[Any]:
    rule = RandomMoves(seed=seed, rate=rate)
    return [wants(ask(rule, run(1, start=t, knobs=knobs, reward_mean=FLAT[0]))) for t in range(300)]


def test_random_moves_every_knob_both_ways_at_its_rate() -> None:
    seen = [lot for lot in lots(3) if lot is not None]
    assert 110 <= len(seen) <= 190 and lots(3) == lots(3) != lots(4)
    assert lots(3, rate=0.0) == [None] * 300
    factors = {knob: {value for k, value in seen if k == knob} for knob, _ in seen}
    assert set(factors) == set(RandomMoves.moves)
    assert all(len(values) == 2 for values in factors.values())


def test_random_leaves_pinned_and_zero_knobs_alone() -> None:
    of = facts(immovable={"kl_coef": "no reference", "max_response_length": "fixed"})
    rule = RandomMoves(rate=1.0)
    seen = {ask(rule, run(1, start=t), of=of, pinned=frozenset({"clip_range_low"})).knob for t in range(80)}
    assert seen == {"actor_learning_rate", "ppo_mini_batch_size"}


def actions(profile: str, seed: int) -> int:
    """Granted changes of 200 rollouts on the plant, from a timid start."""
    start = {"actor_learning_rate": 3e-5, "ppo_mini_batch_size": 64}
    trainer = FakeTrainer(start, seed=seed, rollouts=200)
    policies = {"random": {"seed": seed}} if profile == "random" else {}
    controller, count = Controller(ControlSettings(profile=profile, policies=policies), trainer.facts()), 0
    while trainer.rollout < 200:
        decision = controller.step(trainer.read(trainer.advance(), trainer.rollout - 1))
        restored = trainer.restore(decision.restore) if decision.restore else None
        controller.confirm(trainer.apply(decision.values, decision.epoch), restored)
        count += len(decision.changes)
    return count


def test_random_acts_about_as_often_as_the_rules() -> None:
    rules = sum(actions("recommended", seed) for seed in range(3))
    lots_ = sum(actions("random", seed) for seed in range(3))
    assert rules / 2.5 <= lots_ <= rules * 2.5


# -------------------------------------------------------------------------------------- profiles


def test_every_baseline_is_a_profile_of_its_own() -> None:
    assert PROFILES["fixed"] == ()
    assert all(PROFILES[name] == (name,) for name in BASELINES if name != "fixed")
    assert set(BASELINES) - set(UNGUARDED) == {"fixed", "random"}
    assert not any(set(BASELINES) & set(rules) for name, rules in PROFILES.items() if name not in BASELINES)


def test_fixed_never_changes_anything() -> None:
    controller = Controller(ControlSettings(profile="fixed"), facts())
    wild = run(TREND * 2, start=0, kl_ref=3.0, kl_step=0.9, reward_mean=0.0, clip_ratio=0.9)
    assert not any(d.changes or d.restore or d.stop for d in map(controller.step, wild))
