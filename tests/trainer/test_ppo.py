"""PPO in the loop: two engines, one clock; the critic's rate is a knob, its state is in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification

from autotune.controller import Controller, ControlSettings
from autotune.errors import AdapterError, CheckpointError
from autotune.metrics import read_metric
from autotune.recipe import Recipe, knob_vector, recipe_facts
from autotune.trainer.checkpoint import find_checkpoints
from autotune.trainer.loop import Trainer
from autotune.trainer.records import RolloutRecord

MakeRecipe = Callable[..., Recipe]
State = tuple[dict[str, torch.Tensor], int, dict[str, torch.Tensor], int]


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


@pytest.fixture
def recipe(make_recipe: MakeRecipe) -> Recipe:
    return make_recipe(algorithm="ppo", critic_learning_rate=0.02, rollouts=4)


def state(trainer: Trainer) -> State:
    critic = trainer.parts.critic
    assert critic is not None
    actor = trainer.parts.engine
    return actor.state_tensors(), actor.steps(), critic.engine.state_tensors(), critic.engine.steps()


def same(a: State, b: State) -> bool:
    steps = (a[1], a[3]) == (b[1], b[3])
    return steps and all(torch.equal(x[n], y[n]) for x, y in ((a[0], b[0]), (a[2], b[2])) for n in x)


def test_the_run_has_a_critic_and_says_so(recipe: Recipe, start: Callable[..., Trainer]) -> None:
    trainer, records = start(recipe), []
    fresh = state(trainer)
    trainer.run(records.append)
    after = state(trainer)
    assert after[1] == after[3] == 16  # four updates in each of four rollouts, of both
    moved = [name for name in after[2] if not torch.equal(after[2][name], fresh[2][name])]
    assert moved == list(after[2])
    for record in records:
        assert len(record.per_update["value_loss"]) == 4
        assert read_metric("value_loss", record.scalars["value_loss"]).value is not None
        assert record.scalars["learning_rate"] == pytest.approx(0.01)  # the actor's
        assert record.times["values"] > 0
    facts = trainer.facts()
    assert facts.has_critic
    assert facts.can_move("critic_learning_rate")
    assert str(facts.metric_capability["value_loss"].state) == "valid"
    promised = {n for n, c in facts.metric_capability.items() if c.state == "valid"}
    assert promised <= set(records[-1].scalars)


def test_the_first_values_are_zero(recipe: Recipe, start: Callable[..., Trainer]) -> None:
    """So the first advantages are the rewards, whatever the actor's transformer says."""
    trainer = start(recipe)
    critic = trainer.parts.critic
    assert critic is not None
    logits = critic.model(input_ids=torch.tensor([[5, 6, 7]])).logits
    assert logits.shape == (1, 3, 1)
    assert not logits.any()
    body, actor = critic.model.base_model.state_dict(), trainer.parts.model.base_model.state_dict()
    assert all(torch.equal(body[name], actor[name]) for name in actor)


def test_rule_b5b_has_its_sensor_and_its_knob(make_recipe: MakeRecipe) -> None:
    def status(recipe: Recipe) -> tuple[bool, str]:
        controller = Controller(ControlSettings(), recipe_facts(recipe))
        rule = next(rule for rule in controller.rules() if rule.id == "B5b")
        return rule.can_act, rule.reason

    assert status(make_recipe(algorithm="ppo")) == (True, "")
    can_act, reason = status(make_recipe())
    assert not can_act
    assert "critic" in reason


def test_the_critics_rate_is_twice_the_actors_unless_given(make_recipe: MakeRecipe) -> None:
    assert knob_vector(make_recipe(algorithm="ppo"))["critic_learning_rate"] == 0.02
    assert "critic_learning_rate" not in knob_vector(make_recipe())


def test_the_critics_rate_moves_live_and_alone(recipe: Recipe, start: Callable[..., Trainer]) -> None:
    trainer = start(recipe.model_copy(update={"trainer": _linear(recipe)}))
    critic = trainer.parts.critic
    assert critic is not None
    used: list[tuple[float, float]] = []
    step = critic.engine.step

    def spy() -> object:
        used.append((critic.engine.learning_rate(), trainer.parts.engine.learning_rate()))
        return step()

    critic.engine.step = spy  # type: ignore[method-assign]

    def on_rollout(record: RolloutRecord) -> None:
        if record.rollout == 1:
            assert trainer.live.set("critic_learning_rate", 0.003) == pytest.approx(0.003)

    trainer.run(on_rollout)
    rates = [used[4 * t] for t in range(4)]  # of each rollout's first update
    assert [critic for critic, _ in rates] == pytest.approx([0.02, 0.015, 0.0015, 0.00075])
    assert [actor for _, actor in rates] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    with pytest.raises(AdapterError, match="above 0"):
        trainer.live.set("critic_learning_rate", 0.0)


def _linear(recipe: Recipe) -> Any:
    schedule = type(recipe.trainer.lr_schedule)(type="linear")
    return recipe.trainer.model_copy(update={"lr_schedule": schedule})


def test_a_critic_that_refuses_its_rate_keeps_the_actors_too(
    recipe: Recipe, start: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(recipe)
    critic = trainer.parts.critic
    assert critic is not None
    monkeypatch.setattr(critic.engine, "learning_rate", lambda: 0.5)
    with pytest.raises(AdapterError, match=r"critic_learning_rate: set 0\.03, the optimizer has 0\.5"):
        trainer.live.set_many({"actor_learning_rate": 0.002, "critic_learning_rate": 0.03})
    assert trainer.live["actor_learning_rate"] == 0.01
    assert trainer.parts.engine.learning_rate() == 0.01


def test_undo_brings_both_back(recipe: Recipe, start: Callable[..., Trainer]) -> None:
    trainer = start(recipe)
    before = [state(trainer)]

    def on_rollout(record: RolloutRecord) -> None:
        if record.rollout == 1:
            assert not same(state(trainer), before[-1])
            trainer.undo_rollout()
            assert same(state(trainer), before[-1])
        before.append(state(trainer))

    trainer.run(on_rollout)


def test_resume_is_bit_equal_in_both(recipe: Recipe, start: Callable[..., Trainer]) -> None:
    whole = start(recipe, "whole")
    whole.run(lambda record: None)

    class Killed(RuntimeError):
        """Nothing is saved on the way out."""

    def kill(record: RolloutRecord) -> None:
        if record.rollout == 3:
            raise Killed

    with pytest.raises(Killed):
        start(recipe, "cut").run(kill)
    resumed = start(recipe, "cut", resume=True)
    assert resumed.rollout == 3
    resumed.run(lambda record: None)
    assert same(state(resumed), state(whole))
    assert resumed.restore_checkpoint(0) == 0
    assert state(resumed)[3] == 0


def test_the_saved_critic_is_an_ordinary_model(recipe: Recipe, start: Callable[..., Trainer]) -> None:
    trainer = start(recipe)
    trainer.run(lambda record: None)
    critic = trainer.parts.critic
    assert critic is not None
    newest = find_checkpoints(trainer.folder / "checkpoints")[0]
    loaded = AutoModelForTokenClassification.from_pretrained(newest / "critic")
    ids = torch.tensor([[3, 4, 5, 6]])
    critic.model.eval()
    expected = critic.model(input_ids=ids).logits
    assert expected.abs().min() > 0
    assert torch.equal(loaded(input_ids=ids).logits, expected)


def test_a_checkpoint_without_a_critic_is_refused(
    recipe: Recipe, make_recipe: MakeRecipe, start: Callable[..., Trainer]
) -> None:
    start(make_recipe(rollouts=1), "run").run(lambda record: None)
    with pytest.raises(CheckpointError, match="holds no critic"):
        start(recipe, "run", resume=True)


def test_one_response_per_prompt_is_enough(make_recipe: MakeRecipe, start: Callable[..., Trainer]) -> None:
    sizes = {"algorithm": "ppo", "rollouts": 2, "rollout_n": 1}
    sizes |= {"micro_batch_size": 2, "rollout_micro_batch_size": 8}
    trainer, records = start(make_recipe(**sizes)), []
    trainer.run(records.append)
    assert records[-1].scalars["grad_norm"] > 0
    assert records[-1].scalars["zero_std_fraction"] == 1.0  # nobody has siblings
    assert trainer.live.set("rollout_n", 1) == 1
