"""Journal lines as what MLflow stores: params, metrics, tags, a table and a note.

Pure functions of the journal, timestamps included, so that delivering a line again sends the very
same points (see `receipt`). A rollout that was repeated after a resume is delivered once: the
first time. Step = rollout everywhere.
"""

from __future__ import annotations

import contextlib
import getpass
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.story import Act, Event, Line, Row, Story, What, acts_of, finite, row_of
from autotune.tracking.names import TAG_LIMIT, clean_names, cut, tags_in_limits


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one metric."""

    name: str
    value: float
    step: int
    after: float
    """Seconds after the run's start."""


def rollout_points(line: Line, after: float) -> list[Point]:
    """Everything valid of one rollout: metrics, `knob/…`, `time/…` and the actions taken on it.

    The actions are counts `control/…`, and marks `decision/RULE/KNOB`, `would/…`, `verdict/…`.
    """
    row = row_of(line)
    values = clean_names(
        {
            **{f"time/{phase}": seconds for phase, seconds in row.times.items()},
            **row.metrics,
            **{f"knob/{name}": value for name, value in row.knobs.items()},
            **_control(row),
            **dict(_marks(row)),
        }
    )
    known = {name: finite(value) for name, value in values.items()}
    return [Point(name, v, row.rollout, after) for name, v in known.items() if v is not None]


def _control(row: Row) -> dict[str, float]:
    """How many changes, vetoes and restores this rollout led to; nothing when there is no controller."""
    if not row.state:
        return {}
    kinds = {"changes": What.CHANGE, "vetoes": What.VETO, "restores": What.RESTORE}
    return {f"control/{name}": float(sum(e.what is what for e in row.events)) for name, what in kinds.items()}


VERDICTS = {"kept": 1.0, "inconclusive": 0.0, "reverted": -1.0}


def _marks(row: Row) -> Iterator[tuple[str, float]]:
    """Decisions as points of series of their own: what a knob was set to, how a change was judged."""
    for event in reversed(row.events):  # of two on one knob the more telling, the first, stays
        if event.what in (What.CHANGE, What.WOULD) and event.after is not None:
            kind = "decision" if event.what is What.CHANGE else "would"
            yield f"{kind}/{event.rule}/{event.knob}", event.after
        elif event.what is What.VERDICT:
            yield f"verdict/{event.rule}/{event.knob}", VERDICTS.get(event.outcome, 0.0)


def eval_points(line: Line, after: float) -> list[Point]:
    """Held-out scores as `eval/greedy` and `eval/sampled`."""
    step = int(line.get("rollout", 0))
    scores = {kind: finite(line.get(kind)) for kind in ("greedy", "sampled")}
    return [Point(f"eval/{k}", v, step, after) for k, v in scores.items() if v is not None]


def seconds_of(line: Line) -> float:
    """Wall time that a journal line stands for."""
    times = line.get("times") or {}
    return float(times.get("total", sum(times.values()))) if line.get("type") == "rollout" else 0.0


def tags_of(recipe: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, str]:
    """What a person filters runs by; the recipe's own tags cannot replace them."""
    control = recipe.get("control") or {}
    own = ((recipe.get("tracking") or {}).get("mlflow") or {}).get("tags") or {}
    tags = {
        **own,
        "mlflow.user": _user(),
        "mlflow.runName": f"{recipe.get('name', 'run')}-{recipe.get('seed', 0)}",
        "mlflow.source.name": "autotune run",
        "mlflow.source.type": "LOCAL",
        "name": recipe.get("name"),
        "seed": recipe.get("seed"),
        "mode": control.get("mode"),
        "profile": control.get("profile"),
        "mlflow.source.git.commit": environment.get("git_commit"),
    }
    return tags_in_limits(tags)


def _user() -> str:
    with contextlib.suppress(Exception):  # no name behind this user id, as in some containers
        return getpass.getuser()
    return ""


COLUMNS = ("rollout", "what", "rule", "knob", "before", "after", "reason", "guard")


def decision_table(story: Story) -> dict[str, Any]:
    """Every change, veto, verdict, restore, alarm and command in MLflow's table format."""
    return {"columns": list(COLUMNS), "data": [_cells(event) for event in story.events()]}


def _cells(event: Event) -> list[Any]:
    what = event.outcome or str(event.what)
    before, after = _short(event.before), _short(event.after)
    return [event.rollout, what, event.rule, event.knob, before, after, event.reason, event.guard]


def _short(value: float | None) -> float | None:
    """Six significant digits, for reading; the journal beside the table has all of them."""
    return None if value is None else float(f"{value:.6g}")


def note(story: Story) -> str:
    """The run's description in Markdown: held-out scores, then what was changed, why, and verdicts."""
    return cut("\n".join([*_score_lines(story), "", *_act_lines(story)]).strip(), TAG_LIMIT)


def _score_lines(story: Story) -> Iterator[str]:
    if story.evaluations:
        first, last = story.evaluations[0], story.evaluations[-1]
        yield "| held-out | before | after |\n|---|---|---|"
        for kind in ("greedy", "sampled"):
            before, after = getattr(first, kind), getattr(last, kind)
            if before is not None and after is not None:
                yield f"| {kind} | {before:.3f} | **{after:.3f}** |"


def _act_lines(story: Story) -> Iterator[str]:
    acts = acts_of(story.events())
    if not acts:
        yield "No knob was changed."
        return
    yield "| rollout | rule | knob | before → after | why | verdict |\n|---|---|---|---|---|---|"
    yield from map(_act_line, acts)


def _act_line(act: Act) -> str:
    e = act.event
    when = str(act.first) if act.moves == 1 else f"{act.first}-{act.last}"
    before = "-" if e.before is None else f"{e.before:g}"
    after = "-" if act.after is None else f"{act.after:g}"
    verdict = act.verdict or (e.kind if e.what is What.CHANGE else str(e.what))
    why = e.reason.replace("|", "\\|")
    return f"| {when} | {e.rule} | {e.knob} | {before} → {after} | {why} | {verdict} |"


STATUSES = {"done": "FINISHED", "finished": "FINISHED", "interrupted": "KILLED", "killed": "KILLED"}


def status_of(end: Line | None) -> str:
    """MLflow's word for how a run ended; a journal that just stops belongs to a killed process."""
    return "KILLED" if end is None else STATUSES.get(str(end.get("status", "done")), "FAILED")
