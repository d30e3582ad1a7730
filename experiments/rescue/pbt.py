"""Population-based training (Jaderberg et al. 2017) of four members on our own checkpoints.

    every member trains for an interval; then the worst copies weights and optimizer of the best
    (exploit) and each of its hyperparameters is multiplied by 0.8 or 1.2 (explore)

Member 0 begins with the start's own values, the others within a factor of ten of them. All four
together spend what one run of any other arm spends, so each has a quarter of the rollouts. Selection
sees the mean training reward of the last half of an interval. It is the published algorithm on this
project's checkpoints and not Ray Tune's implementation of it.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEMBERS, INTERVALS = 4, 3
KNOBS = {
    "trainer.actor_learning_rate": (1e-6, 1e-1),
    "trainer.kl_coef": (1e-5, 10.0),
    "trainer.clip_range": (0.005, 0.9),
}
"""What is perturbed, and the bounds; batch sizes are not, as in most uses of the algorithm."""
SPREAD = 10.0


@dataclass
class Member:
    knobs: dict[str, float]
    checkpoint: Path | None = None
    reward: float = 0.0


def first_members(fields: dict[str, Any], rng: random.Random) -> list[Member]:
    own = {name: float(fields[name]) for name in KNOBS}
    spread = [
        {n: bounded(n, v * SPREAD ** rng.uniform(-1, 1)) for n, v in own.items()} for _ in range(MEMBERS - 1)
    ]
    return [Member(own), *(Member(knobs) for knobs in spread)]


def bounded(name: str, value: float) -> float:
    low, high = KNOBS[name]
    return min(max(value, low), high)


def exploit_and_explore(members: list[Member], rng: random.Random) -> None:
    """The worst becomes the best with other hyperparameters; a quarter of four is one."""
    ranked = sorted(members, key=lambda member: member.reward)
    worst, best = ranked[0], ranked[-1]
    worst.checkpoint, worst.reward = best.checkpoint, best.reward
    worst.knobs = {n: bounded(n, v * rng.choice((0.8, 1.2))) for n, v in best.knobs.items()}


def run(fields: dict[str, Any], folder: Path, log: Path) -> tuple[Any, dict[str, Any]]:
    """All members through all intervals; the row is the final best member's."""
    from experiments.rescue import runs

    rng = random.Random(int(fields["seed"]))
    rollouts = int(fields["trainer.rollouts"]) // MEMBERS
    members, spent, tokens, curve = first_members(fields, rng), [], 0.0, []
    untrained = 0.0
    for interval in range(1, INTERVALS + 1):
        until = rollouts * interval // INTERVALS
        for at, member in enumerate(members):
            ended, found = one_interval(fields, member, until, folder / f"{interval}-{at}", log)
            spent.append(ended)
            tokens += found["tokens"]
            untrained = found["untrained"] if (interval, at) == (1, 0) else untrained
        curve.append(max(member.reward for member in members))
        if interval < INTERVALS:
            exploit_and_explore(members, rng)
    best = max(range(MEMBERS), key=lambda at: members[at].reward)
    found = runs.numbers(folder / f"{INTERVALS}-{best}" / "journal.jsonl")
    total = runs.Ended(
        max(ended.exit_code for ended in spent),
        round(sum(ended.seconds for ended in spent), 1),
        round(sum(ended.core_seconds for ended in spent), 1),
    )
    return total, found | {
        "score": members[best].reward,
        "untrained": untrained,
        "tokens": tokens,
        "curve": curve,
    }


def one_interval(
    fields: dict[str, Any], member: Member, until: int, folder: Path, log: Path
) -> tuple[Any, dict[str, Any]]:
    """Continue one member up to rollout `until`."""
    from experiments.rescue import runs

    start = {} if member.checkpoint is None else {"checkpoint.start": str(member.checkpoint)}
    mine = {**fields, **member.knobs, **start, "trainer.rollouts": until, "trainer.token_budget": None}
    ended = runs.launch({**mine, "checkpoint.every": until}, folder, log)
    found = runs.numbers(folder / "journal.jsonl")
    member.checkpoint = folder / "checkpoints" / f"rollout-{until:05d}"
    # The last half of an interval is a sixth of a member's tokens: a score, as everywhere.
    member.reward = statistics.fmean(found["curve"][len(found["curve"]) // 2 :])
    return ended, found
