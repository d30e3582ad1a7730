"""The rules. Adding one: a file with its class, one row in `POLICIES`, one test file.

`PROFILES` says which rules are on: `documented` is the two documents behind the guards,
`recommended` adds X1-X5, `literal` is the documents with no guards, for study. The optional watchers
(XC, XE, XL, XM, XR, XT, XZ) are off until a recipe switches them on. The other profiles are what the
rules are measured against: `fixed` has no rule, the others one baseline each.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from autotune.errors import InputError
from autotune.policies.base import Policy
from autotune.policies.baselines import AdaptiveEntropy, AdaptiveKl, RandomMoves
from autotune.policies.batch import ClipTooHigh, ClipTooLow, UpdatesInGoldenRange
from autotune.policies.clip import HardlyAnyClipped, TooMuchClipped
from autotune.policies.collapse import VetoAndCollapse
from autotune.policies.critic import CriticTooSlow
from autotune.policies.data import BatchTooSmall, DataFreshness
from autotune.policies.integrity import AnchorHolds, RolloutsSucceed
from autotune.policies.learning_rate import SawTooth, StepKlTrustRegion
from autotune.policies.length import AnswersCut, CapTooHigh, LengthSurge, PromptsCut
from autotune.policies.memory import RolloutMemory
from autotune.policies.reference_kl import FarAndVolatile, KlBand, StuckNearReference
from autotune.policies.stall import PinnedToReference, Saturated
from autotune.policies.watch import (
    ComponentsDiverge,
    EntropyCollapse,
    NoSignal,
    ResetReference,
    SamplerMismatch,
    TemperatureOff,
)

POLICIES: dict[str, type[Policy]] = {
    "A1": UpdatesInGoldenRange,
    "A2": BatchTooSmall,
    "A3": ClipTooLow,
    "A4": ClipTooHigh,
    "A6": AnchorHolds,
    "B1": RolloutMemory,
    "B2": DataFreshness,
    "B3a": StuckNearReference,
    "B3b": FarAndVolatile,
    "B3c": KlBand,
    "B4a": TooMuchClipped,
    "B4b": HardlyAnyClipped,
    "B5a": SawTooth,
    "B5b": CriticTooSlow,
    "B6": CapTooHigh,
    "B6p": PromptsCut,
    "B7": RolloutsSucceed,
    "X1": StepKlTrustRegion,
    "X2": VetoAndCollapse,
    "X3": AnswersCut,
    "X4": Saturated,
    "X5": PinnedToReference,
    "XC": ComponentsDiverge,
    "XE": EntropyCollapse,
    "XL": LengthSurge,
    "XM": SamplerMismatch,
    "XR": ResetReference,
    "XT": TemperatureOff,
    "XZ": NoSignal,
    "random": RandomMoves,
    "adaptive_kl": AdaptiveKl,
    "adaptive_entropy": AdaptiveEntropy,
}

_A = ("A1", "A2", "A3", "A4", "A6")
_B = ("B1", "B2", "B3a", "B3b", "B3c", "B4a", "B4b", "B5a", "B5b", "B6", "B6p", "B7")
_DOCUMENTED = (*_A, *_B)

PROFILES: dict[str, tuple[str, ...]] = {
    "documented": _DOCUMENTED,
    "recommended": (*_DOCUMENTED, "X1", "X2", "X3", "X4", "X5"),
    "literal": _DOCUMENTED,
    "fixed": (),
    "random": ("random",),
    "adaptive_kl": ("adaptive_kl",),
    "adaptive_entropy": ("adaptive_entropy",),
}

BASELINES = ("fixed", "random", "adaptive_kl", "adaptive_entropy")
UNGUARDED = ("literal", "adaptive_kl", "adaptive_entropy")
"""Profiles whose rules act at once: no warm-up, no cooldown, no probation."""


def build_policies(profile: str, overrides: Mapping[str, Any]) -> tuple[Policy, ...]:
    """The rules of a profile with the recipe's changes, in order of priority.

    Args:
        profile: a key of `PROFILES`.
        overrides: rule id -> `off`/False, `on`/True, or a mapping of the rule's parameters (which
            also switches it on).

    Raises:
        InputError: unknown rule or parameter, with the nearest name.
    """
    active = dict.fromkeys(PROFILES[profile], True)
    parameters: dict[str, Mapping[str, Any]] = {}
    for rule, wanted in overrides.items():
        if rule not in POLICIES:
            raise InputError(f"unknown rule {rule!r}{_nearest(rule, POLICIES)}")
        active[rule] = wanted not in (False, "off")
        parameters[rule] = wanted if isinstance(wanted, Mapping) else {}
    built = [_build(rule, parameters.get(rule, {})) for rule, on in active.items() if on]
    return tuple(sorted(built, key=lambda policy: policy.family))


def _build(rule: str, parameters: Mapping[str, Any]) -> Policy:
    known = {f.name: f for f in dataclasses.fields(POLICIES[rule])}
    for name, value in parameters.items():
        if name not in known:
            raise InputError(f"rule {rule} has no parameter {name!r}{_nearest(name, known)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError(f"rule {rule}: {name} is {value!r}, expected a number")
    return POLICIES[rule](**parameters)


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
