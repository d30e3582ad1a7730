"""The main figure, from rows alone: every start, the sweep that it takes, and the harm, as one SVG.

    A   each start: reward at the end, controller off and on; every run a mark, their mean with its interval
    B   expected score of the best of k sweep trials, and where one run under the controller stands
    C   the well-set recipe: how its scores are spread without and with the controller

All scores are shares of what there is to learn: 0 is the untrained model, 1 the sweep's best on fresh seeds.
The two colours differ in hue and in lightness (Okabe and Ito), the two arms also in their marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from experiments.rescue import measures, report
from experiments.rescue.report import Yardstick
from experiments.rescue.runs import Row
from experiments.rescue.suite import STARTS

WIDTH, GAP, LABELS, HEAD, ROW, SMALL = 860, 26, 112, 66, 27, 250
COLOURS = {"fixed": "#d55e00", "recommended": "#0072b2"}
NAMES = {"fixed": "without controller", "recommended": "with controller"}
INK, QUIET, LINE = "#222222", "#666666", "#d8d8d8"
LOW, HIGH = -0.3, 1.4
"""Range of the scores shown; what is beyond lies on the border."""


@dataclass(frozen=True, slots=True)
class Box:
    """Where a panel's data goes: left, top, width, height."""

    x: float
    y: float
    wide: float
    high: float

    def at(self, share: float) -> float:
        """Pixel of a share of the width."""
        return self.x + self.wide * min(max(share, 0.0), 1.0)

    def up(self, share: float) -> float:
        """Pixel of a share of the height, from below."""
        return self.y + self.high * (1 - min(max(share, 0.0), 1.0))


def figure(rows: Sequence[Row], tasks: Sequence[str], purpose: str) -> str:
    """The whole picture, or an empty string where no task has both runs and a sweep."""
    yards = {task: yard for task in tasks if (yard := report.yardstick(rows, task, purpose))}
    starts = [s for s in STARTS if any(report.chosen(rows, t, s, "recommended", purpose) for t in yards)]
    if not starts:
        return ""
    below = HEAD + ROW * len(starts) + 84
    half = (WIDTH - LABELS - GAP) / 2
    marks = [
        *_starts(rows, yards, starts, purpose),
        *_sweep(rows, yards, purpose, Box(LABELS - 40, below, half - 20, SMALL - 90)),
        *_harm(rows, yards, purpose, Box(LABELS + half + GAP + 40, below, half - 66, SMALL - 90)),
    ]
    height = below + SMALL - 34
    title = "One run under the controller: from every start, against a sweep, and on a well-set recipe"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img"'
        f' font-family="Helvetica, Arial, sans-serif" font-size="13" fill="{INK}">'
        f"<title>{escape(title)}</title>"
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>{"".join(marks)}</svg>\n'
    )


def share_of(yard: Yardstick, score: float) -> float:
    """0 untrained, 1 the sweep's best."""
    return 1 - yard.regret(score)


def _place(share: float) -> float:
    return (share - LOW) / (HIGH - LOW)


# -- A: every start ------------------------------------------------------------------------------


def _starts(
    rows: Sequence[Row], yards: dict[str, Yardstick], starts: Sequence[str], purpose: str
) -> Iterator[str]:
    yield _text(8, 20, "A", weight="bold", size=15)
    yield from _legend()
    wide = (WIDTH - LABELS - GAP * len(yards)) / len(yards)
    for at, (task, yard) in enumerate(yards.items()):
        box = Box(LABELS + at * (wide + GAP), HEAD, wide, ROW * len(starts))
        yield _text(box.x + wide / 2, 44, task, anchor="middle", weight="bold")
        yield from _scale(box, [(0, "untrained"), (0.5, ""), (1, "sweep's best")])
        bad = report.bad_starts(rows, task)
        for row, start in enumerate(starts):
            y = HEAD + ROW * (row + 0.5)
            if at == 0:
                yield _text(LABELS - 12, y + 4, _named(start), anchor="end")
            tint = QUIET if start in bad else "#aaaaaa"
            yield _line(box.x, y + ROW / 2, box.x + wide, y + ROW / 2, "#eeeeee")
            if start in bad:
                yield f'<rect x="{box.x:.1f}" y="{y - 8:.1f}" width="3" height="16" fill="{tint}"/>'
            for shift, arm in ((-5, "fixed"), (5, "recommended")):
                some = report.chosen(rows, task, start, arm, purpose)
                yield from _runs(box, y + shift, arm, some, yard)
    y = HEAD + ROW * len(starts) + 40
    yield _text(
        LABELS, y, "▌ bad: loses a fifth or more on tuning seeds; small marks are runs", fill=QUIET, size=12
    )


def _named(start: str) -> str:
    words = {"lr_x30": "LR × 30", "lr_x10": "LR × 10", "lr_d10": "LR ÷ 10", "lr_d30": "LR ÷ 30"}
    words |= {"kl_1": "kl_coef 1", "clip_001": "clip 0.01", "cap_low": "length cap low"}
    return words.get(start, start.replace("_", " "))


def _runs(box: Box, y: float, arm: str, rows: Sequence[Row], yard: Yardstick) -> Iterator[str]:
    """Every run small, their mean large with its interval."""
    if not rows:
        return
    groups = [[share_of(yard, report.scored(row))] for row in rows]
    many = len(rows) > 20
    for (share,) in groups:
        yield _mark(box.at(_place(share)), y, 2.0, arm, 0.12 if many else 0.4)
    mean = measures.bootstrap(groups)
    if mean.low == mean.low:  # an interval needs two seeds
        yield _line(box.at(_place(mean.low)), y, box.at(_place(mean.high)), y, COLOURS[arm], width=2)
    yield _mark(box.at(_place(mean.value)), y, 4.6, arm, 1.0)


def _scale(box: Box, ticks: Sequence[tuple[float, str]]) -> Iterator[str]:
    for value, name in ticks:
        x = box.at(_place(value))
        yield _line(x, box.y, x, box.y + box.high, LINE)
        yield _text(x, box.y + box.high + 16, name or f"{value:g}", anchor="middle", fill=QUIET, size=12)


def _legend() -> Iterator[str]:
    for at, arm in enumerate(COLOURS):
        x = LABELS + 170 * at
        yield _mark(x, 16, 4.6, arm, 1.0)
        yield _text(x + 12, 20, NAMES[arm], size=13)


# -- B: against a sweep --------------------------------------------------------------------------


def _sweep(rows: Sequence[Row], yards: dict[str, Yardstick], purpose: str, box: Box) -> Iterator[str]:
    """Both in regret over the same runs: the sweep's tasks weigh as ours do."""
    yield _text(8, box.y - 22, "B", weight="bold", size=15)
    yield _text(box.x, box.y - 22, "bad starts: one run against the best of k trials", weight="bold")
    found = [yard for _, yard in report.pooled_runs(rows, list(yards), "recommended", purpose)]
    if not found:
        yield _text(box.x, box.y + 20, "no bad start was run", fill=QUIET)
        return
    trials = min(len(yard.trials) for yard in found)
    sizes = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= trials]
    expected = [1 - measures.mean(yard.regret_of_sweep(k) for yard in found) for k in range(1, trials + 1)]
    across = _doubling(box, trials)
    yield from _frame(
        box, [(across(k), str(k)) for k in sizes], "k, trials of the sweep (each costs one run)"
    )
    points = " ".join(f"{across(k):.1f},{box.up(v / 1.1):.1f}" for k, v in enumerate(expected, 1))
    yield f'<polyline points="{points}" fill="none" stroke="{INK}" stroke-width="2"/>'
    yield _text(across(2) + 8, box.up(expected[1] / 1.1) + 14, "best of k trials, expected")
    for arm in COLOURS:
        yield from _level(rows, yards, purpose, box, arm)


def _doubling(box: Box, trials: int) -> Callable[[int], float]:
    """Pixel of k on a scale on which every doubling is as wide."""
    whole = max((trials - 1).bit_length(), 1)

    def across(k: int) -> float:
        from math import log2

        return box.at(log2(k) / whole)

    return across


def _level(
    rows: Sequence[Row], yards: dict[str, Yardstick], purpose: str, box: Box, arm: str
) -> Iterator[str]:
    found = report.pooled(rows, list(yards), arm, purpose)
    if found is None:
        return
    value, low, high = (1 - v for v in (found.regret.value, found.regret.high, found.regret.low))
    if low == low:
        top, bottom = box.up(high / 1.1), box.up(low / 1.1)
        yield (
            f'<rect x="{box.x:.1f}" y="{top:.1f}" width="{box.wide:.1f}" height="{bottom - top:.1f}"'
            f' fill="{COLOURS[arm]}" opacity="0.15"/>'
        )
    y = box.up(value / 1.1)
    yield _line(box.x, y, box.x + box.wide, y, COLOURS[arm], width=2, dashes="" if arm != "fixed" else "6 4")
    size = report.sweep_size(found.size, found.trials)
    told = f"{NAMES[arm]}, k* {size}" if arm != "fixed" else NAMES[arm]
    yield _text(box.x + 6, y - 6, told, fill=COLOURS[arm])


def _frame(box: Box, ticks: Sequence[tuple[float, str]], name: str) -> Iterator[str]:
    for value in (0.0, 0.5, 1.0):
        y = box.up(value / 1.1)
        yield _line(box.x, y, box.x + box.wide, y, LINE)
        yield _text(box.x - 6, y + 4, f"{value:g}", anchor="end", fill=QUIET, size=12)
    for x, label in ticks:
        yield _text(x, box.y + box.high + 16, label, anchor="middle", fill=QUIET, size=12)
    yield _text(box.x + box.wide / 2, box.y + box.high + 34, name, anchor="middle", fill=QUIET, size=12)


# -- C: harm -------------------------------------------------------------------------------------


def _harm(rows: Sequence[Row], yards: dict[str, Yardstick], purpose: str, box: Box) -> Iterator[str]:
    """Share of the well-set runs that ended at a score or below it."""
    yield _text(box.x - 40, box.y - 22, "C", weight="bold", size=15)
    yield _text(box.x - 20, box.y - 22, "well-set recipe: share of runs at or below", weight="bold")
    found = report.harm(rows, list(yards), purpose)
    if found is None:
        yield _text(box.x, box.y + 20, "fewer than two pairs were run", fill=QUIET)
        return
    pairs = [(yards[t], pair) for t in yards for pair in report.well_set_pairs(rows, t, purpose)]
    shares = {
        arm: sorted(share_of(yard, report.scored(pair[arm == "fixed"])) for yard, pair in pairs)
        for arm in COLOURS
    }
    low, high = min(min(v) for v in shares.values()), max(max(v) for v in shares.values())
    span = max(high - low, 0.1)

    def across(share: float) -> float:
        return box.at((share - low + 0.1 * span) / (1.2 * span))

    ticks = [(across(v / 10), f"{v / 10:g}") for v in range(-5, 21) if low <= v / 10 <= high]
    yield from _frame(box, ticks, "score (1: the sweep's best)")
    for arm, values in shares.items():
        yield _steps(box, values, across, arm)
    told = f"difference {found.difference}", f"excess harm {found.excess}"
    for at, text in enumerate(told):
        yield _text(box.x + 6, box.y + 12 + 17 * at, text, size=12)


def _steps(box: Box, values: Sequence[float], across: Callable[[float], float], arm: str) -> str:
    points, n = [f"{box.x:.1f},{box.up(0):.1f}"], len(values)
    for at, value in enumerate(values):
        points += [
            f"{across(value):.1f},{box.up(at / n / 1.1):.1f}",
            f"{across(value):.1f},{box.up((at + 1) / n / 1.1):.1f}",
        ]
    points.append(f"{box.x + box.wide:.1f},{box.up(1 / 1.1):.1f}")
    dashes = ' stroke-dasharray="6 3"' if arm == "fixed" else ""
    look = f'fill="none" stroke="{COLOURS[arm]}" stroke-width="2"{dashes}'
    return f'<polyline points="{" ".join(points)}" {look}/>'


# -- strokes -------------------------------------------------------------------------------------


def _mark(x: float, y: float, radius: float, arm: str, opacity: float) -> str:
    """A disc with the controller, a diamond without."""
    look = f'fill="{COLOURS[arm]}" opacity="{opacity}"'
    if arm == "recommended":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" {look}/>'
    r = radius * 1.2
    return f'<path d="M{x:.1f} {y - r:.1f}l{r:.1f} {r:.1f}l{-r:.1f} {r:.1f}l{-r:.1f} {-r:.1f}z" {look}/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"'
        f' stroke-width="{width}"{dashed}/>'
    )


def _text(
    x: float,
    y: float,
    words: str,
    anchor: str = "start",
    fill: str = INK,
    size: int = 13,
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-size="{size}"'
        f' font-weight="{weight}">{escape(words)}</text>'
    )
