"""The opponent: a random sweep whose space spans every start, and the sizes it takes to reach a score.

Trials are drawn independently, so that any k of them are a sweep of size k and the expected best of k can
be computed without bias from all of them (Tang et al. 2020, arXiv 2004.13705).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.rescue.suite import ROLLOUTS, TUNING_SEEDS, Job

TRIALS = 64
SWEEP_SEEDS = 32
"""The first tuning seeds; a winner is run again on later ones, which no trial has won on."""


def draw(trial: int) -> dict[str, Any]:
    """The fields of one trial, the same on every machine."""
    rng = random.Random(f"rescue sweep {trial}")
    train = rng.choice((64, 64, 64, 16))
    mini = rng.choice([m for m in (2, 4, 8, 16, 32, 64) if m <= train])
    return {
        "trainer.actor_learning_rate": _log(rng, 1e-5, 1e-2),
        "trainer.train_batch_size": train,
        "trainer.rollouts": ROLLOUTS * 64 // train,
        "trainer.ppo_mini_batch_size": mini,
        "trainer.micro_batch_size": min(128, mini * 8),
        "trainer.rollout_micro_batch_size": train * 8,
        "trainer.kl_coef": _log(rng, 1e-4, 1.0),
        "trainer.clip_range": _log(rng, 0.01, 0.5),
        "trainer.max_response_length": rng.choice((8, 8, 8, 4)),
    }


def _log(rng: random.Random, low: float, high: float) -> float:
    return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.3g}")


def jobs_of_sweep(tasks: Sequence[str], trials: int = TRIALS) -> Iterator[Job]:
    """One tuning seed a trial, as a sweep of that size would spend its budget."""
    for trial in range(trials):
        for task in tasks:
            seed = TUNING_SEEDS[trial % SWEEP_SEEDS]
            yield Job(task, f"trial{trial:02d}", "fixed", seed, "sweep", tuple(draw(trial).items()))


def expected_best(scores: Sequence[float], k: int) -> float:
    """Mean of the best of k trials drawn without replacement, over all choices of k: no bias.

    With scores sorted upward, the i-th (from 1) is the best of comb(i - 1, k - 1) of the comb(n, k) choices.

    Raises:
        ValueError: k is not within 1 and the number of scores.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"received k = {k}; expected 1 to {n}, the number of trials")
    ranked = sorted(scores)
    return sum(math.comb(i, k - 1) * score for i, score in enumerate(ranked)) / math.comb(n, k)


def equivalent_size(scores: Sequence[float], score: float) -> int | None:
    """k*: the smallest sweep whose expected best reaches `score`; None if even all of it does not."""
    return next((k for k in range(1, len(scores) + 1) if expected_best(scores, k) >= score), None)
