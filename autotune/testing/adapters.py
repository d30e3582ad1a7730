"""What every adapter must keep: subclass, say how to make one, run pytest.

    class TestMyAdapter(AdapterContract):
        def make(self, rollouts, knobs): ...      # a fresh trainer and its adapter
        def run(self, adapter, on_rollout): ...   # the trainer's own loop
        def weights(self, adapter): ...           # something comparable

    class TestMyTrainer(GuestContract):           # all of the above, for somebody else's trainer
        declared = DECLARED
        def host(self, rollouts, knobs, control, version): ...

Sensing: every promised metric is there, in its unit and range. Acting: a knob, once set, is read back and
is what the next rollout uses, all or none. Restoring: the weights come back or a reason does. As a guest:
what needs a restart becomes advice with its line, an untested version is only watched, and whatever fails in
the adapter never stops the host.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune.decisions import Applied, Decision, Proposal, Restore, State, Veto
from autotune.errors import RunError
from autotune.hooks.base import RATIO_METRICS, Adapter
from autotune.hooks.declared import Declaration
from autotune.hooks.guest import JOURNAL, Guest
from autotune.journal import read_journal
from autotune.knobs import KNOBS, Liveness, fit_micro_batch, mini_batch_lattice
from autotune.metrics import Snapshot, Validity, spec_of

LR = "actor_learning_rate"


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

    restores: frozenset[str] = frozenset({"undo", "checkpoint"})
    """Kinds of restore that this trainer can do; it must refuse the others with a reason."""

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
        if self._sensed("kl_step"):
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
        adapter = self.make(1, {})
        facts, knobs = adapter.facts(), adapter.knobs()
        if not facts.can_move("ppo_mini_batch_size"):
            return
        train, n = int(knobs["train_batch_size"]), int(knobs["rollout_n"])
        mini = next(m for m in mini_batch_lattice(train, n, facts.cut) if m != knobs["ppo_mini_batch_size"])
        micro = fit_micro_batch(mini, n, facts.world_size, int(knobs["micro_batch_size"]))
        if facts.can_move("micro_batch_size"):
            micro = mini * n
        values = {"ppo_mini_batch_size": float(mini), "micro_batch_size": float(micro)}
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

    def test_a_restore_that_cannot_be_done_is_refused_with_a_reason(self) -> None:
        for kind in {"undo", "checkpoint", "magic"} - self.restores:
            try:
                self.make(1, {}).restore(Restore(kind, 0, "test"))
            except RunError as refusal:
                assert str(refusal)
            else:
                raise AssertionError(f"{kind} was neither done nor refused")

    def test_undo_brings_back_the_weights_from_before_this_rollout(self) -> None:
        if "undo" not in self.restores:
            return
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
        if "checkpoint" not in self.restores:
            return
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
            lattice = mini_batch_lattice(train, n, self.make(1, {}).facts().cut)
            return next((float(v) for v in lattice if v != now), None)
        if knob == "ppo_epochs":
            return now + 1
        if knob == "entropy_coef":
            return 0.01
        if spec.integer:
            return None
        return now / 2 if now > 0 else None

    def _sensed(self, metric: str) -> bool:
        found = self.make(1, {}).facts().metric_capability.get(metric)
        return found is not None and found.state == Validity.VALID

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


# ------------------------------------------------------------------------------------------ guests


class GuestContract(AdapterContract):
    """Tests of an adapter that lives in somebody else's trainer, plugged in the way a user does it."""

    declared: Declaration

    def host(
        self, rollouts: int, knobs: Mapping[str, float], control: Mapping[str, Any], version: str = ""
    ) -> tuple[Guest, Callable[[], object]]:
        """A fresh trainer with autotune in it, and what trains it to the end.

        Args:
            rollouts: of the run.
            knobs: canonical, over the trainer's own.
            control: fields of a `control.yaml`.
            version: what the trainer's package shall seem to be; empty for what it is.
        """
        raise NotImplementedError

    def test_what_is_sensed_is_declared(self) -> None:
        adapter, (snapshot, *_) = self._watch(2)
        names = {row.name for row in self.declared.metrics}
        families = tuple(name[:-1] for name in names if name.endswith("/…"))
        for name in names:
            assert spec_of(name).unit, name
        for name, capability in adapter.facts().metric_capability.items():
            claimed = name in names or name.startswith(families)
            if capability.state == Validity.VALID:
                assert claimed, f"{name} is sensed and not declared"
            elif name in (self.declared.missing or {}):
                assert not claimed, f"{name} is declared both ways"
        for name in snapshot.readings:
            declared = name in names or name in (self.declared.missing or {}) or name.startswith(families)
            assert declared or name.startswith("time/"), f"{name} is read and not declared"

    def test_what_moves_is_declared(self) -> None:
        for knob, capability in self.make(1, {}).facts().knob_capability.items():
            row = self.declared.knob(knob)
            assert row is not None, f"{knob} is not declared"
            if capability.acts:
                assert row.liveness in (Liveness.LIVE, Liveness.NEXT_ROLLOUT), knob

    def test_a_knob_that_needs_a_restart_has_a_line_to_write(self) -> None:
        knobs = self.make(1, {}).knobs()
        for row in self.declared.knobs:
            if row.liveness is Liveness.RESTART and row.name in knobs:
                line = self.declared.restart_line(row.name, 48, knobs)
                assert line and "{" not in line, f"{row.name}: {line!r}"

    def test_advice_for_a_restart_is_journalled_with_the_line(self) -> None:
        guest, train = self.host(2, {}, {"mode": "act"})
        table = guest.adapter.facts().knob_capability
        stuck = [knob for knob, capability in table.items() if capability.state == Liveness.RESTART]
        if not stuck:
            return
        value = 2 * guest.adapter.knobs()[stuck[0]]
        guest.controller = _Wishes(stuck[0], value, table[stuck[0]].reason)  # type: ignore[assignment]
        train()
        told = [line["text"] for line in read_journal(guest.folder / JOURNAL) if line["type"] == "note"]
        line = self.declared.restart_line(stuck[0], value, guest.adapter.knobs())
        assert [text for text in told if line in text and text.startswith("advice T: ")], told
        assert sum(text.startswith("advice T: ") for text in told) == 1, "advice is said once"

    def test_an_untested_version_is_watched_and_not_touched(self) -> None:
        if not self.declared.versions:
            return
        control = {"mode": "act", "profile": "random", "pace": 0.1}
        guest, train = self.host(6, {}, control, version="0.0.1")
        start = guest.adapter.knobs()
        train()
        assert "0.0.1" in guest.reason and not guest.broken
        lines = read_journal(guest.folder / JOURNAL)
        assert any(guest.reason in line.get("text", "") for line in lines), "the journal must say why"
        rollouts = [line for line in lines if line["type"] == "rollout"]
        assert len(rollouts) == 6 and not any(line["decision"]["act"] for line in rollouts)
        assert not any(line["applied"] for line in rollouts) and guest.adapter.knobs() == start

    def test_whatever_fails_in_the_adapter_the_host_goes_on(self) -> None:
        for method in ("read", "apply", "knobs"):
            guest, train = self.host(3, {}, {"mode": "act"})
            _break_second_call(guest.adapter, method)
            train()
            assert "planted" in guest.broken, f"{method} failed unseen: {guest.broken!r}"
            lines = read_journal(guest.folder / JOURNAL)
            assert any("planted" in line.get("text", "") for line in lines), "the journal must say why"
            assert lines[-1]["type"] == "end" and lines[-1]["status"] == "done", lines[-1]


class _Wishes:
    """A controller that always wants one knob which cannot move."""

    epoch = 0

    def __init__(self, knob: str, value: float, reason: str) -> None:
        self.veto = Veto(Proposal("T", knob, value, "the test wants it"), "knob_movable", reason)

    def step(self, snapshot: Snapshot) -> Decision:
        return Decision(snapshot.rollout, State.OBSERVE, 0, vetoes=(self.veto,))

    def confirm(self, applied: Sequence[Applied], restored: int | None) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def _break_second_call(adapter: Any, method: str) -> None:
    """The first rollout is handled; in the second one the method raises."""
    whole, read = getattr(adapter, method), adapter.read
    rollouts = [0]

    def counting(raw: Any, rollout: int) -> Any:
        rollouts[0] += 1
        return broken(raw, rollout) if method == "read" else read(raw, rollout)

    def broken(*arguments: Any, **named: Any) -> Any:
        if rollouts[0] > 1:
            raise RuntimeError("planted")
        return whole(*arguments, **named)

    setattr(adapter, method, broken)
    adapter.read = counting
