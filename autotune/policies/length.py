"""Lengths: B6 (cap far above the answers), X3 (answers cut), B6p (prompts cut), XL (a length surge).

Watched: `response_length_mean` and its 99.5th percentile in tokens, `truncated_fraction`, `prompts_cut`.
Moved: `max_response_length`.

    B6   mean < 60 % of the cap, truncation < 0.5 %  ->  cap down, never below 1.15 x p99.5
    X3   truncation > 5 %                            ->  cap up by a quarter, within the recipe's limit;
                                                         twice where nearly all answers are cut
    B6p  max_prompt_length < 1024, or prompts cut    ->  said before and during the run
    XL   lengths at 3 x their own start              ->  alarm; length and gradient noise rise together

Sources: document B 3.6; X3 and XL beyond it. The 60 % rule alone fires on healthy runs whose mean is short
and whose longest answers still hit the cap, so the tail decides: "trim refused" is a result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from autotune.decisions import Proposal
from autotune.policies.base import Advice, Alarm, Answer, Context, Family, Policy


@dataclass(frozen=True)
class CapTooHigh(Policy):
    """B6."""

    id: ClassVar[str] = "B6"
    family: ClassVar[Family] = Family.THROUGHPUT
    source: ClassVar[str] = "B 3.6: mean length below 60 % of the cap"
    summary: ClassVar[str] = "response_length_mean < 60 % of the cap, tail clear -> cap down"
    needs: ClassVar[tuple[str, ...]] = ("response_length_mean", "truncated_fraction")
    moves: ClassVar[tuple[str, ...]] = ("max_response_length",)

    share: float = 0.60
    truncated: float = 0.005
    tail: float = 1.15
    """Headroom over the 99.5th percentile."""
    step: float = 0.9
    """One move trims at most to this share of the cap."""
    quantum: int = 8
    """Tokens; trimming less is not worth a change."""

    def propose(self, ctx: Context) -> Answer:
        mean, cut = ctx.level("response_length_mean"), ctx.window("truncated_fraction", ctx.pace.trend)
        cap = ctx.knobs["max_response_length"]
        if mean is None or mean >= self.share * cap:
            return None
        if ctx.literal:
            reason = f"mean length {mean:.0f} < {self.share:.0%} of the cap {cap:.0f}"
            return Proposal(self.id, "max_response_length", math.ceil(self.step * cap), reason)
        if cut is None or max(cut) >= self.truncated:
            return None
        longest = ctx.window("response_length_p995", ctx.pace.trend)
        longest = longest or ctx.window("response_length_max", ctx.pace.trend)
        if not longest:
            return None
        after = max(math.ceil(self.tail * max(longest)), math.ceil(self.step * cap))
        if cap - after < self.quantum:
            return None
        reason = f"mean length {mean:.0f} < {self.share:.0%} of the cap {cap:.0f}, p99.5 {max(longest):.0f}"
        return Proposal(self.id, "max_response_length", after, reason, evidence={"length": mean})


@dataclass(frozen=True)
class AnswersCut(Policy):
    """X3."""

    id: ClassVar[str] = "X3"
    family: ClassVar[Family] = Family.THROUGHPUT
    source: ClassVar[str] = "beyond the documents: truncation above 5 %"
    summary: ClassVar[str] = "truncated_fraction > 5 % -> max_response_length up"
    needs: ClassVar[tuple[str, ...]] = ("truncated_fraction",)
    moves: ClassVar[tuple[str, ...]] = ("max_response_length",)

    threshold: float = 0.05
    factor: float = 1.25
    nearly_all: float = 0.9
    far: float = 2.0
    """The factor where so many are cut that nothing says how long they would be."""
    span: float = 4.0
    """The cap stays within this x the recipe's."""

    def propose(self, ctx: Context) -> Answer:
        cut = ctx.level("truncated_fraction")
        if cut is None or cut <= self.threshold:
            return None
        cap, start = ctx.knobs["max_response_length"], ctx.facts.knobs["max_response_length"]
        factor = self.far if cut >= self.nearly_all else self.factor
        after = min(math.ceil(cap * factor), int(start * self.span))
        reason = f"{cut:.0%} of the responses are cut at {cap:.0f} tokens"
        return Proposal(self.id, "max_response_length", after, reason, evidence={"truncated_fraction": cut})


@dataclass(frozen=True)
class PromptsCut(Policy):
    """B6p."""

    id: ClassVar[str] = "B6p"
    family: ClassVar[Family] = Family.INTEGRITY
    source: ClassVar[str] = "B 3.6: max_prompt_length at least 1024"
    summary: ClassVar[str] = "prompts are cut -> say so, with the count"
    needs: ClassVar[tuple[str, ...]] = ("prompts_cut",)

    def propose(self, ctx: Context) -> Answer:
        cut = ctx.value("prompts_cut")
        if not cut:
            return None
        cap = ctx.knobs.get("max_prompt_length", 0)
        reason = f"{cut:.0f} prompts were cut to max_prompt_length {cap:.0f}: raise it, then restart"
        return Advice(self.id, "max_prompt_length", reason)


@dataclass(frozen=True)
class LengthSurge(Policy):
    """XL."""

    id: ClassVar[str] = "XL"
    family: ClassVar[Family] = Family.COLLAPSE
    source: ClassVar[str] = "beyond the documents: response length surge"
    summary: ClassVar[str] = "response_length_mean at 3x its own start -> alarm"
    needs: ClassVar[tuple[str, ...]] = ("response_length_mean",)

    factor: float = 3.0

    def propose(self, ctx: Context) -> Answer:
        level, first = ctx.level("response_length_mean"), ctx.first_level("response_length_mean")
        if level is None or not first or level < self.factor * first:
            return None
        return Alarm(self.id, f"response_length_mean {level:.0f} is {level / first:.1f}x its start")
