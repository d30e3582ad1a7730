"""Sampling noise without a random stream: Gumbel noise as a function of where it is used.

    noise = gumbel(hash(seed, rollout, prompt, sample, position, token))

Adding it to the scaled logits and taking the largest draws from the softmax (Gumbel-max). Because
nothing is consumed from a stream, a token depends neither on which samples were generated together
nor on what was generated before, and a resumed run draws what the uninterrupted one would have.

The hash is the finaliser of SplitMix64, chained over the key's parts, in wrapping int64 arithmetic:
the same bits on every device. 53 bits become a uniform u in (0, 1); -log(-log1p(-u)) keeps full
relative precision where it matters, at the large values that win.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """The low 64 bits of an integer as the int64 that has the same bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


_STEP = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _xor_shift(x: Tensor, bits: int) -> Tensor:
    """x ^= x >>> bits, in place; int64 shifts are arithmetic, so the sign copies are masked off."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, in place: every input bit moves half of the output bits."""
    _xor_shift(x, 30).mul_(_MIX_1)
    _xor_shift(x, 27).mul_(_MIX_2)
    return _xor_shift(x, 31)


def sample_keys(seed: int, rollout: int, prompts: Tensor, samples: Tensor) -> Tensor:
    """One int64 key per sample, [B], from its place in the run.

    Args:
        seed: the run's seed.
        rollout: rollout index; negative ones are free for evaluations.
        prompts: prompt index within the rollout, int64 [B].
        samples: index of the sample within its group, int64 [B].
    """
    key = torch.full_like(prompts, seed)  # [B]
    for part in (torch.full_like(prompts, rollout), prompts, samples):
        key = mix((mix(key + _STEP)).add_(part).mul_(_STEP))
    return key


def places(keys: Tensor, position: Tensor) -> Tensor:
    """What is the same for all tokens at one position of every sample, int64 [B].

    Args:
        keys: from `sample_keys`, int64 [B].
        position: index of the response token that is being drawn, an int64 scalar.
    """
    return mix(keys + (position + 1) * _STEP)


def token_steps(vocabulary: int, device: torch.device) -> Tensor:
    """What is the same for all samples, int64 [V]."""
    return torch.arange(1, vocabulary + 1, device=device).mul_(_STEP)


def gumbel(places: Tensor, steps: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 [B, V], of `places` and `token_steps`.

    Neither is made in here: compiled together with the `arange` that `steps` begins as, torch 2.13 gave other
    numbers on a CPU and wrote over foreign memory.
    """
    bits = mix(places[:, None] + steps)  # [B, V]
    uniform = (bits >> 11).bitwise_and_((1 << 53) - 1).to(torch.float32)  # [B, V], 53 bits
    uniform.add_(0.5).mul_(2.0**-53).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()  # -log(-log(1 - u)), [B, V]
