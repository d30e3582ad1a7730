"""Sampling: what is drawn depends on its place alone, and is drawn from the model's own softmax."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from autotune.trainer.forward import TokenBatch, response_log_probs
from autotune.trainer.rollout.base import Draw, Prompts, Responses, pad_prompts, response_mask
from autotune.trainer.rollout.hf import HfSampler

PAD, END = 0, 1
DRAW = Draw(seed=7, rollout=3, temperature=1.0, max_response_length=10)
GROUP = 4


@pytest.fixture
def prompts() -> Prompts:
    """Nine prompts of two to five tokens."""
    generator = torch.Generator().manual_seed(0)
    return pad_prompts(
        [torch.randint(2, 40, (2 + i % 4,), generator=generator).tolist() for i in range(9)], 16, PAD
    )


@pytest.fixture
def sampler(tiny_model: PreTrainedModel) -> HfSampler:
    return HfSampler(tiny_model, [END], PAD, record_gaps=True)


def rows(prompts: Prompts) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.arange(prompts.ids.shape[0] * GROUP)
    return total // GROUP, total % GROUP


def in_parts(sampler: HfSampler, prompts: Prompts, size: int, draw: Draw = DRAW) -> Responses:
    prompt_of, sample_of = rows(prompts)
    cuts = zip(prompt_of.split(size), sample_of.split(size), strict=True)
    parts = [sampler.sample(prompts, p, s, draw) for p, s in cuts]
    return Responses(*(torch.cat([getattr(part, name) for part in parts]) for name in Responses.__slots__))


def first_differences(a: Responses, b: Responses) -> Iterator[tuple[int, int]]:
    for row in range(a.ids.shape[0]):
        apart = (a.ids[row] != b.ids[row]).nonzero()
        if len(apart):
            yield row, int(apart[0])


@pytest.mark.parametrize("size", [1, 4, 5, 12])
@pytest.mark.parametrize("seed", range(5))
def test_tokens_do_not_depend_on_the_split(
    sampler: HfSampler, prompts: Prompts, size: int, seed: int
) -> None:
    """Equal up to the first near tie: cached decoding is not bit-equal across batch shapes."""
    draw = Draw(seed, rollout=0, temperature=1.0, max_response_length=10)
    whole, parts = in_parts(sampler, prompts, 36, draw), in_parts(sampler, prompts, size, draw)
    assert whole.gaps is not None
    for row, position in first_differences(whole, parts):
        assert whole.gaps[row, position] < 1e-4
    same = (whole.ids == parts.ids).all(dim=1)
    assert same.float().mean() > 0.9  # near ties are rare, so this is not an empty promise


@pytest.mark.parametrize("size", [36, 5])
def test_a_static_cache_draws_the_same(
    sampler: HfSampler, tiny_model: PreTrainedModel, prompts: Prompts, size: int
) -> None:
    """Rows are filled up to 64 and 8 with copies, the cache to 128 positions: nothing of it comes out."""
    static = HfSampler(tiny_model, [END], PAD, record_gaps=True, static_cache=True)
    expected, drawn = in_parts(sampler, prompts, 36), in_parts(static, prompts, size)
    assert expected.gaps is not None and expected.log_probs is not None and drawn.log_probs is not None
    for row, position in first_differences(expected, drawn):
        assert expected.gaps[row, position] < 1e-4
    same = (expected.ids == drawn.ids).all(dim=1)  # [B]
    assert same.float().mean() > 0.9
    assert torch.equal(expected.mask[same], drawn.mask[same])
    assert torch.equal(expected.truncated[same], drawn.truncated[same])
    assert torch.allclose(expected.log_probs[same], drawn.log_probs[same], atol=1e-5)


def test_a_static_cache_is_kept_between_calls_and_follows_the_weights(
    tiny_model: PreTrainedModel, prompts: Prompts
) -> None:
    static = HfSampler(tiny_model, [END], PAD, record_gaps=True, static_cache=True)
    first = in_parts(static, prompts, 36)
    (kept,) = static._caches.values()
    again = in_parts(static, prompts, 36)
    assert next(iter(static._caches.values())) is kept
    assert torch.equal(first.ids, again.ids)
    with torch.no_grad():
        tiny_model.get_output_embeddings().weight.neg_()
    assert not torch.equal(in_parts(static, prompts, 36).ids, first.ids)


def test_a_near_tie_is_where_a_split_may_differ(sampler: HfSampler, prompts: Prompts) -> None:
    """The recorded gap is that of the perturbed scores: shifting one by more than it flips a token."""
    whole = in_parts(sampler, prompts, 36)
    assert whole.gaps is not None
    assert (whole.gaps[whole.mask] > 0).all()
    row = int(torch.where(whole.mask[:, 0], whole.gaps[:, 0], torch.inf).argmin())
    gap, token = float(whole.gaps[row, 0]), int(whole.ids[row, 0])
    head = sampler._model.get_output_embeddings()
    handle = head.register_forward_hook(lambda m, i, out: _lower(out, token, gap * 1.5))
    shifted = in_parts(sampler, prompts, 36)
    handle.remove()
    assert shifted.ids[row, 0] != token


def _lower(logits: torch.Tensor, token: int, by: float) -> torch.Tensor:
    logits = logits.clone()
    logits[..., token] -= by
    return logits


def test_padding_on_the_left_changes_nothing(sampler: HfSampler, prompts: Prompts) -> None:
    whole = in_parts(sampler, prompts, 36)
    for index in range(9):
        ids = prompts.ids[index][prompts.mask[index]].tolist()
        single = pad_prompts([ids] * (index + 1), 16, PAD)  # its index is part of the key
        row = index * GROUP + 1
        alone = sampler.sample(single, torch.tensor([index]), torch.tensor([1]), DRAW)
        picked = Responses(*(getattr(whole, n)[row : row + 1] for n in Responses.__slots__))
        for _, position in first_differences(picked, alone):
            assert picked.gaps is not None
            assert picked.gaps[0, position] < 1e-4


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_own_log_probs_are_the_model_s(
    sampler: HfSampler, prompts: Prompts, tiny_model: PreTrainedModel, temperature: float
) -> None:
    draw = Draw(7, 0, temperature, 10)
    prompt_of, sample_of = rows(prompts)
    drawn = sampler.sample(prompts, prompt_of, sample_of, draw)
    batch = TokenBatch(prompts.ids[prompt_of], prompts.mask[prompt_of], drawn.ids, drawn.mask)
    with torch.no_grad():
        again = response_log_probs(tiny_model, batch, temperature)
    assert drawn.log_probs is not None
    assert torch.allclose(drawn.log_probs[drawn.mask], again[drawn.mask], atol=1e-5)


def test_frequencies_are_those_of_the_softmax(sampler: HfSampler, tiny_model: PreTrainedModel) -> None:
    prompt, count = [5, 9, 12], 4000
    prompts = pad_prompts([prompt], 16, PAD)
    one = Draw(1, 0, temperature=1.5, max_response_length=1)
    zeros = torch.zeros(count, dtype=torch.long)
    drawn = sampler.sample(prompts, zeros, torch.arange(count), one).ids[:, 0]
    with torch.no_grad():
        logits = tiny_model(torch.tensor([prompt])).logits[0, -1]
    p = (logits / 1.5).softmax(dim=0)
    frequency = drawn.bincount(minlength=len(p)) / count
    assert ((frequency - p).abs() < 5 * (p * (1 - p) / count).sqrt() + 1e-4).all()


def test_greedy_is_plain_generation(
    sampler: HfSampler, prompts: Prompts, tiny_model: PreTrainedModel
) -> None:
    indices = torch.arange(9)
    got = sampler.sample(prompts, indices, torch.zeros_like(indices), Draw(0, 0, 1.0, 10, greedy=True))
    for index in range(9):
        ids = prompts.ids[index][prompts.mask[index]][None]
        plain = tiny_model.generate(ids, do_sample=False, max_new_tokens=10, pad_token_id=PAD)
        expected = plain[0, ids.shape[1] :]
        assert got.ids[index, : len(expected)].tolist() == expected.tolist()
    assert got.log_probs is None


def test_the_model_s_own_generation_defaults_are_put_aside(
    sampler: HfSampler, prompts: Prompts, tiny_model: PreTrainedModel
) -> None:
    plain = in_parts(sampler, prompts, 36)
    defaults = GenerationConfig(
        repetition_penalty=5.0, no_repeat_ngram_size=1, suppress_tokens=[3, 4], eos_token_id=END
    )
    tiny_model.generation_config = defaults
    assert torch.equal(in_parts(sampler, prompts, 36).ids, plain.ids)
    assert tiny_model.generation_config is defaults


def test_sampling_is_in_eval_mode_and_once_per_prompt(
    sampler: HfSampler, prompts: Prompts, tiny_model: PreTrainedModel
) -> None:
    seen: list[tuple[bool, tuple[int, ...]]] = []
    hook = tiny_model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: seen.append((tiny_model.training, tuple(args[0].shape)))
    )
    tiny_model.train()
    sampler.sample(prompts, *rows(prompts), DRAW)
    hook.remove()
    assert not any(training for training, _ in seen)
    width = prompts.ids.shape[1]
    assert seen[0][1] == (9, width - 1)  # nine prompts, not 36 rows
    assert all(shape == (36, 1) for _, shape in seen[1:])


def test_prompts_are_cut_at_their_beginning() -> None:
    prompts = pad_prompts([[2, 3, 4, 5], [6], [7, 8]], 3, PAD)
    assert prompts.ids.tolist() == [[3, 4, 5], [0, 0, 6], [0, 7, 8]]
    assert prompts.mask.tolist() == [[True] * 3, [False, False, True], [False, True, True]]
    assert prompts.cut == 1
    assert prompts.lengths.tolist() == [3, 1, 2]


def test_mask_ends_with_the_first_end_token_even_when_padding_is_the_same_id() -> None:
    ids = torch.tensor([[5, END, END, END], [END, 5, 5, 5], [5, 6, 7, 8], [5, 6, 9, END]])
    mask, truncated = response_mask(ids, torch.tensor([END, 9]))
    assert mask.sum(dim=1).tolist() == [2, 1, 4, 3]
    assert truncated.tolist() == [False, False, True, False]
