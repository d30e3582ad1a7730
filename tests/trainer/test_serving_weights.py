"""What an engine with weights of its own is given: every tensor, named as on disk, adapters folded in."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from autotune.recipe.schema import LoraSection
from autotune.trainer.lora import with_adapters
from autotune.trainer.rollout.base import Draw, pad_prompts
from autotune.trainer.rollout.vllm import group_requests
from autotune.trainer.rollout.weights import serving_weights


def test_a_plain_model_gives_its_own_tensors(tiny_model: PreTrainedModel) -> None:
    given = dict(serving_weights(tiny_model))
    own = dict(tiny_model.named_parameters())
    assert given.keys() == own.keys()
    assert all(given[name].data_ptr() == own[name].data_ptr() for name in own)


def test_adapters_are_folded_in_under_the_names_on_disk(
    tiny_model: PreTrainedModel, tiny_folder: Path
) -> None:
    pytest.importorskip("peft")
    base = copy.deepcopy(dict(tiny_model.named_parameters()))
    adapted = with_adapters(tiny_model, LoraSection(rank=2, alpha=8), seed=1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    given = dict(serving_weights(adapted))
    fresh = AutoModelForCausalLM.from_pretrained(tiny_folder)
    missing = fresh.load_state_dict(given, strict=False)
    assert missing.unexpected_keys == [] and set(missing.missing_keys) <= {"lm_head.weight"}  # shared
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.allclose(fresh.eval()(ids).logits, adapted.eval()(ids).logits, atol=1e-4)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.allclose(given[name], base[name])


def test_rows_of_a_group_become_one_request_with_seeds_that_follow_from_their_place() -> None:
    prompts = pad_prompts([[3, 4], [5], [6]], 4, 0)
    draw = Draw(seed=1, rollout=2, temperature=1.0, max_response_length=4)
    prompt_of, sample_of = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([2, 3, 0, 1, 2, 0])
    whole = group_requests(prompts, prompt_of, sample_of, draw, seeded=True)
    assert [(r.prompt, r.count) for r in whole] == [([3, 4], 2), ([5], 3), ([6], 1)]
    single = [
        group_requests(prompts, p[None], s[None], draw, seeded=True)[0].seed
        for p, s in zip(prompt_of, sample_of, strict=True)
    ]
    assert single == [r.seed + i for r in whole for i in range(r.count) if r.seed is not None]
    assert len(set(single)) == 6 and all(0 <= seed < 2**49 for seed in single if seed is not None)
    assert [r.seed for r in group_requests(prompts, prompt_of, sample_of, draw, seeded=False)] == [None] * 3
