"""The arithmetic and the plan of the rescue benchmark, on rows made by hand; no training here."""

from __future__ import annotations

import io
import itertools
import json
import math
import random
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.controller import Controller, ControlSettings
from autotune.recipe import load_recipe
from autotune.trainer.tasks import digits
from autotune.trainer.tasks.base import is_held_out
from experiments.rescue import __main__ as command
from experiments.rescue import (
    figure,
    freezing,
    goals,
    lot,
    measures,
    pbt,
    real,
    report,
    runs,
    suite,
    sweep,
)
from tests.series import facts, snapshot

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def row(start: str, arm: str, seed: int, score: float | None, **rest: Any) -> runs.Row:
    given = {"purpose": "report", "task": "sort6", "recipe": "r", "commit": COMMIT, "exit_code": 0,
             "seconds": 1.0, "core_seconds": 1.0, "untrained": 0.2, **rest}  # fmt: skip
    return runs.Row(start=start, arm=arm, seed=seed, score=score, **given)


# -- the plan ------------------------------------------------------------------------------------


def every_job() -> list[suite.Job]:
    tasks = suite.SMALL_TASKS
    some = {task: [1] for task in tasks}
    left_out = suite.jobs_of_leave_one_out("ops6x2", [1], suite.COMPARED_ON)
    real = suite.jobs_of_sums([1], "tuning", tuple(suite.SUMS_STARTS))
    return [*suite.jobs_of_starts(tasks, some, "tuning"), *left_out, *sweep.jobs_of_sweep(tasks, 8), *real]


def test_a_second_machine_begins_at_the_other_end(tmp_path: Path) -> None:
    plans = [
        command.listed(command.arguments(["list", "--out", str(tmp_path), *words]), tmp_path)
        for words in ([], ["--backwards"])
    ]
    assert len(plans[0]) > 1 and plans[1] == plans[0][::-1]


def test_every_rule_left_out_has_a_run_with_all_of_them_to_be_compared_with(tmp_path: Path) -> None:
    planned = list(command.jobs("leave_one_out", tmp_path, []))
    whole = {(job.task, job.start, job.seed) for job in planned if job.arm == "recommended"}
    lacking = [job for job in planned if job.arm != "recommended"]
    assert len(lacking) == len(whole) * len(suite.LEAVE_OUT)
    assert {(job.task, job.start, job.seed) for job in lacking} == whole


def test_every_recipe_of_the_benchmark_is_valid(tmp_path: Path) -> None:
    """Bad is what a start may be, not invalid."""
    path = tmp_path / "empty.yaml"
    path.write_text("name: rescue\n")
    for job in every_job():
        recipe = load_recipe(path, runs.overrides(job.fields()))
        budget = 984_000 if job.task == "sums" else suite.TOKENS
        assert recipe.seed == job.seed and recipe.trainer.token_budget == budget


def test_names_of_runs_are_distinct() -> None:
    names = [job.name for job in every_job()]
    assert len(set(names)) == len(names)


def test_arms_differ_in_their_control_section_alone() -> None:
    base = suite.Job("sort6", "timid", "fixed", 1).fields()
    for arm in suite.ARMS:
        other = suite.Job("sort6", "timid", arm, 1).fields()
        changed = {k for k in base.keys() | other.keys() if base.get(k) != other.get(k)}
        assert all(name.startswith("control.") for name in changed)


def test_the_sweep_spans_every_start() -> None:
    """Each field that a start makes wrong is, in the space, at least as wrong."""
    drawn = [sweep.draw(trial) for trial in range(400)]
    for start, fields in suite.STARTS.items():
        for name, value in fields.items():
            seen = [trial[name] for trial in drawn]
            assert min(seen) <= value * 1.05 and value * 0.95 <= max(seen), (start, name)
    assert sweep.draw(3) == sweep.draw(3) != sweep.draw(4)


def test_trials_spend_the_same_tokens() -> None:
    for trial in map(sweep.draw, range(64)):
        assert trial["trainer.rollouts"] * trial["trainer.train_batch_size"] == suite.ROLLOUTS * 64


# -- no leak -------------------------------------------------------------------------------------


def test_reporting_seeds_follow_from_the_commit_and_are_fresh() -> None:
    seeds = suite.reporting_seeds(COMMIT, "sort6", 75)
    winners = suite.reporting_seeds(COMMIT, "sort6", 5, "winner")
    assert seeds == suite.reporting_seeds(COMMIT, "sort6", 75) and len(set(seeds)) == 75
    assert not set(seeds) & set(suite.USED_SEEDS) and not set(winners) & set(suite.USED_SEEDS)
    assert seeds != suite.reporting_seeds("f" * 40, "sort6", 75)
    with pytest.raises(ValueError, match="40 hex digits"):
        suite.reporting_seeds("v1.0", "sort6", 1)


def test_tuning_seeds_of_the_sweep_and_of_its_winner_are_disjoint() -> None:
    trials = {job.seed for job in sweep.jobs_of_sweep(["sort6"])}
    assert not trials & set(suite.TUNING_SEEDS[-command.WINNER_SEEDS :])


def test_no_prompt_is_both_trained_on_and_held_out() -> None:
    for variant in suite.SMALL_TASKS:
        train = itertools.islice(digits.prompts(variant, digits.PROMPT_SEED, False), 500)
        held = itertools.islice(digits.prompts(variant, digits.PROMPT_SEED, True), 500)
        assert not any(map(is_held_out, train)) and all(map(is_held_out, held))


def test_no_decision_depends_on_the_held_out_score() -> None:
    """A held-out score that rises, or falls apart, changes what is advised to a person and nothing else."""
    settings = ControlSettings(profile="recommended")

    def decided(scores: Callable[[int], dict[str, float]]) -> list[Any]:
        controller, out = Controller(settings, facts()), []
        for t in range(60):
            told = snapshot(t, reward_mean=0.3, kl_step=0.0004, **scores(t))
            decision = controller.step(told)
            out.append((decision.changes, decision.restore, decision.stop, decision.state, decision.vetoes))
        return out

    without = decided(lambda t: {})
    assert any(changes for changes, *_ in without)  # there is something to be changed by a leak
    assert without == decided(lambda t: {"eval_score": 0.2 + t / 100})
    assert without == decided(lambda t: {"eval_score": 0.9 - t / 100})


def test_a_report_needs_a_freeze(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="freeze"):
        freezing.frozen(tmp_path / "freeze.json")


def test_a_freeze_holds_package_suite_and_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held = ("autotune/a.py", "autotune/report/page.css", *freezing.FROZEN[1:])
    for name in (*held, "experiments/rescue/pbt.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1", "utf-8")
    path = tmp_path / "freeze.json"
    monkeypatch.setattr(runs, "commit", lambda: COMMIT)
    freezing.freeze(path, tmp_path)
    assert freezing.frozen(path, tmp_path) == COMMIT
    (tmp_path / "autotune" / "__pycache__").mkdir()
    (tmp_path / "autotune" / "__pycache__" / "a.pyc").write_text("compiled", "utf-8")
    (tmp_path / "experiments" / "rescue" / "pbt.py").write_text("2", "utf-8")
    assert freezing.frozen(path, tmp_path) == COMMIT  # neither of them decides anything
    for name in held:
        (tmp_path / name).write_text("2", "utf-8")
        with pytest.raises(SystemExit, match=f"differs from the freeze {COMMIT}"):
            freezing.frozen(path, tmp_path)
        (tmp_path / name).write_text("1", "utf-8")
    (tmp_path / "autotune" / "b.py").write_text("", "utf-8")  # a file more
    with pytest.raises(SystemExit, match="differs"):
        freezing.frozen(path, tmp_path)
    monkeypatch.setattr(runs, "commit", lambda: COMMIT + "+")
    with pytest.raises(SystemExit, match="clean commit"):
        freezing.freeze(path, tmp_path)


def test_every_freeze_is_a_commit_with_the_files_it_says(tmp_path: Path) -> None:
    for at, freeze in enumerate(freezing.freezes(command.FREEZE)):
        given = ["git", "archive", freeze["commit"], *freezing.FROZEN]
        archive = subprocess.run(given, cwd=runs.ROOT, capture_output=True)
        if archive.returncode != 0:
            pytest.skip("the history is not here")
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(tmp_path / str(at), filter="data")
        assert freezing.digest(tmp_path / str(at)) == freeze["digest"]


# -- measures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("score", "expected"), [(0.8, 0.0), (0.2, 1.0), (0.5, 0.5), (0.9, -1 / 6), (0.0, 4 / 3)]
)
def test_regret_is_a_share_of_what_there_is_to_learn(score: float, expected: float) -> None:
    assert measures.regret(score, 0.8, 0.2) == pytest.approx(expected)


def test_regret_without_anything_to_learn_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected best above untrained"):
        measures.regret(0.2, 0.2, 0.2)


def test_expected_best_is_the_mean_over_all_choices() -> None:
    scores = [0.3, 0.9, 0.1, 0.5, 0.5, 0.7]
    for k in range(1, 7):
        every = [max(c) for c in itertools.combinations(scores, k)]
        assert sweep.expected_best(scores, k) == pytest.approx(sum(every) / len(every))
    with pytest.raises(ValueError, match="expected 1 to 6"):
        sweep.expected_best(scores, 7)


def test_equivalent_size_is_the_smallest_that_reaches() -> None:
    scores = [0.3, 0.9, 0.1, 0.5]
    sizes = [sweep.expected_best(scores, k) for k in range(1, 5)]
    assert sweep.equivalent_size(scores, sizes[1]) == 2
    assert sweep.equivalent_size(scores, 0.0) == 1 and sweep.equivalent_size(scores, 0.95) is None


def test_an_interval_widens_with_seeds_that_differ_and_draws_seeds_whole() -> None:
    """Ten copies of each seed are no more evidence than one."""
    once = measures.bootstrap([[0.1], [0.5], [0.9], [0.3]])
    copies = measures.bootstrap([[0.1] * 10, [0.5] * 10, [0.9] * 10, [0.3] * 10])
    assert once.value == copies.value == pytest.approx(0.45)
    assert copies.high - copies.low == pytest.approx(once.high - once.low, rel=0.02)


def test_a_bootstrap_covers_the_mean() -> None:
    rng = random.Random(5)
    inside = 0
    for _ in range(60):
        found = measures.bootstrap([[rng.gauss(1.0, 0.5)] for _ in range(20)])
        inside += found.low <= 1.0 <= found.high
    assert inside >= 50


def test_excess_harm_counts_runs_below_the_usual_worst() -> None:
    off = [0.7 + 0.001 * i for i in range(100)]
    same = measures.excess_harm([(off, off)])
    worse = measures.excess_harm([(off[:90] + [0.1] * 10, off)])
    assert same.value == pytest.approx(0.0, abs=0.011) and worse.value == pytest.approx(0.1, abs=0.02)
    assert worse.low > 0
    # Position 1.98 of a hundred: the two lowest lie below their own quantile, by chance alone.
    assert measures.below_quantile([(off, off)]) == 2
    assert measures.below_quantile([(off[:90] + [0.1] * 10, off), (off, off)]) == 12 + 2


def test_sign_flips_agree_with_all_flips() -> None:
    values = [0.3, 0.1, -0.05, 0.2, 0.4, 0.15]
    flips = list(itertools.product((-1, 1), repeat=6))
    exact = sum(sum(f * v for f, v in zip(s, values, strict=True)) >= sum(values) - 1e-12 for s in flips)
    assert measures.sign_flip_p(values) == pytest.approx(exact / len(flips), abs=0.005)


def test_the_tail_counts_the_border_in_part() -> None:
    assert runs.tail_mean([0.0, 1.0], [1.0, 1.0], 0.5) == 1.0
    assert runs.tail_mean([0.0, 1.0], [3.0, 1.0], 0.5) == 0.5
    # Sixty equal rollouts: a sixth is the last ten.
    values = [float(i) for i in range(60)]
    assert runs.tail_mean(values, [7.0] * 60) == pytest.approx(54.5)


def test_a_curve_by_tokens_follows_the_tokens() -> None:
    assert runs.by_tokens([0.0, 1.0], [1.0, 3.0], 4) == [0.0, 1.0, 1.0, 1.0]


def test_time_to_target_is_a_share_of_the_tokens() -> None:
    curve = [0.0] * 30 + [1.0] * 30
    assert measures.tokens_to(curve, 1.0) == pytest.approx(35 / 60)
    assert measures.tokens_to(curve, 1.1) is None


# -- rows and tables -----------------------------------------------------------------------------


def rows() -> list[runs.Row]:
    made = [row("trial01", "fixed", s, 0.8, purpose="winner") for s in (1, 2, 139, 140)]
    made += [row(f"trial{t:02d}", "fixed", 1, 0.2 + t / 10, purpose="sweep") for t in range(7)]
    for seed in (1, 2, 3):
        made += [row("well_set", "fixed", seed, 0.78 + seed / 1000, purpose=p) for p in ("tuning", "report")]
        made += [row("well_set", "recommended", seed, 0.78 + seed / 1000)]
        made += [row("timid", "fixed", seed, 0.3, purpose=p) for p in ("tuning", "report")]
        made += [row("timid", "recommended", seed, 0.77, actions=3, kept=2, reverted=1, rules={"X1": 3})]
        made += [row("timid", "random", seed, 0.4)]
        made += [row("lr_x10", "fixed", seed, 0.75, purpose=p) for p in ("tuning", "report")]
    return made


def test_a_start_is_bad_by_what_it_loses() -> None:
    yard = report.yardstick(rows(), "sort6")
    assert yard is not None and yard.best == 0.8 and yard.untrained == pytest.approx(0.2)
    assert report.bad_starts(rows(), "sort6") == ["timid"]


def test_the_table_tells_regret_rescue_and_sweep_size() -> None:
    text = report.whole(rows(), "report")
    line = next(part for part in text.splitlines() if part.startswith("| timid (bad) | recommended"))
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[2:4] == ["3", "0.770 (0.770 to 0.770)"]
    assert cells[4].startswith("0.050") and cells[5] == "3 of 3" and cells[6] == "6"
    assert cells[11] == "never"  # rows made by hand have no curve
    assert "recommended against random: 0.617 (" in text
    assert "Actions by rule: X1 9" in text


def test_the_table_tells_how_soon_the_goal_was_reached() -> None:
    made = [*rows(), row("lr_d10", "recommended", 1, 0.8, curve=[0.0] * 30 + [0.8] * 30)]
    made += [row("lr_d10", "recommended", 2, 0.5, curve=[0.5] * 60)]
    line = next(part for part in report.whole(made, "report").splitlines() if part.startswith("| lr_d10"))
    assert line.split("|")[12].strip() == "0.58 (1 of 2)"


def test_a_run_that_failed_learnt_nothing_and_is_counted() -> None:
    made = [*rows(), row("timid", "recommended", 4, None, exit_code=1)]
    text = report.whole(made, "report")
    line = next(part for part in text.splitlines() if part.startswith("| timid (bad) | recommended"))
    assert line.split("|")[3].strip() == "4" and line.rstrip("| ").endswith("1")
    assert "3 of 4" in line


# -- the bad starts together, the goals, the page ----------------------------------------------------


SEEDS = suite.reporting_seeds(COMMIT, "sort6", 5)
WINNER = suite.reporting_seeds(COMMIT, "sort6", 5, "winner")


def report_rows() -> list[runs.Row]:
    """A report as the freeze would give it: one bad start, every arm on it, and the sweep."""
    made = [
        row(f"trial{t:02d}", "fixed", 101, 0.2 + t / 100, purpose="sweep", tokens=50.0) for t in range(64)
    ]
    made += [row("trial63", "fixed", s, 0.8, purpose="winner") for s in WINNER]
    made += [row("trial63", "fixed", s, 0.75, purpose="winner") for s in suite.TUNING_SEEDS[-5:]]
    for s in suite.TUNING_SEEDS[:2]:
        made += [
            row("timid", "fixed", s, 0.3, purpose="tuning"),
            row("well_set", "fixed", s, 0.8, purpose="tuning"),
        ]
    for at, s in enumerate(SEEDS):
        made += [row("well_set", arm, s, 0.8 + at / 1000) for arm in ("fixed", "recommended")]
        made += [row("timid", arm, s, 0.3, tokens=100.0) for arm in suite.SMALL_ARMS if arm != "recommended"]
        scores = {"tokens": 100.0, "actions": 3, "kept": 2, "reverted": 1, "curve": [0.3] * 30 + [0.8] * 30}
        made.append(row("timid", "recommended", s, 0.74 + at / 1000, **scores))
    return made


def test_a_report_is_measured_against_the_winner_on_its_own_seeds() -> None:
    """The winner on tuning seeds says which starts are bad, and nothing else."""
    made = report_rows()
    found = report.yardstick(made, "sort6", "report"), report.yardstick(made, "sort6")
    assert [yard and yard.best for yard in found] == [pytest.approx(0.8), pytest.approx(0.75)]


def test_pooled_figures_of_the_bad_starts() -> None:
    found = report.pooled(report_rows(), ["sort6"], "recommended", "report")
    assert found is not None and found.runs == 5 and found.rescued == 5 and found.failed == 0
    assert found.regret.value == pytest.approx((0.8 - 0.742) / 0.6)
    # The 64 trials are 0.20 to 0.83: so many of them are expected to have one of 0.742.
    scores = [0.2 + t / 100 for t in range(64)]
    assert found.size is not None and sweep.expected_best(scores, found.size) >= 0.742
    assert sweep.expected_best(scores, found.size - 1) < 0.742
    assert found.size_low is not None and found.size_low <= found.size
    assert found.ratio == f"{found.size * 50 / 100:.1f} x"
    assert found.goal == "0.58 (5 of 5)" and found.actions == ("3.0", "2.0", "1.0")
    assert report.pooled(report_rows(), ["sort6"], "shadow", "report") is None


def test_two_tasks_weigh_by_their_runs_in_the_size_of_the_sweep() -> None:
    easy = report.Yardstick(1.0, 0.0, (0.9, 0.9, 0.9), 1.0)
    hard = report.Yardstick(1.0, 0.0, (0.0, 0.3, 0.6), 1.0)
    assert report.pooled_size([easy], 0.1 + 1e-9) == 1 and report.pooled_size([hard], 0.1) is None
    # Regret of the mean: easy 0.1 for every k; hard 0.7, 0.5, 0.4.
    assert report.pooled_size([easy, hard], 0.3 + 1e-9) == 2
    assert report.pooled_size([easy, hard, hard, hard], 0.35) == 3


def test_a_comparison_is_paired_by_seed_and_flips_whole_seeds() -> None:
    found = report.against(report_rows(), ["sort6"], "random", "report")
    assert found is not None and found.pairs == 5
    assert found.difference.value == pytest.approx(0.442 / 0.6)
    assert found.p == pytest.approx(1 / 32, abs=0.01)  # five seeds have 32 sign patterns
    assert report.against(report_rows(), ["sort6"], "shadow", "report") is None


def test_every_goal_is_met_or_missed_beside_its_figure() -> None:
    found = {goal.wanted.split(",")[0]: goal for goal in goals.goals(report_rows(), ["sort6"], "report")}
    assert found["pooled regret of the bad starts ≤ 0.10"].met
    assert found["less regret than `random`"].met and found["less regret than `adaptive_kl`"].met
    assert found["≥ 64 trials a sweep"].met and found["≥ 5 seeds a start"].met
    short = found["≥ 150 well-set runs an arm"]
    assert not short.met and short.line == "| ≥ 150 well-set runs an arm | 5 | **missed** |"
    size = next(goal for name, goal in found.items() if name.startswith("k*"))
    assert size.met == (int(size.found.split()[0]) >= 12)


def test_goals_that_were_not_run_are_missed() -> None:
    found = goals.goals([], [], "report")
    assert len(found) == 9 and not any(goal.met for goal in found)


def test_harm_in_one_task_is_not_hidden_by_another_of_a_higher_level() -> None:
    """Each task has a quantile of its own."""
    made = []
    for task, level in (("sort6", 0.2), ("unique6", 0.8)):
        for s in range(50):
            off = level + s / 1000
            made.append(row("well_set", "fixed", s, off, task=task))
            made.append(row("well_set", "recommended", s, off - (0.1 if task == "unique6" else 0), task=task))
    found = report.harm(made, ["sort6", "unique6"], "report")
    assert found is not None and found.runs == 100
    assert found.excess.value == pytest.approx(0.5 + 0.01 - 0.02, abs=0.011)
    assert found.difference.value == pytest.approx(-0.05) and found.verdict == "not shown"
    alone = report.harm(made, ["sort6"], "report")
    assert alone is not None and alone.verdict == "not inferior"


def test_the_figure_has_a_mark_for_every_run() -> None:
    from xml.etree import ElementTree

    root = ElementTree.fromstring(figure.figure(report_rows(), ["sort6"], "report"))
    space = "{http://www.w3.org/2000/svg}"
    # Two starts with five runs and a mean, and the legend: discs with the controller, diamonds without.
    assert len(root.findall(f"{space}circle")) == len(root.findall(f"{space}path")) == 2 * (5 + 1) + 1
    words = [text.text or "" for text in root.findall(f"{space}text")]
    assert "timid" in words and any("k*" in text for text in words)
    assert figure.figure([], [], "report") == ""


def test_the_page_is_made_of_reporting_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "FREEZE", tmp_path / "freeze.json")
    assert command.prove(report_rows(), tmp_path / "docs") == 1  # no freeze
    freeze = [{"commit": "f" * 40, "date": "2026-12-01"}, {"commit": COMMIT, "date": "2026-12-02"}]
    command.FREEZE.write_text(json.dumps(freeze))
    before = [r for r in report_rows() if r.purpose in ("tuning", "sweep")]
    assert command.prove(before, tmp_path / "docs") == 1 and not (tmp_path / "docs").exists()

    # Rows of the earlier freeze stand in the same file and are not mixed in.
    old = [row("timid", "recommended", s, 0.0) for s in suite.reporting_seeds("f" * 40, "sort6", 5)]
    for arm, score in (("recommended", 0.7), ("without_X1", 0.4)):
        old.append(row("timid", arm, 101, score, purpose="tuning", task="ops6x2"))
    assert command.prove([*report_rows(), *old], tmp_path / "docs") == 0
    text = (tmp_path / "docs" / "evidence.md").read_text("utf-8")
    assert "5 of 5 runs" in text and "0.097 (" in text and "fffffffffff" in text
    assert "| X1 | 1 | 0.400 | 0.700 |" in text  # which rule earned what, on the task it was tuned on
    assert len(text.splitlines()) < 80  # a page
    assert (tmp_path / "docs" / "evidence.svg").read_text("utf-8").startswith("<svg")


def test_the_published_page_follows_from_the_published_rows(tmp_path: Path) -> None:
    """And README.md claims what the page says, word for word."""
    rows_now = runs.load(Path(command.HERE) / "results" / "results.jsonl")
    assert command.prove(rows_now, tmp_path) == 0
    made = (tmp_path / "evidence.md").read_text("utf-8")
    assert made == (runs.ROOT / "docs" / "evidence.md").read_text("utf-8")
    claim = made.split("\n\n")[1].split(" Every goal")[0]
    readme = (runs.ROOT / "README.md").read_text("utf-8")
    assert claim.startswith("From ") and claim in " ".join(readme.split())


def test_failed_runs_are_shown_by_name() -> None:
    made = [
        *report_rows(),
        row("timid", "recommended", SEEDS[0] + 1, None, exit_code=1, error="ValueError: x"),
    ]
    text = report.whole(made, "report")
    assert f"- sort6 timid recommended {SEEDS[0] + 1}: exit code 1 ValueError: x" in text


def test_what_a_rule_earned_has_an_interval() -> None:
    made = rows()
    for seed in (1, 2, 3):
        made += [row("timid", "recommended", seed, 0.7, purpose="tuning")]
        made += [row("timid", "without_X1", seed, 0.5 + seed / 100, purpose="tuning")]
    line = report.earned(made, "sort6", ["timid"]).splitlines()[-1]
    assert line.startswith("| X1 | 3 | 0.520 | 0.700 | -0.180 (-0.19")


# -- the random arm ------------------------------------------------------------------------------


def test_the_random_arms_rate_follows_from_its_own_tuning_rows() -> None:
    def acted(arm: str, seed: int, actions: int, **rest: Any) -> runs.Row:
        recipe = runs.recipe_hash(suite.Job("sort6", "timid", arm, seed))
        return row(
            "timid", arm, seed, 0.5, **{"purpose": "tuning", "actions": actions, "recipe": recipe, **rest}
        )

    made = [
        acted("recommended", 1, 3),
        acted("recommended", 2, 3),
        acted("random", 1, 6),
        acted("random", 2, 6),
    ]
    found = lot.calibrate([*made, acted("recommended", 3, 99)])  # no random run beside it
    assert found is not None and found.pairs == 2 and not found.settled
    assert found.rate == pytest.approx(suite.RANDOM_RATE / 2)
    assert f"{suite.RANDOM_RATE / 2:.3g}" in lot.told(found)
    assert lot.calibrate([acted("recommended", 1, 3), acted("random", 1, 6, recipe="another rate")]) is None
    assert lot.calibrate([acted("recommended", 1, 3), acted("random", 1, 3, purpose="report")]) is None


def test_the_random_arm_draws_other_moves_on_every_seed() -> None:
    drawn = [suite.Job("sort6", "timid", "random", s).fields()["control.policies"]["random"] for s in (1, 2)]
    assert drawn[0]["seed"] == 1 and drawn[1]["seed"] == 2 and drawn[0]["rate"] == drawn[1]["rate"]


# -- the real model ------------------------------------------------------------------------------


def test_the_real_models_suite_is_small_and_has_one_shadow() -> None:
    jobs = list(command.jobs("gpu_tuning", Path("nowhere"), []))
    assert len(jobs) == 25 and sum(job.arm == "shadow" for job in jobs) == 1
    assert {job.task for job in jobs} == {"sums"} and {job.purpose for job in jobs} == {"tuning"}
    bad = {job.start for job in jobs} - {"well_set"}
    assert len(bad) == 3


def test_the_real_models_table_and_curves() -> None:
    from xml.etree import ElementTree

    made = [
        row(start, arm, seed, score, task="sums", greedy=0.5, sampled=0.4, curve=[0.1, score])
        for seed in (1, 2)
        for start, arm, score in (
            ("well_set", "fixed", 0.5),
            ("timid", "fixed", 0.1),
            ("timid", "recommended", 0.45),
        )
    ]
    made[-1].decisions = [[2, "X1", "actor_learning_rate", 1e-6, 1e-5, "kept"]]
    text = real.whole([*made, row("timid", "recommended", 3, None, task="sums", exit_code=137)])
    assert "| timid | act | 2 | 0.450 (0.450 to 0.450) | 90% |" in text
    assert "Failed: timid recommended 3 (exit code 137)" in text and "2: X1 actor_learning_rate" in text
    lines = ElementTree.fromstring(real.figure(made)).findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 6


def test_rows_survive_a_torn_line_and_the_last_wins(tmp_path: Path) -> None:
    import dataclasses

    path = tmp_path / "results.jsonl"
    first, again = row("timid", "fixed", 1, 0.1), row("timid", "fixed", 1, 0.2)
    lines = [json.dumps(dataclasses.asdict(r)) for r in (first, again)]
    path.write_text("\n".join(lines) + '\n{"purpose": "rep', "utf-8")
    assert [r.score for r in runs.load(path)] == [0.2]
    assert runs.load(tmp_path / "none.jsonl") == []


# -- population-based training -------------------------------------------------------------------


def test_the_worst_member_becomes_the_best_one_with_other_knobs() -> None:
    fields = suite.Job("sort6", "timid", "pbt", 1).fields()
    members = pbt.first_members(fields, random.Random(1))
    assert members[0].knobs == {name: float(fields[name]) for name in pbt.KNOBS}
    for at, member in enumerate(members):
        member.reward, member.checkpoint = 0.1 * at, Path(f"member{at}")
    pbt.exploit_and_explore(members, random.Random(2))
    assert members[0].checkpoint == Path("member3") and members[0].reward == pytest.approx(0.3)
    for name, value in members[0].knobs.items():
        ratio = value / members[3].knobs[name]
        assert math.isclose(ratio, 0.8) or math.isclose(ratio, 1.2) or value in pbt.KNOBS[name]


def test_one_run_has_a_value_and_no_interval() -> None:
    assert str(measures.bootstrap([[0.5]])) == "0.500"
    assert str(measures.bootstrap([[0.5], [0.5]])) == "0.500 (0.500 to 0.500)"
