"""The loop as a whole on a tiny model: resume, undo, restore, stops, records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autotune.errors import AdapterError, CheckpointError, ControlStop
from autotune.metrics import METRICS, read_metric, spec_of
from autotune.recipe import Recipe
from autotune.trainer import scoring as scoring_module
from autotune.trainer.checkpoint import find_checkpoints
from autotune.trainer.loop import Trainer, checkpoint_rollout
from autotune.trainer.records import RolloutRecord

MakeRecipe = Callable[..., Recipe]
State = tuple[dict[str, torch.Tensor], int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Builds trainers and closes them."""
    trainers: list[Trainer] = []

    def build(recipe: Recipe, name: str = "run", **kwargs: Any) -> Trainer:
        trainers.append(Trainer(recipe, tmp_path / name, **kwargs))
        return trainers[-1]

    yield build
    for trainer in trainers:
        trainer.close()


def state(trainer: Trainer) -> State:
    return trainer.parts.engine.state_tensors(), trainer.parts.engine.steps()


def assert_same(a: State, b: State) -> None:
    assert a[1] == b[1]
    assert a[0].keys() == b[0].keys()
    assert all(torch.equal(a[0][name], b[0][name]) for name in a[0])


def differs(a: State, b: State) -> bool:
    return any(not torch.equal(a[0][name], b[0][name]) for name in a[0])


def lasting(record: RolloutRecord) -> dict[str, Any]:
    """A record without wall time."""
    scalars = {k: v for k, v in record.scalars.items() if k != "tokens_per_second"}
    return {
        "rollout": record.rollout,
        "knobs": record.knobs,
        "epoch": record.epoch,
        "scalars": scalars,
        "per_update": record.per_update,
        "histograms": record.histograms,
    }


@pytest.mark.parametrize("stage", [0, 1])
def test_resume_is_bit_equal(make_recipe: MakeRecipe, start: Callable[..., Trainer], stage: int) -> None:
    recipe = make_recipe({"deepspeed": {"zero_stage": stage}}, lr_schedule={"type": "linear"})
    whole = start(recipe, "whole")
    records: list[RolloutRecord] = []
    whole.run(records.append)

    class Killed(RuntimeError):
        """Stands for a kill: nothing is saved on the way out."""

    def kill(phase: str, rollout: int) -> None:
        if (phase, rollout) == ("update", 4):
            raise Killed

    killed = start(recipe, "cut", on_phase=kill, extra_state=lambda: {"controller": [1, 2]})
    with pytest.raises(Killed):
        killed.run(lambda record: None)
    resumed = start(recipe, "cut", resume=True)
    assert resumed.rollout == 3
    assert resumed.restored_state == {"controller": [1, 2]}
    rest: list[RolloutRecord] = []
    resumed.run(rest.append)
    assert_same(state(resumed), state(whole))
    assert [lasting(r) for r in rest] == [lasting(r) for r in records[3:]]
    assert records[0].scalars["grad_norm"] != 0.0


def test_three_and_three_are_six(make_recipe: MakeRecipe, start: Callable[..., Trainer]) -> None:
    """Stopped from outside after three rollouts, knobs moved on the way."""

    def regulate(trainer: Trainer, stop_after: int | None) -> Callable[[RolloutRecord], None]:
        def on_rollout(record: RolloutRecord) -> None:
            if record.rollout == 1:
                trainer.live.set("ppo_mini_batch_size", 4)
                trainer.live.set("actor_learning_rate", 0.003)
                trainer.live.epoch = 1
            if record.rollout == stop_after:
                raise ControlStop("enough")

        return on_rollout

    recipe = make_recipe()
    whole, first = start(recipe, "whole"), start(recipe, "cut")
    whole.run(regulate(whole, None))
    with pytest.raises(ControlStop):
        first.run(regulate(first, 2))
    second = start(recipe, "cut", resume=True)
    assert second.rollout == 3
    assert second.live.vector() == first.live.vector()
    assert (second.live["micro_batch_size"], second.live.epoch) == (4, 1)
    second.run(regulate(second, None))
    assert_same(state(second), state(whole))


def test_a_rollout_is_undone_exactly(make_recipe: MakeRecipe, start: Callable[..., Trainer]) -> None:
    trainer = start(make_recipe(rollouts=3))
    before: list[State] = [state(trainer)]

    def on_rollout(record: RolloutRecord) -> None:
        if record.rollout == 1:
            assert differs(state(trainer), before[-1])
            trainer.undo_rollout()
            assert_same(state(trainer), before[-1])
        before.append(state(trainer))

    trainer.run(on_rollout)
    assert before[1][1] == before[2][1] == 4  # four updates, then four taken back
    assert before[3][1] == 8
    assert differs(before[3], before[2])
    assert trainer.rollout == 3  # the clock never rewinds


def test_a_checkpoint_comes_back_exactly(make_recipe: MakeRecipe, start: Callable[..., Trainer]) -> None:
    trainer = start(make_recipe(rollouts=6))
    after: dict[int, State] = {0: state(trainer)}
    prompts: list[float | None] = []

    def on_rollout(record: RolloutRecord) -> None:
        after[record.rollout + 1] = state(trainer)
        prompts.append(record.scalars["prompt_length_mean"])
        if record.rollout == 4:
            assert trainer.restore_checkpoint(4) == 3
            assert_same(state(trainer), after[3])
            assert trainer.restore_checkpoint(2) == 0
            assert_same(state(trainer), after[0])

    trainer.run(on_rollout)
    assert trainer.rollout == 6
    assert trainer.drawing.cursor == 48  # the data cursor went on
    with pytest.raises(CheckpointError, match="rollout -1"):
        trainer.restore_checkpoint(-1)


def test_a_token_budget_ends_the_run_at_a_rollout_boundary(
    make_recipe: MakeRecipe, start: Callable[..., Trainer]
) -> None:
    """Prompts' tokens count for every response; what a resumed run sampled before counts too."""
    used: list[float] = []

    def on_rollout(record: RolloutRecord) -> None:
        used.append(record.scalars["tokens_per_second"] * record.times["total"])

    start(make_recipe(rollouts=3), "free").run(on_rollout)
    budget = round(used[0]) + 1  # reached by the second rollout
    short = make_recipe(rollouts=3, token_budget=budget)
    trainer = start(short, "short")
    trainer.run(lambda record: None)
    assert trainer.rollout == 2
    again = start(short, "short", resume=True)
    again.run(lambda record: pytest.fail("the budget was spent before"))
    assert again.rollout == 2


def test_undo_needs_the_snapshot(make_recipe: MakeRecipe, start: Callable[..., Trainer]) -> None:
    trainer = start(make_recipe(rollouts=1, veto_snapshot=False))
    trainer.run(lambda record: None)
    with pytest.raises(AdapterError, match="veto_snapshot"):
        trainer.undo_rollout()


def test_checkpoints_are_due_and_the_first_is_the_start(
    make_recipe: MakeRecipe, start: Callable[..., Trainer]
) -> None:
    events: list[tuple[str, int]] = []
    trainer = start(
        make_recipe(rollouts=5), on_event=lambda name, payload: events.append((name, payload["rollout"]))
    )
    untouched = state(trainer)
    trainer.run(lambda record: None)
    saved = [checkpoint_rollout(path) for path in find_checkpoints(trainer.folder / "checkpoints")]
    assert saved == [5, 3, 0]
    assert events == [
        ("checkpoint", 0),
        ("eval", 0),
        ("checkpoint", 3),
        ("eval", 3),
        ("checkpoint", 5),
        ("eval", 5),
    ]
    trainer.restore_checkpoint(0)
    assert_same(state(trainer), untouched)
    saved_state = json.loads((trainer.folder / "checkpoints/rollout-00000/state.json").read_text())
    assert saved_state["cursor"] == 0


@pytest.mark.parametrize("phase", ["rollout", "update", "on_rollout"])
def test_ctrl_c_saves_a_whole_state(
    make_recipe: MakeRecipe, start: Callable[..., Trainer], phase: str
) -> None:
    """Inside the updates the started rollout is taken back; elsewhere nothing is half done."""
    recipe = make_recipe(rollouts=4)
    whole = start(recipe, "whole")
    whole.run(lambda record: None)

    def interrupt(name: str, rollout: int) -> None:
        if (name, rollout) == (phase, 1):
            raise KeyboardInterrupt

    cut = start(recipe, "cut", on_phase=interrupt)
    with pytest.raises(KeyboardInterrupt):
        cut.run(lambda record: None)
    newest = find_checkpoints(cut.folder / "checkpoints")[0]
    assert checkpoint_rollout(newest) == 1
    resumed = start(recipe, "cut", resume=True)
    resumed.run(lambda record: None)
    assert_same(state(resumed), state(whole))


def test_old_log_probs_are_computed_once_and_kept(
    make_recipe: MakeRecipe, start: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[object] = []
    original = scoring_module.score_samples

    def counted(model: object, *args: Any, **kwargs: Any) -> Any:
        models.append(model)
        return original(model, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(scoring_module, "score_samples", counted)
    seen: list[tuple[bool, bool, int]] = []
    trainer = start(make_recipe({"eval": {"every": 0}}, rollouts=1, ppo_epochs=3))
    trainer.parts.model.register_forward_hook(
        lambda m, a, out: seen.append((m.training, torch.is_grad_enabled(), out.logits.shape[0]))
    )
    trainer._train({})
    assert models == [trainer.parts.model, trainer.parts.reference]
    updates = [entry for entry in seen if entry[1]]
    assert len(updates) == 3 * 32 // 4
    assert all(training for training, _, _ in updates)
    assert not any(training for training, grad, _ in seen if not grad)
    first = seen.index(updates[0])
    assert sum(size for _, _, size in seen[first - 8 : first]) == 32  # each sample once


def test_ratio_is_exactly_one_at_one_update(make_recipe: MakeRecipe, start: Callable[..., Trainer]) -> None:
    trainer = start(make_recipe(rollouts=2, ppo_mini_batch_size=8))
    records: list[RolloutRecord] = []
    trainer.run(records.append)
    for record in records:
        assert record.scalars["ratio_in"] == 1.0
        assert record.per_update["kl_step"] == [0.0]
        assert record.histograms["policy_ratio"][33] == sum(record.histograms["policy_ratio"]) > 0
        assert record.scalars["kl_step"] > 0.0  # type: ignore[operator]
    assert records[0].scalars["kl_ref"] == 0.0  # the reference is the start


def test_a_record_tells_every_promised_metric(make_recipe: MakeRecipe, start: Callable[..., Trainer]) -> None:
    trainer = start(make_recipe(rollouts=1))
    records: list[RolloutRecord] = []
    trainer.run(records.append)
    record = records[0]
    promised = {n for n, c in trainer.facts().metric_capability.items() if c.state == "valid"}
    assert promised <= set(record.scalars)
    for name, value in record.scalars.items():
        assert str(read_metric(name, value).validity) == "valid", name
        assert spec_of(name)
    assert {len(values) for values in record.per_update.values()} == {4}
    assert set(record.per_update) <= set(METRICS)
    assert {len(counts) for counts in record.histograms.values()} == {66}
    phases = {"rollout", "old_log_prob", "reference", "update", "kl_step_forward"}
    assert set(record.times) == phases | {"total"}
    assert sum(record.times[p] for p in phases) == pytest.approx(record.times["total"], rel=0.1)


def test_without_a_reference_there_is_no_kl_metric(
    make_recipe: MakeRecipe, start: Callable[..., Trainer]
) -> None:
    trainer = start(make_recipe(rollouts=1, kl_coef=0.0))
    records: list[RolloutRecord] = []
    trainer.run(records.append)
    assert trainer.parts.reference is None
    assert "kl_ref" not in records[0].scalars | records[0].per_update
    facts = trainer.facts()
    assert not facts.has_reference
    assert not facts.can_move("kl_coef")
    assert facts.metric_capability["kl_ref"].reason


def test_knobs_set_in_between_are_used_next(make_recipe: MakeRecipe, start: Callable[..., Trainer]) -> None:
    trainer = start(make_recipe(rollouts=4, lr_schedule={"type": "linear"}))
    records: list[RolloutRecord] = []

    def on_rollout(record: RolloutRecord) -> None:
        records.append(record)
        if record.rollout == 1:
            assert trainer.live.set("actor_learning_rate", 0.004) == pytest.approx(0.004)
            trainer.live.set_many({"ppo_mini_batch_size": 8, "ppo_epochs": 2})
            trainer.live.set("max_response_length", 2)
            trainer.live.set("rollout_micro_batch_size", 8)
            trainer.live.epoch = 1

    trainer.run(on_rollout)
    rates = [record.scalars["learning_rate"] for record in records]
    assert rates == pytest.approx([0.01, 0.0075, 0.002, 0.001])
    assert [len(record.per_update["loss"]) for record in records] == [4, 4, 2, 2]
    assert [record.epoch for record in records] == [0, 0, 1, 1]
    assert records[2].scalars["response_length_max"] <= 2  # type: ignore[operator]
    assert records[1].knobs["ppo_epochs"] == 1
    assert records[2].knobs["micro_batch_size"] == 4


def test_the_split_of_sampling_changes_no_result(
    make_recipe: MakeRecipe, start: Callable[..., Trainer]
) -> None:
    """Tokens are keyed by place; this seed has no near tie in its first rollout."""
    rewards = []
    for size in (32, 8):
        trainer = start(make_recipe(rollouts=1, rollout_micro_batch_size=size), str(size))
        trainer.run(lambda record: rewards.append(lasting(record)["scalars"]))
    for name in ("reward_mean", "response_length_mean", "zero_std_fraction"):
        assert rewards[0][name] == rewards[1][name]
    assert rewards[0]["kl_step"] == pytest.approx(rewards[1]["kl_step"], rel=1e-3)


def test_nothing_to_resume(make_recipe: MakeRecipe, start: Callable[..., Trainer]) -> None:
    with pytest.raises(CheckpointError, match="without --resume"):
        start(make_recipe(), resume=True)


def test_non_finite_gradients_are_counted_and_leave_the_weights(
    make_recipe: MakeRecipe, start: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(make_recipe({"eval": {"every": 0}}, rollouts=1))
    before = state(trainer)
    backward = trainer.parts.engine.backward
    monkeypatch.setattr(
        trainer.parts.engine, "backward", lambda loss, last: backward(loss * np.nan, last=last)
    )
    record = trainer._train({})
    assert record.scalars["updates_skipped"] == 4
    assert_same(state(trainer), before)
    assert str(read_metric("grad_norm", record.scalars["grad_norm"]).validity) == "non_finite"


class TightSampler:
    """The run's own sampler on a device with room for four samples."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.tried = inner, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def sample(self, prompts: Any, prompt_of: Any, sample_of: Any, draw: Any) -> Any:
        self.tried.append(len(prompt_of))
        if len(prompt_of) > 4:
            raise torch.OutOfMemoryError("no room")
        return self.inner.sample(prompts, prompt_of, sample_of, draw)


def test_a_rollout_that_did_not_fit_is_cut_noted_and_remembered_across_a_resume(
    make_recipe: MakeRecipe, start: Callable[..., Trainer]
) -> None:
    recipe, whole, cut = make_recipe(rollouts=2), [], []
    start(recipe, "whole").run(whole.append)
    notes: list[str] = []
    tight = start(recipe, "tight", on_event=lambda name, payload: notes.append(payload.get("about", name)))
    tight.replace_parts(sampler=TightSampler(tight.parts.sampler))
    tight.run(cut.append)
    assert notes.count("rollout/memory") == 3  # 32 samples: 16, 8, 4
    assert [lasting(record) for record in cut] == [lasting(record) for record in whole]
    assert start(recipe, "tight", resume=True).drawing.room.limit == 4


def test_old_log_probs_are_spared_while_sampler_and_trainer_agree_and_recomputed_when_not(
    make_recipe: MakeRecipe, start: Callable[..., Trainer]
) -> None:
    def records(name: str, **rollout: Any) -> tuple[list[dict[str, Any]], list[str]]:
        notes: list[str] = []
        rows: list[RolloutRecord] = []
        recipe = make_recipe({"rollout": rollout}, rollouts=2, kl_step_responses=64)
        trainer = start(recipe, name, on_event=lambda n, payload: notes.append(payload.get("about", n)))
        trainer.run(rows.append)
        return [lasting(row) for row in rows], notes

    plain, _ = records("plain")
    spared, quiet = records("spared", old_log_probs="sampler")
    distrusted, told = records("distrusted", old_log_probs="sampler", mismatch_bound=1e-300)
    assert "rollout/mismatch" not in quiet
    assert told.count("rollout/mismatch") == 2
    assert distrusted == plain  # the fallback is the default's own path
    assert spared != plain  # ratios against the sampler's numbers, equal but for rounding
    for a, b in zip(spared, plain, strict=True):
        assert a["scalars"]["loss"] == pytest.approx(b["scalars"]["loss"], abs=1e-4)
        assert a["scalars"]["kl_mismatch"] < 1e-9
