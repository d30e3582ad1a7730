"""Adapters: only they are trained, the reference is the model without them, checkpoints hold them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from autotune.errors import InputError
from autotune.recipe import Recipe
from autotune.recipe.schema import LoraSection
from autotune.trainer.checkpoint import find_checkpoints
from autotune.trainer.loop import Trainer
from autotune.trainer.lora import WithoutAdapters, with_adapters
from autotune.trainer.records import RolloutRecord

MakeRecipe = Callable[..., Recipe]
IDS = torch.tensor([[3, 4, 5, 6]])


def lora_recipe(make_recipe: MakeRecipe, folder: Path, stage: int = 1, **trainer: object) -> Recipe:
    model = {"path": str(folder), "lora": {"rank": 4, "alpha": 8}}
    return make_recipe({"model": model, "deepspeed": {"zero_stage": stage}}, **trainer)


@pytest.mark.parametrize("stage", [0, 1])
def test_adapters_move_and_the_base_stands_still(
    make_recipe: MakeRecipe, tiny_folder: Path, tmp_path: Path, stage: int
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_folder).eval()
    trainer = Trainer(lora_recipe(make_recipe, tiny_folder, stage, rollouts=3), tmp_path)
    records: list[RolloutRecord] = []
    names = set(trainer.parts.engine.state_tensors())
    assert names
    assert all("lora_" in name for name in names)
    trainer.run(records.append)
    assert [record.scalars["grad_norm"] > 0 for record in records] == [True] * 3  # type: ignore[operator]
    assert records[0].scalars["kl_ref"] == 0.0  # adapters begin as the zero map
    assert records[2].scalars["kl_ref"] > 1e-4  # type: ignore[operator]
    reference, model = trainer.parts.reference, trainer.parts.model.eval()
    assert isinstance(reference, WithoutAdapters)
    reference.eval()
    assert torch.equal(reference(input_ids=IDS).logits, base(input_ids=IDS).logits)
    assert not torch.allclose(model(input_ids=IDS).logits, base(input_ids=IDS).logits, atol=1e-3)
    assert all(p.requires_grad == ("lora_" in n) for n, p in model.named_parameters())
    trainer.close()


def test_a_checkpoint_loads_by_from_pretrained_and_resumes_bit_equal(
    make_recipe: MakeRecipe, tiny_folder: Path, tmp_path: Path
) -> None:
    recipe = lora_recipe(make_recipe, tiny_folder, rollouts=4)
    whole = Trainer(recipe, tmp_path / "whole")
    whole.run(lambda record: None)

    class Killed(RuntimeError):
        """Nothing is saved on the way out."""

    def kill(record: RolloutRecord) -> None:
        if record.rollout == 3:
            raise Killed

    cut = Trainer(recipe, tmp_path / "cut")
    with pytest.raises(Killed):
        cut.run(kill)
    cut.close()
    resumed = Trainer(recipe, tmp_path / "cut", resume=True)
    resumed.run(lambda record: None)
    first, second = (t.parts.engine.state_tensors() for t in (whole, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)

    newest = find_checkpoints(tmp_path / "whole/checkpoints")[0]
    assert not (newest / "model.safetensors").exists()  # the base never changes: it is not copied
    loaded = AutoModelForCausalLM.from_pretrained(newest).eval()
    expected = whole.parts.model.eval()(input_ids=IDS).logits
    torch.testing.assert_close(loaded(input_ids=IDS).logits, expected, rtol=1e-5, atol=1e-6)
    assert AutoTokenizer.from_pretrained(newest).eos_token == whole.parts.tokenizer.eos_token
    whole.close()
    resumed.close()


def test_ppo_trains_adapters_beside_a_whole_critic(
    make_recipe: MakeRecipe, tiny_folder: Path, tmp_path: Path
) -> None:
    trainer = Trainer(lora_recipe(make_recipe, tiny_folder, rollouts=2, algorithm="ppo"), tmp_path)
    records: list[RolloutRecord] = []
    trainer.run(records.append)
    critic = trainer.parts.critic
    assert critic is not None
    assert not any("lora_" in name for name in critic.engine.state_tensors())
    assert records[1].scalars["kl_ref"] > 0  # type: ignore[operator]
    assert records[1].scalars["value_loss"] > 0  # type: ignore[operator]
    trainer.close()


def test_fresh_adapters_follow_the_seed(tiny_folder: Path) -> None:
    def first_matrix(seed: int) -> torch.Tensor:
        model = with_adapters(AutoModelForCausalLM.from_pretrained(tiny_folder), LoraSection(rank=4), seed)
        return next(p for n, p in model.named_parameters() if "lora_A" in n).detach()

    before = torch.random.get_rng_state()
    assert torch.equal(first_matrix(1), first_matrix(1))
    assert not torch.equal(first_matrix(1), first_matrix(2))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_targets_choose_the_layers(tiny_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    adapted = with_adapters(model, LoraSection(rank=2, targets=("q_proj", "v_proj")), 1)
    trained = {n.split(".")[-4] for n, p in adapted.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "v_proj"}
    fresh = AutoModelForCausalLM.from_pretrained(tiny_folder)
    with pytest.raises(InputError, match=r"model\.lora\.targets: .*no_such_layer"):
        with_adapters(fresh, LoraSection(targets=("no_such_layer",)), 1)
