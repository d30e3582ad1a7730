"""What the rules are measured against: a coin, and the two adaptive laws that trainers ship.

    random            now and then some knob a step up or down, decided by (seed, rollout) alone, behind the
                      same guards and the same judge as the rules: it shares everything but the knowledge
    adaptive_kl       Ziegler's law, every rollout:
                          e = clip(kl / target - 1, -0.2, 0.2);   coef *= 1 + e * n_steps / horizon
    adaptive_entropy  the coefficient c walks by `delta` and the bonus is gated on one side:
                          c += delta if entropy <= target else -delta,  least <= c <= most
                          entropy_coef = c if entropy <= target else 0

Watched: nothing; `kl_ref`; `entropy`. Moved: any of five knobs; `kl_coef`; `entropy_coef`.

Sources: Ziegler et al. 2019 as verl ships it (n_steps counts the responses of the rollout); Skywork-OR1's
law as TRL ships it. Both laws act at once and without guards, as they do where they come from; only pins,
bounds of the knobs and invalid metrics stop them. Each is a profile of its own, beside `fixed` (no rule).

They are here with their faults. Ziegler's gain depends on the batch, it turns negative where n_steps
exceeds five horizons, stays at zero for good and winds down while KL is still rising from zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from autotune.decisions import Kind, Proposal, RunFacts
from autotune.knobs import mini_batch_lattice
from autotune.policies.base import Answer, Context, Family, Policy, no_reference

_WORD = (1 << 64) - 1


def draw(seed: int, rollout: int, use: int) -> float:
    """A number in [0, 1) that depends on its arguments alone, on every machine (splitmix64)."""
    state = (seed * 0xD1B54A32D192ED03 + rollout * 0x9E3779B97F4A7C15 + use * 0x8CB92BA72F3D8DD7) & _WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
    return ((state ^ (state >> 31)) >> 11) / (1 << 53)


@dataclass(frozen=True)
class RandomMoves(Policy):
    """random."""

    id: ClassVar[str] = "random"
    family: ClassVar[Family] = Family.LEARNING_SPEED
    source: ClassVar[str] = "baseline: the same guards and judge, no knowledge"
    summary: ClassVar[str] = "now and then a random knob one step up or down"
    moves: ClassVar[tuple[str, ...]] = (
        "actor_learning_rate",
        "kl_coef",
        "clip_range",
        "ppo_mini_batch_size",
        "max_response_length",
    )

    seed: int = 0
    rate: float = 0.05
    """Share of the rollouts at which it wants something; cooldowns let about half of it through."""
    factor: float = 1.5
    """Size of a step, up or down; a mini-batch moves one notch of its lattice."""

    def propose(self, ctx: Context) -> Answer:
        if draw(self.seed, ctx.rollout, 0) >= self.rate:
            return None
        knobs = [k for k in self.moves if ctx.movable(k) and ctx.knob(k) > 0]
        if not knobs:
            return None
        knob = knobs[int(draw(self.seed, ctx.rollout, 1) * len(knobs))]
        after = self._step(ctx, knob, up=draw(self.seed, ctx.rollout, 2) < 0.5)
        return None if after is None else Proposal(self.id, knob, after, "drawn by lot")

    def _step(self, ctx: Context, knob: str, up: bool) -> float | None:
        if knob != "ppo_mini_batch_size":
            return ctx.knob(knob) * (self.factor if up else 1 / self.factor)
        train, n = int(ctx.knobs["train_batch_size"]), int(ctx.knobs["rollout_n"])
        lattice = mini_batch_lattice(train, n, ctx.facts.world_size)
        place = lattice.index(int(ctx.knob(knob))) + (1 if up else -1)
        return float(lattice[place]) if 0 <= place < len(lattice) else None


def ziegler(coef: float, kl: float, target: float, n_steps: float, horizon: float) -> float:
    """One evaluation of the classic adaptive controller, without any limit on its result."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * n_steps / horizon)


@dataclass(frozen=True)
class AdaptiveKl(Policy):
    """adaptive_kl."""

    id: ClassVar[str] = "adaptive_kl"
    family: ClassVar[Family] = Family.REFERENCE_KL
    source: ClassVar[str] = "baseline: Ziegler et al. 2019, as verl ships it"
    summary: ClassVar[str] = "kl_coef x (1 + clip(kl_ref / target - 1, +-0.2) x samples / horizon)"
    needs: ClassVar[tuple[str, ...]] = ("kl_ref",)
    moves: ClassVar[tuple[str, ...]] = ("kl_coef",)

    target: float = 0.1
    """Nats/token."""
    horizon: float = 10_000
    """Responses."""

    def blocked(self, facts: RunFacts, knobs: Mapping[str, float]) -> str:
        return no_reference(facts)

    def propose(self, ctx: Context) -> Answer:
        kl, now = ctx.value("kl_ref"), ctx.knobs["kl_coef"]
        if kl is None:
            return None
        samples = ctx.knobs["train_batch_size"] * ctx.knobs["rollout_n"]
        after = ziegler(now, kl, self.target, samples, self.horizon)
        if after == now:
            return None
        reason = f"kl_ref {kl:.2g} against a target of {self.target:g}"
        return Proposal(self.id, "kl_coef", after, reason, kind=Kind.REGULATOR, evidence={"kl_ref": kl})


@dataclass(frozen=True)
class AdaptiveEntropy(Policy):
    """adaptive_entropy."""

    id: ClassVar[str] = "adaptive_entropy"
    family: ClassVar[Family] = Family.ENTROPY
    source: ClassVar[str] = "baseline: Skywork-OR1, as TRL ships it"
    summary: ClassVar[str] = "coefficient +-delta toward the entropy target, applied only below it"
    needs: ClassVar[tuple[str, ...]] = ("entropy",)
    moves: ClassVar[tuple[str, ...]] = ("entropy_coef",)

    target: float = 0.2
    """Nats/token."""
    delta: float = 0.005
    least: float = 0.0
    most: float = 1.0

    def remember(self, ctx: Context) -> float | None:
        """The coefficient c, which walks on while the gate is closed."""
        entropy, before = ctx.value("entropy"), ctx.memory.get(self.id, ctx.facts.knobs["entropy_coef"])
        if entropy is None:
            return before
        step = self.delta if entropy <= self.target else -self.delta
        return min(max(before + step, self.least), self.most)

    def propose(self, ctx: Context) -> Answer:
        entropy, coef = ctx.value("entropy"), self.remember(ctx)
        if entropy is None or coef is None:
            return None
        after = coef if entropy <= self.target else 0.0
        if after == ctx.knobs["entropy_coef"]:
            return None
        reason = f"entropy {entropy:.2g} against a target of {self.target:g}"
        evidence = {"entropy": entropy, "coefficient": coef}
        return Proposal(self.id, "entropy_coef", after, reason, kind=Kind.REGULATOR, evidence=evidence)
