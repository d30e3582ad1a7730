"""The choice of a token: the softmax's own, and compiled only where the compiler gets it right."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.trainer.rollout.choice import CompiledChoice, Perturb, choose
from autotune.trainer.rollout.noise import places, token_steps
from tests.trainer.whole_noise import gumbel_noise


def given(rows: int = 6, words: int = 700, position: int = 3, temperature: float = 0.6) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(5)
    scores = torch.randn(rows, words, generator=g)
    keys = torch.randint(-(2**62), 2**62, (rows,), generator=g)
    steps = token_steps(words, torch.device("cpu"))
    return scores, places(keys, torch.tensor(position)), steps, torch.tensor(temperature)


def test_positions_count_up_and_the_winners_log_prob_is_the_softmaxs() -> None:
    scores = given()[0]
    keys = torch.arange(6) * 977
    perturb = Perturb(keys, 0.6, False, choose)
    for position in range(3):
        found = perturb(torch.empty(0), scores)
        expected = scores / 0.6 + gumbel_noise(keys, position, 700)
        assert torch.equal(found, expected)
        shares = (scores / 0.6).log_softmax(1).gather(1, expected.argmax(1, keepdim=True))[:, 0]
        torch.testing.assert_close(perturb.log_probs[position], shares)


def test_a_compiler_that_gets_it_wrong_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def wrong(*parts: Any) -> tuple[Tensor, Tensor]:
        calls.append(parts)
        perturbed, log_probs = choose(*parts)
        return perturbed + 0.01, log_probs

    choice = CompiledChoice(wrong)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            found = choice(*given())
            assert all(torch.equal(a, b) for a, b in zip(found, choose(*given()), strict=True))
    assert len(calls) == 1 and "other numbers" in caplog.text
    choice(*given(rows=2))
    assert len(calls) == 2  # another shape is another program


def test_without_a_compiler_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def missing(*parts: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no C compiler")

    choice = CompiledChoice(missing)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(choice(*given())[0], choose(*given())[0])
    assert "no C compiler" in caplog.text


@pytest.mark.slow
def test_the_compiled_choice_is_the_plain_one() -> None:
    """One compiled form for all positions and temperatures; the hash wraps there as it does here."""
    choice = CompiledChoice()
    for position, temperature in ((0, 1.0), (1, 1.0), (200, 0.6), (200, 1.7)):
        parts = given(position=position, temperature=temperature)
        for made, plain in zip(choice(*parts), choose(*parts), strict=True):
            torch.testing.assert_close(made, plain, rtol=1e-5, atol=1e-5)
    assert list(choice._agreed.values()) == [True]
