"""Small marks that every view shares: sparklines, the band gauge, numbers and colours.

A sparkline cell is the mean of the rollouts that fall into it, so its shape does not depend on
which rollout happened to be sampled. Where the output cannot encode block characters the same
marks are drawn in ASCII.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from autotune.story import Event, What

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII_BLOCKS = " ..-=+*##"

GOOD, WARN, BAD, ACCENT, DIM = "green", "yellow", "red", "cyan", "bright_black"

SIGNS: dict[str, tuple[str, str]] = {
    What.CHANGE: ("▲", ACCENT),
    What.WOULD: ("△", ACCENT),
    What.REFUSED: ("✗", BAD),
    What.VETO: ("·", DIM),
    What.RESTORE: ("↺", "magenta"),
    What.ALARM: ("!", WARN),
    What.STOP: ("■", BAD),
    What.COMMAND: ("☞", "blue"),
    "kept": ("✓", GOOD),
    "reverted": ("↩", WARN),
    "inconclusive": ("?", DIM),
}
"""Kind of event, or outcome of a verdict -> its sign and colour."""


def sign_of(event: Event) -> tuple[str, str]:
    return SIGNS.get(event.outcome or event.what, ("·", DIM))


def number(value: float | None) -> str:
    """A number in at most seven characters that keeps three significant digits."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1 else f"{value:.4g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def arrow(before: float | None, after: float | None) -> str:
    return number(after) if before is None else f"{number(before)} → {number(after)}"


def duration(seconds: float) -> str:
    """h:mm:ss or m:ss."""
    minutes, s = divmod(round(max(seconds, 0.0)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def cells(values: Sequence[float | None], width: int, total: int) -> list[float | None]:
    """Means of `values` in `width` cells that span `total` rollouts; None where nothing is known."""
    if total <= width:
        return [*values[:width], *[None] * (width - len(values))]
    buckets: list[list[float]] = [[] for _ in range(width)]
    for t, value in enumerate(values):
        if value is not None and t < total:
            buckets[t * width // total].append(value)
    return [sum(b) / len(b) if b else None for b in buckets]


def tail(values: Sequence[float | None], width: int) -> list[float | None]:
    """The last `width` values."""
    return list(values[-width:])


def spark(
    values: Sequence[float | None], style: str, *, rows: int = 1, low: float | None = None,
    high: float | None = None, ascii_only: bool = False,
) -> list[Text]:  # fmt: skip
    """A bar chart of block characters, `rows` lines tall, the top line first."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    low = min(known, default=0.0) if low is None else low
    high = max(known, default=1.0) if high is None else high
    heights = [_height(v, low, high, rows) for v in values]
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    return [_bar_row(heights, 8 * (rows - 1 - r), blocks, style) for r in range(rows)]


def _height(value: float | None, low: float, high: float, rows: int) -> int | None:
    """Eighths of a line, at least one so that a known low value is still seen."""
    if value is None or not math.isfinite(value):
        return None
    share = (value - low) / (high - low) if high > low else 0.5
    return max(1, round(min(max(share, 0.0), 1.0) * 8 * rows))


def _bar_row(heights: Sequence[int | None], base: int, blocks: str, style: str) -> Text:
    text = Text()
    for h in heights:
        if h is None:
            text.append("·" if base == 0 and blocks is BLOCKS else " ", DIM)
        else:
            text.append(blocks[min(max(h - base, 0), 8)], style)
    return text


KL_BAND = (0.03, 0.08)
"""nats/token: where the reference KL is documented to be steady and healthy."""
_GAUGE = (0.005, 0.5)
"""nats/token: ends of the gauge's logarithmic track."""


def gauge(value: float | None, width: int, *, ascii_only: bool = False) -> Text:
    """The reference KL on a logarithmic track with its band marked."""
    low, high = (_place(edge, width) for edge in KL_BAND)
    track, band, mark = ("-", "=", "o") if ascii_only else ("─", "━", "●")
    text = Text("".join(band if low <= i <= high else track for i in range(width)), DIM)
    text.stylize(GOOD, low, high + 1)
    if value is not None:
        at = _place(value, width)
        text = Text.assemble(text[:at], (mark, band_style(value)), text[at + 1 :])
    return text


def band_style(value: float) -> str:
    return GOOD if KL_BAND[0] <= value <= KL_BAND[1] else WARN


def _place(value: float, width: int) -> int:
    low, high = (math.log(edge) for edge in _GAUGE)
    share = (math.log(max(value, 1e-9)) - low) / (high - low)
    return round(min(max(share, 0.0), 1.0) * (width - 1))
