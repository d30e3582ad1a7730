"""Canonical knobs, their units and bounds, and the batch algebra.

Names are the documented parameter names. `train_batch_size` and `ppo_mini_batch_size` count
prompts, `micro_batch_size` and `rollout_micro_batch_size` count samples (responses); every
message says which.

Algebra, with n = rollout_n and W = ranks (`batch_problems`):

    train_batch_size * n = rollout_micro_batch_size * num_rollout_batches * W
    train_batch_size % ppo_mini_batch_size = 0
    ppo_mini_batch_size * n % (micro_batch_size * W) = 0
    updates_per_rollout U = train_batch_size / ppo_mini_batch_size * ppo_epochs

`micro_batch_size` never changes the training result (rule A5), so a change of
`ppo_mini_batch_size` re-derives it: `fit_micro_batch`. Proposals are taken from the divisor
lattice, so a vector off the lattice cannot be built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Liveness(StrEnum):
    """When a changed knob takes effect in the running trainer."""

    LIVE = "live"
    NEXT_ROLLOUT = "next_rollout"
    RESTART = "restart"
    UNAVAILABLE = "unavailable"
    PINNED = "pinned"


@dataclass(frozen=True, slots=True)
class Capability:
    """What an adapter declares about one knob or metric, with the reason where it is not plain."""

    state: str
    reason: str = ""

    @property
    def acts(self) -> bool:
        """Whether a controller may move this knob in the running trainer."""
        return self.state in (Liveness.LIVE, Liveness.NEXT_ROLLOUT)


class Scale(StrEnum):
    LINEAR = "linear"
    LOG = "log"
    LATTICE = "lattice"


@dataclass(frozen=True, slots=True)
class KnobSpec:
    """One row of the knob table; low and high bound what the controller and a sweep may use."""

    name: str
    unit: str
    low: float
    high: float
    scale: Scale
    conservative: int
    """-1 when lower is the careful direction, +1 when higher is, 0 when neither."""
    what: str

    @property
    def integer(self) -> bool:
        return self.unit in ("prompts", "samples", "tokens", "epochs", "batches")

    def clip(self, value: float) -> float:
        return min(max(value, self.low), self.high)


def _table(*rows: tuple[str, str, float, float, Scale, int, str]) -> dict[str, KnobSpec]:
    return {row[0]: KnobSpec(*row) for row in rows}


KNOBS: dict[str, KnobSpec] = _table(
    ("train_batch_size", "prompts", 1, 65536, Scale.LATTICE, 1, "prompts per rollout"),
    ("rollout_n", "samples", 1, 1024, Scale.LATTICE, 1, "responses per prompt (group size)"),
    ("ppo_mini_batch_size", "prompts", 1, 65536, Scale.LATTICE, 1, "prompts per update"),
    ("ppo_epochs", "epochs", 1, 8, Scale.LINEAR, -1, "passes over one rollout's data"),
    ("micro_batch_size", "samples", 1, 65536, Scale.LATTICE, 0, "responses per backward pass"),
    ("rollout_micro_batch_size", "samples", 1, 65536, Scale.LATTICE, -1, "responses sampled at once"),
    ("num_rollout_batches", "batches", 1, 65536, Scale.LATTICE, 0, "sampling batches per rollout"),
    ("kl_coef", "1", 1e-5, 2.0, Scale.LOG, 1, "weight of the KL to the reference"),
    ("clip_range_low", "1", 0.02, 0.3, Scale.LINEAR, -1, "policy ratio is clipped below 1 - this"),
    ("clip_range_high", "1", 0.02, 0.3, Scale.LINEAR, -1, "policy ratio is clipped above 1 + this"),
    ("actor_learning_rate", "1", 1e-8, 1e-1, Scale.LOG, -1, "peak learning rate of the actor"),
    ("critic_learning_rate", "1", 1e-8, 1e-1, Scale.LOG, -1, "peak learning rate of the critic"),
    ("max_prompt_length", "tokens", 1, 1 << 20, Scale.LINEAR, 0, "prompt tokens kept"),
    ("max_response_length", "tokens", 1, 1 << 20, Scale.LINEAR, 0, "response tokens sampled"),
    ("temperature", "1", 0.1, 2.0, Scale.LINEAR, 0, "sampling temperature, also of log-probs"),
    ("entropy_coef", "1", 0.0, 0.1, Scale.LINEAR, 0, "weight of the entropy bonus"),
)
"""Name -> row. `clip_range` is an alias that moves both sides; see `expand`."""

ALIASES: dict[str, tuple[str, ...]] = {"clip_range": ("clip_range_low", "clip_range_high")}


def expand(name: str) -> tuple[str, ...]:
    """The real knobs behind a name: `clip_range` is both sides, every other name is itself."""
    return ALIASES.get(name, (name,))


def divisors(n: int) -> tuple[int, ...]:
    """All divisors of n, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def mini_batch_lattice(train_batch_size: int, rollout_n: int, world_size: int) -> tuple[int, ...]:
    """Legal `ppo_mini_batch_size` values in prompts, ascending: every rank gets whole samples."""
    legal = [d for d in divisors(train_batch_size) if d * rollout_n % world_size == 0]
    return tuple(legal)


def fit_micro_batch(mini_batch: int, rollout_n: int, world_size: int, wanted: int) -> int:
    """Largest micro batch in samples that divides a rank's share of the mini-batch, <= wanted."""
    share = mini_batch * rollout_n // world_size
    return max(d for d in divisors(share) if d <= max(wanted, 1))


def updates_per_rollout(knobs: Mapping[str, float]) -> int:
    """U = train_batch_size / ppo_mini_batch_size * ppo_epochs."""
    per_epoch = int(knobs["train_batch_size"]) // int(knobs["ppo_mini_batch_size"])
    return per_epoch * int(knobs["ppo_epochs"])


def batch_problems(knobs: Mapping[str, float], world_size: int) -> list[tuple[str, str]]:
    """(knob, message) for every equation of the algebra that the vector breaks; empty when legal."""
    train, n = int(knobs["train_batch_size"]), int(knobs["rollout_n"])
    mini, micro = int(knobs["ppo_mini_batch_size"]), int(knobs["micro_batch_size"])
    rollout_micro, w = int(knobs["rollout_micro_batch_size"]), world_size
    problems: list[tuple[str, str]] = []
    sizes = {"train_batch_size": train, "rollout_n": n, "ppo_mini_batch_size": mini}
    sizes |= {"micro_batch_size": micro, "rollout_micro_batch_size": rollout_micro}
    empty = [(name, f"is {size}, expected at least 1") for name, size in sizes.items() if size < 1]
    if empty:
        return empty
    if mini > train:
        problems.append(("ppo_mini_batch_size", f"{mini} prompts is more than train_batch_size {train}"))
    elif train % mini or mini * n % w:
        near = ", ".join(map(str, mini_batch_lattice(train, n, w))) or "more prompts or fewer ranks"
        why = f"does not divide train_batch_size {train}"
        if not train % mini:
            why = f"x rollout_n {n} = {mini * n} samples does not split over {w} ranks"
        problems.append(("ppo_mini_batch_size", f"{mini} prompts {why}; use {near}"))
    elif mini * n % (micro * w):
        best = fit_micro_batch(mini, n, w, micro)
        problems.append(
            (
                "micro_batch_size",
                f"{micro} samples x {w} rank(s) does not divide ppo_mini_batch_size x rollout_n ="
                f" {mini} x {n} = {mini * n} samples; the nearest legal value is {best}",
            )
        )
    if train * n % (rollout_micro * w):
        share = train * n // w
        best = max(d for d in divisors(share) if d <= max(rollout_micro, 1)) if share else 1
        problems.append(
            (
                "rollout_micro_batch_size",
                f"{rollout_micro} samples x {w} rank(s) does not divide train_batch_size x rollout_n ="
                f" {train * n} samples; the nearest legal value is {best}",
            )
        )
    elif int(knobs.get("num_rollout_batches", 0)) not in (0, train * n // (rollout_micro * w)):
        batches = train * n // (rollout_micro * w)
        problems.append(
            ("num_rollout_batches", f"{knobs['num_rollout_batches']:g} batches, expected {batches}")
        )
    return problems
