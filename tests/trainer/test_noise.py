"""Keyed noise: the right bits, the right distribution, and dependence on its key alone."""

from __future__ import annotations

import math

import pytest
import torch

from autotune.trainer.rollout.noise import mix, sample_keys
from tests.trainer.whole_noise import gumbel_noise

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def plain_mix(x: int) -> int:
    """SplitMix64's finaliser on unsigned Python integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def plain_noise(seed: int, rollout: int, prompt: int, sample: int, position: int, token: int) -> float:
    key = seed
    for part in (rollout, prompt, sample):
        key = plain_mix((plain_mix((key + GOLDEN) & MASK) + part) * GOLDEN & MASK)
    place = plain_mix((key + (position + 1) * GOLDEN) & MASK)
    bits = plain_mix((place + (token + 1) * GOLDEN) & MASK) >> 11
    return -math.log(-math.log1p(-(bits + 0.5) * 2.0**-53))


def test_splitmix_reference_values() -> None:
    """The published generator: state advances by the golden ratio; first outputs for state 0."""
    states = torch.tensor([(i * GOLDEN & MASK) - (1 << 64) * ((i * GOLDEN & MASK) >> 63) for i in (1, 2)])
    got = [value & MASK for value in mix(states).tolist()]
    assert got == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize("rollout", [0, 7, -1])
def test_equals_plain_integers(rollout: int) -> None:
    prompts, samples = torch.tensor([0, 3, 3]), torch.tensor([1, 0, 5])
    got = gumbel_noise(sample_keys(11, rollout, prompts, samples), 2, 9)
    for row, (prompt, sample) in enumerate(zip(prompts.tolist(), samples.tolist(), strict=True)):
        expected = [plain_noise(11, rollout % (1 << 64), prompt, sample, 2, v) for v in range(9)]
        assert got[row].tolist() == pytest.approx(expected, rel=2e-4, abs=1e-5)


def test_every_part_of_the_key_matters() -> None:
    def first(seed: int = 1, rollout: int = 2, prompt: int = 3, sample: int = 4, position: int = 5) -> float:
        keys = sample_keys(seed, rollout, torch.tensor([prompt]), torch.tensor([sample]))
        return gumbel_noise(keys, position, 1).item()

    values = {
        first(),
        first(seed=2),
        first(rollout=3),
        first(prompt=4),
        first(sample=5),
        first(position=6),
        first(prompt=4, sample=3),  # swapped
    }
    assert len(values) == 7


def test_draws_from_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -6.0])
    count = 200_000
    keys = sample_keys(0, 0, torch.arange(count), torch.zeros(count, dtype=torch.long))
    noise = gumbel_noise(keys, 0, 5)  # [N, 5]
    drawn = (logits + noise).argmax(dim=1).bincount(minlength=5) / count
    p = logits.softmax(dim=0)
    sigma = (p * (1 - p) / count).sqrt()
    assert ((drawn - p).abs() < 4.5 * sigma).all()
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.005)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert noise.isfinite().all()
