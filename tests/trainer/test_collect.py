"""Sampling in chunks: what does not fit into memory is halved, and the run remembers; and texts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from autotune.errors import TrainingError
from autotune.trainer.collect import Room, _plain_backend, sample_all, texts
from autotune.trainer.ranks import Ranks
from autotune.trainer.rollout.base import Draw, Prompts, Responses, pad_prompts

DRAW = Draw(seed=1, rollout=0, temperature=1.0, max_response_length=2)
GROUP = 4


class Small:
    """A sampler on a device with room for some rows; a response tells which row it belongs to."""

    has_own_weights = False

    def __init__(self, room: int) -> None:
        self.room = room
        self.tried: list[int] = []

    def sample(
        self, prompts: Prompts, prompt_of: torch.Tensor, sample_of: torch.Tensor, draw: Draw
    ) -> Responses:
        self.tried.append(len(prompt_of))
        if len(prompt_of) > self.room:
            raise torch.OutOfMemoryError("no room")
        ids = torch.stack([prompt_of, sample_of], dim=1)
        whole = torch.ones_like(ids, dtype=torch.bool)
        return Responses(ids, whole, torch.zeros(len(ids), dtype=torch.bool), ids.float())


def draw_with(sampler: Small, room: Room, chunk: int = 16) -> list[list[int]]:
    prompts = pad_prompts([[3], [4, 5], [6], [7]], 4, 0)
    samples = sample_all(sampler, prompts, DRAW, GROUP, chunk, Ranks(), room)  # type: ignore[arg-type]
    return samples.batch.response_ids.tolist()


EXPECTED = [[prompt, sample] for prompt in range(4) for sample in range(GROUP)]


def test_what_does_not_fit_is_halved_until_it_does_and_nothing_is_lost() -> None:
    sampler, told = Small(room=5), []
    room = Room(on_shrink=told.append)
    assert draw_with(sampler, room) == EXPECTED
    assert sampler.tried == [16, 8, 4, 4, 4, 4]
    assert room.limit == 4
    assert len(told) == 2 and "from now on 4 at most" in told[1]


def test_the_next_rollout_begins_with_what_fitted() -> None:
    sampler, room = Small(room=5), Room(limit=4)
    assert draw_with(sampler, room) == EXPECTED
    assert sampler.tried == [4, 4, 4, 4]


def test_a_smaller_knob_still_counts() -> None:
    sampler = Small(room=5)
    assert draw_with(sampler, Room(limit=4), chunk=2) == EXPECTED
    assert max(sampler.tried) == 2


def test_one_response_that_does_not_fit_ends_the_run_with_the_next_move() -> None:
    with pytest.raises(TrainingError, match="max_response_length"):
        draw_with(Small(room=0), Room())


def test_texts_are_those_of_the_library(tiny_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    ids = torch.randint(0, len(tokenizer), (4, 6), generator=torch.Generator().manual_seed(1))
    lengths = np.array([6, 1, 0, 4])
    samples = SimpleNamespace(batch=SimpleNamespace(response_ids=ids), lengths=lengths)
    rows = np.array([3, 0, 2, 1])
    kept = [ids[row, : lengths[row]].tolist() for row in rows]
    wanted = [tokenizer.decode(row, skip_special_tokens=True) for row in kept]
    assert _plain_backend(tokenizer) is not None
    assert texts(samples, tokenizer, rows) == wanted  # type: ignore[arg-type]
    tokenizer.clean_up_tokenization_spaces = True
    assert _plain_backend(tokenizer) is None
