"""Rows -> one observation a rollout, after a survey that says which of their keys are which.

*Survey* (first pass): their keys with ranges, the trainer's table, the plan `their key -> column`, what is
unknown, how many trainer steps a row stands for. Nothing in it depends on the order of the rows.

*Reader* (second pass): rows become rollouts. A row with a reward opens one; rows without a reward that
follow are further updates of the same rollout (several updates on one batch) and are averaged into
its update metrics. Rows before the first reward have no rollout and are counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median as middle

import numpy as np

from autotune.errors import InputError, NothingYet
from autotune.history import HEAD
from autotune.logs.blocks import Block
from autotune.logs.join import same_step
from autotune.logs.lines import Row
from autotune.logs.sniff import Log
from autotune.logs.tables import OURS, TABLES, Column, Table, best_table, find, normal_key, skipped
from autotune.metrics import FAMILIES, METRICS, Reading, Snapshot, read_metric

FIRST = 1000
"""Rows that say how far the step counter moves from row to row."""
UPDATE_METRICS = ("clip_ratio", "kl_ref", "entropy", "grad_norm", "loss", "kl_step", "learning_rate")
"""Measured at every update; the others once a rollout."""
DERIVED = {
    "kl_sum": "kl_ref",
    "mixed_fraction": "zero_std_fraction",
    "stopped_fraction": "truncated_fraction",
    "reward_top": "reward_std",
}
"""A column that is none of our metrics -> the metric that is computed from it."""


@dataclass(slots=True)
class KeyStats:
    """One of their keys over the whole log."""

    numbers: int = 0
    low: float = math.inf
    high: float = -math.inf
    bad: int = 0
    """Not finite."""

    def add(self, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        self.numbers += 1
        if value - value != 0:  # nan or inf
            self.bad += 1
            return
        if value < self.low:
            self.low = value
        if value > self.high:
            self.high = value

    def add_all(self, values: np.ndarray) -> None:
        """`add` for a column of numbers."""
        finite = values[np.isfinite(values)]
        self.numbers += len(values)
        self.bad += len(values) - len(finite)
        if len(finite):
            self.low = min(self.low, float(finite.min()))
            self.high = max(self.high, float(finite.max()))


@dataclass
class Survey:
    """What the first pass found."""

    log: Log
    table: Table
    plan: dict[str, Column]
    """Their key -> column, one key for each of our metrics."""
    keys: dict[str, KeyStats]
    rows: int
    unknown: list[str]
    unused: dict[str, str]
    """Their key -> why it is no sensor, where somebody might expect one."""
    notes: list[str] = field(default_factory=list)
    step_gap: int = 0
    """Median difference of the step counter between rows; 0 when there is none."""

    @property
    def trainer(self) -> str:
        return self.table.trainer if self.plan else ""

    def of(self, ours: str) -> KeyStats | None:
        """Statistics of the key behind one of our metrics, in their unit."""
        return next((self.keys[k] for k, c in self.plan.items() if c.ours == ours), None)

    @property
    def rounded_away(self) -> dict[str, str]:
        """Our metric -> their key that only ever printed 0.000: too few decimals for the number."""
        dead = {c.ours: k for k, c in self.plan.items() if c.coarse and self.keys[k].high <= 0}
        return {name: key for name, key in dead.items() if name in METRICS}

    @property
    def metrics(self) -> list[str]:
        """Our metrics that this log holds."""
        names = {DERIVED.get(c.ours, c.ours) for c in self.plan.values()} - set(self.rounded_away)
        return sorted(n for n in names if n in METRICS or n.startswith(tuple(FAMILIES)))

    @property
    def steps_per_row(self) -> int:
        """Trainer steps that one row averages over."""
        if not self.table.averages:
            return 1
        if self.step_gap:
            return self.step_gap
        hints = self.log.hints
        if hints.finished and hints.total_steps and self.rows:
            return max(round(hints.total_steps / self.rows), 1)
        return max(hints.steps_per_row, 1)


def survey(log: Log, mapping: Mapping[str, str] | None = None, trainer: str = "") -> Survey:
    """Read the log once.

    Args:
        log: from `open_log`.
        mapping: our metric -> their key, or `key*factor`; overrules the tables.
        trainer: a key of `TABLES`, or empty to find out.

    Raises:
        InputError: a mapping names a metric that is not ours or a key that is not in the log.
        NothingYet: the log has no rows yet in which a mapped key could be.
    """
    keys: dict[str, KeyStats] = {}
    rows, gaps = _count(log.parts(), keys)
    if trainer and trainer not in TABLES:
        raise InputError(f"trainer is {trainer!r}, expected one of {', '.join(TABLES)}")
    table = TABLES[trainer] if trainer else best_table(set(keys)) or OURS
    found = Survey(log, table, {}, keys, rows, [], {}, step_gap=gaps)
    _plan(found)
    _mapped(found, mapping or {})
    _percent(found)
    return found


def _count(parts: Iterable[Row | Block], keys: dict[str, KeyStats]) -> tuple[int, int]:
    steps: list[float] = []
    count = 0
    for part in parts:
        if isinstance(part, Block):
            for key in part.keys:
                keys.setdefault(key, KeyStats()).add_all(part.column(key))
            if count < FIRST:
                begun = (_step(row) for row in part.split(FIRST - count)[0].rows())
                steps += [step for step in begun if step is not None]
            count += len(part)
            continue
        row = part
        count += 1
        for key, value in row.items():
            stats = keys.get(key)
            if stats is None:
                stats = keys[key] = KeyStats()
            if type(value) is float and stats.low <= value <= stats.high:  # nearly every number
                stats.numbers += 1
            else:
                stats.add(value)
        if count <= FIRST and (step := _step(row)) is not None:
            steps.append(step)
    gaps = [b - a for a, b in itertools.pairwise(steps) if b > a]
    return count, int(middle(gaps)) if gaps else 0


def _step(row: Row) -> float | None:
    for key in ("step", "Step", "global_step", "iteration", "rollout", "training_step"):
        value = row.get(key)
        if isinstance(value, (int, float)) and value == value:
            return float(value)
    return None


def _plan(found: Survey) -> None:
    best: dict[str, tuple[int, str]] = {}
    for key, stats in found.keys.items():
        column = find(found.table, key)
        if column is None or not stats.numbers:
            _set_aside(found, key, stats)
            continue
        rival = best.get(column.ours)
        if rival is not None and rival[0] >= column.rank:
            found.unused[key] = f"{rival[1]} is read for {column.ours}" if column.ours != "step" else ""
            continue
        if rival is not None:
            del found.plan[rival[1]]
            found.unused[rival[1]] = f"{key} is read for {column.ours}"
        best[column.ours] = (column.rank, key)
        found.plan[key] = column


def _set_aside(found: Survey, key: str, stats: KeyStats) -> None:
    why = skipped(found.table, key)
    if why is not None:
        found.unused[key] = why
    elif stats.numbers:
        found.unknown.append(key)


def _mapped(found: Survey, mapping: Mapping[str, str]) -> None:
    for ours, theirs in mapping.items():
        if ours not in METRICS and not ours.startswith(tuple(FAMILIES)) and ours != "step":
            raise InputError(
                f"--map {ours}={theirs}: {ours!r} is none of our metrics; see autotune.metrics.METRICS"
            )
        key, star, factor = theirs.rpartition("*")
        name, scale = (key, _factor(ours, theirs, factor)) if star else (theirs, 1.0)
        real = next((k for k in found.keys if name in (k, normal_key(k))), None)
        if real is None:
            error = InputError if found.rows else NothingYet
            keys = ", ".join(sorted(found.keys)) or "no rows"
            raise error(f"--map {ours}={theirs}: no row has {name!r}; there are {keys}")
        found.plan = {k: c for k, c in found.plan.items() if c.ours != ours}
        found.plan[real] = Column(ours, scale, "mapped by you")
        found.unknown = [k for k in found.unknown if k != real]
        found.unused.pop(real, None)


def _factor(ours: str, theirs: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(
            f"--map {ours}={theirs}: {text!r} is not a number; expected their_key*0.01"
        ) from None


def _percent(found: Survey) -> None:
    """A share that runs above 1 but stays within 100 is in percent; said, not done in silence."""
    for key, column in list(found.plan.items()):
        spec, stats = METRICS.get(column.ours), found.keys[key]
        if spec is None or spec.unit != "share" or column.scale != 1.0:
            continue
        if 1.0 < stats.high <= 100.0 and stats.low >= 0:
            found.plan[key] = Column(column.ours, 0.01, "percent", column.coarse, column.rank)
            found.notes.append(f"{key} runs up to {stats.high:g}, so it is read as percent: divided by 100")


# ---------------------------------------------------------------------------------- second pass


@dataclass(slots=True)
class Observed:
    """One rollout as the log shows it."""

    index: int
    """0, 1, 2 … in the order of the log: the controller's clock."""
    step: float
    """The trainer's own counter, for people."""
    scalars: dict[str, float | None]
    knobs: dict[str, float]
    updates: int = 1
    """Rows that were averaged."""
    lists: dict[str, list[float]] = field(default_factory=dict)

    def readings(self) -> dict[str, Reading]:
        return {name: read_metric(name, value) for name, value in self.scalars.items()}

    def snapshot(self, knobs: Mapping[str, float], readings: Mapping[str, Reading]) -> Snapshot:
        per_update = {n: tuple(v) for n, v in self.lists.items() if len(v) > 1}
        return Snapshot(self.index, {**knobs, **self.knobs}, readings, per_update=per_update)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Many rollouts of a long log at once, for figures over the whole of it."""

    index: int
    """Of the first."""
    steps: np.ndarray
    """[rollouts]."""
    scalars: dict[str, np.ndarray]
    """Our metric -> its numbers as the log has them, not judged yet, [rollouts]."""


class Reader:
    """Turns the rows of a surveyed log into rollouts."""

    def __init__(self, found: Survey, cap: float = 0.0) -> None:
        self.survey = found
        self.cap = cap
        """Response tokens allowed, where it is known."""
        self.orphans = 0
        """Rows that came before any rollout."""
        self.restarts = 0
        """Times that the step counter ran backwards: another run, or a resume."""
        named = {c.ours for c in found.plan.values()}
        self._scalars = {n for n in named if n in METRICS or n.startswith(tuple(FAMILIES))}
        self._knobs = [n for n in named if n.startswith("knob:")]
        self._derives = bool(named & {*DERIVED, "response_length_max"})
        self.rows = 0
        """Rows read so far."""
        self._columns = [(k, c.ours, c.scale, c.coarse) for k, c in found.plan.items()]
        self._index = 0
        self._longest = 0.0
        self._last_step = -math.inf

    def rollouts(
        self, follow: Callable[[], bool] | None = None, in_passing: int = 0
    ) -> Iterator[Observed | Stretch]:
        """Every rollout of the log. The newest is held back until the next begins or the log ends.

        Args:
            follow: asked at the end of the file whether to wait on.
            in_passing: so many rows are wanted as figures only; where they are regular they come as
                stretches. The run's first rollouts, its own baseline, never do.
        """
        held: list[dict[str, float | None]] = []
        extra: dict[str, float | None] = {}
        for part in self._parts(follow, in_passing):
            if isinstance(part, Block):
                yield from [self._observe(held)] if held else []
                yield self._stretch(part)
                held, extra = [], {}
                continue
            self.rows += 1
            values = self._values(part)
            if "reward_mean" in values or (not self.survey.table.averages and self._has_update(values)):
                if held:
                    yield self._observe(held)
                held, extra = [{**extra, **values}], {}
            elif self._has_update(values):
                if held:
                    held.append(values)
                else:
                    self.orphans += 1
            elif "eval_score" in values:  # a row of its own for an evaluation
                (held[-1] if held else extra)["eval_score"] = values["eval_score"]
        if held:
            yield self._observe(held)

    def _parts(self, follow: Callable[[], bool] | None, in_passing: int) -> Iterator[Row | Block]:
        """Rows, and blocks where every row is known to be one rollout of which only figures are wanted.

        The last row of a block comes as a row: updates of the same rollout may follow.
        """
        log = self.survey.log
        if follow is not None or self.survey.table.joins:
            rows = log.rows(follow)
            yield from same_step(rows) if self.survey.table.joins else rows
            return
        for part in log.parts():
            if not isinstance(part, Block):
                yield part
            elif self.rows + len(part) <= in_passing and self._plain(part):
                most, last = part.split(len(part) - 1)
                yield most
                yield from last.rows()
            else:
                yield from part.rows()

    def _plain(self, block: Block) -> bool:
        """Whether every row opens a rollout and holds all that is made of it."""
        columns = [c for c in self._columns if c[0] in block.keys]
        rewarded = any(ours == "reward_mean" for _, ours, _, _ in columns)
        fine = not self._derives and not any(coarse for *_, coarse in columns)
        return rewarded and fine and self._index >= HEAD and len(block) > 1

    def _stretch(self, block: Block) -> Stretch:
        """A block's rollouts."""
        read = {ours: block.column(key) * scale for key, ours, scale, _ in self._columns if key in block.keys}
        index, count = self._index, len(block)
        steps = read.get("step", (np.arange(index, index + count) + 1.0) * self.survey.steps_per_row)
        if "step" in read:
            self.restarts += int((np.diff(steps, prepend=self._last_step) < 0).sum())
            self._last_step = float(steps[-1])
        self._index, self.rows = index + count, self.rows + count
        return Stretch(index, steps, {n: v for n, v in read.items() if n in self._scalars})

    @staticmethod
    def _has_update(values: Mapping[str, float | None]) -> bool:
        return any(name in values for name in UPDATE_METRICS)

    def _values(self, row: Row) -> dict[str, float | None]:
        values: dict[str, float | None] = {}
        for key, ours, scale, coarse in self._columns:
            if key not in row:
                continue
            value = row[key]
            if type(value) is float and scale == 1.0 and not coarse:
                values[ours] = value
            elif value is None:
                values[ours] = None
            elif isinstance(value, (int, float)):
                if coarse and value == 0:
                    continue  # printed as 0.000: too small to print, so not a sensor
                values[ours] = value * scale if scale != 1.0 else value
            elif isinstance(value, str):
                values[ours] = math.nan  # text where a number should be is a fault, never 0
        return values

    def _observe(self, rows: list[dict[str, float | None]]) -> Observed:
        first = rows[0]
        lists: dict[str, list[float]] = {}
        scalars = {n: v for n, v in first.items() if n in self._scalars}
        if len(rows) > 1:
            lists = _per_update(rows)
            scalars.update({n: sum(v) / len(v) for n, v in lists.items()})
        if self._derives:
            self._derive(first, scalars)
        knobs = {n[5:]: v for n in self._knobs if (v := first.get(n)) is not None}
        observed = Observed(self._index, self._label(first), scalars, knobs, len(rows), lists)
        self._index += 1
        return observed

    def _label(self, row: Mapping[str, float | None]) -> float:
        step = row.get("step")
        if step is None:
            return float((self._index + 1) * self.survey.steps_per_row)
        if step < self._last_step:
            self.restarts += 1
        self._last_step = step
        return step

    def _derive(self, row: Mapping[str, float | None], scalars: dict[str, float | None]) -> None:
        """Metrics that need two columns, and the truncation that some verl versions get wrong."""
        kl, total, per_token = row.get("kl_sum"), row.get("entropy_sum"), row.get("entropy")
        if kl is not None and total and per_token and total > per_token:
            scalars["kl_ref"] = kl / (total / per_token)  # tokens an answer, by its two entropies
        mean, top, bottom = row.get("reward_mean"), row.get("reward_top"), row.get("reward_bottom")
        if "reward_std" not in scalars and None not in (mean, top, bottom):
            inside = max((top - mean) * (mean - bottom), 0.0)  # type: ignore[operator]
            scalars["reward_std"] = math.sqrt(inside)  # the largest std these allow; exact for 0/1
        if (mixed := row.get("mixed_fraction")) is not None:
            scalars["zero_std_fraction"] = 1 - mixed
        if (stopped := row.get("stopped_fraction")) is not None:
            scalars["truncated_fraction"] = 1 - stopped
        longest = row.get("response_length_max")
        if longest is not None and longest == longest:
            self._longest = max(self._longest, longest)
            shorter = longest < max(self.cap, self._longest)
            if shorter and self.survey.trainer == "verl" and scalars.get("truncated_fraction"):
                scalars["truncated_fraction"] = 0.0  # measured against the longest answer, not the cap


def _per_update(rows: list[dict[str, float | None]]) -> dict[str, list[float]]:
    lists = {name: [v for row in rows if (v := row.get(name)) is not None] for name in UPDATE_METRICS}
    return {name: values for name, values in lists.items() if values}
