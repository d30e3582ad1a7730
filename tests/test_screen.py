"""The live panel, the plain lines and the summary."""

from __future__ import annotations

import io
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autotune.decisions import RunFacts
from autotune.recipe.schema import ControlSection, Recipe
from autotune.screen import RunScreen, marks, print_summary
from tests import journal_lines as j

FACTS = RunFacts(20, 1, "grpo", "token", True, False, dict(j.KNOBS), reward_maximum=1.0)
LR = "actor_learning_rate"


def run_lines(count: int = 12) -> list[j.Line]:
    """A short run with one of everything."""
    happened: dict[int, dict[str, Any]] = {
        3: {"changes": [j.change("X1", LR, 3e-5, 1.2e-4, "regulator")], "silent": {"B5b": "no critic"}},
        5: {"vetoes": [j.veto("A3", "ppo_mini_batch_size", 8, "plateau")]},
        6: {"verdicts": [j.verdict("X1", LR, "kept", 3)]},
        7: {"changes": [j.change("A1", "ppo_mini_batch_size", 16, 8)]},
        9: {"alarms": ["reward fell below its floor"]},
        10: {
            "verdicts": [j.verdict("A1", "ppo_mini_batch_size", "reverted", 7)],
            "changes": [j.change("A1", "ppo_mini_batch_size", 8, 16)],
        },
        11: {"changes": [j.change("A3", "ppo_epochs", 1, 2)]},
    }
    metrics = {"kl_ref": 0.05, "kl_step": 0.012, "clip_ratio": 0.015, "entropy": 0.4}
    lines = [j.header(), j.evaluation(0, 0.07, 0.18)]
    for t in range(count):
        knobs = {**({LR: 1.2e-4} if t > 3 else {}), **({"ppo_mini_batch_size": 8} if 7 < t <= 10 else {})}
        lines.append(j.rollout(t, metrics, knobs, **happened.get(t, {})))
    checkpoint = {"type": "checkpoint", "rollout": 10, "path": "runs/small-7/checkpoints/rollout-00010"}
    return [*lines, checkpoint, j.evaluation(count, 0.91, 0.77), j.end()]


def console(width: int = 80, height: int = 24, terminal: bool = True) -> Console:
    return Console(
        file=io.StringIO(), width=width, height=height, force_terminal=terminal, color_system=None,
        legacy_windows=False, _environ={"TERM": "xterm-256color"},
    )  # fmt: skip


def panel(screen: RunScreen) -> str:
    drawn = console(*screen.console.size)
    drawn.print(screen.frame())
    assert isinstance(drawn.file, io.StringIO)
    return drawn.file.getvalue()


def fed(lines: list[j.Line], width: int = 80, height: int = 24, mode: str = "act") -> RunScreen:
    recipe = Recipe(name="small", seed=7, control=ControlSection(mode=mode))  # type: ignore[arg-type]
    screen = RunScreen(recipe, FACTS, console(width, height))
    screen._live = object()  # type: ignore[assignment]  # keep the lines for the frame
    for line in lines:
        screen.on_line(line)
    return screen


@pytest.fixture(autouse=True)
def _not_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (132, 43), (200, 60)])
def test_panel_fits_its_terminal_and_says_everything(width: int, height: int) -> None:
    screen = fed(run_lines(), width, height)
    text = panel(screen)
    assert screen.failures == 0
    rows = text.splitlines()
    assert len(rows) < height
    assert max(len(row) for row in rows) <= width
    for expected in (
        "12/20 rollouts", "60%", "small", "seed 7", "0.05", "0.012", "1.50%", "from 0.07", "0.91",
        f"▸ {LR}", "3e-5 → 1.2e-4", "▸ ppo_epochs", "1 → 2", "clip_range", "0.2",
        "reverted ppo_mini_batch_size → 16", "X1", "A1", "observe", "1 kept", "1 reverted", "1 vetoed",
        "--resume runs/small-7",
    ):  # fmt: skip
        assert expected in text, expected


def test_structural_zero_and_faults_are_words_never_a_number() -> None:
    invalid = {"clip_ratio": ["structural_zero", "U = 1"], "kl_step": ["non_finite", "nan"]}
    text = panel(fed([j.header(), j.rollout(0, invalid=invalid)]))
    assert "structurally zero" in text
    assert "non finite" in text
    assert "0.00%" not in text


def test_panel_before_the_first_rollout_and_without_controller() -> None:
    assert "waiting for the first rollout" in panel(fed([]))
    assert "controller off" in panel(fed([j.rollout(0, controlled=False)], mode="off"))


def test_ascii_terminal_gets_ascii_only(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = fed(run_lines())
    monkeypatch.setattr(type(screen.console), "encoding", "ascii")
    drawn = panel(screen)
    assert screen.failures == 0
    assert "▁" not in drawn
    assert "╭" not in drawn


def test_broken_lines_are_counted_and_the_run_goes_on() -> None:
    screen = fed([j.rollout(0), {"type": "rollout"}, None, 7, j.rollout(1)])  # type: ignore[list-item]
    assert "2/20 rollouts" in panel(screen)
    assert screen.failures >= 3


def test_output_that_cannot_be_written_does_not_stop_the_run() -> None:
    broken = console(terminal=False)
    broken.file.close()
    screen = RunScreen(Recipe(), FACTS, broken)
    with screen:
        screen.on_line(j.rollout(0))
    assert screen.failures == 1


def test_live_panel_is_drawn_by_the_refresh_thread_alone() -> None:
    out = console()
    with RunScreen(Recipe(name="small", seed=7), FACTS, out) as screen:
        began = time.perf_counter()
        for line in run_lines():
            screen.on_line(line)
        spent = time.perf_counter() - began
    assert isinstance(out.file, io.StringIO)
    assert "12/20 rollouts" in out.file.getvalue()
    assert screen.failures == 0
    assert spent / len(run_lines()) < 1e-3


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_costs_less_than_a_millisecond_on_the_training_path(terminal: bool) -> None:
    costs = []
    with RunScreen(Recipe(), FACTS, console(terminal=terminal)) as screen:
        for t in range(300):
            line, before = j.rollout(t % 20, {"kl_ref": 0.05}), screen.seconds
            screen.on_line(line)
            costs.append(screen.seconds - before)
    assert statistics.median(costs) < 1e-3


def test_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    out = console()
    with RunScreen(Recipe(name="small", seed=7), FACTS, out) as screen:
        for line in run_lines():
            screen.on_line(line)
    assert isinstance(out.file, io.StringIO)
    rows = out.file.getvalue().splitlines()
    assert rows[0] == "held-out after 0: greedy 0.07 sampled 0.18"
    assert rows[1].startswith(
        "1/20 rollout 0 reward 0.2 kl_ref 0.05 kl_step 0.012 clip 1.50% | lr 3e-5 kl_coef 0.005 | observe"
    )
    assert f"  X1 change {LR} 3e-5 -> 1.2e-4: X1 had its reason" in rows
    assert "  A1 ppo_mini_batch_size reverted: judged reverted" in rows
    assert sum(" rollout " in row for row in rows) == 12
    assert not any("\x1b" in row for row in rows)


def test_summary_answers_did_it_help_what_was_done_why_and_where(tmp_path: Path) -> None:
    out = console(width=160, terminal=False)
    lines = run_lines()
    print_summary(out, lines, tmp_path / "small-7", "run 12ab in runs/mlflow.db")
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    for expected in (
        "done after 12 rollouts", "held-out, greedy", "+0.840", "held-out, sampled", "+0.590",
        "mean of 10 rollouts", "X1", "3e-5 → 1.2e-4", "X1 had its reason", "kept: judged kept",
        "16 → 8", "A1 had its reason", "reverted: judged reverted", "plateau", "plateau says no",
        "B5b", "no critic",
        "reward fell below its floor", "rollout 0:06 (50%)", "journal.jsonl", "autotune replay",
        "rollout-00010", "from_pretrained", "run 12ab in runs/mlflow.db",
    ):  # fmt: skip
        assert expected in text, expected


def test_summary_of_nothing_says_so(tmp_path: Path) -> None:
    out = console(terminal=False)
    print_summary(out, [j.header()], tmp_path)
    assert isinstance(out.file, io.StringIO)
    assert "No knob was changed" in out.file.getvalue()
    assert "no end recorded" in out.file.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (64, "64"), (3e-5, "3e-5"), (1.2e-4, "1.2e-4"), (0.005, "0.005"),
     (0.123456, "0.123"), (12.3456, "12.35"), (-0.5, "-0.5"), (123456789.0, "1.23e8")],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert marks.number(value) == text


def test_spark_scales_marks_gaps_and_stacks() -> None:
    (line,) = marks.spark([0.0, 0.5, 1.0, None], "", low=0.0, high=1.0)
    assert line.plain == "▁▄█·"
    top, bottom = marks.spark([0.0, 0.75, 1.0], "", rows=2, low=0.0, high=1.0)
    assert (top.plain, bottom.plain) == (" ▄█", "▁██")
    (flat,) = marks.spark([0.3, 0.3], "")
    assert flat.plain == "▄▄"


def test_cells_average_and_leave_the_future_open() -> None:
    assert marks.cells([1.0, 3.0, None, 5.0], 4, 8) == [2.0, 5.0, None, None]
    assert marks.cells([1.0], 3, 3) == [1.0, None, None]


@pytest.mark.parametrize(
    ("kl", "inside"), [(0.001, False), (0.03, True), (0.05, True), (0.08, True), (9.0, False)]
)
def test_gauge_puts_the_mark_where_the_value_is(kl: float, inside: bool) -> None:
    text = marks.gauge(kl, 21)
    at = text.plain.index("●")
    neighbours = text.plain[max(at - 1, 0)] + text.plain[min(at + 1, 20)]
    assert len(text.plain) == 21
    assert ("━" in neighbours) is inside
