"""One chart: curves in an inline SVG that stretches, everything that is text beside it in HTML.

    figure
      figcaption        title, unit, legend, a button that shows the same numbers as a table
      .plot
        svg             bands, reference lines, curves; role img with title and description
        .tick .ref      labels, placed by percentages: they keep their size on a phone
        .cross          the common crosshair of all charts of one run
        .cursor         role slider: arrow keys go through the rollouts, a screen reader reads the values
        .marks          decisions as links to their rows in the table below
      script            the drawn numbers as JSON, for tooltip and table

The drawing is 1000 x 1000 and not scaled in proportion; lines keep their width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autotune.report.markup import data, esc, short, tag, text
from autotune.report.scales import Axis
from autotune.report.thin import keep

SIZE = 1000
MARK = 17
"""CSS pixels from one mark to the next."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line, with a band where seeds were averaged."""

    name: str
    x: Sequence[int]
    y: Sequence[float | None]
    color: str
    """A palette name of page.css: c1 … c8, or what a colour means: reward, kl, low, high, ink."""
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    count: Sequence[int] = ()
    right: bool = False
    """Whether it belongs to the right axis."""
    step: bool = False
    """A knob: flat until it is changed, and changed between two rollouts."""
    dash: int = 0
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Reference:
    """A documented threshold: a line, or a band where `high` is given."""

    value: float
    label: str
    high: float | None = None
    right: bool = False
    color: str = "ref"


@dataclass(frozen=True, slots=True)
class Mark:
    """A decision in a chart, linked to its row in the table of decisions."""

    x: float
    href: str
    outcome: str
    label: str
    """What a screen reader says."""
    y: float | None = None
    """On the left axis; in the middle where it is None."""
    sign: str = "▲"


@dataclass(frozen=True, slots=True)
class Panel:
    """What one chart shows."""

    key: str
    title: str
    span: tuple[float, float]
    """First and last rollout of the horizontal axis."""
    left: Axis
    curves: Sequence[Curve] = ()
    right: Axis | None = None
    references: Sequence[Reference] = ()
    marks: Sequence[Mark] = ()
    lines: Sequence[tuple[float, str]] = ()
    """Vertical lines through the chart: (rollout, outcome)."""
    height: int = 150
    """CSS pixels."""
    missing: str = ""
    """Why there is nothing to draw; said instead of a chart."""
    note: str = ""
    picture: str = ""
    """Markup behind the curves, in the coordinates of the drawing."""
    said: str = ""
    """What the chart says, in a sentence: its description for whoever cannot see it."""
    points: int = 600
    """About how many positions are drawn."""
    numbered: bool = True
    """Whether the rollouts are written below; a chart of a strip may leave that to its neighbours."""
    extra: dict[str, list[float | None]] = field(default_factory=dict)
    """More columns for tooltip and table that are not drawn; aligned with the first curve."""

    def at(self, x: float) -> float:
        low, high = self.span
        return (x - low) / (high - low)


def draw(panel: Panel, key: str) -> str:
    """The chart as markup; `key` is its id on the page."""
    if panel.missing:
        words = text("p", panel.missing, class_="missing")
        return tag(
            "figure", _caption(panel, key, table=False), words, class_="panel none", data_key=panel.key
        )
    drawn = _thinned(panel)
    body = tag(
        "div",
        *_grid(panel),
        _svg(panel, drawn, key),
        *_labels(panel),
        *_crosses(),
        _cursor(panel, drawn, key),
        _marks(panel),
        class_="plot",
        style=f"height:{panel.height}px",
    )
    note = text("p", panel.note, class_="note") if panel.note else ""
    numbers = data(_numbers(panel, drawn), id=f"{key}-d")
    return tag(
        "figure",
        _caption(panel, key),
        body,
        note,
        numbers,
        class_="panel" + (" two" if panel.right else "") + ("" if panel.numbered else " bare"),
        id=key,
        data_key=panel.key,
    )


# ---------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The positions that are drawn, and the curves at these."""

    x: list[int]
    curves: list[Curve]
    extra: dict[str, list[float | None]]
    of: int
    """Positions before thinning."""


def _thinned(panel: Panel) -> _Drawn:
    x = sorted({t for curve in panel.curves for t in curve.x})
    full = [_on(x, curve) for curve in panel.curves]
    kept = keep(
        [c.y for c in full] + [c for curve in full for c in (curve.low, curve.high) if c],
        len(x),
        panel.points,
    )
    picked = [_pick(curve, kept) for curve in full]
    extra = {}
    for name, column in panel.extra.items():
        at = dict(zip(panel.curves[0].x, column, strict=False))
        extra[name] = [at.get(x[i]) for i in kept]
    return _Drawn([x[i] for i in kept], picked, extra, len(x))


def _on(x: Sequence[int], curve: Curve) -> Curve:
    """The curve on all positions of the chart; None where it has none."""
    if list(curve.x) == list(x):
        return curve
    at = {t: i for i, t in enumerate(curve.x)}

    def spread(column: Sequence[float | None]) -> list[float | None]:
        return [column[at[t]] if t in at else None for t in x] if column else []

    count = [curve.count[at[t]] if t in at else 0 for t in x] if curve.count else ()
    return _copy(curve, x, spread(curve.y), spread(curve.low), spread(curve.high), count)


def _pick(curve: Curve, kept: Sequence[int]) -> Curve:
    def some(column: Sequence[float | None]) -> list[float | None]:
        return [column[i] for i in kept] if column else []

    count = [curve.count[i] for i in kept] if curve.count else ()
    return _copy(curve, [curve.x[i] for i in kept], some(curve.y), some(curve.low), some(curve.high), count)


def _copy(
    curve: Curve,
    x: Sequence[int],
    y: Sequence[float | None],
    low: Sequence[float | None],
    high: Sequence[float | None],
    count: Sequence[int],
) -> Curve:
    return Curve(
        curve.name, x, y, curve.color, low, high, count, curve.right, curve.step, curve.dash, curve.dots
    )


def _numbers(panel: Panel, drawn: _Drawn) -> dict[str, object]:
    """What the page's script needs: positions, span, and per curve its values as drawn."""
    series = []
    for curve in drawn.curves:
        axis = panel.right if curve.right and panel.right else panel.left
        entry: dict[str, object] = {"n": curve.name, "c": curve.color, "y": [short(v) for v in curve.y]}
        if axis.percent:
            entry["p"] = 1
        if curve.dots:
            entry["o"] = 1
        if axis.unit:
            entry["u"] = axis.unit
        if any(v is not None for v in curve.low):
            entry["l"], entry["h"] = [short(v) for v in curve.low], [short(v) for v in curve.high]
        if curve.count and max(curve.count) > 1:
            entry["k"] = list(curve.count)
        series.append(entry)
    series += [{"n": n, "c": "", "y": [short(v) for v in column]} for n, column in drawn.extra.items()]
    return {"t": panel.title, "x": drawn.x, "a": panel.span[0], "b": panel.span[1], "s": series}


# ---------------------------------------------------------------------------------------- drawing


def _svg(panel: Panel, drawn: _Drawn, key: str) -> str:
    title = text("title", panel.title, id=f"{key}-t")
    described = panel.said or _description(drawn)
    inside = [
        title,
        text("desc", described, id=f"{key}-e"),
        panel.picture,
        *_references(panel),
        *(_vertical(panel, x, outcome) for x, outcome in panel.lines),
        *(_band(panel, curve) for curve in drawn.curves),
        *(_line(panel, curve) for curve in drawn.curves),
    ]
    return tag(
        "svg",
        *inside,
        viewBox=f"0 0 {SIZE} {SIZE}",
        preserveAspectRatio="none",
        role="img",
        aria_labelledby=f"{key}-t {key}-e",
    )


def _description(drawn: _Drawn) -> str:
    """From where to where each curve goes."""
    parts = []
    for curve in drawn.curves:
        known = [v for v in curve.y if v is not None]
        if known:
            parts.append(
                f"{curve.name}: {len(known)} points, first {known[0]:.4g}, last {known[-1]:.4g}, "
                f"lowest {min(known):.4g}, highest {max(known):.4g}"
            )
    return "; ".join(parts) + "."


def _axis(panel: Panel, right: bool) -> Axis:
    return panel.right if right and panel.right is not None else panel.left


def _xy(panel: Panel, right: bool, x: float, y: float) -> tuple[int, int]:
    return round(SIZE * panel.at(x)), round(SIZE * (1 - _axis(panel, right).place(y)))


def _line(panel: Panel, curve: Curve) -> str:
    shape = _steps(panel, curve) if curve.step else _polyline(panel, curve)
    known = sum(v is not None for v in curve.y)
    dash = f" d{curve.dash}" if curve.dash else ""
    line = tag("path", d=shape, class_=f"line {curve.color}{dash}", data_points=known)
    return line + _dots(panel, curve) if curve.dots else line


def _dots(panel: Panel, curve: Curve) -> str:
    """Every point as a line of no length with thick round ends: it stays round when the drawing stretches."""
    places = (_xy(panel, curve.right, x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None)
    return tag("path", d="".join(f"M{x} {y}h0" for x, y in places), class_=f"dots {curve.color}")


def _polyline(panel: Panel, curve: Curve) -> str:
    """`M` starts a new piece behind every gap; a lone point is a line of no length with a round end."""
    parts: list[str] = []
    pen = False
    for x, y in zip(curve.x, curve.y, strict=True):
        if y is None:
            pen = pen and curve.dots  # between sparse points the line goes on
            continue
        at = _xy(panel, curve.right, x, y)
        parts.append(f"{'L' if pen else 'M'}{at[0]} {at[1]}" + ("" if pen else "h0"))
        pen = True
    return "".join(parts)


def _steps(panel: Panel, curve: Curve) -> str:
    """Flat over a rollout, and a jump half way to the next: that is when knobs are changed."""
    parts: list[str] = []
    last: int | None = None
    for x, y in zip(curve.x, curve.y, strict=True):
        if y is None:
            last = None
            continue
        left, height = _xy(panel, curve.right, x - 0.5, y)
        right, _ = _xy(panel, curve.right, x + 0.5, y)
        if last is None:
            parts.append(f"M{left} {height}H{right}")
        else:
            parts.append(f"H{left}V{height}H{right}" if height != last else f"H{right}")
        last = height
    return "".join(parts)


def _band(panel: Panel, curve: Curve) -> str:
    """The area between low and high, one piece per stretch that has both."""
    if not any(value is not None for value in curve.low):
        return ""
    pieces: list[str] = []
    there: list[str] = []
    back: list[str] = []
    for x, low, high in [*zip(curve.x, curve.low, curve.high, strict=True), (0, None, None)]:
        if low is None or high is None:
            if there:
                pieces.append(f"M{'L'.join(there)}L{'L'.join(reversed(back))}Z")
            there, back = [], []
            continue
        there.append("{} {}".format(*_xy(panel, curve.right, x, high)))
        back.append("{} {}".format(*_xy(panel, curve.right, x, low)))
    return tag("path", d="".join(pieces), class_=f"band {curve.color}")


def _references(panel: Panel) -> Iterator[str]:
    for ref in panel.references:
        axis = _axis(panel, ref.right)
        if not axis.low <= ref.value <= axis.high:
            continue
        y = round(SIZE * (1 - axis.place(ref.value)))
        if ref.high is None:
            yield tag("path", d=f"M0 {y}H{SIZE}", class_=f"rule {ref.color}")
        else:
            top = round(SIZE * (1 - axis.place(ref.high)))
            yield tag("rect", x=0, y=top, width=SIZE, height=y - top, class_=f"zone {ref.color}")


def _vertical(panel: Panel, x: float, outcome: str) -> str:
    return tag("path", d=f"M{round(SIZE * panel.at(x))} 0V{SIZE}", class_=f"when {outcome}")


# ----------------------------------------------------------------------------------------- labels


def _caption(panel: Panel, key: str, table: bool = True) -> str:
    legend = "".join(_key(curve) for curve in panel.curves) if len(panel.curves) > 1 or panel.right else ""
    unit = f" {panel.left.unit}" if panel.left.unit and not panel.right else ""
    button = ""
    if table and panel.curves:
        button = text(
            "button",
            "table",
            type="button",
            class_="totable",
            aria_controls=key,
            aria_expanded="false",
            aria_label=f"{panel.title}: show as a table",
        )
    head = text("b", panel.title) + (text("span", unit, class_="unit") if unit else "")
    return tag("figcaption", head, tag("span", legend, class_="legend"), button)


def _key(curve: Curve) -> str:
    sample = f'<svg class="key" viewBox="0 0 18 8" aria-hidden="true"><path class="line {esc(curve.color)}'
    sample += f'{f" d{curve.dash}" if curve.dash else ""}" d="M1 4H17"/></svg>'
    return tag("span", sample, esc(curve.name))


def _grid(panel: Panel) -> Iterator[str]:
    """Thin lines at the ticks of the left axis, behind the curves."""
    for value in panel.left.ticks(_most_ticks(panel)):
        yield tag("i", class_="grid", style=f"top:{100 * (1 - panel.left.place(value)):.2f}%")


def _most_ticks(panel: Panel) -> int:
    return 2 if panel.height < 80 else 3 if panel.height < 120 else 5


def _labels(panel: Panel) -> Iterator[str]:
    most = _most_ticks(panel)
    for right, axis in ((False, panel.left), (True, panel.right)):
        if axis is None:
            continue
        for value in axis.ticks(most):
            place = f"top:{100 * (1 - axis.place(value)):.2f}%"
            yield text(
                "span",
                axis.write(value),
                class_="tick " + ("right" if right else "left"),
                style=place,
                aria_hidden="true",
            )
    for ref in panel.references:
        axis = _axis(panel, ref.right)
        value = ref.value if ref.high is None else ref.high
        if ref.label and axis.low <= ref.value <= axis.high:
            place = f"top:{100 * (1 - axis.place(value)):.2f}%"
            side = "inside" if ref.high is not None else ""
            yield text("span", ref.label, class_=f"ref {side} {ref.color}", style=place, aria_hidden="true")
    for value in _x_ticks(panel.span) if panel.numbered else ():
        yield text(
            "span",
            f"{value:g}",
            class_="tick x",
            style=f"left:{100 * panel.at(value):.2f}%",
            aria_hidden="true",
        )


def _x_ticks(span: tuple[float, float]) -> list[float]:
    """Whole rollouts only."""
    return [value for value in Axis("linear", *span).ticks(8) if value == int(value)]


def _crosses() -> Iterator[str]:
    yield tag("i", class_="cross", hidden="")


def _cursor(panel: Panel, drawn: _Drawn, key: str) -> str:
    if not drawn.x:
        return ""
    return tag(
        "div",
        class_="cursor",
        role="slider",
        tabindex="0",
        data_for=key,
        aria_label=f"{panel.title}: go through the rollouts with the arrow keys",
        aria_valuemin=drawn.x[0],
        aria_valuemax=drawn.x[-1],
        aria_valuenow=drawn.x[-1],
        aria_valuetext=f"rollout {drawn.x[-1]}",
        aria_describedby=f"{key}-e",
    )


def _marks(panel: Panel) -> str:
    if not panel.marks:
        return ""
    items: list[str] = []
    here: Counter[tuple[float, float]] = Counter()  # what happened at one rollout stands side by side
    for mark in panel.marks:
        top = 50.0 if mark.y is None else 100 * (1 - panel.left.place(mark.y))
        place = f"left:{100 * panel.at(mark.x):.2f}%;top:{top:.1f}%"
        place += f";margin-left:{MARK * here[mark.x, top]}px" if here[mark.x, top] else ""
        here[mark.x, top] += 1
        items.append(
            text(
                "a",
                mark.sign,
                class_=f"mark {mark.outcome}",
                href=f"#{mark.href}",
                style=place,
                aria_label=mark.label,
            )
        )
    return tag("div", *items, class_="marks", role="group", aria_label=f"{panel.title}: decisions")
