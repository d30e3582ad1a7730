"""Axes: where a value stands between 0 and 1, and which ticks to write.

linear   for rewards and lengths, which may be negative
log      for knobs and rates, which are positive
asinh    for shares and KL: asinh(v / c) is linear around 0 and logarithmic beyond c, so that a true 0,
         a band at 0.03 and an explosion to 50 are all seen on one axis
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotune.screen.marks import number

MOST_TICKS = 5


@dataclass(frozen=True, slots=True)
class Axis:
    """One vertical axis."""

    kind: str
    """linear, log or asinh."""
    low: float
    high: float
    soft: float = 1.0
    """asinh: up to about here the axis is linear."""
    unit: str = ""
    percent: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end; beyond the ends it is cut there."""
        low, high, at = (self._bend(v) for v in (self.low, self.high, value))
        return min(max((at - low) / (high - low), 0.0), 1.0) if high > low else 0.5

    def _bend(self, value: float) -> float:
        if self.kind == "log":
            return math.log(max(value, 1e-300))
        return math.asinh(value / self.soft) if self.kind == "asinh" else value

    def ticks(self, most: int = MOST_TICKS) -> list[float]:
        """Round values inside, at most `most` and never close together."""
        inside = [v for v in self._round_values() if self.low <= v <= self.high]
        gap, kept = 1 / (most + 1), list[float]()
        for value in inside:
            if not kept or self.place(value) - self.place(kept[-1]) >= gap:
                kept.append(value)
        return kept

    def _round_values(self) -> Iterable[float]:
        if self.kind == "linear":
            return _steps(self.low, self.high, MOST_TICKS)
        decades = range(-9, 7)
        small = (
            [m * 10.0**d for d in decades for m in (1, 2, 5)]
            if self._narrow()
            else [m * 10.0**d for d in decades for m in (1, 3)]
        )
        floor = self.soft / 3 if self.kind == "asinh" else 0.0
        return [0.0, *(v for v in small if v >= floor)]

    def _narrow(self) -> bool:
        return self.kind == "log" and self.high < 20 * self.low

    def write(self, value: float) -> str:
        """A value as the axis and the tooltip write it."""
        return f"{100 * value:.3g} %" if self.percent else number(value)


def _steps(low: float, high: float, most: int) -> list[float]:
    raw = (high - low) / most
    size = 10 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * 0.999) if raw > 0 else 1.0
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def linear(
    values: Sequence[float], *, low: float | None = None, high: float | None = None, unit: str = ""
) -> Axis:
    """A linear axis around the values, with a little air; `low` and `high` are shown at least."""
    known = [v for v in (*values, low, high) if v is not None]
    bottom, top = min(known, default=0.0), max(known, default=1.0)
    air = (top - bottom) * 0.04 or abs(top) * 0.1 or 1.0
    return Axis("linear", bottom if bottom == low else bottom - air, top + air, unit=unit)


def log(values: Sequence[float], unit: str = "") -> Axis:
    """A logarithmic axis around positive values; around others a linear one."""
    if not values or min(values) <= 0:
        return linear(values, unit=unit)
    return Axis("log", min(values) / 1.25, max(values) * 1.25, unit=unit)


def asinh(
    values: Sequence[float], soft: float, at_least: float, *, unit: str = "", percent: bool = False
) -> Axis:
    """From 0 to what is there, and at least to `at_least`."""
    return Axis("asinh", 0.0, max([at_least, *values]) * 1.05, soft, unit, percent)
