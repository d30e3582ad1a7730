"""Knob schedules: what was really used, written down, and followed without a controller."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from autotune.cli import app
from autotune.commands import Inbox, drop
from autotune.controller import Controller, ControlSettings
from autotune.decisions import to_json
from autotune.errors import AdapterError, ControlStop, InputError, RecipeError
from autotune.hooks.loop import ControlLoop
from autotune.hooks.schedule import ScheduleFollower
from autotune.journal import Journal, read_journal
from autotune.knobs import KNOBS
from autotune.recipe import KnobSchedule, Recipe, dump_schedule, load_recipe, load_schedule, schedule_of
from autotune.replay import by_rule, export, print_replay, replay, report
from autotune.testing import FakeTrainer
from autotune.testing.faults import DeadKnob, Fault, Overwrite

RATE, COEF, MINI = "actor_learning_rate", "kl_coef", "ppo_mini_batch_size"
ROLLOUTS = 40
CALM = {"policies": {"X2": "off"}}


def run(
    folder: Path,
    knobs: dict[str, float],
    control: dict[str, Any],
    schedule: KnobSchedule | None = None,
    faults: tuple[Fault, ...] = (),
    script: dict[int, tuple[str, list[str], dict[str, float]]] | None = None,
) -> Path:
    """A run of the plant with the header of `run.py`; its journal."""
    folder.mkdir(exist_ok=True)
    recipe = Recipe.model_validate({"control": control, "trainer": {"rollouts": ROLLOUTS}})
    trainer = FakeTrainer(knobs, seed=5, rollouts=ROLLOUTS, faults=faults)
    control_settings = ControlSettings(**recipe.control.model_dump())
    off = control_settings.mode == "off"
    controller: Any = None if off else Controller(control_settings, trainer.facts())
    header = {"recipe": recipe.model_dump(mode="json"), "facts": to_json(trainer.facts())}
    if schedule is not None:
        controller = ScheduleFollower(schedule)
        header["schedule"] = schedule.model_dump(mode="json")
    with Journal(folder / "journal.jsonl") as journal:
        journal.append("header", -1, header)
        if schedule is not None:
            controller.begin(trainer)
        loop = ControlLoop(trainer, controller, journal, inbox=Inbox(folder))

        def on_rollout(record: Any) -> None:
            if script and record.rollout in script:
                drop(folder, *script[record.rollout])
            loop.on_rollout(record)

        trainer.run(on_rollout)
    return folder / "journal.jsonl"


def vectors(journal: Path) -> list[dict[str, float]]:
    return [ln["snapshot"]["knobs"] for ln in read_journal(journal) if ln["type"] == "rollout"]


def metrics(journal: Path) -> list[dict[str, float]]:
    return [ln["snapshot"]["metrics"] for ln in read_journal(journal) if ln["type"] == "rollout"]


BOLD = {RATE: 1.2e-3, MINI: 4}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    script = {5: ("set", [], {COEF: 0.02}), 9: ("set", [], {"clip_range": 0.15, "temperature": 0.9})}
    return run(tmp_path / "source", BOLD, CALM, script=script)


def test_a_followed_run_has_the_very_same_vectors(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "schedule.yaml"
    file.write_text(dump_schedule(export(source)))
    schedule = load_schedule(file)
    assert len(schedule.changes) >= 3, "there is something to follow"
    followed = run(tmp_path / "followed", {RATE: 3e-4}, {"schedule": str(file)}, schedule)
    assert vectors(followed) == vectors(source)
    assert metrics(followed) == metrics(source), "the plant trains the same"
    decided = [ln for ln in read_journal(followed) if ln["type"] == "rollout"]
    assert all(c["rule"] == "schedule" for ln in decided for c in ln["decision"]["changes"])
    assert [a["read_back"] for ln in decided for a in ln["applied"]], "read back and journalled"


def test_a_followed_run_replays_and_exports_itself(source: Path, tmp_path: Path) -> None:
    schedule = export(source)
    followed = run(tmp_path / "followed", BOLD, {"schedule": "s.yaml"}, schedule)
    assert replay(followed).equal and len(replay(followed).pairs) == ROLLOUTS
    again = export(followed)
    assert (again.start, again.changes) == (schedule.start, schedule.changes)


def test_any_run_can_be_exported(tmp_path: Path) -> None:
    """Shadow and off move nothing: the schedule is their start, and nothing else."""
    for mode in ("off", "shadow"):
        schedule = export(run(tmp_path / mode, BOLD, {"mode": mode}))
        assert schedule.changes == () and schedule.start[RATE] == BOLD[RATE]


def test_restores_are_no_part_of_a_schedule_and_that_is_said(tmp_path: Path) -> None:
    wild = run(tmp_path / "wild", {RATE: 6e-3, MINI: 4}, {})
    back = [ln["rollout"] for ln in read_journal(wild) if ln.get("restored") is not None]
    assert back, "the source brought weights back"
    schedule = export(wild)
    assert list(schedule.restores) == back and f"after rollout(s) {back[0]}" in schedule.warning()
    assert load_schedule_text(tmp_path, dump_schedule(schedule)) == schedule
    result = CliRunner().invoke(app, ["replay", str(wild), "--export", str(tmp_path / "s.yaml")])
    assert result.exit_code == 0 and "weights came back" in result.output


def test_a_trainer_that_does_not_obey_ends_the_run(source: Path, tmp_path: Path) -> None:
    schedule = export(source)
    with pytest.raises(ControlStop, match=r"rollout 6 used kl_coef = 0\.005, the schedule says 0\.02"):
        run(tmp_path / "dead", BOLD, {"schedule": "x"}, schedule, faults=(DeadKnob(COEF),))
    with pytest.raises(ControlStop, match="cannot be followed"):
        other = Overwrite(COEF, lambda t: 0.5, at=3)
        run(tmp_path / "other", BOLD, {"schedule": "x"}, schedule, faults=(other,))
    with pytest.raises(AdapterError, match="start cannot be set"):
        run(tmp_path / "start", {RATE: 1e-5}, {"schedule": "x"}, schedule, faults=(DeadKnob(RATE),))


def test_a_hand_does_not_bend_a_schedule(source: Path, tmp_path: Path) -> None:
    script = {2: ("set", [], {RATE: 1e-5}), 3: ("pause", [], {})}
    followed = run(tmp_path / "f", BOLD, {"schedule": "x"}, export(source), script=script)
    told = [ln for ln in read_journal(followed) if ln["type"] == "command"]
    assert [ln["outcome"] for ln in told] == ["refused"] * 2 and "follows a schedule" in told[0]["reason"]
    assert vectors(followed) == vectors(source)


def test_a_gap_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rollout 1 is missing"):
        schedule_of([(0, {COEF: 1.0}), (2, {COEF: 1.0})])
    with pytest.raises(InputError, match="no rollout"):
        schedule_of([])


# -------------------------------------------------------------------------------------- the file


def load_schedule_text(folder: Path, text: str) -> KnobSchedule:
    (folder / "x.yaml").write_text(text)
    return load_schedule(folder / "x.yaml")


values = st.floats(0, 1e6, allow_nan=False) | st.integers(0, 10**6)
knobs = st.dictionaries(st.sampled_from(sorted(KNOBS)), values, min_size=1, max_size=4)


@settings(max_examples=40)
@given(st.lists(knobs, min_size=1, max_size=6))
def test_the_file_keeps_every_bit(
    tmp_path_factory: pytest.TempPathFactory, steps: list[dict[str, float]]
) -> None:
    start = {name: 1.0 for step in steps for name in step}
    told, now = [(0, dict(start))], dict(start)
    for rollout, step in enumerate(steps, 1):
        now = {**now, **step}
        told.append((rollout, dict(now)))
    schedule = schedule_of(told, source={"name": "x", "seed": 1, "rollouts": len(told)})
    again = load_schedule_text(tmp_path_factory.getbasetemp(), dump_schedule(schedule))
    assert [again.vector(t) for t, _ in told] == [vector for _, vector in told] and again == schedule


WRONG = (
    ("start: {kl_cof: 1}", "kl_cof is no knob"),
    ("start: {}", "at least 1 item"),
    ("start: {kl_coef: -1}", "greater than or equal to 0"),
    ("start: {kl_coef: 1}\nchanges: [{rollout: 0, knobs: {kl_coef: 2}}]", "greater than or equal to 1"),
    ("start: {kl_coef: 1}\nchanges: [{rollout: 2, knobs: {temperature: 2}}]", "no value in `start`"),
    (
        "start: {kl_coef: 1}\n"
        "changes: [{rollout: 3, knobs: {kl_coef: 2}}, {rollout: 2, knobs: {kl_coef: 3}}]",
        "in the order of their rollouts",
    ),
    ("begin: {}", "start: Field required"),
)


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_a_wrong_file_is_told_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(RecipeError, match=r"x\.yaml") as caught:
        load_schedule_text(tmp_path, text + "\n")
    assert words in str(caught.value)


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Recipe]:
    def load(schedule: str, control: str = "", trainer: str = "") -> Recipe:
        (tmp_path / "s.yaml").write_text(schedule + "\n")
        text = f"control: {{schedule: s.yaml{control}}}\ntrainer: {{{trainer}}}\n"
        (tmp_path / "r.yaml").write_text(text)
        return load_recipe(tmp_path / "r.yaml")

    return load


def test_a_recipe_finds_its_schedule_beside_it(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    assert recipe("start: {kl_coef: 0.01}").control.schedule == str(tmp_path / "s.yaml")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("start: {kl_coef: 0.01}", ", mode: shadow"), "followed in mode act only"),
        (("start: {kl_cof: 0.01}",), "kl_cof is no knob"),
        (("start: {kl_coef: 0.01}", "", "kl_coef: 0"), "no reference model is built"),
        (("start: {ppo_mini_batch_size: 17}",), "does not divide"),
        (("start: {critic_learning_rate: 0.1}",), "this trainer does not have"),
    ],
)
def test_a_schedule_that_does_not_fit_the_recipe(
    recipe: Callable[..., Recipe], options: tuple[str, ...], words: str
) -> None:
    with pytest.raises(RecipeError, match=r"control\.schedule") as caught:
        recipe(*options)
    assert words in str(caught.value)


# --------------------------------------------------------------------- what other rules would do


def text_of(result: Any) -> str:
    file = io.StringIO()
    print_replay(Console(width=140, file=file), result)
    return file.getvalue()


def test_other_rules_are_shown_by_first_difference_counts_and_table(source: Path, tmp_path: Path) -> None:
    from autotune.recipe import ControlSection

    result = replay(source, ControlSection(profile="documented"))
    shown, data = text_of(result), report(result)
    first = next(row for row in data["changes"])
    assert f"first difference: rollout {first['rollout']} of {ROLLOUTS}" in shown
    assert "this run (recommended, act)" in shown and "the other rules (documented, shadow)" in shown
    assert "acted then" in shown and "≠" in shown
    counts = data["by_rule"]
    then = sum(len(p.journalled["changes"]) for p in result.pairs if p.journalled)
    assert sum(c["then"] for rule, c in counts.items() if rule != "restore") == then
    assert all(c["both"] <= min(c["then"], c["now"]) for c in counts.values())


def test_the_same_rules_part_nowhere(tmp_path: Path) -> None:
    from autotune.recipe import ControlSection

    quiet = run(tmp_path / "quiet", BOLD, {"mode": "shadow"})
    result = replay(quiet, ControlSection())
    assert "would have done the same in all 40 rollouts" in text_of(result)
    assert all(c.then == c.now == c.both for c in by_rule(result.pairs).values())


def test_a_schedule_is_no_rules(source: Path, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(dump_schedule(export(source)))
    (tmp_path / "c.yaml").write_text(json.dumps({"schedule": str(tmp_path / "s.yaml")}))
    result = CliRunner().invoke(app, ["replay", str(source), "--control", str(tmp_path / "c.yaml")])
    assert result.exit_code == 2 and "a schedule has none" in result.output


def test_the_command_writes_the_file(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.yaml"
    result = CliRunner().invoke(app, ["replay", str(source), "--export", str(file)])
    assert result.exit_code == 0 and "changes in 40 rollouts" in result.output
    assert load_schedule(file) == export(source)
    bad = CliRunner().invoke(app, ["replay", str(source), "--export", str(tmp_path / "no" / "x.yaml")])
    assert bad.exit_code == 2 and "cannot be written" in bad.output
