"""Attention of one new token with shared keys: the numbers of `sdpa`, and used where it is worth it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CompileConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from autotune.trainer.rollout import grouped
from autotune.trainer.rollout.base import Draw, pad_prompts
from autotune.trainer.rollout.grouped import attend, grouped_attention
from autotune.trainer.rollout.hf import HfSampler


def inputs(heads: int, shared: int, new: int, mask: str) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(1)
    module = SimpleNamespace(num_key_value_groups=heads // shared, is_causal=True, training=False)
    query = torch.randn(3, heads, new, 8, generator=g)
    key, value = (torch.randn(3, shared, 16, 8, generator=g) for _ in range(2))
    seen = torch.arange(16)[None, :] < torch.tensor([16, 5, 9])[:, None]  # [B, L]
    seen = seen[:, None, None].expand(3, 1, new, 16)
    added = torch.zeros(3, 1, new, 16).masked_fill(~seen, torch.finfo(torch.float32).min)
    return module, query, key, value, {"none": None, "bool": seen, "added": added}[mask]


@pytest.mark.parametrize("mask", ["none", "bool", "added"])
@pytest.mark.parametrize(("heads", "shared", "new"), [(6, 2, 1), (4, 1, 1), (4, 4, 1), (6, 2, 5)])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_the_numbers_are_those_of_sdpa(
    heads: int, shared: int, new: int, mask: str, scaling: float | None
) -> None:
    given = inputs(heads, shared, new, mask)
    expected, _ = sdpa_attention_forward(*given, scaling=scaling)
    found, weights = attend(*given, scaling=scaling)
    assert weights is None and found.shape == expected.shape == (3, new, heads, 8)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_bias_or_dropout_goes_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def usual(*given: Any, **more: Any) -> tuple[Any, None]:
        asked.append(more)
        return given[1], None

    monkeypatch.setattr(grouped, "sdpa_attention_forward", usual)
    for more in ({"dropout": 0.1}, {"position_bias": torch.zeros(1, 6, 1, 16)}):
        attend(*inputs(6, 2, 1, "bool"), **more)
    by_head = torch.ones(3, 6, 1, 16, dtype=torch.bool)
    attend(*inputs(6, 2, 1, "bool")[:4], by_head)
    assert [set(more) - {"scaling"} for more in asked] == [{"dropout"}, {"position_bias"}, set()]


# -- in a model ----------------------------------------------------------------------------------


@pytest.fixture
def shared_keys() -> LlamaForCausalLM:
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 60}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("static", [False, True])
def test_sampling_reads_a_cache_once_and_draws_what_the_usual_attention_draws(
    shared_keys: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, static: bool
) -> None:
    folded = 0
    foldable = grouped._foldable

    def counted(*given: Any) -> bool:
        nonlocal folded
        found = foldable(*given)
        folded += found
        return found

    prompts = pad_prompts([[5, 6, 7], [8, 9], [10, 11, 12, 13]], 8, 0)
    draw = Draw(seed=1, rollout=0, temperature=1.0, max_response_length=12)
    places = torch.arange(12) // 4, torch.arange(12) % 4
    sampler = HfSampler(shared_keys, [1], 0, static_cache=static)
    monkeypatch.setattr(grouped, "_foldable", lambda *given: False)
    usual = sampler.sample(prompts, *places, draw)
    monkeypatch.setattr(grouped, "_foldable", counted)
    once = sampler.sample(prompts, *places, draw)
    # Layers x steps; the prompt's last token is a step of its own where the rest of it was computed before.
    assert folded == 2 * (11 if static else 12)
    assert torch.equal(once.ids, usual.ids) and torch.equal(once.mask, usual.mask)
    assert once.log_probs is not None and usual.log_probs is not None
    torch.testing.assert_close(once.log_probs, usual.log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("before", "inside"), [("sdpa", grouped.NAME), ("eager", "eager")])
def test_only_sdpa_is_replaced_and_comes_back(before: str, inside: str) -> None:
    config = SimpleNamespace(_attn_implementation=before)
    with pytest.raises(RuntimeError, match="full"), grouped_attention(config):
        assert config._attn_implementation == inside
        raise RuntimeError("the device is full")
    assert config._attn_implementation == before


@pytest.mark.slow
def test_the_librarys_compiled_step_takes_it_whole(
    shared_keys: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the library compiles by itself; `fullgraph` refuses a function it cannot follow."""
    prompts = pad_prompts([[5, 6, 7], [8, 9]], 8, 0)
    draw = Draw(seed=1, rollout=0, temperature=1.0, max_response_length=6)
    places = torch.arange(8) // 4, torch.arange(8) % 4
    sampler = HfSampler(shared_keys, [1], 0, static_cache=True)
    plain = sampler.sample(prompts, *places, draw)
    config, traced = sampler._config, False

    def compiled(draw: Draw) -> GenerationConfig:
        made = config(draw)
        made.compile_config = CompileConfig(fullgraph=True, dynamic=False, mode="default")
        made.compile_config._compile_all_devices = True
        return made

    def watched(*given: Any) -> bool:
        nonlocal traced
        found = foldable(*given)
        traced = traced or (found and torch.compiler.is_compiling())
        return found

    foldable = grouped._foldable
    monkeypatch.setattr(sampler, "_config", compiled)
    monkeypatch.setattr(grouped, "_foldable", watched)
    found = sampler.sample(prompts, *places, draw)
    assert traced, "the decoding step was not compiled"
    assert torch.equal(found.ids, plain.ids)
