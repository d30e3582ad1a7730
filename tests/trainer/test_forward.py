"""Response log-probs from few positions equal those from all of them."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from autotune.trainer.forward import TokenBatch, log_probs_and_entropy, response_log_probs


def batch(lengths: list[int], padded: bool) -> TokenBatch:
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(2, 40, (len(lengths), 5), generator=generator)
    response = torch.randint(2, 40, (len(lengths), 4), generator=generator)
    mask = torch.arange(5)[None, :] >= 5 - torch.tensor(lengths)[:, None]
    return TokenBatch(prompt, mask if padded else None, response, torch.ones_like(response, dtype=torch.bool))


def one_by_one(model: PreTrainedModel, data: TokenBatch, temperature: float) -> torch.Tensor:
    """Whole sequences without padding, all logits, one sample at a time, float64 softmax."""
    out = []
    for row in range(data.prompt_ids.shape[0]):
        prompt = data.prompt_ids[row]
        if data.prompt_mask is not None:
            prompt = prompt[data.prompt_mask[row]]
        ids = torch.cat([prompt, data.response_ids[row]])
        logits = model(ids[None]).logits[0].double() / temperature
        log_probs = logits.log_softmax(dim=1)
        places = range(len(prompt), len(ids))
        out.append(torch.stack([log_probs[t - 1, ids[t]] for t in places]))
    return torch.stack(out)


@torch.no_grad()
def test_log_probs_equal_full_forward(tiny_model: PreTrainedModel) -> None:
    for data in (batch([5, 5, 5], padded=False), batch([5, 2, 1], padded=True)):
        for temperature in (1.0, 0.6):
            got = response_log_probs(tiny_model, data, temperature)
            assert torch.allclose(got.double(), one_by_one(tiny_model, data, temperature), atol=1e-5)


@torch.no_grad()
def test_entropy_is_that_of_the_same_distribution(tiny_model: PreTrainedModel) -> None:
    data = batch([5, 5], padded=False)
    log_probs, entropy = log_probs_and_entropy(tiny_model, data, 0.8)
    ids = torch.cat([data.prompt_ids, data.response_ids], dim=1)
    logits = tiny_model(ids).logits[:, 4:-1] / 0.8
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert torch.allclose(entropy, expected, atol=1e-5)
    assert torch.equal(log_probs, response_log_probs(tiny_model, data, 0.8))


def test_no_logits_for_prompt_positions(tiny_model: PreTrainedModel) -> None:
    shapes = []
    head = tiny_model.get_output_embeddings()
    hook = head.register_forward_hook(lambda m, args, out: shapes.append(tuple(out.shape)))
    data = batch([5, 5, 5], padded=False)
    response_log_probs(tiny_model, data, 1.0)
    response_log_probs(tiny_model, data.rows(torch.tensor([2, 0]), 3), 1.0)
    hook.remove()
    vocabulary = tiny_model.config.vocab_size
    assert shapes == [(3, 4, vocabulary), (2, 3, vocabulary)]
