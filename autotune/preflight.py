"""What the documents say about a run before it starts: A1, A2, B5b, B6p, B8 and the temperature.

Watched: the knobs that the run would start with, and where they were carried from. Nothing is refused
here: each function yields words, and an empty answer means that there is nothing to say.

    A1   updates per rollout outside 4-8
    A2   few prompts per rollout: the reward curve jitters
    B5b  the critic's learning rate against 3 x the actor's, and equal to it
    B6p  max_prompt_length below 1024, or below the task's own prompts
    B8   settings carried from another model, data set, reward or kind of hardware
    XT   temperature outside 0.6-1.2

Sources: documents A and B under the same ids; XT is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autotune.knobs import updates_per_rollout

GOLDEN_UPDATES = (4, 8)
"""Updates per rollout."""
JITTERY_PROMPTS, STEADY_PROMPTS = 256, 10_240
"""The document's two examples of a batch, in prompts."""
SHORT_PROMPTS = 1024
"""Tokens."""
CRITIC_RATIO, CRITIC_USUAL = 3.0, 2.0
TEMPERATURES = (0.6, 1.2)
REWARD_VARIANCE = 0.3
"""P2's limit on the variance of the mean reward, in task units squared."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A word on one rule before the run: not an error, the run may start."""

    rule: str
    text: str


def advise(
    knobs: Mapping[str, float],
    *,
    prompt_tokens: int | None = None,
    carried: Mapping[str, str] | None = None,
    here: Mapping[str, str] | None = None,
) -> Iterator[Advice]:
    """Everything that can be said from the knobs alone.

    Args:
        knobs: real names; a critic's learning rate only where there is a critic.
        prompt_tokens: longest prompt of the task in tokens, where the task fixes it.
        carried: fingerprint of the run that the settings come from.
        here: fingerprint of the run that is to start.
    """
    yield from updates(updates_per_rollout(knobs))
    yield from batch(int(knobs["train_batch_size"]))
    yield from critic(knobs["actor_learning_rate"], knobs.get("critic_learning_rate"))
    yield from prompts(int(knobs["max_prompt_length"]), prompt_tokens)
    yield from temperature(knobs["temperature"])
    yield from transfer(carried or {}, here or {})


def updates(count: int) -> Iterator[Advice]:
    """A1: below 4 a rollout goes partly unused, above 8 late updates leave their data behind."""
    low, high = GOLDEN_UPDATES
    if count == 1:
        text = "one update per rollout: the policy ratio is always 1, so no clip rule has a sensor"
        yield Advice("A1", f"{text}; {low} to {high} updates use a rollout better")
    elif count < low:
        text = f"{count} updates per rollout, below the usual {low} to {high}"
        yield Advice("A1", f"{text}: much of each rollout goes unused")
    elif count > high:
        text = f"{count} updates per rollout, above the usual {low} to {high}"
        yield Advice("A1", f"{text}: late updates drift from the data they learn from")


def batch(prompt_count: int) -> Iterator[Advice]:
    """A2: a small batch is no way to see logs more often."""
    if prompt_count < JITTERY_PROMPTS:
        text = f"{prompt_count} prompts per rollout: expect a jittery reward curve"
        advice = f"{JITTERY_PROMPTS} still jitter, {STEADY_PROMPTS:,} are steady"
        yield Advice("A2", f"{text} ({advice}); use as many as memory and time allow")


def critic(actor: float, critic_rate: float | None) -> Iterator[Advice]:
    """B5b: usually 2-3 x the actor's rate, never the same, never above 3 x.

    The documents' own starting values are 5 x, and below an actor rate of 1.67e-6 their ranges exclude
    each other: so this is said and nothing more, and only the controller's own raises keep the cap.
    """
    if critic_rate is None:
        return
    ratio = critic_rate / actor
    if ratio > CRITIC_RATIO * (1 + 1e-9):
        text = f"critic_learning_rate is {ratio:.3g} x the actor's, above {CRITIC_RATIO:g} x"
        yield Advice("B5b", f"{text}: it will not be raised by the controller")
    elif abs(ratio - 1) <= 1e-9:
        text = "critic_learning_rate equals the actor's"
        yield Advice("B5b", f"{text}: usually {CRITIC_USUAL:g} to {CRITIC_RATIO:g} x as large")
    elif ratio < 1:
        yield Advice("B5b", f"critic_learning_rate is below the actor's ({ratio:.3g} x)")


def prompts(cap: int, longest: int | None) -> Iterator[Advice]:
    """B6p: where the task's prompts are known to fit, a short cap is no fault."""
    if longest is not None and longest > cap:
        text = f"max_prompt_length is {cap}, but this task's prompts have {longest} tokens"
        yield Advice("B6p", text)
    elif longest is None and cap < SHORT_PROMPTS:
        text = f"max_prompt_length is {cap}, below {SHORT_PROMPTS} tokens: longer prompts are cut"
        yield Advice("B6p", f"{text}; the metric prompts_cut counts them")


def temperature(value: float) -> Iterator[Advice]:
    low, high = TEMPERATURES
    if not low <= value <= high:
        yield Advice("XT", f"temperature is {value:g}, outside the usual {low:g} to {high:g}")


def transfer(carried: Mapping[str, str], here: Mapping[str, str]) -> Iterator[Advice]:
    """B8: an optimum does not move with its settings to another model, data set, reward or machine.

    Parts that one of the two does not know are not compared.
    """
    for part in (p for p in carried if p in here and carried[p] != here[p]):
        text = f"the settings were tuned on another {part}: {carried[part]}, here {here[part]}"
        yield Advice("B8", f"{text}; the optimum does not move with them")


def largest_variance(reward_range: tuple[float, float] | None) -> float:
    """Largest variance of anything within a range: half of it at either end."""
    if reward_range is None:
        return math.inf
    low, high = reward_range
    return ((high - low) / 2) ** 2
