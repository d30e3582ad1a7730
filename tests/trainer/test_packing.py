"""Packed micro batches give what padded ones give: log-probs, entropies, losses, gradients, records."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from autotune.errors import InputError
from autotune.recipe.schema import PackingSection
from autotune.trainer.attention import can_pack
from autotune.trainer.engine import Engine, StepResult
from autotune.trainer.forward import TokenBatch
from autotune.trainer.head import head_scores, plain_head
from autotune.trainer.loop import Trainer
from autotune.trainer.losses import LossKnobs
from autotune.trainer.meters import Measured, Meters
from autotune.trainer.packing import (
    Packing,
    compiled_layers,
    cut,
    cut_alike,
    make_layout,
    packed_log_probs,
    packs,
)
from autotune.trainer.ranks import Ranks
from autotune.trainer.update import (
    BatchKnobs,
    Cutter,
    Experience,
    MiniBatch,
    Updater,
    first_epoch,
    make_plan,
    score_samples,
)

CPU = torch.device("cpu")
GROUP, PROMPTS, WIDTH, LEFT = 4, 6, 5, 4
TOTAL = GROUP * PROMPTS
KNOBS = LossKnobs(clip_low=0.1, clip_high=0.1, kl_coef=0.05, kl_estimator="k3", entropy_coef=0.01)
SILENT = replace(KNOBS, kl_coef=0.0, entropy_coef=0.0)


class Scene:
    """Ragged prompts and responses, one response empty, with old and reference log-probs."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(2)
        self.prompt_lengths = torch.randint(1, LEFT + 1, (PROMPTS,), generator=g).repeat_interleave(GROUP)
        lengths = torch.randint(1, WIDTH + 1, (TOTAL,), generator=g)
        lengths[7] = 0
        self.lengths = lengths.numpy()
        self.batch = TokenBatch(
            torch.randint(2, 40, (TOTAL, LEFT), generator=g),
            torch.arange(LEFT)[None, :] >= LEFT - self.prompt_lengths[:, None],
            torch.randint(2, 40, (TOTAL, WIDTH), generator=g),
            torch.arange(WIDTH)[None, :] < lengths[:, None],
        )
        self.advantages = torch.randn(TOTAL, generator=g)
        self.noise = 0.3 * torch.randn(TOTAL, WIDTH, generator=g)

    def packing(self, budget: int | None = None, chunk: int = 7) -> Packing:
        return Packing(self.prompt_lengths.numpy(), LEFT, WIDTH, budget, chunk)

    def plan(self, packing: Packing | None, micro: int = 8, mini: int = 3, **more: Any) -> list[MiniBatch]:
        knobs = BatchKnobs(GROUP, mini, 1, micro)
        return make_plan(self.lengths, self.advantages, knobs, (1, 2), Ranks(), CPU, packing, **more)


@pytest.fixture
def scene() -> Scene:
    return Scene()


class Recorder:
    """The engine's shape around bare torch: keeps every step's gradient and moves nothing."""

    world_size = 1

    def __init__(self, model: Any) -> None:
        self.module, self.gradients, self.passes = model, [], 0  # type: ignore[var-annotated]

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()
        self.passes += 1

    def step(self) -> StepResult:
        parts = [p.grad.flatten() for p in self.module.parameters() if p.grad is not None]
        self.gradients.append(torch.cat(parts))
        self.module.zero_grad()
        return StepResult(self.gradients[-1].norm(), True)


def experience(model: PreTrainedModel, scene: Scene, plan: list[MiniBatch]) -> Experience:
    old, _ = score_samples(model, scene.batch, first_epoch(plan, 1), 0.8, Ranks())
    return Experience(scene.batch, scene.advantages, old + scene.noise, old - scene.noise)


def train(
    model: Any, data: Experience, plan: list[MiniBatch], knobs: LossKnobs = KNOBS
) -> tuple[Recorder, Measured]:
    engine, meters = Recorder(model), Meters(len(plan), 0.1, 0.1, True, CPU, ratio=knobs.ratio)
    list(Updater(engine, data, knobs, 0.8).run(plan, meters))  # type: ignore[arg-type]
    return engine, meters.finish(Ranks())


# -- the output layer ------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("chunk", "compiled"), [(1, False), (7, False), (100, False), (12, True)])
def test_the_head_equals_plain_autograd(temperature: float, chunk: int, compiled: bool) -> None:
    g = torch.Generator().manual_seed(1)
    head = torch.nn.Linear(16, 50, bias=False)
    hidden = torch.randn(23, 16, generator=g, requires_grad=True)
    targets = torch.randint(0, 50, (23,), generator=g)
    pull = torch.randn(23, 2, generator=g)

    log_p = (head(hidden) / temperature).log_softmax(dim=1)
    wanted = torch.stack([log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=1)], dim=1)
    gradients = torch.autograd.grad((wanted * pull).sum(), [hidden, head.weight])
    with head_scores(head, targets, temperature, True, chunk, compiled):
        got = head(hidden[None])[0]
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad((got * pull).sum(), [hidden, head.weight])
    for mine, theirs in zip(ours, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert head(hidden).shape == (23, 50)  # itself again


def test_the_head_makes_logits_for_response_positions_only(
    tiny_model: PreTrainedModel, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    import autotune.trainer.head as head_module

    seen, original = [], head_module._logits

    def counted(hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(len(hidden))
        return original(hidden, *rest)

    monkeypatch.setattr(head_module, "_logits", counted)
    layout = make_layout(np.arange(TOTAL), scene.lengths, scene.packing(), CPU)
    packed_log_probs(tiny_model, scene.batch, layout, 1.0, False)
    assert max(seen) == 7
    assert sum(seen) == scene.lengths.sum()


def test_a_head_with_more_to_it_is_left_alone(tiny_model: PreTrainedModel, scene: Scene) -> None:
    layout = make_layout(np.arange(TOTAL), scene.lengths, scene.packing(), CPU)
    wanted = packed_log_probs(tiny_model, scene.batch, layout, 0.8, True)
    assert plain_head(tiny_model) is not None
    tiny_model.config.final_logit_softcapping = 30.0
    assert plain_head(tiny_model) is None
    got = packed_log_probs(tiny_model, scene.batch, layout, 0.8, True)  # Qwen2 itself caps nothing
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


# -- packed = padded -------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("budget", [None, 1, 20, 10_000])
def test_scores_equal_padded_ones(tiny_model: PreTrainedModel, scene: Scene, budget: int | None) -> None:
    padded = first_epoch(scene.plan(None), 1)
    packed = first_epoch(scene.plan(scene.packing(budget)), 1)
    args = (0.8, Ranks(), True)
    for got, wanted in zip(
        score_samples(tiny_model, scene.batch, packed, *args),
        score_samples(tiny_model, scene.batch, padded, *args),
        strict=True,
    ):
        mask = scene.batch.response_mask
        torch.testing.assert_close(got[mask], wanted[mask], rtol=1e-5, atol=1e-5)
        assert not got[~mask].any()
    assert tiny_model.config._attn_implementation == "sdpa"  # as it was


LOSSES = {
    "grpo": KNOBS,
    "no penalties": SILENT,
    "grpo by response": replace(KNOBS, average="responses"),
    "dr_grpo": replace(KNOBS, average="length", longest=WIDTH + 2),
    "gspo": replace(KNOBS, ratio="sequence", average="responses"),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("budget", [None, 20])
def test_gradients_equal_padded_ones(
    tiny_model: PreTrainedModel, scene: Scene, loss: str, budget: int | None
) -> None:
    padded, packed = scene.plan(None), scene.plan(scene.packing(budget))
    data = experience(tiny_model, scene, padded)
    plain, one = train(tiny_model, data, padded, LOSSES[loss])
    fast, other = train(tiny_model, data, packed, LOSSES[loss])
    assert len(plain.gradients) == 2
    for mine, theirs in zip(fast.gradients, plain.gradients, strict=True):
        assert theirs.norm() > 0.01
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert other.histograms == one.histograms
    assert other.scalars["loss"] == pytest.approx(one.scalars["loss"], rel=1e-5, abs=1e-7)
    assert other.scalars["clip_ratio"] == one.scalars["clip_ratio"] > 0.05


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_real_engine_agrees(tiny_folder: Path, scene: Scene, stage: int) -> None:
    """At ZeRO 3 the output layer's weights are gathered by hooks on the layer, called as ever."""
    weights, norms = [], []
    for packing in (None, scene.packing(20)):
        model = AutoModelForCausalLM.from_pretrained(tiny_folder).eval()
        engine = Engine(
            model,
            zero_stage=stage,
            learning_rate=1e-3,
            betas=(0.9, 0.99),
            weight_decay=0.0,
            max_grad_norm=1.0,
        )
        plan = scene.plan(packing)
        with engine.whole_weights():
            data = experience(model, scene, plan)
        meters = Meters(len(plan), 0.1, 0.1, True, CPU)
        assert list(Updater(engine, data, KNOBS, 0.8).run(plan, meters)) == [True, True]
        norms.append(meters.finish(Ranks()).per_update["grad_norm"])
        state = engine.state_tensors()
        weights.append(torch.cat([t.flatten() for n, t in state.items() if n.startswith("model/")]))
        engine.close()
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert (weights[0] - weights[1]).abs().median() < 1e-7


def test_a_run_packs_and_its_first_ratio_is_one(make_recipe: Callable[..., Any], tmp_path: Path) -> None:
    """With and without an adapter: the reference without adapters is packed too."""
    for name, model, tokens in (("whole", {}, None), ("budget", {}, 40), ("lora", {"lora": {"rank": 4}}, 40)):
        base = make_recipe()
        model = {**base.model.model_dump(), **model}
        packing = {"enabled": "on", "tokens": tokens}
        recipe = make_recipe({"model": model}, rollouts=2, packing=packing, kl_coef=0.01)
        records: list[Any] = []
        trainer = Trainer(recipe, tmp_path / name)
        trainer.run(records.append)
        trainer.close()
        first = [r.per_update["kl_step"][0] for r in records]
        assert first == [0.0, 0.0] if tokens is None else max(first) < 1e-9
        assert all(r.scalars["kl_mismatch"] < 1e-9 for r in records)  # the sampler pads


# -- cutting ---------------------------------------------------------------------------------------


def test_micro_batches_keep_to_the_budget(scene: Scene) -> None:
    sizes = scene.packing().prompt_lengths + np.maximum(scene.lengths - 1, 0)
    for budget in (1, 9, 20, 1000):
        parts = cut(np.arange(TOTAL), sizes, budget)
        assert np.concatenate(parts).tolist() == list(range(TOTAL))
        assert all(sizes[part].sum() <= budget or len(part) == 1 for part in parts)
    assert len(cut(np.arange(TOTAL), sizes, 1000)) == 1


def test_the_passes_over_a_subset_keep_to_the_budget_too(scene: Scene) -> None:
    """With a budget, `micro_batch_size` in samples says nothing about memory: its default is 128."""
    rows, packing = np.arange(0, TOTAL, 2), scene.packing(20)
    sizes = packing.prompt_lengths + np.maximum(scene.lengths - 1, 0)
    parts = [
        part.index.numpy() for part in Cutter(scene.lengths, 128, Ranks(), CPU, packing).of_one_rank(rows)
    ]
    assert np.concatenate(parts).tolist() == rows.tolist()
    assert all(sizes[part].sum() <= 20 for part in parts)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_as_many_micro_batches(ranks: int) -> None:
    sizes = np.concatenate([np.full(12, 10), np.full(12, 1)])  # the first rank has all the long ones
    parts = [cut_alike(np.arange(24), sizes, 20, Ranks(rank, ranks)) for rank in range(ranks)]
    assert len({len(of_one) for of_one in parts}) == 1
    assert np.concatenate([np.concatenate(of_one) for of_one in parts]).tolist() == list(range(24))
    assert all(sizes[part].sum() <= 20 and len(part) for of_one in parts for part in of_one)


# -- samples without signal ------------------------------------------------------------------------


def test_leaving_out_quiet_samples_changes_no_gradient(tiny_model: PreTrainedModel, scene: Scene) -> None:
    quiet = (np.arange(TOTAL) // GROUP) % 2 == 0
    scene.advantages[torch.from_numpy(quiet)] = 0.0
    packing = scene.packing(20)
    everything, some = scene.plan(packing), scene.plan(packing, quiet=quiet)
    data = experience(tiny_model, scene, everything)
    plain, one = train(tiny_model, data, everything, SILENT)
    fewer, other = train(tiny_model, data, some, SILENT)
    for mine, theirs in zip(fewer.gradients, plain.gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert 0 < fewer.passes < plain.passes
    assert other.scalars["clip_ratio"] == pytest.approx(one.scalars["clip_ratio"])
    assert other.scalars["loss"] == pytest.approx(one.scalars["loss"], rel=1e-4)
    trained = scene.lengths[~quiet].sum()
    assert sum(other.histograms["policy_ratio"]) == trained < sum(one.histograms["policy_ratio"])
    scored = torch.cat([micro.index for micro in first_epoch(some, 1)])
    assert sorted(scored.tolist()) == list(range(TOTAL))  # the rollout's own numbers are over all


@pytest.mark.parametrize(
    ("trainer", "left_out"),
    [({"kl_coef": 0.0}, True), ({"kl_coef": 0.01}, False), ({"kl_coef": 0.0, "entropy_coef": 0.01}, False)],
)
def test_a_run_leaves_them_out_only_where_nothing_else_acts(
    make_recipe: Callable[..., Any], tmp_path: Path, trainer: dict[str, Any], left_out: bool
) -> None:
    recipe = make_recipe(rollouts=1, packing={"enabled": "on"}, **trainer)
    records: list[Any] = []
    run = Trainer(recipe, tmp_path)
    run.run(records.append)
    run.close()
    record = records[0]
    tokens = record.scalars["response_length_mean"] * 32
    counted = sum(record.histograms["policy_ratio"])
    assert record.scalars["zero_std_fraction"] > 0
    assert (counted < tokens) == left_out


# -- compiled layers -------------------------------------------------------------------------------


def test_a_model_whose_layers_were_compiled_can_be_let_go(tiny_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    layer = model.model.layers[0]
    for _ in range(2):
        with compiled_layers(model):
            assert layer._compiled_call_impl is not None
        assert layer._compiled_call_impl is None
    seen = weakref.ref(layer)
    del model, layer
    gc.collect()
    assert seen() is None


# -- whether at all --------------------------------------------------------------------------------


def test_who_packs(tiny_model: PreTrainedModel) -> None:
    gpu = torch.device("cuda")
    assert not packs(PackingSection(), tiny_model, CPU)
    assert packs(PackingSection(), tiny_model, gpu)
    assert packs(PackingSection(enabled="on"), tiny_model, CPU)
    assert not packs(PackingSection(enabled="off"), tiny_model, gpu)
    tiny_model.config.layer_types = ["sliding_attention"]
    assert not can_pack(tiny_model)
    assert not packs(PackingSection(), tiny_model, gpu)
    with pytest.raises(InputError, match=r"trainer\.packing\.enabled: on"):
        packs(PackingSection(enabled="on"), tiny_model, CPU)
