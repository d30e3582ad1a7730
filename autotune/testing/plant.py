"""The plant: a small arithmetic model of GRPO on the embedded digit task, for closed-loop tests.

One call of `advance` is one rollout. With U = updates per rollout, B = prompts x group size and
p = the expected reward of a sample:

    drift      kl_step = drift * (lr/3e-4)^a * U_eff^b * (B/512)^c * (clip/0.2)^d * noise, and
               3-4 times that during Adam's first steps (its second moment is still filling up)
    learning   dp = speed(kl_step) * B^s * epochs^e * p^i * (ceiling - p)^j; speed rises with kl_step
               up to 0.04 and falls beyond; the ceiling falls with kl_coef and with drift above 0.04
    reference  KL to the reference relaxes toward what progress and drift ask for, divided by the
               pull of kl_coef (a kl_coef of 1 pins it in 0.03-0.05 and holds the reward back)
    clipping   share of tokens outside the range = tail of sqrt(2 kl)/range; about 6 in 10 of these
               have the clipped branch active
    reward     mean over B samples of Beta-distributed prompts, variance v_between/P + v_within/B
    death      a drift above about 0.45 (certain from 0.7 on, rare at 0.3): reward 0, entropy up, no
               group with a spread, no gradient. Nothing but older weights brings it back.

The extremes: lr -> 0 freezes p, one update per rollout has no clipping, a dead model stays dead.
The constants are fitted to a scan of real runs by `experiments/plant/fit.py`; what was assumed
and not fitted is marked so. State is a frozen value, so a checkpoint is a reference to one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autotune.knobs import updates_per_rollout
from autotune.metrics import RATIO_BINS, RATIO_LIMIT

HEALTHY: dict[str, float] = {
    "train_batch_size": 64,
    "rollout_n": 8,
    "ppo_mini_batch_size": 16,
    "ppo_epochs": 1,
    "micro_batch_size": 128,
    "rollout_micro_batch_size": 512,
    "num_rollout_batches": 1,
    "kl_coef": 0.005,
    "clip_range_low": 0.2,
    "clip_range_high": 0.2,
    "actor_learning_rate": 3e-4,
    "max_prompt_length": 16,
    "max_response_length": 8,
    "temperature": 1.0,
    "entropy_coef": 0.0,
}
"""The well-set recipe of the embedded task: the point around which the plant was fitted."""

NOISES = 10
"""Standard normal numbers that one rollout consumes, in the order that `advance` unpacks them."""


@dataclass(frozen=True, slots=True)
class Constants:
    """Everything that the plant's equations need; defaults are the fit to the scan."""

    # drift: kl_step at the healthy point [nats/token] and its exponents
    drift: float = 0.01465
    drift_lr: float = 1.635
    drift_updates: float = 1.814
    updates_soft: float = 19.64
    """U_eff = U / (1 + U / this): clipping brakes long rollouts."""
    drift_batch: float = -0.5319
    drift_clip: float = 0.4169
    drift_noise: float = 0.25
    """Log-normal scatter from rollout to rollout."""
    boost: float = 2.47
    """Extra drift of the very first optimizer step, as a factor of the steady one."""
    boost_steps: float = 6.956
    # learning
    start: float = 0.18
    ceiling: float = 0.8188
    speed: float = 0.1838
    rise: float = 0.4506
    """Exponent of speed in kl_step far below `best_drift`."""
    best_drift: float = 0.04
    fall: float = 0.7883
    """Exponent by which speed falls far above `best_drift`."""
    signal: float = 0.8851
    """Exponent of speed in B/512."""
    reuse: float = 0.6621
    """Exponent of speed in ppo_epochs: passes over the same data learn more per drift."""
    early: float = 1.343
    late: float = 1.1
    ceiling_drift: float = 0.1025
    """Loss of ceiling per e-fold of kl_step above `best_drift`."""
    hold: float = 0.7587
    """kl_coef that takes half of the progress that is possible."""
    hold_power: float = 1.463
    # reference KL [nats/token]
    reference_progress: float = 0.0488
    reference_drift: float = 0.2619
    reference_drift_power: float = 0.2839
    reference_rate: float = 0.0417
    pull: float = 0.3519
    pull_power: float = 1.572
    # death
    death: float = 0.45
    death_width: float = 0.15
    dead_drift: float = 0.0103
    """Drift of a dead model at four updates [nats/token]; it looks like a healthy one's."""
    dead_reference: float = 2.0
    dead_entropy: float = 1.7
    # clipping
    tail: float = 0.07589
    tail_power: float = 0.7567
    tail_onset: float = 0.195
    active: float = 0.5824
    """Share of tokens outside the range whose clipped branch is the active one."""
    low_side: float = 0.55
    """Share of these that are on the low side (assumed)."""
    # entropy [nats/token], gradient norm
    entropy_start: float = 0.4336
    entropy_progress: float = 0.4346
    entropy_drift: float = 0.0258
    entropy_rate: float = 0.0409
    grad: float = 1.431
    grad_batch: float = 0.4109
    grad_epochs: float = -0.2703
    grad_noise: float = 0.3
    # rewards: Beta concentration of the prompts' success probabilities
    concentration: float = 3.08
    # lengths [tokens] (assumed: the embedded task always answers seven)
    length_median: float = 7.0
    length_sigma: float = 0.02
    length_growth: float = 0.0
    """Relative growth of the median length per unit of progress."""
    dead_length: float = 1.3


@dataclass(frozen=True, slots=True)
class State:
    """The model and the optimizer: all that a checkpoint holds."""

    skill: float
    """Expected reward of an untruncated sample, 0-1."""
    kl_ref: float = 0.0
    entropy: float = 0.0
    steps: float = 0
    """Adam's step count."""
    alive: bool = True

    @classmethod
    def initial(cls, constants: Constants) -> State:
        return cls(skill=constants.start, entropy=constants.entropy_start)


@dataclass(slots=True)
class Measured:
    """What a trainer would log of one rollout; all numbers honest."""

    scalars: dict[str, float] = field(default_factory=dict)
    per_update: dict[str, list[float]] = field(default_factory=dict)
    histograms: dict[str, list[float]] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)


def advance(
    c: Constants,
    knobs: Mapping[str, float],
    learning_rate: float,
    state: State,
    noise: Sequence[float],
    length_factor: float = 1.0,
) -> tuple[State, Measured]:
    """One rollout: sample from `state`, update it, report.

    Args:
        c: the plant's constants.
        knobs: vector in force for this rollout.
        learning_rate: what the optimizer uses: schedule x peak.
        state: model and optimizer at the start of the rollout.
        noise: [NOISES] standard normal numbers.
        length_factor: multiplies response lengths (a length surge).

    Returns:
        State after the rollout's updates, and what was measured.
    """
    z_reward, z_zero, z_drift, z_entropy, z_grad, *others = noise
    z_reference, z_death, z_length, z_loss, z_time = others
    updates = updates_per_rollout(knobs)
    measured = Measured()
    scalars = measured.scalars
    kept = _lengths(c, knobs, state, length_factor, z_length, scalars)
    _rewards(c, knobs, state, kept, z_reward, z_zero, scalars)
    kl_step = drift(c, knobs, learning_rate, updates, state) * math.exp(c.drift_noise * z_drift)
    after = learn(c, knobs, state, kl_step, updates, z_death)
    _clipping(c, knobs, state, kl_step, updates, measured)
    scalars["kl_step"] = kl_step
    scalars["kl_ref"] = 0.5 * (state.kl_ref + after.kl_ref) * math.exp(0.08 * z_reference)
    scalars["entropy"] = state.entropy * math.exp(0.03 * z_entropy)
    norm = grad_norm(c, knobs, state) * math.exp(c.grad_noise * z_grad)
    scalars["grad_norm"] = norm
    scalars["loss"] = knobs["kl_coef"] * scalars["kl_ref"] + 0.005 * z_loss
    scalars["learning_rate"] = learning_rate
    scalars["data_age"] = 0.0
    scalars["updates_skipped"] = 0.0
    measured.per_update["grad_norm"] = [norm] * updates
    _times(knobs, updates, scalars, measured.times, z_time)
    if knobs["kl_coef"] == 0.0:
        del scalars["kl_ref"]  # no reference model was built
    return after, measured


# --------------------------------------------------------------------------------- the updates


def drift(
    c: Constants, knobs: Mapping[str, float], learning_rate: float, updates: int, state: State
) -> float:
    """Expected `kl_step` [nats/token] of this rollout's updates."""
    batch = knobs["train_batch_size"] * knobs["rollout_n"]
    clip = 0.5 * (knobs["clip_range_low"] + knobs["clip_range_high"])
    longer = _soft(updates, c.updates_soft) / _soft(4, c.updates_soft)
    if not state.alive:  # seen to follow the updates, hardly the learning rate
        return c.dead_drift * math.pow(longer, c.drift_updates) * min(1.0, learning_rate / 1e-3)
    steady = (
        c.drift
        * math.pow(learning_rate / 3e-4, c.drift_lr)
        * math.pow(longer, c.drift_updates)
        * math.pow(batch / 512, c.drift_batch)
        * math.pow(clip / 0.2, c.drift_clip)
    )
    fresh = c.boost * math.exp(-state.steps / c.boost_steps) * min(1.0, 4 / updates)
    return steady * (1.0 + fresh)


def _soft(updates: float, limit: float) -> float:
    return updates / (1.0 + updates / limit)


def learn(
    c: Constants,
    knobs: Mapping[str, float],
    state: State,
    kl_step: float,
    updates: int,
    z_death: float,
) -> State:
    """The state after this rollout's updates; `z_death` blurs the edge of death."""
    steps = state.steps + updates
    if not state.alive or kl_step * math.exp(c.death_width * z_death) > c.death:
        return _dead(c, state, steps)
    skill = _skill(c, knobs, state.skill, kl_step)
    pull = 1.0 / (1.0 + math.pow(knobs["kl_coef"] / c.pull, c.pull_power))
    wanted = pull * (
        c.reference_progress * max(skill - c.start, 0.0)
        + c.reference_drift * math.pow(kl_step / 0.014, c.reference_drift_power)
    )
    calm = c.entropy_start - c.entropy_progress * max(skill - c.start, 0.0)
    calm -= c.entropy_drift * math.log1p(kl_step / 0.001)
    return State(
        skill=skill,
        kl_ref=state.kl_ref + c.reference_rate * (wanted - state.kl_ref),
        entropy=state.entropy + c.entropy_rate * (max(calm, 0.03) - state.entropy),
        steps=steps,
    )


def _skill(c: Constants, knobs: Mapping[str, float], skill: float, kl_step: float) -> float:
    ratio = kl_step / c.best_drift
    speed = c.speed * math.pow(ratio, c.rise) * (c.rise + c.fall)
    speed /= c.fall + c.rise * math.pow(ratio, c.rise + c.fall)  # its maximum is at ratio = 1
    batch = knobs["train_batch_size"] * knobs["rollout_n"]
    speed *= math.pow(batch / 512, c.signal) * math.pow(knobs["ppo_epochs"], c.reuse)
    top = c.ceiling - c.ceiling_drift * max(math.log(max(ratio, 1e-9)), 0.0)
    top = c.start + (top - c.start) / (1.0 + math.pow(knobs["kl_coef"] / c.hold, c.hold_power))
    gap = top - skill
    gain = speed * math.pow(skill, c.early) * math.copysign(math.pow(abs(gap), c.late), gap)
    return min(max(skill + gain, 0.001), 0.999)


def _dead(c: Constants, state: State, steps: float) -> State:
    """Reward 0 at once; entropy and KL to the reference drift to where dead models stay."""
    return State(
        skill=0.0,
        kl_ref=state.kl_ref + 0.5 * (c.dead_reference - state.kl_ref),
        entropy=state.entropy + 0.5 * (c.dead_entropy - state.entropy),
        steps=steps,
        alive=False,
    )


def grad_norm(c: Constants, knobs: Mapping[str, float], state: State) -> float:
    """Median gradient norm before clipping."""
    if not state.alive:
        return 0.005
    samples = knobs["ppo_mini_batch_size"] * knobs["rollout_n"]
    epochs = math.pow(knobs["ppo_epochs"], c.grad_epochs)
    return c.grad * math.pow(128 / samples, c.grad_batch) * epochs


# ---------------------------------------------------------------------------- the measurements


def outside_share(c: Constants, kl: float, clip_range: float) -> float:
    """Share of tokens whose ratio is outside +-clip_range after a drift of `kl`, both sides."""
    if kl <= 0.0:
        return 0.0
    x = math.sqrt(2.0 * kl) / clip_range  # the range in standard deviations of log r, inverted
    onset = c.tail_onset / x
    return min(c.tail * math.pow(x, c.tail_power) * math.exp(-onset * onset), 0.9)


@functools.lru_cache(maxsize=64)
def _schedule(updates: int, power: float) -> tuple[float, ...]:
    """Share of the rollout's drift that is already there before each update, [U]."""
    return tuple((u / updates) ** power for u in range(updates))


def _clipping(
    c: Constants,
    knobs: Mapping[str, float],
    state: State,
    kl_step: float,
    updates: int,
    measured: Measured,
) -> None:
    """Per-update shares, their means over the rollout, and the ratio histograms."""
    low_range, high_range = knobs["clip_range_low"], knobs["clip_range_high"]
    drifts = [kl_step * share for share in _schedule(updates, c.drift_updates)]
    low = [c.low_side * outside_share(c, k, low_range) for k in drifts]
    high = [(1.0 - c.low_side) * outside_share(c, k, high_range) for k in drifts]
    active = c.active if state.alive else 0.0  # all advantages are zero in a dead model
    mean_low, mean_high = sum(low) / updates, sum(high) / updates
    measured.scalars["clip_ratio"] = active * (mean_low + mean_high)
    measured.scalars["ratio_low"] = mean_low
    measured.scalars["ratio_in"] = 1.0 - mean_low - mean_high
    measured.scalars["ratio_high"] = mean_high
    measured.per_update.update(
        clip_ratio=[active * (a + b) for a, b in zip(low, high, strict=True)],
        ratio_low=low,
        ratio_in=[1.0 - a - b for a, b in zip(low, high, strict=True)],
        ratio_high=high,
        kl_step=drifts,
    )
    tokens = measured.scalars["response_length_mean"] * (
        knobs["train_batch_size"] * knobs["rollout_n"] * knobs["ppo_epochs"]
    )
    measured.histograms["policy_ratio"] = _histogram(low_range, high_range, mean_low, mean_high, tokens)
    measured.histograms["policy_ratio_last"] = _histogram(
        low_range, high_range, low[-1], high[-1], tokens / updates
    )


def _histogram(low_range: float, high_range: float, low: float, high: float, tokens: float) -> list[float]:
    """Expected counts of the ratio histogram, [RATIO_BINS + 2], with the given shares."""
    parts = _templates(low_range, high_range)
    shares = (low * tokens, (1.0 - low - high) * tokens, high * tokens)
    return [shares[side] * weight for side, weight in parts]


@functools.lru_cache(maxsize=256)
def _templates(low_range: float, high_range: float) -> tuple[tuple[int, float], ...]:
    """Per bin: which side of the clip range its centre is on, and its weight within that side.

    Within a side the weight halves every three bins away from ratio 1 (assumed).
    """
    width = 2.0 * math.log(RATIO_LIMIT) / RATIO_BINS
    centres = [(i - 0.5 - RATIO_BINS / 2) * width for i in range(RATIO_BINS + 2)]
    lower, upper = math.log(max(1.0 - low_range, 1e-3)), math.log(1.0 + high_range)
    side = [0 if x < lower else 2 if x > upper else 1 for x in centres]
    weight = [2.0 ** (-abs(x) / (3.0 * width)) for x in centres]
    total = [sum(w for s, w in zip(side, weight, strict=True) if s == k) or 1.0 for k in range(3)]
    return tuple((s, w / total[s]) for s, w in zip(side, weight, strict=True))


def _lengths(
    c: Constants,
    knobs: Mapping[str, float],
    state: State,
    factor: float,
    z: float,
    scalars: dict[str, float],
) -> float:
    """Log-normal response lengths cut at the cap; the share of responses that were not cut."""
    cap, sigma = knobs["max_response_length"], c.length_sigma
    median = c.length_median * factor * (1.0 if state.alive else c.dead_length)
    median *= 1.0 + c.length_growth * max(state.skill - c.start, 0.0)
    median *= math.exp(sigma * 0.05 * z)
    edge = math.log(cap / median) / sigma
    cut = 0.5 * math.erfc(edge / math.sqrt(2.0))
    below = 0.5 * math.erfc((sigma - edge) / math.sqrt(2.0))  # partial mean of the log-normal
    mean = median * math.exp(0.5 * sigma**2) * below + cap * cut
    scalars["response_length_mean"] = min(mean, cap)
    for name, quantile in (("p50", 0.0), ("p95", 1.645), ("p995", 2.576), ("max", 3.1)):
        scalars[f"response_length_{name}"] = min(median * math.exp(quantile * sigma), cap)
    scalars["truncated_fraction"] = cut
    scalars["prompt_length_mean"] = scalars["prompt_length_max"] = 8.0
    scalars["prompts_cut"] = scalars["prompts_dropped"] = 0.0
    return 1.0 - cut


def _rewards(
    c: Constants,
    knobs: Mapping[str, float],
    state: State,
    kept: float,
    z_mean: float,
    z_zero: float,
    scalars: dict[str, float],
) -> None:
    """0/1 rewards of P prompts x G samples whose success probabilities are Beta-distributed."""
    prompts, group = knobs["train_batch_size"], int(knobs["rollout_n"])
    p = state.skill * kept
    spread = p * (1.0 - p) / (c.concentration + 1.0)
    variance = spread / prompts + spread * c.concentration / (prompts * group)
    samples = prompts * group
    observed = min(max(round((p + math.sqrt(variance) * z_mean) * samples), 0), samples) / samples
    scalars["reward_mean"] = scalars["reward/exact_match"] = observed
    scalars["reward_std"] = math.sqrt(observed * (1.0 - observed))
    flat = flat_group_share(p, group, c.concentration)
    seen = flat + math.sqrt(flat * (1.0 - flat) / prompts) * z_zero
    scalars["zero_std_fraction"] = min(max(round(seen * prompts), 0), prompts) / prompts
    scalars["rollout_success_rate"] = 1.0


def flat_group_share(p: float, group: int, concentration: float) -> float:
    """E[q^G + (1-q)^G] for q ~ Beta with mean p: groups in which all rewards are equal."""
    a, b = p * concentration, (1.0 - p) * concentration
    right = wrong = 1.0
    for i in range(group):
        right *= (a + i) / (concentration + i)
        wrong *= (b + i) / (concentration + i)
    return right + wrong


def _times(
    knobs: Mapping[str, float],
    updates: int,
    scalars: dict[str, float],
    times: dict[str, float],
    z: float,
) -> None:
    """Seconds per phase, shaped like two CPU cores on the embedded task."""
    samples = knobs["train_batch_size"] * knobs["rollout_n"]
    size = samples / 512 * (1.0 + 0.02 * z)
    times["rollout"] = 0.114 * size
    times["old_log_prob"] = 0.114 * size
    times["reference"] = 0.112 * size if knobs["kl_coef"] else 0.0
    times["update"] = 0.25 * size * knobs["ppo_epochs"] + 0.012 * updates
    times["kl_step_forward"] = 0.015
    times["total"] = total = sum(times.values())
    tokens = samples * (8.0 + scalars["response_length_mean"])  # prompt + response
    scalars["tokens_per_second"] = tokens / total
