"""Updates: the same gradient however the mini-batch is cut, ratio exactly 1 at the start, no empty steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from autotune.trainer.critic import Critic, value_model
from autotune.trainer.engine import Engine, StepResult
from autotune.trainer.forward import TokenBatch
from autotune.trainer.losses import LossKnobs
from autotune.trainer.meters import Measured, Meters
from autotune.trainer.ranks import Ranks
from autotune.trainer.update import (
    BatchKnobs,
    Cutter,
    Experience,
    MiniBatch,
    Updater,
    ValueTargets,
    first_epoch,
    fixed_subset,
    make_plan,
    measure_drift,
    score_samples,
    with_signal,
)

CPU = torch.device("cpu")
GROUP, PROMPTS, WIDTH = 4, 6, 5
KNOBS = LossKnobs(clip_low=0.2, clip_high=0.2, kl_coef=0.05, kl_estimator="k3", entropy_coef=0.01)
SILENT = replace(KNOBS, kl_coef=0.0, entropy_coef=0.0)


@dataclass
class Scene:
    """Random responses of unequal length to padded prompts, with advantages."""

    batch: TokenBatch
    lengths: np.ndarray
    advantages: torch.Tensor

    def plan(self, micro: int, mini: int = PROMPTS, epochs: int = 1) -> list[MiniBatch]:
        knobs = BatchKnobs(GROUP, mini, epochs, micro)
        return make_plan(self.lengths, self.advantages, knobs, (1, 2), Ranks(), CPU)


@pytest.fixture
def scene() -> Scene:
    g = torch.Generator().manual_seed(2)
    total = GROUP * PROMPTS
    prompts = torch.randint(2, 40, (PROMPTS, 4), generator=g).repeat_interleave(GROUP, dim=0)
    starts = torch.randint(0, 3, (PROMPTS, 1), generator=g).repeat_interleave(GROUP, dim=0)
    lengths = torch.randint(1, WIDTH + 1, (total,), generator=g)
    batch = TokenBatch(
        prompts,
        torch.arange(4)[None, :] >= starts,
        torch.randint(2, 40, (total, WIDTH), generator=g),
        torch.arange(WIDTH)[None, :] < lengths[:, None],
    )
    return Scene(batch, lengths.numpy(), torch.randn(total, generator=g))


class PlainEngine:
    """The engine's shape around bare torch, which keeps the gradients of every step."""

    def __init__(self, model: PreTrainedModel, learning_rate: float = 0.0) -> None:
        self.module, self.world_size = model, 1
        self.optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
        self.gradients: list[torch.Tensor] = []
        self.boundaries: list[bool] = []

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()
        self.boundaries.append(last)

    def step(self) -> StepResult:
        flat = torch.cat([p.grad.flatten() for p in self.module.parameters() if p.grad is not None])
        self.gradients.append(flat.clone())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(flat.norm(), True)


def experience(model: PreTrainedModel, scene: Scene, plan: list[MiniBatch], epochs: int = 1) -> Experience:
    old, _ = score_samples(model, scene.batch, first_epoch(plan, epochs), 1.0, Ranks())
    return Experience(scene.batch, scene.advantages, old, old - 0.3)


def train(
    engine: PlainEngine | Engine, data: Experience, plan: list[MiniBatch], knobs: LossKnobs = KNOBS
) -> tuple[list[bool], Measured]:
    meters = Meters(len(plan), knobs.clip_low, knobs.clip_high, True, CPU, ratio=knobs.ratio)
    moved = list(Updater(engine, data, knobs, 1.0).run(plan, meters))  # type: ignore[arg-type]
    return moved, meters.finish(Ranks())


def drift(scene: Scene) -> torch.Tensor:
    """What other weights might have made of the log-probs, [N, R]."""
    return 0.4 * torch.randn(scene.batch.response_ids.shape, generator=torch.Generator().manual_seed(6))


LOSSES = {
    "grpo": KNOBS,
    "grpo by response": replace(KNOBS, average="responses"),
    "dr_grpo": replace(KNOBS, average="length", longest=WIDTH + 2),
    "dapo": replace(KNOBS, clip_high=0.28),
    "gspo": replace(KNOBS, ratio="sequence", average="responses"),
}


@pytest.mark.parametrize("micro", [1, 4, 6])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_do_not_depend_on_the_micro_batch(
    tiny_model: PreTrainedModel, scene: Scene, loss: str, micro: int
) -> None:
    whole, knobs = PlainEngine(tiny_model), LOSSES[loss]
    plan = scene.plan(GROUP * PROMPTS)
    data = experience(tiny_model, scene, plan)
    data = replace(data, old_log_probs=data.old_log_probs + drift(scene))
    _, one = train(whole, data, plan, knobs)
    cut = PlainEngine(tiny_model)
    _, many = train(cut, data, scene.plan(micro), knobs)
    assert len(cut.boundaries) == GROUP * PROMPTS // micro
    assert cut.boundaries == [False] * (len(cut.boundaries) - 1) + [True]
    reference = whole.gradients[0]
    assert reference.norm() > 0.01
    assert torch.allclose(cut.gradients[0], reference, rtol=1e-4, atol=1e-6)
    assert many.histograms == one.histograms
    assert many.scalars["loss"] == pytest.approx(one.scalars["loss"], rel=1e-4)
    assert one.scalars["clip_ratio"] > 0.05  # clipped and unclipped parts were both in it


@pytest.mark.parametrize("micro", [1, 4, 6])
def test_actor_and_critic_do_not_depend_on_the_micro_batch(
    tiny_model: PreTrainedModel, scene: Scene, micro: int
) -> None:
    """PPO: an advantage for every token, and the critic's own loss beside the actor's."""
    model = value_model(tiny_model)
    with torch.no_grad():  # a head that is not zero, so that the whole critic has gradients
        model.score.weight.normal_(generator=torch.Generator().manual_seed(4))
    g, plan = torch.Generator().manual_seed(3), scene.plan(GROUP * PROMPTS)
    data = experience(tiny_model, scene, plan)
    mask = scene.batch.response_mask & (torch.arange(len(scene.lengths)) != 5)[:, None]
    old, returns = torch.randn(2, *mask.shape, generator=g)
    data = replace(
        data,
        advantages=torch.randn(mask.shape, generator=g),
        targets=ValueTargets(old, returns, mask),
    )
    gradients, losses = [], []
    for size in (GROUP * PROMPTS, micro):
        actor, critic = PlainEngine(tiny_model), PlainEngine(model)
        meters = Meters(1, 0.2, 0.2, True, CPU, has_critic=True)
        updater = Updater(actor, data, KNOBS, 1.0, Critic(model, critic, 0.2))  # type: ignore[arg-type]
        assert list(updater.run(scene.plan(size), meters)) == [True]
        assert len(critic.boundaries) == GROUP * PROMPTS // size
        gradients.append((actor.gradients[0], critic.gradients[0]))
        losses.append(meters.finish(Ranks()).per_update["value_loss"][0])
    for whole, cut in zip(*gradients, strict=True):
        assert whole.norm() > 0.01
        assert torch.allclose(cut, whole, rtol=1e-4, atol=1e-6)
    assert losses[0] > 0.1
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_quiet_update_still_teaches_the_critic(tiny_model: PreTrainedModel, scene: Scene) -> None:
    model, plan = value_model(tiny_model), scene.plan(4)
    mask = scene.batch.response_mask
    data = replace(
        experience(tiny_model, scene, plan),
        advantages=torch.zeros(mask.shape),
        targets=ValueTargets(torch.zeros(mask.shape), torch.ones(mask.shape), mask),
    )
    actor, critic = PlainEngine(tiny_model), PlainEngine(model)
    meters = Meters(1, 0.2, 0.2, True, CPU, has_critic=True)
    updater = Updater(actor, data, SILENT, 1.0, Critic(model, critic, None))  # type: ignore[arg-type]
    assert list(updater.run(with_signal(plan, data.advantages), meters)) == [False]
    assert actor.gradients == []
    assert critic.gradients[0].norm() > 0
    assert meters.finish(Ranks()).scalars["value_loss"] == pytest.approx(0.5)  # values 0, returns 1


def test_values_do_not_depend_on_padding(tiny_model: PreTrainedModel, scene: Scene) -> None:
    """A sample alone, without its left padding, has the values that it has in the batch."""
    model = value_model(tiny_model)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(4))
    micro = first_epoch(scene.plan(4), 1)
    values = Critic(model, None, None).score(scene.batch, micro, Ranks())  # type: ignore[arg-type]
    for row in (0, 9, 23):
        prompt = scene.batch.prompt_ids[row][scene.batch.prompt_mask[row]]  # type: ignore[index]
        length = int(scene.lengths[row])
        alone = torch.cat([prompt, scene.batch.response_ids[row, : length - 1]])[None]
        expected = model(input_ids=alone).logits[0, -length:, 0]
        torch.testing.assert_close(values[row, :length], expected, rtol=1e-4, atol=1e-5)
    assert values[scene.batch.response_mask].std() > 0.01


def test_ratio_metrics_count_responses_where_the_ratio_is_a_responses_own(
    tiny_model: PreTrainedModel, scene: Scene
) -> None:
    plan = scene.plan(4)
    data = experience(tiny_model, scene, plan)
    old = data.old_log_probs + drift(scene)
    knobs = replace(KNOBS, ratio="sequence", average="responses")
    _, measured = train(PlainEngine(tiny_model), replace(data, old_log_probs=old), plan, knobs)
    mask = scene.batch.response_mask.numpy()
    d = np.where(mask, (data.old_log_probs - old).numpy(), 0.0)
    s = np.exp(d.sum(axis=1) / mask.sum(axis=1))  # [N]
    a = scene.advantages.numpy()
    clipped = ((s > 1.2) & (a > 0)) | ((s < 0.8) & (a < 0))
    assert 0 < clipped.mean() < 1
    assert measured.scalars["clip_ratio"] == pytest.approx(clipped.mean())
    assert measured.scalars["ratio_low"] == pytest.approx((s < 0.8).mean())
    assert measured.scalars["ratio_high"] == pytest.approx((s > 1.2).mean())
    assert sum(measured.histograms["policy_ratio"]) == GROUP * PROMPTS
    by_token = np.exp(d[mask]) - 1 - d[mask]
    assert measured.per_update["kl_step"][0] == pytest.approx(by_token.mean(), rel=1e-4)


@pytest.mark.parametrize("stage", [0, 1])
def test_the_real_engine_agrees(tiny_folder: object, scene: Scene, stage: int) -> None:
    from transformers import AutoModelForCausalLM

    norms, weights = [], []
    for micro in (1, 4, GROUP * PROMPTS):
        model = AutoModelForCausalLM.from_pretrained(tiny_folder).eval()
        engine = Engine(
            model,
            zero_stage=stage,
            learning_rate=1e-3,
            betas=(0.9, 0.99),
            weight_decay=0.0,
            max_grad_norm=1.0,
        )
        plan = scene.plan(GROUP * PROMPTS)
        data = experience(model, scene, plan)
        moved, measured = train(engine, data, scene.plan(micro))
        assert moved == [True]
        norms.append(measured.per_update["grad_norm"][0])
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        engine.close()
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)
    moved_by = (weights[0] - weights[2]).abs()
    assert moved_by.median() < 1e-7  # Adam turns a gradient near 0 into a sign: compare the bulk


def test_the_loss_is_the_token_mean_of_the_mini_batch(tiny_model: PreTrainedModel, scene: Scene) -> None:
    """At ratio 1 the objective is the advantage, so the loss can be written down."""
    plan = scene.plan(4)
    data = experience(tiny_model, scene, plan)
    _, measured = train(PlainEngine(tiny_model), data, plan, SILENT)
    expected = -np.average(scene.advantages.numpy(), weights=scene.lengths)
    assert measured.scalars["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("micro", [1, 4, 8, 24])
def test_one_update_has_ratio_exactly_one(tiny_model: PreTrainedModel, scene: Scene, micro: int) -> None:
    plan = scene.plan(micro)
    _, measured = train(PlainEngine(tiny_model), experience(tiny_model, scene, plan), plan)
    tokens = float(scene.lengths.sum())
    assert measured.histograms["policy_ratio"][33] == tokens  # the bin that begins at 1
    assert measured.scalars["ratio_in"] == 1.0
    assert measured.scalars["clip_ratio"] == 0.0
    assert measured.per_update["kl_step"] == [0.0]


def test_the_first_update_only_is_exact(tiny_model: PreTrainedModel, scene: Scene) -> None:
    plan = scene.plan(4, mini=2, epochs=2)
    data = experience(tiny_model, scene, plan, epochs=2)
    _, measured = train(PlainEngine(tiny_model, 0.5), data, plan)
    assert len(plan) == 6
    assert measured.per_update["kl_step"][0] == 0.0
    assert min(measured.per_update["kl_step"][1:]) > 0.0


def test_every_sample_once_per_epoch(scene: Scene) -> None:
    plan = scene.plan(4, mini=2, epochs=2)
    for epoch in (plan[:3], plan[3:]):
        rows = torch.cat([micro.index for mini in epoch for micro in mini.micro])
        assert sorted(rows.tolist()) == list(range(GROUP * PROMPTS))
    scored = torch.cat([micro.index for micro in first_epoch(plan, 2)])
    assert sorted(scored.tolist()) == list(range(GROUP * PROMPTS))
    for mini in plan:  # whole groups
        rows = torch.cat([micro.index for micro in mini.micro]).numpy()
        assert all(np.sum(rows // GROUP == g) in (0, GROUP) for g in range(PROMPTS))
        assert mini.tokens == scene.lengths[rows].sum()


def quiet(scene: Scene, prompts: set[int]) -> Scene:
    """The same scene where the given prompts' groups have no signal."""
    rows = torch.tensor([row // GROUP in prompts for row in range(GROUP * PROMPTS)])
    return replace(scene, advantages=scene.advantages.masked_fill(rows, 0.0))


def test_an_update_without_signal_is_skipped_and_measured(tiny_model: PreTrainedModel, scene: Scene) -> None:
    first = scene.plan(4, mini=2)[0]
    groups = {int(i) // GROUP for micro in first.micro for i in micro.index}
    still = quiet(scene, groups)
    plan = still.plan(4, mini=2)
    engine = PlainEngine(tiny_model, 0.1)
    moved, measured = train(engine, experience(tiny_model, still, plan), plan, SILENT)
    assert moved == [False, True, True]
    assert len(engine.gradients) == 2
    assert measured.per_update["grad_norm"][0] == 0.0
    assert sum(measured.histograms["policy_ratio"]) == scene.lengths.sum()


@pytest.mark.parametrize("penalty", ["kl_coef", "entropy_coef"])
def test_a_penalty_alone_is_signal(tiny_model: PreTrainedModel, scene: Scene, penalty: str) -> None:
    still = quiet(scene, set(range(PROMPTS)))
    plan = still.plan(4, mini=2)
    data = experience(tiny_model, still, plan)
    moved, _ = train(PlainEngine(tiny_model), data, plan, SILENT)
    assert moved == [False, False, False]
    engine = PlainEngine(tiny_model)
    moved, _ = train(engine, data, plan, replace(SILENT, **{penalty: 0.1}))
    assert moved == [True, True, True]
    assert all(gradient.norm() > 0 for gradient in engine.gradients)


def test_updates_run_in_train_mode_and_old_log_probs_in_eval_mode(
    tiny_model: PreTrainedModel, scene: Scene
) -> None:
    seen: list[tuple[bool, bool]] = []
    tiny_model.register_forward_hook(
        lambda module, args, out: seen.append((module.training, torch.is_grad_enabled()))
    )
    plan = scene.plan(12)
    tiny_model.train()
    data = experience(tiny_model, scene, plan)
    train(PlainEngine(tiny_model), data, plan)
    assert seen == [(False, False)] * 2 + [(True, True)] * 2


def test_drift_is_measured_on_the_fixed_subset(tiny_model: PreTrainedModel, scene: Scene) -> None:
    plan = scene.plan(4, mini=2)
    data = experience(tiny_model, scene, plan)
    train(PlainEngine(tiny_model, 0.5), data, plan)
    rows, meters = fixed_subset(GROUP * PROMPTS, 10), Meters(3, 0.2, 0.2, True, CPU)
    tiny_model.train()
    parts = Cutter(scene.lengths, 4, Ranks(), CPU).of_one_rank(rows)
    measure_drift(tiny_model, data, parts, 1.0, meters)
    new, _ = score_samples(tiny_model, scene.batch, first_epoch(plan, 1), 1.0, Ranks())
    mask = scene.batch.response_mask[rows].numpy()
    d = (new - data.old_log_probs).numpy().astype(np.float64)[rows][mask]
    expected = np.mean(np.exp(d) - 1 - d)
    assert expected > 1e-4
    assert meters.finish(Ranks()).scalars["kl_step"] == pytest.approx(expected, rel=1e-4)


def test_the_subset_is_spread_and_fixed() -> None:
    assert fixed_subset(512, 64).tolist() == list(range(0, 512, 8))
    assert fixed_subset(10, 64).tolist() == list(range(10))
    assert len(set(fixed_subset(100, 64).tolist())) == 64


def test_ranks_share_a_mini_batch(scene: Scene) -> None:
    knobs = BatchKnobs(GROUP, 3, 1, 2)
    plans = [
        make_plan(scene.lengths, scene.advantages, knobs, (1, 2), Ranks(rank, 2), CPU) for rank in (0, 1)
    ]
    alone = make_plan(scene.lengths, scene.advantages, knobs, (1, 2), Ranks(), CPU)
    for ours, theirs, whole in zip(*plans, alone, strict=True):
        assert ours.tokens == theirs.tokens == whole.tokens
        rows = [torch.cat([m.index for m in mini.micro]).tolist() for mini in (ours, theirs, whole)]
        assert rows[0] + rows[1] == rows[2]
        assert len(rows[0]) == len(rows[1]) == 6
