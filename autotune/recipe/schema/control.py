"""`control`: who decides, by which rules."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from autotune.recipe.schema.base import Section


class ControlSection(Section):
    """Who decides, by which rules. On its own this is a `control.yaml` for other trainers."""

    mode: Literal["off", "shadow", "act"] = "act"
    profile: Literal[
        "recommended", "documented", "literal", "fixed", "random", "adaptive_kl", "adaptive_entropy"
    ] = "recommended"
    """The rules that are on; the last four are what the rules are measured against."""
    pace: Literal["auto"] | Annotated[float, Field(gt=0, le=1)] = "auto"
    """Scale of warm-up, windows and cooldowns; auto is rollouts / 1000 within [0.1, 1]."""
    pin: tuple[str, ...] = ()
    """Knobs that the controller must not touch."""
    policies: dict[str, Literal["on", "off"] | bool | dict[str, Any]] = Field(default_factory=dict)
    """Rule id -> off, on, or a mapping of the rule's parameters."""
    schedule: str | None = None
    """A knob schedule to follow instead of a controller: a file of `autotune replay --export`."""
