"""A knob schedule: which vector each rollout used, to be followed later without a controller.

    start:   {actor_learning_rate: 3.0e-05, ...}        every knob, as rollout 0 used it
    changes: [{rollout: 12, knobs: {kl_coef: 0.006}}]   what is new from a rollout on

What stands here was read back from the trainer, not asked for. Weights that came back are not part of
a schedule, since nobody can bring back weights that another run had: `restores` names those rollouts.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, model_validator
from ruamel.yaml import YAML

from autotune.errors import InputError, Problem, RecipeError
from autotune.knobs import KNOBS
from autotune.recipe.schema import Section
from autotune.recipe.source import dotted, read_document

Value = Annotated[float, Field(allow_inf_nan=False, ge=0)]


def _known(vector: dict[str, float]) -> dict[str, float]:
    unknown = [name for name in vector if name not in KNOBS]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is no knob; expected any of {', '.join(KNOBS)}")
    return vector


Vector = Annotated[dict[str, Value], Field(min_length=1), AfterValidator(_known)]


class Step(Section):
    """Knobs that have new values from one rollout on."""

    rollout: Annotated[int, Field(ge=1)]
    knobs: Vector


class Source(Section):
    """The run that a schedule was taken from."""

    name: str = ""
    seed: int = 0
    rollouts: int = 0


class KnobSchedule(Section):
    """Knob vectors by rollout."""

    source: Source = Source()
    restores: tuple[int, ...] = ()
    """Rollouts after which weights came back in the source."""
    start: Vector
    changes: tuple[Step, ...] = ()

    @model_validator(mode="after")
    def _in_order(self) -> KnobSchedule:
        rollouts = [step.rollout for step in self.changes]
        if rollouts != sorted(set(rollouts)):
            raise ValueError("changes must be in the order of their rollouts, each rollout once")
        late = sorted({name for step in self.changes for name in step.knobs} - set(self.start))
        if late:
            raise ValueError(f"{', '.join(late)} is changed but has no value in `start`")
        return self

    def vector(self, rollout: int) -> dict[str, float]:
        """Every knob as `rollout` uses it; behind the last change it stays."""
        vector = dict(self.start)
        for step in self.changes:
            if step.rollout <= rollout:
                vector |= step.knobs
        return whole(vector)

    def epoch(self, rollout: int) -> int:
        """How often knobs have changed up to `rollout`."""
        return sum(step.rollout <= rollout for step in self.changes)

    def warning(self) -> str:
        """What a run that follows this schedule cannot have, or an empty string."""
        if not self.restores:
            return ""
        at = ", ".join(map(str, self.restores[:8])) + (", …" if len(self.restores) > 8 else "")
        return (
            f"in the run that this schedule is from, weights came back after rollout(s) {at}; a schedule"
            " holds knobs only, so a run that follows it trains on where that one went back"
        )


def whole(vector: Mapping[str, float]) -> dict[str, float]:
    """Counts as ints, as trainers have them."""
    return {k: int(v) if KNOBS[k].integer and v == int(v) else v for k, v in vector.items()}


def schedule_of(vectors: Iterable[tuple[int, Mapping[str, float]]], **about: Any) -> KnobSchedule:
    """A schedule from (rollout, knobs that it used), from rollout 0 on without a gap.

    Raises:
        InputError: a rollout is missing.
    """
    start: dict[str, float] = {}
    changes: list[dict[str, Any]] = []
    now: dict[str, float] = {}
    expected = 0
    for rollout, knobs in vectors:
        if rollout != expected:
            raise InputError(f"rollout {expected} is missing: its knobs are not known")
        if rollout == 0:
            start = dict(knobs)
        elif moved := {k: v for k, v in knobs.items() if v != now.get(k)}:
            changes.append({"rollout": rollout, "knobs": moved})
        now, expected = dict(knobs), rollout + 1
    if not start:
        raise InputError("there is no rollout, so there are no knobs to export")
    return KnobSchedule.model_validate({**about, "start": start, "changes": changes})


def dump_schedule(schedule: KnobSchedule) -> str:
    """YAML that `load_schedule` reads back to the same numbers, bit for bit."""
    text = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = None  # one line per change
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 110
    data = schedule.model_dump(mode="python")
    data["restores"], data["start"] = list(data["restores"]), whole(data["start"])
    data["changes"] = [{**step, "knobs": whole(step["knobs"])} for step in data["changes"]]
    yaml.dump(data, text)
    return (
        "# Knobs by rollout, as the trainer read them back: control: {schedule: THIS FILE}\n"
        + text.getvalue()
    )


def load_schedule(path: str | Path) -> KnobSchedule:
    """Read and check a schedule file.

    Raises:
        RecipeError: with all problems.
    """
    document = read_document(Path(path))
    schedule = None
    if not document.problems:
        try:
            schedule = KnobSchedule.model_validate(document.data)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                key = tuple(item["loc"])
                document.problems.append(Problem(dotted(key), item["msg"], document.where(key)))
    if schedule is None:
        raise RecipeError(document.problems)
    return schedule
