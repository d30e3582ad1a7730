"""Snapshots for rule tests: a healthy run, except for what a test says.

    answer = ask(ClipTooLow(), run(8, clip_ratio=0.009))
    answer = ask(KlBand(), run(8, kl_ref=[0.02] * 8, reward_mean=RISING), knobs={"kl_coef": 0.1})

A metric is a number (the same at every rollout), a sequence (one number a rollout) or None (missing).
The default pace is the shortest there is: window 4, trend 8, settle 2, evaluate 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import settings

from autotune.decisions import Proposal, RunFacts
from autotune.history import History, Sample
from autotune.knobs import Capability, Liveness
from autotune.metrics import METRICS, Reading, Snapshot, Validity, read_metric
from autotune.policies.base import Answer, Context, Pace, Policy, pace_for
from autotune.testing.plant import HEALTHY

QUICK = settings(deadline=None, max_examples=50)
"""For properties: machines that share their cores are slow at times."""

PACE: Pace = pace_for(0.1)
WINDOW, TREND = PACE.window, PACE.trend

METRICS_OF_A_HEALTHY_RUN: dict[str, float] = {
    "reward_mean": 0.5,
    "reward_std": 0.5,
    "clip_ratio": 0.015,
    "ratio_low": 0.05,
    "ratio_in": 0.85,
    "ratio_high": 0.10,
    "kl_ref": 0.05,
    "kl_step": 0.01,
    "entropy": 0.30,
    "grad_norm": 1.5,
    "loss": 0.01,
    "learning_rate": 3e-4,
    "zero_std_fraction": 0.25,
    "rollout_success_rate": 1.0,
    "response_length_mean": 7.0,
}

NOISE = 0.5 * ((1 / 3) / 64 + (2 / 3) / 512) ** 0.5
"""Noise floor of the reward at reward_std 0.5, 64 prompts x 8: the rules' yardstick."""

FLAT: list[float] = [0.5] * TREND
RISING: list[float] = [0.3 + 0.03 * k for k in range(TREND)]
FALLING: list[float] = [0.6 - 0.03 * k for k in range(TREND)]
UNCLEAR: list[float] = [0.5 + 1.5 * NOISE * (-1) ** k for k in range(TREND)]
"""Neither a trend nor a proven plateau, and no wilder than its noise."""
SAW: list[float] = [0.4, 0.55, 0.70, 0.35, 0.50, 0.70, 0.35, 0.5]
"""Rise, sharp drop, and again: far beyond the noise floor, without a trend."""

Series = float | Sequence[float | None] | None


def facts(
    rollouts: int = 60,
    *,
    immovable: Mapping[str, str] | None = None,
    unlogged: Mapping[str, str] | None = None,
    has_reference: bool = True,
    loss_kind: str = "token",
    knobs: Mapping[str, float] | None = None,
    **more: Any,
) -> RunFacts:
    """A run in which every knob moves and every metric is logged, except for what is named."""
    vector = HEALTHY | dict(knobs or {})
    capability = {name: Capability(Liveness.NEXT_ROLLOUT) for name in vector}
    for name, reason in (immovable or {}).items():
        capability[name] = Capability(Liveness.UNAVAILABLE, reason)
    sensed = {name: Capability(Validity.VALID) for name in METRICS}
    for name, reason in (unlogged or {}).items():
        sensed[name] = Capability(Validity.NOT_LOGGED, reason)
    return RunFacts(
        rollouts=rollouts,
        world_size=more.pop("world_size", 1),
        algorithm="grpo",
        loss_kind=loss_kind,
        has_reference=has_reference,
        has_critic=False,
        knobs=vector,
        knob_capability=capability,
        metric_capability=sensed,
        reward_maximum=more.pop("reward_maximum", 1.0),
        **more,
    )


def snapshot(
    rollout: int,
    knobs: Mapping[str, float] | None = None,
    *,
    epoch: int = 0,
    per_update: Mapping[str, Sequence[float]] | None = None,
    readings: Mapping[str, Reading] | None = None,
    **metrics: Any,
) -> Snapshot:
    """One rollout; `readings` overrules `metrics` where a test needs a state and not a number."""
    raw = METRICS_OF_A_HEALTHY_RUN | metrics
    return Snapshot(
        rollout=rollout,
        knobs=HEALTHY | dict(knobs or {}),
        readings={n: read_metric(n, v) for n, v in raw.items()} | dict(readings or {}),
        epoch=epoch,
        per_update={n: tuple(v) for n, v in (per_update or {}).items()},
    )


def run(
    rollouts: int,
    *,
    knobs: Mapping[str, float] | None = None,
    start: int = 3,
    epoch: int = 0,
    **metrics: Series,
) -> list[Snapshot]:
    """`rollouts` snapshots in a row, from rollout `start` on (3: Adam's start is over)."""
    at = [{n: _at(series, k) for n, series in metrics.items()} for k in range(rollouts)]
    return [snapshot(start + k, knobs, epoch=epoch, **values) for k, values in enumerate(at)]


def _at(series: Series, k: int) -> float | None:
    return series if series is None or isinstance(series, (int, float)) else series[k]


def context(
    snapshots: Sequence[Snapshot],
    *,
    knobs: Mapping[str, float] | None = None,
    of: RunFacts | None = None,
    pace: Pace = PACE,
    **more: Any,
) -> Context:
    """What a rule sees after the last of these snapshots; `knobs` differ from the snapshots' own."""
    last, history = snapshots[-1], History()
    for snap in snapshots:
        history.add(Sample.of(snap))
    return Context(
        facts=of or facts(),
        snapshot=last,
        history=history,
        knobs=dict(last.knobs) | dict(knobs or {}),
        pace=pace,
        epoch=last.epoch,
        **more,
    )


def ask(policy: Policy, snapshots: Sequence[Snapshot], **more: Any) -> Answer:
    """What the rule answers after these snapshots; `more` goes to `context`."""
    return policy.propose(context(snapshots, **more))


def wants(answer: Answer) -> tuple[str, float] | None:
    """(knob, value) of a proposal, None for silence; anything else fails the test."""
    if answer is None:
        return None
    assert isinstance(answer, Proposal), f"expected a proposal or silence, got {answer}"
    return answer.knob, answer.value
