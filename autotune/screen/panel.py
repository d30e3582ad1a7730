"""The live panel, drawn from a story and nothing else.

    progress          where the run is and when it ends
    reward            a curve over the whole run; the signs below it say when something was decided
    sensors | knobs   what is measured | what is set now, and from where it came
    decisions         the newest ones: rollout, rule, before → after, why
    state             the controller's machine and its tally

It fits 80 x 24; a taller terminal gets a taller curve and more decisions, a wider one the reasons
in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from autotune.metrics import Validity
from autotune.screen import marks
from autotune.screen.marks import ACCENT, BAD, DIM, GOOD, WARN, number
from autotune.story import Evaluation, Event, Story, What

MAX_WIDTH = 132
_FIXED_LINES = 8
"""Borders, progress and the gap below it, the signs, two rules, the controller's state."""
_BODY_LINES = 7
"""Rows of sensors, and at most as many knobs."""

KNOBS_SHOWN = (
    "actor_learning_rate", "kl_coef", "clip_range", "ppo_mini_batch_size", "ppo_epochs",
    "train_batch_size", "rollout_n", "temperature", "max_response_length", "micro_batch_size",
)  # fmt: skip
"""Order in which unchanged knobs are shown; changed ones come first."""


@dataclass(frozen=True, slots=True)
class Run:
    """What is fixed about a run: its names, length and scale."""

    name: str
    seed: int
    folder: str
    rollouts: int
    mode: str
    profile: str
    reward_maximum: float | None = None


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds since the start, and the estimate to the end (None before the first rollout)."""

    elapsed: float
    left: float | None


@dataclass(frozen=True, slots=True)
class Size:
    """Columns and lines available, and whether block characters can be encoded."""

    width: int
    height: int
    ascii_only: bool = False

    @property
    def inner(self) -> int:
        return self.width - 4

    @property
    def curve(self) -> int:
        """Lines of the reward curve."""
        return 2 if self.height < 30 else 4 if self.height < 40 else 6

    @property
    def wide(self) -> bool:
        return self.width >= 100

    @property
    def spark(self) -> int:
        """Cells of a sensor's sparkline: what names, values, remarks and the knobs leave."""
        return min(max(self.inner - 80, 8), 40)

    @property
    def decisions(self) -> int:
        """Lines of decisions; one line stays free so that the panel never scrolls."""
        return min(max(self.height - _FIXED_LINES - _BODY_LINES - self.curve - 1, 3), 10)


def draw(run: Run, story: Story, clock: Clock, size: Size) -> RenderableType:
    """The whole panel."""
    body = Group(
        _progress(run, story, clock, size),
        Text(),
        *_curve(run, story, size),
        _rule("now", size),
        _columns(story, size),
        _rule("decisions", size),
        _decisions(story, size),
        _state(run, story, size),
    )
    return Panel(
        body,
        title=_title(run),
        title_align="left",
        subtitle=f"[{DIM}]Ctrl-C saves · autotune run --resume {run.folder}[/]",
        subtitle_align="right",
        border_style=DIM,
        box=box.ASCII if size.ascii_only else box.ROUNDED,
        width=size.width,
        padding=(0, 1),
    )


def _title(run: Run) -> str:
    mode = {"act": GOOD, "shadow": WARN}.get(run.mode, DIM)
    return (
        f"[bold {ACCENT}]autotune[/] [bold]{run.name}[/] [{DIM}]seed {run.seed} · control[/]"
        f" [{mode}]{run.mode}[/]" + (f" [{DIM}]({run.profile})[/]" if run.mode != "off" else "")
    )


def _rule(title: str, size: Size) -> Rule:
    line = "-" if size.ascii_only else "─"
    return Rule(f"[{DIM}]{title}[/]", align="left", style=DIM, characters=line)


def _progress(run: Run, story: Story, clock: Clock, size: Size) -> Table:
    done = min(story.last.rollout + 1 if story.last else 0, run.rollouts)
    left = "-" if clock.left is None else marks.duration(clock.left)
    grid = Table.grid(padding=(0, 2), expand=True)
    for column in ({}, {"ratio": 1}, {"justify": "right"}, {}, {}):
        grid.add_column(no_wrap=True, **column)
    bar = ProgressBar(run.rollouts, done, complete_style=ACCENT, finished_style=GOOD)
    grid.add_row(
        f"[bold]{done}[/][{DIM}]/{run.rollouts} rollouts[/]",
        bar,
        f"{done / run.rollouts:.0%}",
        f"[{DIM}]elapsed[/] {marks.duration(clock.elapsed)}",
        f"[{DIM}]left[/] [bold]{left}[/]",
    )
    return grid


def _curve(run: Run, story: Story, size: Size) -> list[RenderableType]:
    """The reward over the whole run, with the signs of the decisions below."""
    scale_width = 8
    width = size.inner - scale_width
    values = marks.cells(story.series("reward_mean"), width, run.rollouts)
    known = [v for v in values if v is not None]
    low, high = min([0.0, *known]), max(known, default=1.0)
    high = run.reward_maximum if run.reward_maximum is not None and run.reward_maximum >= high else high
    lines = marks.spark(
        _stretch(values, width, run.rollouts), ACCENT, rows=size.curve, low=low, high=high,
        ascii_only=size.ascii_only,
    )  # fmt: skip
    scale = [Text(number(high), DIM), *[Text("", DIM)] * (size.curve - 2), Text(number(low), DIM)]
    rows = [_scaled(s, line, scale_width) for s, line in zip(scale, lines, strict=True)]
    signs = _scaled(Text("reward", "bold"), _signs(story, width, run.rollouts), scale_width)
    return [*rows, signs]


def _stretch(values: Sequence[float | None], width: int, total: int) -> list[float | None]:
    """A run shorter than the curve is drawn over its whole width."""
    return list(values) if total >= width else [values[i * total // width] for i in range(width)]


def _scaled(label: Text, line: Text, width: int) -> Text:
    return Text.assemble(label, " " * (width - len(label)), line)


def _signs(story: Story, width: int, total: int) -> Text:
    signs = [(" ", "")] * width
    for event in story.events():
        if event.what is not What.VETO:
            at = min(event.rollout * width // max(total, 1), width - 1)
            signs[at] = marks.sign_of(event)
    return Text.assemble(*signs)


def _columns(story: Story, size: Size) -> Table:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    grid.add_row(_sensors(story, size), _knobs(story, size))
    return grid


def _sensors(story: Story, size: Size) -> Table:
    grid = Table.grid(padding=(0, 1))
    for style, width in ((DIM, 10), ("bold", 6), ("", None)):
        grid.add_column(style=style, no_wrap=True, min_width=width)
    for name in ("reward_mean", "kl_ref", "kl_step", "clip_ratio", "entropy"):
        grid.add_row(_short(name), *_sensor(story, name, size))
    grid.add_row("held-out", *_held_out(story))
    grid.add_row("tokens/s", *_speed(story, size))
    return grid


def _short(name: str) -> str:
    return {"reward_mean": "reward"}.get(name, name)


def _sensor(story: Story, name: str, size: Size) -> tuple[Text, Text]:
    """A metric's value, and its recent course with a remark."""
    values = story.series(name)
    value = values[-1] if values else None
    if value is None:
        state, _ = (story.last.invalid if story.last else {}).get(name, ("", ""))
        return _absent(state)
    course = _spark(values, ACCENT, size)
    return _value(name, value), Text.assemble(course, " ", _remark(story, name, value, size))


def _spark(values: Sequence[float | None], style: str, size: Size) -> Text:
    """The newest readings; padded, so that what stands behind does not move as they come in."""
    recent = marks.tail(values, size.spark)
    line = marks.spark(recent, style, ascii_only=size.ascii_only)[0]
    line.pad_right(size.spark - len(line))
    return line


def _absent(state: str) -> tuple[Text, Text]:
    """A reading that is no number is said in words, never drawn as 0."""
    words = {
        Validity.STRUCTURAL_ZERO: ("structurally zero", DIM),
        Validity.NOT_LOGGED: ("not logged", DIM),
        Validity.MISSING: ("missing here", WARN),
        "": ("", DIM),
    }
    word, style = words.get(state, (state.replace("_", " "), BAD))
    return Text("-", style), Text(word, style)


def _value(name: str, value: float) -> Text:
    if name == "kl_ref":
        return Text(number(value), f"bold {marks.band_style(value)}")
    return Text(f"{value:.2%}" if name == "clip_ratio" else number(value))


def _remark(story: Story, name: str, value: float, size: Size) -> Text:
    if name == "kl_ref":
        track = marks.gauge(value, 11, ascii_only=size.ascii_only)
        band = f" {marks.KL_BAND[0]}-{marks.KL_BAND[1]}" if size.wide else ""
        return Text.assemble(track, (band, DIM))
    if name == "reward_mean":
        first = next((v for v in story.series(name) if v is not None), value)
        return Text(f"{value - first:+.3f}", GOOD if value >= first else WARN)
    return Text({"kl_step": "nats/token", "entropy": "nats/token", "clip_ratio": "of tokens"}[name], DIM)


def _held_out(story: Story) -> tuple[Text, Text]:
    """The newest held-out score and where it started; greedy where it is measured."""
    scores = [_score(e) for e in story.evaluations]
    if not scores or scores[-1] is None:
        return Text("-", DIM), Text()
    kind = "greedy" if story.evaluations[-1].greedy is not None else "sampled"
    return Text(number(scores[-1])), Text(f"{kind}, from {number(scores[0])}", DIM)


def _score(evaluation: Evaluation) -> float | None:
    return evaluation.sampled if evaluation.greedy is None else evaluation.greedy


def _speed(story: Story, size: Size) -> tuple[Text, Text]:
    values = story.series("tokens_per_second")
    if not values or values[-1] is None:
        return Text("-", DIM), Text()
    return Text(f"{values[-1]:,.0f}"), _spark(values, DIM, size)


def _knobs(story: Story, size: Size) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right")
    for name, before, now in knob_rows(story)[:_BODY_LINES]:
        if before == now:
            grid.add_row(Text(f"  {name}", DIM), Text(number(now), DIM))
        else:
            value = Text.assemble((f"{number(before)} → ", DIM), (number(now), f"bold {ACCENT}"))
            grid.add_row(Text(f"{'*' if size.ascii_only else '▸'} {name}", ACCENT), value)
    return grid


def knob_rows(story: Story) -> list[tuple[str, float, float]]:
    """(knob, at the start, now): changed ones first; equal clip sides as one `clip_range`."""
    start, now = _merged(story.start_knobs), _merged(story.knobs)
    names = [n for n in now if n in start]
    order = {name: i for i, name in enumerate(KNOBS_SHOWN)}
    names.sort(key=lambda n: (start[n] == now[n], order.get(n, len(order))))
    return [(n, start[n], now[n]) for n in names]


def _merged(knobs: Mapping[str, float]) -> dict[str, float]:
    low, high = knobs.get("clip_range_low"), knobs.get("clip_range_high")
    if low is None or low != high:
        return dict(knobs)
    rest = {n: v for n, v in knobs.items() if not n.startswith("clip_range_")}
    return {**rest, "clip_range": low}


def _decisions(story: Story, size: Size) -> RenderableType:
    events = [e for e in story.events() if e.what is not What.VETO][-size.decisions :]
    grid = Table.grid(padding=(0, 1), expand=True)
    for column in ({"justify": "right"}, {}, {}, {}, {"ratio": 1}):
        grid.add_column(no_wrap=True, overflow="ellipsis", **column)
    for event in reversed(events):
        grid.add_row(*decision_cells(event))
    for _ in range(size.decisions - len(events)):
        grid.add_row("", "", "", "", Text("" if events or _ else _quiet(story), DIM))
    return grid


def _quiet(story: Story) -> str:
    return "none so far" if story.last else "waiting for the first rollout"


def decision_cells(event: Event) -> tuple[Text, ...]:
    """Rollout, sign, rule, what happened, why."""
    sign, style = marks.sign_of(event)
    if event.what is What.VERDICT:
        back = f" → {number(event.after)}" if event.outcome == "reverted" else ""
        happened = Text(f"{event.outcome} {event.knob}{back}", style)
    elif event.knob:
        happened = Text.assemble(f"{event.knob} ", (marks.arrow(event.before, event.after), "bold"))
    else:
        happened = Text(str(event.what), style)
    reason = Text(event.reason, DIM)
    return Text(str(event.rollout), DIM), Text(sign, style), Text(event.rule, style), happened, reason


def _state(run: Run, story: Story, size: Size) -> Text:
    if run.mode == "off":
        return Text("controller off: knobs stay as the recipe sets them", DIM)
    state = (story.last.state if story.last else "") or "starting"
    tally = story.counts()
    made = tally[What.WOULD] if run.mode == "shadow" else tally[What.CHANGE]
    parts = [
        (f"{made} {'would-be ' if run.mode == 'shadow' else ''}changes", ""),
        (f"{tally['kept']} kept", GOOD if tally["kept"] else DIM),
        (f"{tally['reverted']} reverted", WARN if tally["reverted"] else DIM),
        (f"{tally[What.VETO]} vetoed", DIM),
        (f"{tally[What.RESTORE]} restores", "magenta" if tally[What.RESTORE] else DIM),
    ]
    text = Text.assemble(("controller ", DIM), (state, f"bold {_state_style(state)}"))
    for words, style in parts:
        text.append("  ·  " if size.wide else " · ", DIM).append(words, style)
    return text


def _state_style(state: str) -> str:
    return {"hold": WARN, "emergency": BAD, "frozen": WARN, "paused": WARN}.get(state, GOOD)
