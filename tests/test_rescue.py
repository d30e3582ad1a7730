"""The arithmetic and the plan of the rescue benchmark, on rows made by hand; no training here."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from autotune.recipe import load_recipe
from autotune.trainer.tasks import digits
from autotune.trainer.tasks.base import is_held_out
from experiments.rescue import __main__ as command
from experiments.rescue import measures, pbt, report, runs, suite, sweep

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


def test_a_rule_cannot_see_the_held_out_score() -> None:
    """The score's only reader is the journal: with it removed, every decision stays."""
    from autotune.policies import POLICIES

    for rule, policy in POLICIES.items():
        assert "eval_score" not in policy.needs, rule


def test_a_report_needs_a_freeze(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "FREEZE", tmp_path / "freeze.json")
    with pytest.raises(SystemExit, match="freeze"):
        command.frozen()


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
    same = measures.excess_harm(off, off)
    worse = measures.excess_harm(off[:90] + [0.1] * 10, off)
    assert same.value == pytest.approx(0.0, abs=0.011) and worse.value == pytest.approx(0.1, abs=0.02)
    assert worse.low > 0


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
    made = [row("trial01", "fixed", s, 0.8, purpose="winner") for s in (1, 2)]
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
    assert report.bad_starts(rows(), "sort6", yard) == ["timid"]


def test_the_table_tells_regret_rescue_and_sweep_size() -> None:
    text = report.whole(rows(), "report")
    line = next(part for part in text.splitlines() if part.startswith("| timid (bad) | recommended"))
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[2:4] == ["3", "0.770 (0.770 to 0.770)"]
    assert cells[4].startswith("0.050") and cells[5] == "3 of 3" and cells[6] == "6"
    assert cells[10] == "never"  # rows made by hand have no curve
    assert "recommended against random: +0.617" in text
    assert "Actions by rule: X1 9" in text


def test_the_table_tells_how_soon_the_goal_was_reached() -> None:
    made = [*rows(), row("lr_d10", "recommended", 1, 0.8, curve=[0.0] * 30 + [0.8] * 30)]
    made += [row("lr_d10", "recommended", 2, 0.5, curve=[0.5] * 60)]
    line = next(part for part in report.whole(made, "report").splitlines() if part.startswith("| lr_d10"))
    assert line.split("|")[11].strip() == "0.58 (1 of 2)"


def test_a_run_that_failed_learnt_nothing_and_is_counted() -> None:
    made = [*rows(), row("timid", "recommended", 4, None, exit_code=1)]
    text = report.whole(made, "report")
    line = next(part for part in text.splitlines() if part.startswith("| timid (bad) | recommended"))
    assert line.split("|")[3].strip() == "4" and line.rstrip("| ").endswith("1")
    assert "3 of 4" in line


def test_the_figure_has_a_dot_for_every_run() -> None:
    from xml.etree import ElementTree

    root = ElementTree.fromstring(report.figure(rows(), "sort6", "report"))
    dots = root.findall("{http://www.w3.org/2000/svg}circle")
    # Two starts with the controller: 3 + 3 runs and a mean each way; two more dots are the legend.
    assert len(dots) == 4 * (3 + 1) + 2


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
