"""A run folder read into plain series: what every page, picture and comparison is drawn from.

    journal.jsonl -> winning lines -> Story (rows, events, acts) -> RunData

Nothing is invented on the way: a reading that was no number stays None with its reason, a run
without an `end` line is in progress only while another process holds its journal, and what is wrong
with the file (torn, altered) is carried along in words to be shown.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import InputError
from autotune.journal import Line, Reading, inspect_journal, is_written, winning_lines
from autotune.metrics import Validity
from autotune.report.acts import Step, steps_of
from autotune.story import Evaluation, Story, finite

JOURNAL = "journal.jsonl"
NOT_THE_RECIPE = ("name", "seed", "run_dir", "control", "tracking", "fingerprint", "checkpoint")
"""Sections in which two arms of one experiment may differ."""


@dataclass(frozen=True, slots=True)
class RunData:
    """One run; every series has one entry per rollout in `rollouts`."""

    name: str
    seed: str
    folder: str
    mode: str
    """off, shadow or act; `schedule` when it followed one; empty where the journal does not say."""
    profile: str
    status: str
    """done, running, broken off (no end was recorded), stopped, interrupted or failed."""
    reason: str
    planned: int
    """Rollouts that the recipe wants; 0 where it is not known."""
    base: str
    """What the run was given apart from its control: arms of one experiment share it."""
    control: str
    """The `control` section as text."""
    rollouts: list[int]
    metrics: dict[str, list[float | None]]
    absent: dict[str, str]
    """Metric that was never a number -> why."""
    faults: dict[str, tuple[int, str]]
    """Metric -> (readings that were no usable number although others were, why the last one was none)."""
    knobs: dict[str, list[float | None]]
    histograms: list[list[float] | None]
    """Counts of the policy ratio over all updates of the rollout, [RATIO_BINS + 2]."""
    times: dict[str, list[float | None]]
    """Phase -> seconds."""
    evaluations: list[Evaluation]
    steps: list[Step]
    vetoes: Counter[tuple[str, str, str]]
    """(rule, knob, guard) -> how often."""
    veto_reasons: dict[tuple[str, str, str], str]
    silent: dict[str, str]
    notes: list[str] = field(default_factory=list)
    """What a reader must know about the file itself."""
    reward_maximum: float | None = None
    commit: str = ""

    @property
    def label(self) -> str:
        return f"{self.name} seed {self.seed}" if self.seed else self.name

    def known(self, metric: str) -> list[float]:
        """All valid readings, in order."""
        return [v for v in self.metrics.get(metric, ()) if v is not None]


def read_run(path: str | Path) -> RunData:
    """Read a run folder, or a journal file.

    Raises:
        InputError: there is no journal, or nothing in it, with the next move.
        JournalError: the file is damaged in its middle, or of another version.
    """
    file = journal_file(Path(path))
    held = is_written(file)
    reading = inspect_journal(file)
    lines = winning_lines(reading.lines)
    if not any(line["type"] == "rollout" for line in lines):
        raise InputError(
            f"{file} has no finished rollout yet, so there is nothing to show; {_next_move(file, held)}"
        )
    return _run_data(file, reading, lines, held)


def journal_file(path: Path) -> Path:
    """The journal of a run folder, or the journal itself.

    Raises:
        InputError: there is none.
    """
    file = path / JOURNAL if path.is_dir() else path
    if file.is_file():
        return file
    if path.is_dir():
        raise InputError(
            f"{path} holds no {JOURNAL}, so it is no run folder; give one, such as runs/NAME-SEED"
        )
    raise InputError(f"there is no {path}; expected the folder of a run, such as runs/NAME-SEED")


def _next_move(file: Path, held: bool) -> str:
    if held:
        return "wait for its first rollout, then ask again"
    return f"the run ended before its first rollout; go on with: autotune run --resume {file.parent}"


def _run_data(file: Path, reading: Reading, lines: Sequence[Line], held: bool) -> RunData:
    story = Story()
    for line in lines:
        story.add(line)
    rows = [line for line in lines if line["type"] == "rollout"]
    rows = list({int(line["rollout"]): line for line in rows}.values())
    rows.sort(key=lambda line: int(line["rollout"]))
    recipe, facts = story.recipe, story.header.get("facts") or {}
    control = recipe.get("control") or {}
    metrics, absent, faults = _metrics(rows, facts)
    status, reason = story.state(file.parent, held)
    vetoes, reasons = _vetoes(rows)
    name = str(recipe.get("name") or file.parent.name)
    return RunData(
        name=name,
        seed=str(recipe.get("seed", "")),
        folder=str(file.parent),
        mode="schedule" if control.get("schedule") else str(control.get("mode", "")),
        profile=str(control.get("profile", "")),
        status=status,
        reason=reason,
        planned=int((recipe.get("trainer") or {}).get("rollouts") or facts.get("rollouts") or 0),
        base=_base(recipe, facts, name),
        control=json.dumps(control, sort_keys=True),
        rollouts=[int(line["rollout"]) for line in rows],
        metrics=metrics,
        absent=absent,
        faults=faults,
        knobs=_columns([_snapshot(line).get("knobs") or {} for line in rows]),
        histograms=[(_snapshot(line).get("histograms") or {}).get("policy_ratio") for line in rows],
        times=_columns([line.get("times") or {} for line in rows]),
        evaluations=sorted(story.evaluations, key=lambda e: e.rollout),
        steps=steps_of(story, rows),
        vetoes=vetoes,
        veto_reasons=reasons,
        silent=story.silent(),
        notes=list(_notes(reading)),
        reward_maximum=finite(facts.get("reward_maximum")),
        commit=str((story.header.get("environment") or {}).get("git_commit") or ""),
    )


def _snapshot(line: Line) -> Mapping[str, Any]:
    return line.get("snapshot") or {}


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Rows of name -> number, as one column per name; None where there was no number."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [finite(row.get(name)) for row in rows] for name in names}


def _metrics(
    rows: Sequence[Line], facts: Mapping[str, Any]
) -> tuple[dict[str, list[float | None]], dict[str, str], dict[str, tuple[int, str]]]:
    """(columns with at least one number, why others have none, how many single readings were faulty)."""
    columns = _columns([_snapshot(line).get("metrics") or {} for line in rows])
    known = {name: column for name, column in columns.items() if any(v is not None for v in column)}
    absent: dict[str, str] = {}
    faults: Counter[str] = Counter()
    for name, capability in (facts.get("metric_capability") or {}).items():
        if capability.get("state") != Validity.VALID:
            absent[name] = _why(capability.get("state", ""), capability.get("reason", ""))
    for line in rows:
        for name, (state, reason) in (_snapshot(line).get("invalid") or {}).items():
            absent[name] = _why(state, reason)
            faults[name] += 1
    never = {name: why for name, why in absent.items() if name not in known}
    return known, never, {name: (n, absent[name]) for name, n in faults.items() if name in known}


def _why(state: str, reason: str) -> str:
    words = str(state).replace("_", " ")
    return f"{words}: {reason}" if reason else words


def _vetoes(
    rows: Iterable[Line],
) -> tuple[Counter[tuple[str, str, str]], dict[tuple[str, str, str], str]]:
    count: Counter[tuple[str, str, str]] = Counter()
    newest: dict[tuple[str, str, str], str] = {}
    for line in rows:
        for veto in (line.get("decision") or {}).get("vetoes", ()):
            key = (veto["proposal"]["rule"], veto["proposal"]["knob"], veto["guard"])
            count[key] += 1
            newest[key] = str(veto["reason"])
    return count, newest


def _base(recipe: Mapping[str, Any], facts: Mapping[str, Any], name: str) -> str:
    """Equal for runs that differ in seed and control only.

    Another trainer's journal does not know model and data. Its runs count as the same experiment when they
    have the same name, trainer settings and first knobs: give both arms one name.
    """
    rest = {key: value for key, value in recipe.items() if key not in NOT_THE_RECIPE}
    if "task" not in recipe:
        rest |= {"name": name, "knobs": facts.get("knobs")}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:12]


def _notes(reading: Reading) -> Iterable[str]:
    if reading.altered:
        yield f"this journal cannot be trusted: {reading.altered}"
    if reading.torn:
        yield f"{reading.torn} was left out (the run was killed while writing it, or writes it now)"
    resumed = [int(line["from"]) for line in reading.lines if line["type"] == "resumed"]
    if resumed:
        times = ", ".join(map(str, resumed))
        yield f"resumed from rollout {times}; what was done again counts once, the last time"
