"""A log through the controller: the same rules, guards and clock as in a live run, nothing applied.

The clock is the rollout as the log shows it; a row that averages several trainer steps is one rollout of
the controller, and everything is reported in the trainer's own step counter.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.advise.known import Known, gather
from autotune.controller import Controller
from autotune.decisions import Change, Decision, Kind, State
from autotune.history import HEAD, History, Sample
from autotune.hooks.base import NOISY_METRICS, FrozenDetector
from autotune.logs import Log, Reader, Stretch, Survey, open_log, survey
from autotune.logs.rollouts import Observed
from autotune.metrics import Reading, Snapshot, Validity, read_metric, spec_of
from autotune.policies.collapse import HARD

if TYPE_CHECKING:
    from autotune.recipe.schema import Recipe

WATCHED = (
    "reward_mean",
    "kl_ref",
    "kl_step",
    "clip_ratio",
    "entropy",
    "truncated_fraction",
    "zero_std_fraction",
    "reward_std",
)
"""Metrics that the verdict looks at over the whole log."""


NEWEST = 20_000
"""Rows that the controller decides on unless it is told otherwise: some seconds of work."""
_FAULTS = (Validity.NON_FINITE, Validity.OUT_OF_RANGE, Validity.FROZEN)


@dataclass(frozen=True, slots=True)
class Said:
    """One thing that the controller said: an action it would have taken, an alarm or an emergency."""

    kind: str
    """`action`, `alarm`, `advice`, `hold` or `emergency`."""
    index: int
    step: float
    rule: str
    reason: str
    knob: str = ""
    before: float | None = None
    after: float | None = None

    def change(self) -> str:
        if not self.knob or self.before is None or self.after is None:
            return ""
        return f"{self.knob} {self.before:.3g} -> {self.after:.3g}"


@dataclass
class Shadow:
    """One log and everything that was made of it."""

    log: Log
    survey: Survey
    known: Known
    reader: Reader
    controller: Controller
    said: list[Said] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)
    columns: dict[str, array[float]] = field(default_factory=lambda: {n: array("d") for n in WATCHED})
    """Metric -> one number a rollout, NaN where it was not valid."""
    steps: array[float] = field(default_factory=lambda: array("d"))
    faults: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Metric that was not finite, out of its range or frozen -> first step, reason."""
    newest: int = NEWEST
    """Rows at the log's end that the controller decides on; those before are in the verdict's figures."""
    in_passing: int = 0
    """Rollouts that were not decided on."""
    not_finite_at: int = -1
    """Last rollout whose loss, gradient or drift was not finite."""
    frozen: FrozenDetector = field(default_factory=FrozenDetector)
    _holding: str = ""
    _emergency_at: int = -(10**9)
    _alarm_at: dict[str, int] = field(default_factory=dict)
    _regulating: dict[str, bool] = field(default_factory=dict)
    """Regulator that is engaged -> whether it pushes upward."""

    def run(
        self,
        follow: Callable[[], bool] | None = None,
        on_rollout: Callable[[list[Said]], None] | None = None,
    ) -> Shadow:
        """Read the log to its end, or as long as `follow` says; decide at every rollout new enough."""
        before = max(self.survey.rows - self.newest, 0) if self.newest else 0
        for observed in self.reader.rollouts(follow, before):
            if isinstance(observed, Stretch):
                self._remember_all(observed)
                continue
            if before and self.reader.rows <= before + 1:
                self._pass(observed)
                continue
            snapshot = self._snapshot(observed)
            decision = self.controller.step(snapshot)
            self._rest(snapshot)
            news = self._said(observed, decision)
            self.said += news
            if on_rollout is not None:
                on_rollout(news)
        return self

    # ---- in passing --------------------------------------------------------------------------

    def _pass(self, observed: Observed) -> None:
        """One rollout of which only figures are kept; the first ones are the run's own baseline."""
        self.in_passing += 1
        head = self.controller.history.head
        if len(head) < HEAD:
            self.controller.history = History(head=[*head, Sample.of(self._snapshot(observed))])
        else:
            self._remember(observed, {**observed.readings(), **self._structural})

    def _remember_all(self, stretch: Stretch) -> None:
        """`_remember` for many rollouts at once."""
        self.in_passing += len(stretch.steps)
        self.steps.frombytes(stretch.steps.tobytes())
        fine = {n: self._valid(n, stretch) for n in stretch.scalars if n not in self._structural}
        nothing = np.full(len(stretch.steps), np.nan)
        for name, column in self.columns.items():
            column.frombytes(fine.get(name, nothing).tobytes())

    def _valid(self, name: str, stretch: Stretch) -> np.ndarray:
        """The metric where it is valid and NaN elsewhere; the first fault is noted."""
        values, spec = stretch.scalars[name], spec_of(name)
        valid = np.isfinite(values) & (values >= spec.low) & (values <= spec.high)
        if valid.all():
            return values
        first = int(valid.argmin())
        reason = read_metric(name, float(values[first])).reason
        self.faults.setdefault(name, (float(stretch.steps[first]), reason))
        wild = np.flatnonzero(~np.isfinite(values))
        if name in HARD and len(wild):
            self.not_finite_at = max(self.not_finite_at, stretch.index + int(wild[-1]))
        return np.where(valid, values, np.nan)

    # ---- sensing -----------------------------------------------------------------------------

    def _snapshot(self, observed: Observed) -> Snapshot:
        readings = {**self._absent, **observed.readings(), **self._structural}
        fine = {n: r for n in NOISY_METRICS if (r := readings.get(n)) is not None and _unrounded(r.value)}
        judged = self.frozen.check(fine, self.known.responses)  # printed decimals repeat by themselves
        readings |= {n: r for n, r in judged.items() if r.validity is Validity.FROZEN}
        self._remember(observed, readings)
        knobs = {**self.known.facts.knobs, **{k: v for k, v in observed.knobs.items() if k == "kl_coef"}}
        return Snapshot(
            observed.index, knobs, readings, per_update={n: tuple(v) for n, v in observed.lists.items()}
        )

    @cached_property
    def _structural(self) -> dict[str, Reading]:
        """What this log cannot show, whatever its rows say."""
        return {
            name: Reading(None, Validity(capability.state), capability.reason)
            for name, capability in self.known.facts.metric_capability.items()
            if capability.state != Validity.VALID
        }

    @cached_property
    def _absent(self) -> dict[str, Reading]:
        """What a row should have; its own readings go on top."""
        promised = (n for n, c in self.known.facts.metric_capability.items() if c.state == Validity.VALID)
        return {n: Reading(None, Validity.MISSING, f"{n} was not in this row") for n in promised}

    def _remember(self, observed: Observed, readings: Mapping[str, Reading]) -> None:
        self.steps.append(observed.step)
        for name, column in self.columns.items():
            value = readings[name].value if name in readings else None
            column.append(float("nan") if value is None else value)
        for name, reading in readings.items():
            if reading.validity in _FAULTS:
                self.faults.setdefault(name, (observed.step, reading.reason))
            if name in HARD and reading.validity is Validity.NON_FINITE:
                self.not_finite_at = observed.index

    # ---- what it says ------------------------------------------------------------------------

    def _said(self, observed: Observed, decision: Decision) -> list[Said]:
        self._note_silence(decision)
        news = [*self._emergencies(observed, decision), *self._actions(observed, decision)]
        for alarm in decision.alarms:
            news += self._alarm(observed, alarm, emergency=decision.state is State.EMERGENCY)
        if not any(a.startswith("hold: ") for a in decision.alarms):
            self._holding = ""
        return news

    def _note_silence(self, decision: Decision) -> None:
        for rule, reason in decision.silent.items():
            if reason:
                self.silent[rule] = reason
            else:
                self.silent.pop(rule, None)

    def _emergencies(self, observed: Observed, decision: Decision) -> list[Said]:
        """Only the first of an episode: in shadow nothing is restored, so the sign goes on standing."""
        if decision.state is not State.EMERGENCY or decision.restore is None:
            return []
        fresh = observed.index - self._emergency_at > self.controller.pace.window
        self._emergency_at = observed.index
        if not fresh:
            return []
        cut = next((c for c in decision.changes if c.knob == "actor_learning_rate"), None)
        before, after = (cut.before, cut.after) if cut else (None, None)
        back = "undo this rollout" if decision.restore.kind == "undo" else "back to the checkpoint before it"
        reason = f"{decision.restore.reason}: {back}"
        knob = "actor_learning_rate" if cut else ""
        rule = decision.alarms[0].split(":", 1)[0] if decision.alarms else "X2"
        return [Said("emergency", observed.index, observed.step, rule, reason, knob, before, after)]

    def _actions(self, observed: Observed, decision: Decision) -> list[Said]:
        if decision.state is State.EMERGENCY:
            return []
        return [self._action(observed, c) for c in decision.changes if not self._goes_on(observed, c)]

    def _action(self, observed: Observed, change: Change) -> Said:
        scale = self.known.averaged if change.knob in ("train_batch_size", "ppo_mini_batch_size") else 1
        before, after = change.before / scale, change.after / scale
        place = observed.index, observed.step
        return Said("action", *place, change.rule, change.reason, change.knob, before, after)

    def _goes_on(self, observed: Observed, change: Change) -> bool:
        """A regulator asks again until it rests; in shadow nobody answers, and all of it is one action."""
        if change.kind is not Kind.REGULATOR:
            return False
        up = change.after > change.before
        engaged = self._regulating.get(change.rule) is up
        self._regulating[change.rule] = up
        return engaged

    def _rest(self, snapshot: Snapshot) -> None:
        """Regulators whose metric is back in its band have ended their engagement."""
        if not self._regulating:
            return
        ctx = self.controller.context(snapshot)
        for policy in self.controller.policies:
            if policy.id in self._regulating and policy.resting(ctx):
                del self._regulating[policy.id]

    def _alarm(self, observed: Observed, text: str, *, emergency: bool) -> list[Said]:
        if text.startswith("hold: "):
            fresh = not self._holding
            self._holding = text
            return [self._say("hold", observed, "", text[6:])] if fresh else []
        if text.startswith("advice "):
            rule, _, reason = text[7:].partition(": ")
            return [self._say("advice", observed, rule, reason)]
        rule, colon, reason = text.partition(": ")
        if not colon or " " in rule:
            rule, reason = "", text
        window = self.controller.pace.window
        in_episode = observed.index - self._emergency_at <= window
        repeated = observed.index - self._alarm_at.get(rule, -(10**9)) <= window
        self._alarm_at[rule] = observed.index
        if (rule == "X2" and (emergency or in_episode)) or repeated:
            return []
        return [self._say("alarm", observed, rule, reason)]

    @staticmethod
    def _say(kind: str, observed: Observed, rule: str, reason: str) -> Said:
        return Said(kind, observed.index, observed.step, rule, reason)

    def of(self, kind: str) -> list[Said]:
        return [s for s in self.said if s.kind == kind]


def _unrounded(value: float | None) -> bool:
    """More than four significant digits: such a number does not repeat by chance."""
    return value is not None and float(f"{value:.4g}") != value


def prepare(
    path: Path | str,
    *,
    recipe: Recipe | None = None,
    knobs: Mapping[str, float] | None = None,
    mapping: Mapping[str, str] | None = None,
    trainer: str = "",
    run: str = "",
    newest: int = NEWEST,
) -> Shadow:
    """Survey a log and set a controller before it; nothing is decided yet.

    Args:
        path: the log.
        recipe: of the run, where there is one.
        knobs: what was told by hand.
        mapping: our metric -> their key.
        trainer: whose keys these are, or empty to find out.
        run: id or name inside a log of several runs.
        newest: rows at the end that are decided on; 0 for all.
    """
    log = open_log(path, run)
    found = survey(log, mapping, trainer)
    known = gather(found, recipe, knobs or {})
    cap = known.known.get("max_response_length", 0.0)
    controller = Controller(known.settings, known.facts)
    return Shadow(log, found, known, Reader(found, cap), controller, newest=newest)


def advise(path: Path | str, **options: Any) -> Shadow:
    """A finished log from its first rollout to its last; options as for `prepare`."""
    return prepare(path, **options).run()
