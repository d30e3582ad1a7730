"""Loss and gradient of one replayed batch against TRL's own loss method, called and not retyped.

A batch of padded prompts and responses of unequal length, old log-probs of other weights (so that the
clip is active on both sides), a reference of others still. Our side goes through the updater in micro
batches, TRL's through `GRPOTrainer._compute_loss` of a real trainer around the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from autotune.trainer.algorithms import ALGORITHMS
from autotune.trainer.credit import group_credit
from autotune.trainer.engine import StepResult
from autotune.trainer.forward import TokenBatch
from autotune.trainer.losses import LossKnobs
from autotune.trainer.meters import Measured, Meters
from autotune.trainer.packing import Packing
from autotune.trainer.ranks import Ranks
from autotune.trainer.update import BatchKnobs, Experience, Updater, first_epoch, make_plan, score_samples

CPU = torch.device("cpu")
GROUP, PROMPTS, WIDTH, LONGEST, TEMPERATURE = 4, 6, 5, 7, 0.7
KL, ENTROPY, LOW, HIGH = 0.04, 0.01, 0.05, 0.08

CASES = {
    # ours: algorithm, ratio, average            TRL's: loss_type, importance_sampling_level
    "grpo": ("grpo", "token", "tokens", "bnpo", "token"),
    "grpo by response": ("grpo", "token", "responses", "grpo", "token"),
    "dr_grpo": ("dr_grpo", "token", "length", "dr_grpo", "token"),
    "dapo": ("dapo", "token", "tokens", "dapo", "token"),
    "gspo": ("gspo", "sequence", "responses", "grpo", "sequence"),
}


@dataclass
class Replay:
    """One batch, with everything that both sides are given."""

    batch: TokenBatch
    old: torch.Tensor
    ref: torch.Tensor
    rewards: torch.Tensor


def shaken(model: PreTrainedModel, scale: float, seed: int) -> PreTrainedModel:
    """The same model with noise on its weights."""
    other, g = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=g))
    return other


@pytest.fixture(scope="module")
def replay(tiny_folder: Path) -> Replay:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder).eval()
    g = torch.Generator().manual_seed(8)
    total = GROUP * PROMPTS
    starts = torch.randint(0, 3, (PROMPTS, 1), generator=g).repeat_interleave(GROUP, dim=0)
    lengths = torch.randint(1, WIDTH + 1, (total,), generator=g)
    batch = TokenBatch(
        torch.randint(2, 40, (PROMPTS, 4), generator=g).repeat_interleave(GROUP, dim=0),
        torch.arange(4)[None, :] >= starts,
        torch.randint(2, 40, (total, WIDTH), generator=g),
        torch.arange(WIDTH)[None, :] < lengths[:, None],
    )
    micro = first_epoch(plan_of(batch, total), 1)
    old, _ = score_samples(shaken(model, 0.02, 1), batch, micro, TEMPERATURE, Ranks())
    ref, _ = score_samples(shaken(model, 0.05, 2), batch, micro, TEMPERATURE, Ranks())
    return Replay(batch, old, ref, torch.randint(0, 2, (total,), generator=g).double())


def plan_of(batch: TokenBatch, micro: int, packed: bool = False) -> list[Any]:
    lengths, prompts = batch.response_mask.sum(dim=1), batch.prompt_mask.sum(dim=1)  # type: ignore[union-attr]
    packing = Packing(prompts.numpy(), batch.prompt_ids.shape[1], WIDTH, 40, 16) if packed else None
    knobs = BatchKnobs(GROUP, PROMPTS, 1, micro)
    return make_plan(lengths.numpy(), torch.ones(len(lengths)), knobs, (1, 2), Ranks(), CPU, packing)


class Recorder:
    """The engine's shape: it keeps the gradients of the one step and moves nothing."""

    world_size = 1

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self) -> StepResult:
        return StepResult(torch.tensor(0.0), True)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def ours(
    folder: Path, replay: Replay, advantages: torch.Tensor, ratio: str, average: str, packed: bool = False
) -> tuple[Measured, dict[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    knobs = LossKnobs(LOW, HIGH, KL, "k3", ENTROPY, ratio=ratio, average=average, longest=LONGEST)
    meters = Meters(1, LOW, HIGH, True, CPU, ratio=ratio)
    data = Experience(replay.batch, advantages, replay.old, replay.ref)
    updater = Updater(Recorder(model), data, knobs, TEMPERATURE)  # type: ignore[arg-type]
    assert list(updater.run(plan_of(replay.batch, 4, packed), meters)) == [True]
    return meters.finish(Ranks()), gradients(model)


@pytest.fixture(scope="module")
def trl_trainer(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A GRPOTrainer of TRL's around the same weights; nothing is sampled or trained with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        config = GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            use_cpu=True,
            bf16=False,
            report_to=[],
            gradient_checkpointing=False,
            beta=KL,
            use_bias_correction_kl=False,  # its default weighs the KL by the ratio: another estimator
            epsilon=LOW,
            epsilon_high=HIGH,
            entropy_coef=ENTROPY,
            temperature=TEMPERATURE,
            max_completion_length=LONGEST,
            num_generations=GROUP,
            per_device_train_batch_size=GROUP * PROMPTS,
        )
        yield GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(tiny_folder),
            reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["1>"] * 64}),
            processing_class=AutoTokenizer.from_pretrained(tiny_folder, padding_side="left"),
        )


def theirs(
    trainer: Any, replay: Replay, advantages: torch.Tensor, loss_type: str, level: str
) -> tuple[float, dict[str, torch.Tensor], dict[str, list[float]]]:
    trainer.loss_type, trainer.importance_sampling_level = loss_type, level
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    trainer._metrics["train"].clear()
    trainer.model.train()
    trainer.model.zero_grad()
    mask = replay.batch.response_mask.long()
    inputs = {
        "prompt_ids": replay.batch.prompt_ids,
        "prompt_mask": replay.batch.prompt_mask.long(),  # type: ignore[union-attr]
        "completion_ids": replay.batch.response_ids,
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": replay.old,
        "ref_per_token_logps": replay.ref,
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), gradients(trainer.model), dict(trainer._metrics["train"])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_clip_share_equal_trl(
    case: str, tiny_folder: Path, replay: Replay, trl_trainer: Any
) -> None:
    algorithm, ratio, average, loss_type, level = CASES[case]
    advantages = group_credit(ALGORITHMS[algorithm], replay.rewards, None, GROUP).advantages
    measured, our_gradients = ours(tiny_folder, replay, advantages, ratio, average)
    loss, their_gradients, metrics = theirs(trl_trainer, replay, advantages, loss_type, level)
    assert measured.scalars["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in our_gradients.items():
        torch.testing.assert_close(gradient, their_gradients[name], rtol=1e-3, atol=2e-6)
    assert max(g.abs().max() for g in our_gradients.values()) > 0.01
    assert 0.05 < measured.scalars["clip_ratio"] < 0.95  # both branches were compared
    assert measured.scalars["clip_ratio"] == pytest.approx(metrics["clip_ratio/region_mean"][0], abs=1e-6)
    assert measured.per_update["kl_ref"][0] == pytest.approx(metrics["kl"][0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_norm_are_within_a_hundred_thousandth(
    case: str, packed: bool, tiny_folder: Path, replay: Replay, trl_trainer: Any
) -> None:
    """The gate before any comparison of speed, padded and packed, in float32."""
    algorithm, ratio, average, loss_type, level = CASES[case]
    advantages = group_credit(ALGORITHMS[algorithm], replay.rewards, None, GROUP).advantages
    measured, our_gradients = ours(tiny_folder, replay, advantages, ratio, average, packed)
    loss, their_gradients, _ = theirs(trl_trainer, replay, advantages, loss_type, level)
    norms = [torch.cat([g.flatten() for g in s.values()]).norm() for s in (our_gradients, their_gradients)]
    assert measured.scalars["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-5)


@pytest.mark.slow
def test_the_comparison_would_see_a_wrong_average(
    tiny_folder: Path, replay: Replay, trl_trainer: Any
) -> None:
    advantages = group_credit(ALGORITHMS["grpo"], replay.rewards, None, GROUP).advantages
    measured, _ = ours(tiny_folder, replay, advantages, "token", "tokens")
    loss, _, _ = theirs(trl_trainer, replay, advantages, "grpo", "token")
    assert measured.scalars["loss"] != pytest.approx(loss, rel=1e-2)
