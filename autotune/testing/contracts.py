"""What every control policy must keep: subclass, say how to make one, run pytest.

    class TestMyRule(PolicyContract):
        def make(self): return MyRule()

What every adapter must keep stands in `autotune.testing.adapters`; both are offered here. The contracts
use plain assertions and import neither pytest nor a trainer, so they work in any project's tests.
For readable failures put this into a conftest.py:

    pytest.register_assert_rewrite("autotune.testing.contracts", "autotune.testing.adapters")
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

from autotune.decisions import Proposal, RunFacts
from autotune.history import History, Sample
from autotune.knobs import KNOBS, expand
from autotune.metrics import Snapshot, spec_of
from autotune.policies.base import Advice, Alarm, Context, Emergency, Hold, Policy, pace_for
from autotune.testing.adapters import AdapterContract, GuestContract
from autotune.testing.fake import FakeTrainer
from autotune.testing.faults import (
    Collapse,
    Fault,
    Frozen,
    LengthSurge,
    Missing,
    NonFinite,
    negative_kl,
    outlier,
    percent,
)

__all__ = ["AdapterContract", "GuestContract", "PolicyContract"]

ANSWERS = (Proposal, Hold, Alarm, Advice, Emergency)


# ---------------------------------------------------------------------------------------- policies


class PolicyContract:
    """Tests of one control policy on the plant: on a healthy run, and with every sensor fault."""

    rollouts = 40
    """Length of the runs that the policy watches."""

    def make(self) -> Policy:
        """The policy under test."""
        raise NotImplementedError

    def knobs(self) -> Mapping[str, float]:
        """Knobs of the run that it watches, over the healthy recipe's."""
        return {}

    def test_it_says_who_it_is(self) -> None:
        policy = self.make()
        assert policy.id and policy.source and policy.summary
        for metric in policy.needs:
            spec_of(metric)
        for knob in policy.moves:
            assert all(real in KNOBS for real in expand(knob)), f"{knob} is not a knob"

    def test_it_is_a_frozen_value(self) -> None:
        policy = self.make()
        assert dataclasses.is_dataclass(policy)
        assert policy == self.make() and hash(policy) == hash(self.make())

    def test_its_answers_are_well_formed(self) -> None:
        for number in range(-1, len(faults())):
            for ctx in self.contexts(number):
                self._check(self.make().propose(ctx), ctx)

    def test_the_same_facts_give_the_same_answer(self) -> None:
        policy = self.make()
        for ctx in self.contexts():
            twice = policy.propose(ctx), policy.propose(dataclasses.replace(ctx))
            assert twice[0] == twice[1], f"rollout {ctx.rollout}: {twice}"

    def test_it_does_not_touch_what_it_reads(self) -> None:
        policy = self.make()
        for ctx in self.contexts():
            before = (ctx.history.to_json(), dict(ctx.knobs), ctx.snapshot.to_json())
            policy.propose(ctx)
            assert (ctx.history.to_json(), dict(ctx.knobs), ctx.snapshot.to_json()) == before

    def contexts(self, fault: int = -1) -> Iterator[Context]:
        """One context per rollout of a run on the plant, as a controller would build them.

        Left out are rollouts at which a controller does not ask: a metric that the policy needs is
        not valid, or the policy says itself that this run blocks it (no critic, for instance).

        Args:
            fault: number of the fault in `faults`; -1 for an honest run.
        """
        facts, snapshots = _watched(tuple(sorted(self.knobs().items())), self.rollouts, fault)
        history, policy = History(), self.make()
        for snapshot in snapshots:
            history.add(Sample.of(snapshot))
            blocked = policy.blocked(facts, snapshot.knobs)
            if not blocked and all(snapshot.value(m) is not None for m in policy.needs):
                yield Context(
                    facts=facts,
                    snapshot=snapshot,
                    history=history,
                    knobs=snapshot.knobs,
                    pace=pace_for(0.1),
                    epoch=snapshot.epoch,
                )

    def _check(self, answer: object, ctx: Context) -> None:
        if answer is None:
            return
        policy = self.make()
        assert isinstance(answer, ANSWERS), answer
        assert answer.rule == policy.id and answer.reason
        if isinstance(answer, Proposal):
            real = expand(answer.knob)
            assert all(map(ctx.facts.can_move, real)), f"{answer.knob} cannot move in this run"
            declared = not policy.moves or answer.knob in policy.moves
            assert declared, f"{answer.knob} is not declared in `moves`"
            assert math.isfinite(answer.value) and answer.value > 0, answer
            assert any(answer.value != ctx.knobs[k] for k in real), "moves nothing"
            assert all(math.isfinite(v) for v in answer.evidence.values()), answer.evidence
        if isinstance(answer, Emergency):
            assert answer.restore in ("undo", "checkpoint") and 0 < answer.factor <= 1


def faults() -> list[Fault]:
    """Everything that a sensor or a model may do to a rule."""
    noisy = ("reward_mean", "kl_step", "kl_ref", "clip_ratio", "entropy", "grad_norm")
    return [
        *(NonFinite(metric, at=12) for metric in noisy),
        *(NonFinite(metric, at=12, count=1, value=math.inf) for metric in noisy),
        *(Missing(metric, at=12, count=3) for metric in noisy),
        *(Frozen(metric, at=12) for metric in noisy),
        *(outlier(metric, at=20) for metric in noisy),
        negative_kl(at=12),
        percent("clip_ratio", at=12),
        Collapse(at=20),
        LengthSurge(at=20),
    ]


@functools.lru_cache(maxsize=128)
def _watched(
    knobs: tuple[tuple[str, float], ...], rollouts: int, fault: int
) -> tuple[RunFacts, tuple[Snapshot, ...]]:
    """Facts and snapshots of a run on the plant; the same for every policy, so made once."""
    broken = [] if fault < 0 else [faults()[fault]]
    trainer = FakeTrainer(dict(knobs), seed=7, rollouts=rollouts, faults=broken)
    return trainer.facts(), tuple(trainer.read(trainer.advance(), t) for t in range(rollouts))
