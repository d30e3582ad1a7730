"""KL and reward overlaid, round by round, as one SVG file: mean over the runs with a band of one deviation.

Reward belongs to the left axis, KL to the right one, on which the documents' band 0.03 to 0.08 is shaded.
Colours follow the reader's light or dark page; nothing is fetched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from autotune.tune.rounds import Stage

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 340, 60, 60, 40, 46
BAND = (0.03, 0.08)
KL_TITLE = "KL, nats per token (band 0.03 to 0.08)"
STYLE = """
text { font: 12px sans-serif; fill: #333 } .axis { stroke: #999; fill: none }
.round { stroke: #999; stroke-dasharray: 4 4 }
.reward { stroke: #1764ab; fill: none; stroke-width: 2 } .reward-band { fill: #1764ab; opacity: .18 }
.kl { stroke: #b3541e; fill: none; stroke-width: 2; stroke-dasharray: 6 3 }
.kl-band { fill: #b3541e; opacity: .15 }
.ideal { fill: #2e8540; opacity: .14 } .r { fill: #1764ab } .k { fill: #b3541e }
@media (prefers-color-scheme: dark) { text { fill: #ddd } svg { background: #1c1c1c }
.reward { stroke: #6db3f2 } .kl { stroke: #f0a06c } .r { fill: #6db3f2 } .k { fill: #f0a06c } }
"""

Place = Callable[[float], float]


def overlay(stages: Sequence[Stage]) -> str:
    """The figure of all rounds so far."""
    last = max(stage.last for stage in stages)
    x = _scale(0, last, LEFT, WIDTH - RIGHT)
    reward = _scale(0, _top(stages, "reward_mean"), HEIGHT - BOTTOM, TOP)
    kl = _scale(0, max(_top(stages, "kl_ref"), BAND[1]), HEIGHT - BOTTOM, TOP)
    parts = [_frame(stages, x), _ideal(x, kl, last), _axes(_top(stages, "reward_mean"), reward, kl, stages)]
    for stage in stages:
        for name, place, css in (("kl_ref", kl, "kl"), ("reward_mean", reward, "reward")):
            parts.append(_curve(stage, name, x, place, css))
    title = "Reward (left axis) and KL to the reference (right axis) by rollout, mean and sd over the runs"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    return (
        f'{head} aria-label="{title}"><title>{title}</title><style>{STYLE}</style>{"".join(parts)}</svg>\n'
    )


def _scale(low: float, high: float, start: float, end: float) -> Place:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _spread(stage: Stage, name: str) -> list[tuple[float, float]]:
    """(mean, standard deviation) over the runs, rollout by rollout."""
    found = []
    for values in zip(*stage.series(name), strict=False):
        mean = math.fsum(values) / len(values)
        found.append((mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))))
    return found


def _top(stages: Sequence[Stage], name: str) -> float:
    tops = [mean + sd for stage in stages for mean, sd in _spread(stage, name)]
    return max(tops, default=1.0) or 1.0


def _curve(stage: Stage, name: str, x: Place, y: Place, css: str) -> str:
    spread = [(x(stage.first + at), mean, sd) for at, (mean, sd) in enumerate(_spread(stage, name))]
    if not spread:
        return ""
    line = " ".join(f"{px:.1f},{y(mean):.1f}" for px, mean, _ in spread)
    upper = [f"{px:.1f},{y(mean + sd):.1f}" for px, mean, sd in spread]
    lower = [f"{px:.1f},{y(max(mean - sd, 0)):.1f}" for px, mean, sd in reversed(spread)]
    band = f'<polygon class="{css}-band" points="{" ".join(upper + lower)}"/>'
    return f'{band}<polyline class="{css}" points="{line}"/>'


def _frame(stages: Sequence[Stage], x: Place) -> str:
    parts = [
        f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}V{TOP}"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">rollout</text>',
    ]
    for stage in stages:
        at = x(stage.first)
        label = f"{stage.name}: {stage.change}" if stage.change else stage.name
        parts.append(f'<line class="round" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{at + 4:.1f}" y="{TOP - 6}">{escape(label)}</text>')
    for rollout in sorted({0, *(stage.last for stage in stages)}):
        at, y = x(rollout), HEIGHT - BOTTOM + 16
        parts.append(f'<text x="{at:.1f}" y="{y}" text-anchor="middle">{rollout}</text>')
    return "".join(parts)


def _ideal(x: Place, kl: Place, last: int) -> str:
    low, high = kl(BAND[0]), kl(BAND[1])
    size = f'width="{x(last) - x(0):.1f}" height="{low - high:.1f}"'
    return f'<rect class="ideal" x="{x(0):.1f}" y="{high:.1f}" {size}/>'


def _axes(top: float, reward: Place, kl: Place, stages: Sequence[Stage]) -> str:
    highest = max(_top(stages, "kl_ref"), BAND[1])
    parts = [
        f'<text class="r" x="{LEFT}" y="16">reward</text>',
        f'<text class="k" x="{WIDTH - RIGHT}" y="16" text-anchor="end">{KL_TITLE}</text>',
    ]
    for share in (0.0, 0.5, 1.0):
        left, right = share * top, share * highest
        y = reward(left) + 4
        parts.append(f'<text class="r" x="{LEFT - 6}" y="{y:.1f}" text-anchor="end">{left:.2g}</text>')
        parts.append(f'<text class="k" x="{WIDTH - RIGHT + 6}" y="{kl(right) + 4:.1f}">{right:.2g}</text>')
    return "".join(parts)
