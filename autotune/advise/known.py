"""What is known about a logged run, and which rules must therefore be silent.

A log seldom says how large the batches were. A knob that neither the log, nor its header, nor `--recipe`,
nor `--knob` names is *not known*: rules that compute with it are switched off with that reason. The
controller still needs numbers in these places; they are neutral and only ever reach the reward's noise
floor, where the assumption is said (`noise_words`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autotune.controller import ControlSettings
from autotune.decisions import RunFacts
from autotune.errors import InputError
from autotune.knobs import KNOBS, Capability, Liveness, expand
from autotune.logs import Survey
from autotune.metrics import METRICS, Validity
from autotune.policies.reads import NOISE, READS

if TYPE_CHECKING:
    from autotune.recipe.schema import Recipe

NOT_KNOWN = "not_known"
"""Capability state of a knob that nobody told us."""

_NEUTRAL: dict[str, float] = {
    "ppo_epochs": 1,
    "kl_coef": 0.0,
    "clip_range_low": 0.2,
    "clip_range_high": 0.2,
    "actor_learning_rate": 1.0,
    "max_prompt_length": 1,
    "max_response_length": 1,
    "temperature": 1.0,
    "entropy_coef": 0.0,
    "num_rollout_batches": 1,
}
SMALL, LARGE = (1, 8), (8, 8)
"""Prompts and responses a prompt that the noise floor assumes when nothing at all is known: the usual
least of trainers on one device, and of those on a cluster."""


@dataclass
class Known:
    """Everything that stands beside the rows."""

    facts: RunFacts
    settings: ControlSettings
    known: dict[str, float]
    """Knobs that somebody said, in their own units."""
    unknown: dict[str, str]
    silent: dict[str, str]
    """Rule -> why it cannot speak on this log."""
    noise_words: str
    averaged: int = 1
    """Trainer steps a row averages; batch sizes are multiplied by it for the noise floor."""
    notes: list[str] = field(default_factory=list)

    @property
    def responses(self) -> int:
        return int(self.facts.knobs["train_batch_size"] * self.facts.knobs["rollout_n"])


def gather(found: Survey, recipe: Recipe | None, told: Mapping[str, float]) -> Known:
    """Put together what the log, its header, the recipe and the user say; the later one wins."""
    hints = found.log.hints
    known = dict(hints.knobs)
    known |= _from_columns(found)
    of_recipe = _recipe_facts(recipe) if recipe is not None else None
    known |= of_recipe.knobs if of_recipe is not None else {}
    known |= _checked(told)
    unknown = {k: _why(k) for k in KNOBS if k not in known}
    vector, words = _vector(found, known)
    silent = _silent(unknown)
    control = recipe.control if recipe is not None else None
    policies: dict[str, Any] = dict(control.policies) if control is not None else {}
    settings = ControlSettings(
        mode="shadow",
        profile=control.profile if control is not None else "recommended",
        pace=control.pace if control is not None else "auto",
        policies=policies | dict.fromkeys(silent, "off"),
    )
    facts = _facts(found, of_recipe, vector, unknown)
    return Known(facts, settings, known, unknown, silent, words, found.steps_per_row, list(found.notes))


def _checked(told: Mapping[str, float]) -> dict[str, float]:
    for name in told:
        if any(real not in KNOBS for real in expand(name)):
            raise InputError(f"--knob {name}: expected one of {', '.join(KNOBS)}")
    return {real: float(value) for name, value in told.items() for real in expand(name)}


def _from_columns(found: Survey) -> dict[str, float]:
    """Knobs that the rows repeat: the peak learning rate, a KL coefficient."""
    known: dict[str, float] = {}
    for key, column in found.plan.items():
        high = found.keys[key].high * column.scale
        if not 0 < high < float("inf"):
            continue
        if column.ours.startswith("knob:"):
            known[column.ours[5:]] = high
        elif column.ours == "learning_rate":
            known["actor_learning_rate"] = high
    return known


def _why(knob: str) -> str:
    return f"{knob} is not known: it is not in the log; tell it with --recipe or --knob {knob}=…"


def _vector(found: Survey, known: Mapping[str, float]) -> tuple[dict[str, float], str]:
    """A full knob vector and what the noise floor stands on."""
    k, responses = found.steps_per_row, found.log.hints.responses
    vector = {**_NEUTRAL, **known}
    if all(name in known for name in NOISE):
        prompts, group = known["train_batch_size"], known["rollout_n"]
        words = f"{prompts:g} prompts x {group:g} responses a rollout"
    elif responses:
        group = known.get("rollout_n", float(responses))
        prompts = max(responses / group, 1.0)
        words = f"{responses} responses an update, as the log says, taken as {prompts:g} prompt(s)"
    else:
        prompts, group = map(float, SMALL if found.table.averages else LARGE)
        words = f"{prompts:g} prompts x {group:g} responses, an assumption: the log does not say"
    mini = known.get("ppo_mini_batch_size", prompts)
    vector |= {"train_batch_size": prompts * k, "rollout_n": group, "ppo_mini_batch_size": mini * k}
    vector.setdefault("micro_batch_size", group)
    vector.setdefault("rollout_micro_batch_size", prompts * k * group)
    vector.setdefault("critic_learning_rate", 1.0)
    return vector, words + (f"; a row averages {k} of them" if k > 1 else "")


def _silent(unknown: Mapping[str, str]) -> dict[str, str]:
    silent = {}
    for rule, reads in READS.items():
        missing = [knob for knob in reads if knob in unknown]
        if missing:
            silent[rule] = f"{', '.join(missing)} not known: tell it with --recipe or --knob"
    return silent


def _recipe_facts(recipe: Recipe) -> RunFacts:
    from autotune.recipe.facts import recipe_facts  # pydantic: only when a recipe is told

    return recipe_facts(recipe)


def _facts(
    found: Survey, of_recipe: RunFacts | None, vector: Mapping[str, float], unknown: Mapping[str, str]
) -> RunFacts:
    total = found.log.hints.total_steps // max(found.steps_per_row, 1)
    facts = RunFacts(
        rollouts=max(total, found.rows, 1),
        world_size=1,
        algorithm=of_recipe.algorithm if of_recipe is not None else "grpo",
        loss_kind="token",
        has_reference="kl_ref" in found.metrics,
        has_critic="value_loss" in found.metrics,
        knobs=vector,
        knob_capability=_movable(vector, unknown),
        metric_capability=_sensed(found),
    )
    if of_recipe is None:
        return facts
    return replace(facts, lr_warmup=of_recipe.lr_warmup, reward_maximum=of_recipe.reward_maximum)


def _movable(vector: Mapping[str, float], unknown: Mapping[str, str]) -> dict[str, Capability]:
    """In shadow every knob that is known could be moved; a rate that is not known is moved by factors."""
    table = {knob: Capability(Liveness.NEXT_ROLLOUT) for knob in vector}
    table |= {knob: Capability(NOT_KNOWN, why) for knob, why in unknown.items() if knob in vector}
    table["actor_learning_rate"] = Capability(Liveness.NEXT_ROLLOUT)
    return table


def _sensed(found: Survey) -> dict[str, Capability]:
    present = found.metrics
    table = {}
    for name in METRICS:
        if name in present:
            table[name] = Capability(Validity.VALID)
        else:
            table[name] = Capability(Validity.NOT_LOGGED, _not_seen(found, name))
    clip = found.of("clip_ratio")
    if clip is not None and clip.high == 0 and clip.low == 0:
        reason = (
            "clip_ratio is exactly 0 on every row, as with one update per rollout: there is nothing to sense"
        )
        table["clip_ratio"] = Capability(Validity.STRUCTURAL_ZERO, reason)
    return table


def _not_seen(found: Survey, name: str) -> str:
    if name in found.rounded_away:
        return f"{found.rounded_away[name]} prints as 0.000: rounded away, not a sensor"
    if name in found.table.missing:
        return f"{name} is not in this log: {found.table.missing[name]}"
    if name == "kl_ref" and found.table.averages:
        return "kl_ref is not in this log: no `kl` means beta is 0, not that KL is 0"
    return f"{name} is not in this log"
