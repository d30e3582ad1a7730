"""What every adapter and every control policy must keep: subclass, say how to make one, run pytest.

    class TestMyAdapter(AdapterContract):
        def make(self, rollouts, knobs): ...      # a fresh trainer and its adapter
        def run(self, adapter, on_rollout): ...   # the trainer's own loop
        def weights(self, adapter): ...           # something comparable

    class TestMyRule(PolicyContract):
        def make(self): return MyRule()

The contracts use plain assertions and import neither pytest nor a trainer, so they work in any
project's tests. For readable failures put this into a conftest.py:

    pytest.register_assert_rewrite("autotune.testing.contracts")
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from autotune.decisions import Proposal, Restore, RunFacts
from autotune.history import History, Sample
from autotune.hooks.base import RATIO_METRICS, Adapter
from autotune.knobs import KNOBS, Liveness, expand, mini_batch_lattice
from autotune.metrics import Snapshot, Validity, spec_of
from autotune.policies.base import Advice, Alarm, Context, Emergency, Hold, Policy, pace_for
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

LR = "actor_learning_rate"
ANSWERS = (Proposal, Hold, Alarm, Advice, Emergency)


class AdapterContract:
    """Tests of one adapter against one real (or fake) trainer. Every test makes its own run."""

    # -- what a subclass provides ------------------------------------------------------------------

    def make(self, rollouts: int, knobs: Mapping[str, float]) -> Adapter:
        """A fresh trainer that will run `rollouts` rollouts, with `knobs` in its recipe.

        It must be deterministic, start a checkpoint before rollout 0, and take another one before
        every second rollout where it can.
        """
        raise NotImplementedError

    def run(self, adapter: Any, on_rollout: Callable[[Any], object]) -> None:
        """Run all rollouts; the trainer calls `on_rollout(raw)` after each of them."""
        raise NotImplementedError

    def weights(self, adapter: Any) -> Any:
        """The trainer's weights now, as something that `==` compares."""
        raise NotImplementedError

    sparse_metrics: frozenset[str] = frozenset({"eval_score"})
    """Promised metrics that are not there at every rollout."""

    changing_metrics: tuple[str, ...] = ("tokens_per_second", "gpu_utilization", "time/")
    """Metrics (or families) that differ between two equal runs."""

    # -- sensing -----------------------------------------------------------------------------------

    def test_facts_use_canonical_names_and_give_reasons(self) -> None:
        facts = self.make(1, {}).facts()
        for knob, capability in facts.knob_capability.items():
            assert knob in KNOBS, f"{knob} is not a canonical knob"
            Liveness(capability.state)
            assert capability.acts or capability.reason, f"{knob} cannot move: say why"
        for metric, capability in facts.metric_capability.items():
            spec_of(metric)
            valid = Validity(capability.state) is Validity.VALID
            assert valid or capability.reason, f"{metric} cannot be sensed: say why"

    def test_the_knobs_at_the_start_are_the_facts(self) -> None:
        adapter = self.make(1, {})
        assert adapter.knobs() == dict(adapter.facts().knobs)

    def test_a_snapshot_says_what_is_known_and_why_the_rest_is_not(self) -> None:
        adapter, (snapshot, *_) = self._watch(2)
        assert snapshot.rollout == 0 and snapshot.epoch == 0
        for name, reading in snapshot.readings.items():
            if reading.validity is Validity.VALID:
                assert reading.value is not None and math.isfinite(reading.value), name
                assert name == "policy_ratio" or spec_of(name).contains(reading.value), name
            else:
                assert reading.value is None and reading.reason, f"{name}: {reading}"
        for name, capability in adapter.facts().metric_capability.items():
            if capability.state == Validity.VALID and name not in self.sparse_metrics:
                assert snapshot.value(name) is not None, f"{name}: {snapshot.reading(name)}"

    def test_rollouts_are_counted_from_zero_without_a_gap(self) -> None:
        _, snapshots = self._watch(3)
        assert [s.rollout for s in snapshots] == [0, 1, 2]

    def test_a_snapshot_is_stamped_with_the_knobs_it_was_made_under(self) -> None:
        adapter, snapshots = self._watch(2)
        assert all(dict(s.knobs) == dict(adapter.facts().knobs) for s in snapshots)

    def test_a_snapshot_survives_json(self) -> None:
        _, snapshots = self._watch(1)
        text = json.dumps(snapshots[0].to_json(), allow_nan=False)
        assert Snapshot.from_json(json.loads(text)).to_json() == snapshots[0].to_json()

    def test_two_equal_runs_give_equal_snapshots(self) -> None:
        first, second = (self._watch(2)[1] for _ in range(2))
        assert [self._steady(s) for s in first] == [self._steady(s) for s in second]

    def test_one_update_per_rollout_leaves_the_ratio_without_a_sensor(self) -> None:
        prompts = self.make(1, {}).knobs()["train_batch_size"]
        _, (snapshot,) = self._watch(1, {"ppo_mini_batch_size": prompts, "ppo_epochs": 1})
        for metric in RATIO_METRICS:
            reading = snapshot.reading(metric)
            assert reading.validity is Validity.STRUCTURAL_ZERO and reading.reason, metric
            assert metric not in snapshot.per_update and metric not in snapshot.histograms
        assert snapshot.value("kl_step") is not None, "the drift after the update is still real"

    def test_without_a_reference_model_there_is_no_reference_kl(self) -> None:
        adapter, (snapshot,) = self._watch(1, {"kl_coef": 0.0})
        reading = snapshot.reading("kl_ref")
        assert reading.validity in (Validity.NOT_LOGGED, Validity.STRUCTURAL_ZERO), reading
        assert reading.reason
        assert not adapter.facts().has_reference
        assert not adapter.facts().can_move("kl_coef")

    # -- acting ------------------------------------------------------------------------------------

    def test_a_knob_is_read_back_and_used_by_the_next_rollout(self) -> None:
        half = self.make(1, {}).knobs()[LR] / 2
        applied, snapshots = self._apply_after_first({LR: half})
        (item,) = applied
        assert item.ok and item.read_back == half and item.effective_from == 1, item
        assert snapshots[0].knobs[LR] == 2 * half and snapshots[0].epoch == 0
        assert snapshots[1].knobs[LR] == half and snapshots[1].epoch == 1
        used, before = (s.value("learning_rate") for s in (snapshots[1], snapshots[0]))
        assert used is None or before is None or used < before, "the optimizer kept its own rate"

    def test_every_knob_that_may_move_does(self) -> None:
        adapter = self.make(1, {})
        movable = [k for k in adapter.knobs() if adapter.facts().can_move(k)]
        assert movable, "nothing can move: is this an adapter?"
        for knob in movable:
            value = self.other_value(knob, adapter.knobs())
            if value is not None:
                applied, snapshots = self._apply_after_first({knob: value})
                assert [a.ok for a in applied] == [True], applied
                assert snapshots[1].knobs[knob] == value

    def test_a_mini_batch_moves_with_its_micro_batch(self) -> None:
        knobs = self.make(1, {}).knobs()
        train, n = int(knobs["train_batch_size"]), int(knobs["rollout_n"])
        mini = mini_batch_lattice(train, n, 1)[0]
        values = {"ppo_mini_batch_size": float(mini), "micro_batch_size": float(mini * n)}
        applied, snapshots = self._apply_after_first(values)
        assert all(item.ok for item in applied), applied
        assert {k: snapshots[1].knobs[k] for k in values} == values

    def test_no_values_change_nothing_but_the_epoch(self) -> None:
        applied, snapshots = self._apply_after_first({})
        assert applied == [] and snapshots[1].epoch == 1
        assert dict(snapshots[1].knobs) == dict(snapshots[0].knobs)

    def test_one_refused_knob_takes_the_others_back(self) -> None:
        knobs = self.make(1, {}).knobs()
        for bad in ({"clip_range_low": math.nan}, {"no_such_knob": 1.0}, self._off_lattice(knobs)):
            values = {LR: knobs[LR] / 2, **bad}
            applied, snapshots = self._apply_after_first(values)
            assert {item.knob for item in applied} == set(values)
            assert not any(item.ok for item in applied) and all(item.error for item in applied)
            assert dict(snapshots[1].knobs) == knobs, f"{bad} left something behind"

    # -- restoring ---------------------------------------------------------------------------------

    def test_undo_brings_back_the_weights_from_before_this_rollout(self) -> None:
        adapter = self.make(2, {})
        before: list[Any] = []

        def on_rollout(raw: Any) -> None:
            snapshot = adapter.read(raw, len(before))
            if snapshot.rollout == 0:
                before.append(self.weights(adapter))
                return
            assert self.weights(adapter) != before[0], "rollout 1 did not train"
            assert adapter.restore(Restore("undo", 1, "test")) == 1
            assert self.weights(adapter) == before[0]

        self.run(adapter, on_rollout)

    def test_a_checkpoint_brings_back_the_first_weights_and_keeps_the_knobs(self) -> None:
        adapter = self.make(2, {})
        seen: list[Snapshot] = []
        start, half = self.weights(adapter), self.make(1, {}).knobs()[LR] / 2

        def on_rollout(raw: Any) -> None:
            seen.append(adapter.read(raw, len(seen)))
            if len(seen) == 1:
                assert self.weights(adapter) != start, "rollout 0 did not train"
                adapter.apply({LR: half}, epoch=1)
                assert adapter.restore(Restore("checkpoint", 0, "test")) == 0
                assert self.weights(adapter) == start
                assert adapter.knobs()[LR] == half, "the restore brought an old knob back"

        self.run(adapter, on_rollout)
        assert seen[1].rollout == 1, "the rollout index never rewinds"
        assert seen[1].knobs[LR] == half and seen[1].epoch == 1

    def test_a_single_process_agrees_with_itself(self) -> None:
        adapter = self.make(1, {})
        assert adapter.broadcast(None) is None and adapter.agree("any digest")

    # -- helpers -----------------------------------------------------------------------------------

    def other_value(self, knob: str, knobs: Mapping[str, float]) -> float | None:
        """A legal value other than the present one; None where the contract does not know any."""
        now, spec = knobs[knob], KNOBS[knob]
        if knob == "ppo_mini_batch_size":
            train, n = int(knobs["train_batch_size"]), int(knobs["rollout_n"])
            return next((float(v) for v in mini_batch_lattice(train, n, 1) if v != now), None)
        if knob == "ppo_epochs":
            return now + 1
        if knob == "entropy_coef":
            return 0.01
        if spec.integer:
            return None
        return now / 2 if now > 0 else None

    def _watch(
        self, rollouts: int, knobs: Mapping[str, float] | None = None
    ) -> tuple[Adapter, list[Snapshot]]:
        adapter = self.make(rollouts, knobs or {})
        seen: list[Snapshot] = []
        self.run(adapter, lambda raw: seen.append(adapter.read(raw, len(seen))))
        assert len(seen) == rollouts
        return adapter, seen

    def _apply_after_first(self, values: Mapping[str, float]) -> tuple[list[Any], list[Snapshot]]:
        adapter = self.make(2, {})
        seen: list[Snapshot] = []
        applied: list[Any] = []

        def on_rollout(raw: Any) -> None:
            seen.append(adapter.read(raw, len(seen)))
            if len(seen) == 1:
                applied.extend(adapter.apply(values, epoch=1))

        self.run(adapter, on_rollout)
        return applied, seen

    def _steady(self, snapshot: Snapshot) -> dict[str, Any]:
        data = snapshot.to_json()
        kept = {n: v for n, v in data["metrics"].items() if not n.startswith(self.changing_metrics)}
        return data | {"metrics": kept}

    def _off_lattice(self, knobs: Mapping[str, float]) -> dict[str, float]:
        return {"ppo_mini_batch_size": knobs["train_batch_size"] + 1}


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
