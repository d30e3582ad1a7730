"""In the loop: the KL acts in one place, and groups without signal are replaced but still counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autotune.recipe import Recipe
from autotune.trainer import scoring as scoring_module
from autotune.trainer.collect import Collected, Samples, Scores, collect
from autotune.trainer.forward import TokenBatch
from autotune.trainer.loop import Trainer
from autotune.trainer.records import RolloutRecord
from autotune.trainer.scoring import loss_knobs

MakeRecipe = Callable[..., Recipe]
REWARD = {"placement": "reward"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Builds trainers and closes them."""
    trainers: list[Trainer] = []

    def build(recipe: Recipe, name: str = "run") -> Trainer:
        trainers.append(Trainer(recipe, tmp_path / name))
        return trainers[-1]

    yield build
    for trainer in trainers:
        trainer.close()


# -- the KL, in one place --------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["rloo", "ppo"])
def test_a_kl_in_the_reward_is_in_no_loss_and_in_no_logged_reward(
    make_recipe: MakeRecipe, start: Callable[..., Trainer], algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(make_recipe(algorithm=algorithm, rollouts=3, kl_coef=0.5, kl=REWARD))
    assert loss_knobs(trainer.recipe, trainer.live).kl_coef == 0.0
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    name = "critic_credit" if algorithm == "ppo" else "group_credit"
    original, at = getattr(scoring_module, name), 1 if algorithm == "ppo" else 2
    experience = scoring_module.Scoring.experience

    def spy(*args: Any) -> Any:
        rewards = args[0] if algorithm == "ppo" else args[1]
        seen.append((rewards, args[at], original(*args).advantages))
        return original(*args)

    monkeypatch.setattr(scoring_module, name, spy)
    built: list[Any] = []
    spied = lambda *a: built.append(experience(*a)) or built[-1]  # noqa: E731
    monkeypatch.setattr(scoring_module.Scoring, "experience", spied)
    records: list[RolloutRecord] = []

    def on_rollout(record: RolloutRecord) -> None:
        records.append(record)
        if record.rollout == 1:
            trainer.live.set("kl_coef", 0.25)

    trainer.run(on_rollout)
    for coef, record, (rewards, penalty, advantages), data in zip(
        [0.5, 0.5, 0.25], records, seen, built, strict=True
    ):
        mask = data.batch.response_mask
        k1 = (data.old_log_probs - data.ref_log_probs).masked_fill(~mask, 0.0)
        torch.testing.assert_close(penalty, coef * k1)
        assert record.scalars["reward_mean"] == pytest.approx(float(rewards.mean()))
        assert torch.equal(data.advantages, advantages)
    assert not seen[0][1].any()  # the reference is the start
    assert seen[2][1].abs().max() > 1e-3


def test_a_kl_in_the_loss_is_in_no_reward(
    make_recipe: MakeRecipe, start: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(make_recipe(rollouts=1, kl_coef=0.5))
    assert loss_knobs(trainer.recipe, trainer.live).kl_coef == 0.5
    monkeypatch.setattr(scoring_module, "kl_penalty", lambda *a: pytest.fail("it is in the loss already"))
    trainer.run(lambda record: None)


@pytest.mark.parametrize("algorithm", ["rloo", "ppo"])
def test_a_kl_in_the_reward_holds_the_model(
    make_recipe: MakeRecipe, start: Callable[..., Trainer], algorithm: str
) -> None:
    """With the task's reward out of the way, the KL is all there is to learn from."""
    drift = {}
    for coef in (1e-6, 3.0):
        recipe = make_recipe(
            algorithm=algorithm, rollouts=6, rollout_n=8, kl_coef=coef, kl=REWARD, actor_learning_rate=0.003
        )
        records: list[RolloutRecord] = []
        start(recipe, f"{algorithm}{coef}").run(records.append)
        drift[coef] = records[-1].scalars["kl_ref"]
    assert drift[3.0] < 0.6 * drift[1e-6]  # type: ignore[operator]


# -- dynamic sampling ------------------------------------------------------------------------------


def fake_round(before: int, silent: list[bool], width: int) -> tuple[Samples, Scores]:
    """Groups of two whose prompt ids tell which prompt they are; `width` prompt columns."""
    count = len(silent)
    names = torch.arange(before, before + count).repeat_interleave(2)
    samples = Samples(
        batch=TokenBatch(
            names[:, None].expand(-1, width),
            None,
            names[:, None] * 10 + torch.arange(3),
            torch.ones(2 * count, 3, dtype=torch.bool),
        ),
        sampler_log_probs=names[:, None].float().expand(-1, 3),
        lengths=np.full(2 * count, 3),
        truncated=np.zeros(2 * count, dtype=bool),
        prompt_lengths=np.full(count, width),
        prompts_cut=1,
    )
    total = np.array([r for s in silent for r in ((1.0, 1.0) if s else (1.0, 0.0))])
    return samples, Scores(total=total, components={"task": total}, silent=np.array(silent))


def fake_rounds(*rounds: tuple[list[bool], int]) -> tuple[Callable[[int, int], Any], list[tuple[int, int]]]:
    asked: list[tuple[int, int]] = []

    def draw(before: int, count: int) -> tuple[Samples, Scores]:
        silent, width = rounds[len(asked)]
        asked.append((before, count))
        return fake_round(before, silent, width)

    return draw, asked


def kept_prompts(data: Collected) -> list[int]:
    return data.kept.batch.prompt_ids[::2, -1].tolist()


def test_silent_groups_are_replaced_and_everything_drawn_is_described() -> None:
    draw, asked = fake_rounds(([True, False, True, False], 2), ([False, True], 3), ([False], 2))
    data = collect(draw, 4, 5)
    assert asked == [(0, 4), (4, 2), (6, 1)]
    assert kept_prompts(data) == [1, 3, 4, 6]
    assert data.rewards.tolist() == [1.0, 0.0] * 4
    assert data.scores.silent.tolist() == [True, False, True, False, False, True, False]
    assert data.scores.total.mean() == pytest.approx(10 / 14)
    assert (data.drawn.prompts_cut, len(data.drawn.lengths)) == (3, 14)
    assert data.kept.batch.prompt_ids.shape == (8, 3)
    assert data.kept.batch.prompt_mask is not None
    assert data.kept.batch.prompt_mask.sum(dim=1)[::2].tolist() == [2, 2, 3, 2]
    assert data.kept.batch.response_ids[::2, 1].tolist() == [11, 31, 41, 61]
    assert data.kept.sampler_log_probs is not None
    assert data.kept.sampler_log_probs[::2, 0].tolist() == [1.0, 3.0, 4.0, 6.0]
    assert data.kept.prompt_lengths.tolist() == [2, 2, 3, 2]


def test_a_batch_that_stays_short_is_filled_with_silent_groups() -> None:
    draw, asked = fake_rounds(([True, True, False], 2), ([True, True], 2))
    data = collect(draw, 3, 1)
    assert asked == [(0, 3), (3, 2)]
    assert kept_prompts(data) == [0, 1, 2]


def test_more_than_enough_is_cut() -> None:
    """A round draws more than is missing where every rank needs something to do."""
    draw, _ = fake_rounds(([True, False], 2), ([False, False, False], 2))
    assert kept_prompts(collect(draw, 2, 3)) == [1, 2]


def test_without_rounds_nothing_is_touched() -> None:
    draw, asked = fake_rounds(([True, False], 2))
    data = collect(draw, 2, 0)
    assert asked == [(0, 2)]
    assert data.kept is data.drawn


def test_dynamic_sampling_in_the_loop(make_recipe: MakeRecipe, start: Callable[..., Trainer]) -> None:
    plain = start(make_recipe(rollouts=2), "plain")
    dapo = start(make_recipe(rollouts=2, algorithm="dapo", dynamic_sampling=8), "dapo")
    records: dict[str, list[RolloutRecord]] = {"plain": [], "dapo": []}
    plain.run(records["plain"].append)
    collected: list[Collected] = []
    original = dapo.drawing.collect

    def kept(*given: Any) -> Any:
        collected.append(original(*given))
        return collected[-1]

    dapo.drawing.collect = kept  # type: ignore[method-assign]
    dapo.run(records["dapo"].append)
    assert dapo.drawing.cursor > plain.drawing.cursor == 16
    for data, record in zip(collected, records["dapo"], strict=True):
        groups = data.rewards.view(-1, 4)
        assert len(groups) == 8
        assert ((groups.amax(1) > groups.amin(1)).sum()) == min(8, int((~data.scores.silent).sum()))
        assert record.scalars["reward_mean"] == pytest.approx(float(np.nanmean(data.scores.total)))
        assert data.scores.silent.any()
        assert record.scalars["zero_std_fraction"] == pytest.approx(data.scores.silent.mean())
    assert sum(len(data.scores.silent) for data in collected) == dapo.drawing.cursor
    first = collected[0]
    signal = ~first.scores.silent[:8]  # its first round is the other run's only round
    assert signal.mean() == pytest.approx(1 - records["plain"][0].scalars["zero_std_fraction"])  # type: ignore[operator]


def test_later_rounds_have_noise_of_their_own(make_recipe: MakeRecipe, start: Callable[..., Trainer]) -> None:
    trainer = start(make_recipe(rollouts=1))
    first, _ = trainer.drawing.round(0, 0, 8)
    trainer.drawing.cursor = -40  # so that the round 40 prompts into the rollout sees the same prompts
    later, _ = trainer.drawing.round(0, 40, 8)
    assert torch.equal(first.batch.prompt_ids, later.batch.prompt_ids)
    assert not torch.equal(first.batch.response_ids, later.batch.response_ids)
