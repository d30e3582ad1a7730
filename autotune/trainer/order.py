"""Which prompts a rollout takes, and in which order its updates go through them.

Both are functions of their place in the run and of nothing else: prompts by (seed, epoch), mini
batches by (seed, rollout, ppo epoch). No generator is carried along, so there is none to save,
and a resumed run or another trainer's rollout in the same process cannot shift it.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Stream(IntEnum):
    """Keeps permutations for different purposes apart."""

    PROMPTS = 1
    MINI_BATCHES = 2
    DROPOUT = 3


def permutation(size: int, stream: Stream, *key: int) -> NDArray[np.int64]:
    """A permutation of range(size) fixed by stream and key."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((stream, *key)))).permutation(size)


def torch_seed(stream: Stream, *key: int) -> int:
    """A 63-bit seed fixed by stream and key."""
    return int(np.random.SeedSequence((stream, *key)).generate_state(1, np.uint64)[0] >> 1)


def take_prompts(size: int, seed: int, cursor: int, count: int) -> list[int]:
    """Indices of `count` prompts from position `cursor` of the endless stream of shuffled epochs."""
    taken: list[int] = []
    while len(taken) < count:
        epoch, offset = divmod(cursor + len(taken), size)
        order = permutation(size, Stream.PROMPTS, seed, epoch)
        taken.extend(order[offset : offset + count - len(taken)].tolist())
    return taken


def mini_batches(
    prompts: int, mini_batch: int, epochs: int, seed: int, rollout: int
) -> list[NDArray[np.int64]]:
    """Prompt indices of every update of a rollout, U arrays of `mini_batch` prompts each."""
    orders = [permutation(prompts, Stream.MINI_BATCHES, seed, rollout, e) for e in range(epochs)]
    return [part for order in orders for part in np.split(order, prompts // mini_batch)]
