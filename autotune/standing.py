"""Where a rule stands in a run: whether it can act at all, and if not, why.

`blocked` is asked by the controller whenever a knob has moved; `standings` is the table that `autotune check`
prints before a run. Neither looks at a single measured number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autotune.decisions import RunFacts
from autotune.knobs import expand
from autotune.metrics import Validity
from autotune.policies import POLICIES
from autotune.policies.base import Policy
from autotune.policies.batch import clip_blocked


@dataclass(frozen=True, slots=True)
class RuleStatus:
    """One row of `autotune check`: whether a rule can act on this run, and why not."""

    id: str
    source: str
    summary: str
    on: bool
    can_act: bool
    reason: str


def blocked(policy: Policy, facts: RunFacts, knobs: Mapping[str, float]) -> str:
    """Structural reasons: no sensor, no reference model, no movable knob; empty when there is none."""
    if policy.needs_ratio and (reason := clip_blocked(facts, knobs)):
        return reason
    return policy.blocked(facts, knobs) or _no_knob(policy, facts)


def _no_knob(policy: Policy, facts: RunFacts) -> str:
    movable = [all(facts.can_speak_of(r) for r in expand(k)) for k in policy.moves]
    stuck = policy.moves and not any(movable)
    return f"{' and '.join(policy.moves)} cannot be changed in this run" if stuck else ""


def standings(
    policies: Sequence[Policy], facts: RunFacts, pinned: Collection[str], profile: str
) -> list[RuleStatus]:
    """For every known rule: is it on, can it act on this run, and why not.

    Args:
        policies: the rules that are on.
        facts: the structure of the run; its knobs are those it starts with.
        pinned: real knobs that only a person may move.
        profile: for the words about a rule that is off.
    """
    on = {policy.id: policy for policy in policies}
    off = f"off in profile {profile} or by the recipe"
    table = []
    for rule, cls in POLICIES.items():
        policy = on.get(rule)
        reason = off if policy is None else _objection(policy, facts, pinned)
        table.append(RuleStatus(rule, cls.source, cls.summary, policy is not None, not reason, reason))
    return table


def _objection(policy: Policy, facts: RunFacts, pinned: Collection[str]) -> str:
    return _unsensed(policy, facts) or blocked(policy, facts, facts.knobs) or _held(policy, pinned)


def _unsensed(policy: Policy, facts: RunFacts) -> str:
    for metric in policy.needs:
        capability = facts.metric_capability.get(metric)
        if capability is not None and capability.state != Validity.VALID:
            return capability.reason or f"{metric} is {capability.state}"
    return ""


def _held(policy: Policy, pinned: Collection[str]) -> str:
    held = [k for k in policy.moves if set(expand(k)) & set(pinned)]
    return f"{', '.join(held)} pinned" if held and len(held) == len(policy.moves) else ""
