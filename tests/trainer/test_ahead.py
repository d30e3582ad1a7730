"""One step off: overlap, whose weights drew what, what is thrown away, and failures in the thread."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.errors import TrainingError
from autotune.recipe import Recipe
from autotune.trainer.loop import Trainer
from autotune.trainer.records import RolloutRecord
from autotune.trainer.rollout import build
from autotune.trainer.rollout.weights import serving_weights
from tests.trainer.served import Engine, mark

from .conftest import MakeRecipe

Start = Callable[..., tuple[Trainer, Engine]]


@pytest.fixture
def start(tmp_path: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    trainers: list[Trainer] = []

    def begin(recipe: Recipe, name: str = "run", **options: Any) -> tuple[Trainer, Engine]:
        engine = Engine(copy.deepcopy(tiny_model))
        monkeypatch.setattr(build, "ServerEngine", lambda *given: engine)
        trainers.append(Trainer(recipe, tmp_path / name, **options))
        return trainers[-1], engine

    yield begin
    for trainer in trainers:
        trainer.close()


def off(make_recipe: MakeRecipe, step_off: bool = True, **trainer: Any) -> Recipe:
    sections = {
        "rollout": {"engine": "vllm_server", "one_step_off": step_off},
        "eval": {"every": 0, "prompts": 4},
    }
    return make_recipe(sections, **{"rollouts": 4, **trainer})


def learnt(record: RolloutRecord) -> dict[str, Any]:
    """What does not depend on the clock, nor on how the data was come by."""
    own = {"tokens_per_second", "data_age", "kl_mismatch"}
    return {name: value for name, value in record.scalars.items() if name not in own}


# -- the thread works while the updates run -------------------------------------------------------


def test_the_next_rollout_is_drawn_while_this_one_is_trained(make_recipe: MakeRecipe, start: Start) -> None:
    """A call from the thread waits for an update of this rollout, which therefore does not wait for it."""
    updated, ended = threading.Event(), []

    def on_phase(phase: str, rollout: int) -> None:
        if phase == "update":
            updated.set()
        if phase == "on_rollout":
            ended.append(rollout)

    trainer, engine = start(off(make_recipe), on_phase=on_phase)

    def before(ahead: bool) -> None:
        if ahead:
            assert updated.wait(60), "no update was made while the next rollout was being drawn"
            updated.clear()

    engine.before = before
    trainer.run(lambda record: None)
    assert ended == [0, 1, 2, 3]
    # Two calls of each evaluation, at both ends, and the first rollout are the main thread's.
    assert [ahead for ahead, _ in engine.calls] == [False] * 3 + [True] * 3 + [False] * 2
    assert not [thread for thread in threading.enumerate() if thread.name == "ahead"]


def test_data_is_one_rollout_old_and_weighed_for_it(make_recipe: MakeRecipe, start: Start) -> None:
    marks: list[float] = []

    def on_phase(phase: str, rollout: int) -> None:
        if phase == "rollout":
            marks.append(mark(dict(serving_weights(trainer.parts.model))))

    records: list[RolloutRecord] = []
    trainer, engine = start(off(make_recipe), on_phase=on_phase)
    trainer.run(records.append)
    assert [record.scalars["data_age"] for record in records] == [0, 1, 1, 1]
    drawn = [version for ahead, version in engine.calls if ahead]
    assert drawn == pytest.approx(marks[:3], rel=1e-9) and len({round(m, 6) for m in marks}) == 4
    mismatch = [record.scalars["kl_mismatch"] or 0.0 for record in records]
    assert mismatch[0] < 1e-9 and min(mismatch[1:]) > 1e-6
    # It is the drift of the updates in between, seen on other prompts.
    steps = [record.scalars["kl_step"] or 0.0 for record in records]
    assert all(0.1 < late / early < 10 for late, early in zip(mismatch[1:], steps, strict=False))


def test_the_first_rollout_is_that_of_a_synchronous_run(make_recipe: MakeRecipe, start: Start) -> None:
    found: list[list[RolloutRecord]] = [[], []]
    for records, step_off in zip(found, (False, True), strict=True):
        trainer, _ = start(off(make_recipe, step_off, rollouts=2), f"run{step_off}")
        trainer.run(records.append)
    assert learnt(found[0][0]) == learnt(found[1][0])
    assert learnt(found[0][1]) != learnt(found[1][1])


def test_where_nothing_is_learnt_the_whole_run_is_the_synchronous_one(
    make_recipe: MakeRecipe, start: Start
) -> None:
    found: list[list[RolloutRecord]] = [[], []]
    for records, step_off in zip(found, (False, True), strict=True):
        recipe = off(make_recipe, step_off, actor_learning_rate=1e-30, dynamic_sampling=1)
        trainer, _ = start(recipe, f"run{step_off}")
        trainer.run(records.append)
    same = ("reward_mean", "response_length_mean", "entropy", "zero_std_fraction")
    for one, other in zip(*found, strict=True):
        assert [one.scalars[n] for n in same] == pytest.approx([other.scalars[n] for n in same], rel=1e-6)


# -- what is thrown away --------------------------------------------------------------------------


def notes_of(start: Start, recipe: Recipe, act: Callable[[Trainer, int], None]) -> Any:
    """Run it, with `act` after every rollout; trainer, records, and what the run said of the batch ahead."""
    records: list[RolloutRecord] = []
    notes: list[str] = []

    def on_event(name: str, payload: dict[str, Any]) -> None:
        if payload.get("about") == "rollout/ahead":
            notes.append(payload["text"])

    trainer, _ = start(recipe, on_event=on_event)

    def on_rollout(record: RolloutRecord) -> None:
        records.append(record)
        act(trainer, record.rollout)

    trainer.run(on_rollout)
    return trainer, records, notes


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.7},
        {"max_response_length": 4},
        {"max_prompt_length": 2},
        {"rollout_n": 2},
        {"train_batch_size": 4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_sampling_knob_takes_effect_in_the_rollout_it_was_moved_for(
    make_recipe: MakeRecipe, start: Start, change: dict[str, float]
) -> None:
    def act(trainer: Trainer, rollout: int) -> None:
        if rollout == 1:
            trainer.live.set_many(change)

    trainer, records, notes = notes_of(start, off(make_recipe), act)
    assert [record.scalars["data_age"] for record in records] == [0, 1, 0, 1]
    assert len(notes) == 1 and "a knob of sampling has changed" in notes[0]
    assert trainer.drawing.cursor == sum(int(r.knobs["train_batch_size"]) for r in records)
    used = sum(
        (r.scalars["tokens_per_second"] or 0.0) * r.times["total"] for r in records
    )  # what was thrown away is spent, too
    assert trainer.drawing.tokens > used + 50


def test_a_knob_of_training_leaves_it_alone(make_recipe: MakeRecipe, start: Start) -> None:
    def act(trainer: Trainer, rollout: int) -> None:
        trainer.live.set_many({"actor_learning_rate": 0.001 * (rollout + 1), "ppo_mini_batch_size": 4})

    _, records, notes = notes_of(start, off(make_recipe), act)
    assert [record.scalars["data_age"] for record in records] == [0, 1, 1, 1] and not notes


def test_a_checkpoints_weights_are_not_taught_with_the_others_responses(
    make_recipe: MakeRecipe, start: Start
) -> None:
    def act(trainer: Trainer, rollout: int) -> None:
        if rollout == 1:
            trainer.restore_checkpoint(0)

    _, records, notes = notes_of(start, off(make_recipe), act)
    assert [record.scalars["data_age"] for record in records] == [0, 1, 0, 1]
    assert len(notes) == 1 and "weights of a checkpoint were brought back" in notes[0]
    assert (records[2].scalars["kl_mismatch"] or 0.0) < 1e-9


def test_undoing_a_rollout_brings_back_the_very_weights_that_draw(
    make_recipe: MakeRecipe, start: Start
) -> None:
    def act(trainer: Trainer, rollout: int) -> None:
        if rollout == 1:
            trainer.undo_rollout()

    _, records, notes = notes_of(start, off(make_recipe), act)
    assert not notes and [record.scalars["data_age"] for record in records] == [0, 1, 1, 1]
    assert (records[2].scalars["kl_mismatch"] or 0.0) < 1e-9  # so that rollout is on-policy after all


def test_a_token_budget_that_is_spent_draws_nothing_more(make_recipe: MakeRecipe, start: Start) -> None:
    trainer, engine = start(off(make_recipe, token_budget=1))
    trainer.run(lambda record: None)
    assert not any(ahead for ahead, _ in engine.calls)


def test_a_resumed_run_draws_its_first_rollout_itself(make_recipe: MakeRecipe, start: Start) -> None:
    recipe = off(make_recipe, rollouts=6)

    def stop(record: RolloutRecord) -> None:
        if record.rollout == 3:
            raise KeyboardInterrupt

    trainer, _ = start(recipe)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(stop)
    place = trainer.drawing.cursor
    trainer.close()
    again, _ = start(recipe, resume=True)
    assert again.drawing.cursor == place
    records: list[RolloutRecord] = []
    again.run(records.append)
    assert [(r.rollout, r.scalars["data_age"]) for r in records] == [(4, 0), (5, 1)]


# -- failures -------------------------------------------------------------------------------------


def test_a_server_that_died_is_told_where_its_batch_is_due(make_recipe: MakeRecipe, start: Start) -> None:
    trainer, engine = start(off(make_recipe))

    def before(ahead: bool) -> None:
        if ahead:
            raise TrainingError("the sampling server does not answer")

    engine.before = before
    records: list[RolloutRecord] = []
    with pytest.raises(TrainingError, match="does not answer"):
        trainer.run(records.append)
    assert len(records) == 1  # the rollout that was in hand is trained to its end


def test_a_batch_ahead_that_had_no_room_is_drawn_again_in_halves(
    make_recipe: MakeRecipe, start: Start
) -> None:
    trainer, engine = start(off(make_recipe))
    full = [True]

    def before(ahead: bool) -> None:
        if ahead and full:
            full.pop()
            raise torch.OutOfMemoryError("full")

    engine.before = before
    records: list[RolloutRecord] = []
    trainer.run(records.append)
    assert trainer.drawing.room.limit == 16
    assert [record.scalars["data_age"] for record in records] == [0, 0, 1, 1]


def test_closing_does_not_wait_for_more_than_the_servers_end(make_recipe: MakeRecipe, start: Start) -> None:
    trainer, engine = start(off(make_recipe))
    gone = threading.Event()
    close = engine.close

    def ends() -> None:
        close()
        gone.set()

    def before(ahead: bool) -> None:
        if ahead:
            assert gone.wait(60)
            raise TrainingError("connection reset")

    engine.before, engine.close = before, ends  # type: ignore[method-assign]

    def stop(record: RolloutRecord) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.run(stop)
    trainer.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "ahead"]
